"""What a round costs here: the cost table's forwards, and coefficients fitted to rounds of the real engine.

    round = forward + drafting + rest
    forward   the table at the round's width, context and batch, times one number and plus another (an engine does more
              around a forward than the table's measurement, and machines change), times what forwards of such a width
              took beside that: little where few were seen
    drafting  a round, each request drafted for, each step, each of its rows, each node verified
    rest      a round, each request, each node, each token: verification, commit, states to the drafter

The coefficients are non-negative least squares over relative errors, without the rounds that something else disturbed.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from infer.cost import CostModel
from infer.tune.replay import Round
from infer.tune.rounds import TimedRound

_OUTLIER = 4.0
"""Rounds so many times the usual deviation above the fit were disturbed, and do not count."""
_LEAST_ROUNDS = 6
"""Of neighbouring widths, for a correction of their own."""
_PRIOR_ROUNDS = 12.0
"""Rounds that the belief in no correction counts for."""


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A sum of a round's features, each times its coefficient [ms]; see `DRAFT` and `REST`."""

    coefficients: tuple[float, ...]

    def __call__(self, features: Sequence[float]) -> float:
        return sum(each * value for each, value in zip(self.coefficients, features, strict=True))


def draft_features(one: Round) -> tuple[float, ...]:
    """(drafted at all, requests drafted for, steps, rows of steps, nodes)."""
    return (float(one.num_asked > 0), one.num_asked, one.num_steps, one.num_step_rows, one.num_nodes)


def rest_features(one: Round) -> tuple[float, ...]:
    """(a round, requests, nodes, tokens)."""
    return (1.0, one.num_requests, one.num_nodes, one.num_tokens)


@dataclass(frozen=True, kw_only=True)
class RoundCost:
    """See the module. forwards: of the table's time and of 1. ratios: (width, measured over that), ascending in
    width."""

    table: CostModel
    forwards: Linear
    ratios: tuple[tuple[int, float], ...]
    drafting: Linear
    rest: Linear
    error: float
    """Median absolute error of the rounds that it was fitted to, as a share of their time."""

    def milliseconds(self, one: Round) -> float:
        drafted = self.drafting(draft_features(one)) if one.num_asked else 0.0
        return self.forward(one) + drafted + self.rest(rest_features(one))

    def forward(self, one: Round) -> float:
        return self.forwards(_forward_features(one, self.table)) * self._ratio(one.num_rows)

    def _ratio(self, width: int) -> float:
        widths = [each for each, _ in self.ratios]
        right = bisect_right(widths, width)
        if right in (0, len(widths)):
            return self.ratios[min(right, len(widths) - 1)][1]
        (low, before), (high, after) = self.ratios[right - 1], self.ratios[right]
        return before + (after - before) * (width - low) / (high - low)

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "table"}

    @classmethod
    def fit(cls, timed: Iterable[TimedRound], table: CostModel) -> RoundCost:
        """Fitted to rounds; those that came with a prefill are left out."""
        rounds = [each for each in timed if not each.round.is_first]
        if not rounds:
            raise ValueError("there are no rounds to fit costs to: the answers end at their first token; allow more")
        drafted = [each for each in rounds if each.round.num_asked]
        forwards = _fitted(rounds, lambda one: _forward_features(one, table), lambda each: each.forward)
        bare = cls(table=table, forwards=forwards, ratios=((1, 1.0),), drafting=_NOTHING, rest=_NOTHING, error=0.0)
        found = cls(
            table=table,
            forwards=forwards,
            ratios=_ratios(rounds, bare),
            drafting=_fitted(drafted, draft_features, lambda each: each.draft) if drafted else _NOTHING,
            rest=_fitted(rounds, rest_features, lambda each: each.rest),
            error=0.0,
        )
        errors = [abs(found.milliseconds(each.round) / each.milliseconds - 1) for each in rounds]
        return cls(**{**found.__dict__, "error": statistics.median(errors)})


_NOTHING = Linear(coefficients=())


def _forward_features(one: Round, table: CostModel) -> tuple[float, ...]:
    here = table.at(context=one.context, batch=one.num_requests)
    return (here.target_milliseconds(one.num_rows), 1.0)


def _ratios(rounds: Sequence[TimedRound], bare: RoundCost) -> tuple[tuple[int, float], ...]:
    """Medians of measured forwards over `bare`'s, over neighbouring widths that have rounds enough together."""
    by_width = sorted((each.round.num_rows, each.forward / bare.forward(each.round)) for each in rounds)
    least = min(_LEAST_ROUNDS, len(by_width))
    found: list[tuple[int, float]] = []
    group: list[tuple[int, float]] = []
    for place, entry in enumerate(by_width):
        group.append(entry)
        is_last_of_width = place + 1 == len(by_width) or by_width[place + 1][0] != entry[0]
        if is_last_of_width and len(group) >= least:
            width = round(statistics.fmean(width for width, _ in group))
            believed = len(group) / (len(group) + _PRIOR_ROUNDS)
            found.append((width, 1 + believed * (statistics.median(ratio for _, ratio in group) - 1)))
            group = []
    return tuple(dict(found).items())


def _fitted(
    rounds: Sequence[TimedRound],
    features: Callable[[Round], tuple[float, ...]],
    milliseconds: Callable[[TimedRound], float],
) -> Linear:
    """Coefficients for the quiet ones among the rounds."""
    matrix = np.array([features(each.round) for each in rounds], dtype=np.float64)
    times = np.array([milliseconds(each) for each in rounds], dtype=np.float64)
    # Errors of a long round weigh less: what is fitted is its share of the round.
    weights = 1.0 / np.array([each.milliseconds for each in rounds])
    quiet = np.ones(len(rounds), dtype=bool)
    for _ in range(3):
        found = non_negative_least_squares(matrix[quiet] * weights[quiet, None], times[quiet] * weights[quiet])
        residual = (times - matrix @ found) * weights
        spread = 1.4826 * float(np.median(np.abs(residual - np.median(residual))))
        quiet = residual <= np.median(residual) + _OUTLIER * max(spread, 1e-9)
    return Linear(coefficients=tuple(found.tolist()))


def non_negative_least_squares(
    matrix: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """x >= 0 that makes `matrix` [n, k] x nearly `wanted` [n]: Lawson and Hanson's active sets, for a handful of
    unknowns."""
    num_unknowns = matrix.shape[1]
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    found = np.zeros(num_unknowns)
    free = np.zeros(num_unknowns, dtype=bool)
    for _ in range(10 * num_unknowns):
        slope = scaled.T @ (wanted - scaled @ found)
        slope[free] = -math.inf
        best = int(np.argmax(slope))
        if free.all() or slope[best] <= 1e-10 * max(1.0, float(np.linalg.norm(wanted))):
            break
        free[best] = True
        while True:
            trial = np.zeros(num_unknowns)
            trial[free] = np.linalg.lstsq(scaled[:, free], wanted, rcond=None)[0]
            negative = free & (trial <= 0)
            if not negative.any():
                break
            steps = found[negative] / (found[negative] - trial[negative] + 1e-300)
            found = found + float(steps.min()) * (trial - found)
            free &= found > 1e-12
            found[~free] = 0.0
        found = trial
    unscaled: npt.NDArray[np.float64] = found / scale
    return unscaled
