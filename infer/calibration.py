"""Calibration of a head's guesses: shares of candidates that are the probabilities they are taken for.

The values by which trees are grown and cut are products of *shares*: the head's estimate, once it has seen the noise of
the position, that a candidate is the token the target draws there. Heads are too sure of themselves, the more so with
noise: of candidates said to be right four times in five, half are. A `Calibration` maps a share, with the candidate's
rank among its siblings and its depth, to the frequency with which such candidates were right on real prompts:

    log-odds(calibrated) = intercept + slope * log-odds(share) + rank * log(1 + rank from 0) + depth * (depth - 1)

with one such map for each temperature it was fitted at. It changes which trees are proposed, never a token.

Shares of drawn children (rejection rules) say what was drawn from, and are never mapped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from infer.request import Request, RequestLaw
from infer.sampling import GREEDY_BELOW, SamplingParams
from infer.tree import ROOT, DraftTree, OneHot
from infer.verify import KindType, Verdict

if TYPE_CHECKING:
    from infer.drafters.base import Drafter, DraftLimit, Room
    from infer.drafters.growing import TreeGrower
    from infer.engine import Engine

BIN_EDGES = (0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Shares are compared with frequencies in bins, finer near 0 where most candidates lie."""
KEY = "calibration"
"""The name under which a head's card keeps its calibration, among the settings of the drafter."""

_LEAST_SHARE = 1e-7
_PRIOR_PRECISION = 4.0
"""How firmly every coefficient is held to the map that changes nothing: few observations move it little."""
_LEAST_SLOPE = 0.01


@dataclass(frozen=True, kw_only=True)
class ShareMap:
    """The map that the module's docstring gives. A larger share never maps to a smaller one."""

    intercept: float = 0.0
    slope: float = 1.0
    rank: float = 0.0
    depth: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{name} of a calibration must be a finite number, got {value!r}")
        if self.slope <= 0:
            raise ValueError(f"slope of a calibration must be above 0, or order would not be kept, got {self.slope}")

    def __call__(self, shares: Tensor, ranks: Tensor, depths: Tensor | int) -> Tensor:
        """Calibrated shares, in the shape and dtype of `shares`; the others broadcast."""
        inside = shares.clamp(_LEAST_SHARE, 1 - _LEAST_SHARE)
        log_odds = self.intercept + self.slope * torch.logit(inside) + self.rank * torch.log1p(ranks)
        return torch.sigmoid(log_odds + self.depth * (depths - 1))


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Maps by the temperature that they were fitted at. Greedy requests use the map fitted at temperature 0; sampled
    ones the nearest map above 0."""

    maps: Mapping[float, ShareMap]

    def __post_init__(self) -> None:
        for temperature in self.maps:
            if not (math.isfinite(temperature) and temperature >= 0):
                raise ValueError(f"a calibration names temperatures of at least 0, got {temperature}")

    def map_for(self, params: SamplingParams) -> ShareMap | None:
        if params.greedy:
            return self.maps.get(0.0)
        nearest = min(
            (temperature for temperature in self.maps if temperature > 0),
            key=lambda temperature: abs(temperature - params.temperature),
            default=None,
        )
        return None if nearest is None else self.maps[nearest]

    def to_dict(self) -> dict[str, Any]:
        return {"maps": [{"temperature": temperature, **asdict(one)} for temperature, one in self.maps.items()]}

    @classmethod
    def from_card(cls, settings: Mapping[str, Any]) -> Calibration | None:
        """The calibration among the drafter settings of a head's card, if there is one."""
        if KEY not in settings:
            return None
        try:
            return cls(maps={float(entry["temperature"]): _map_of(entry) for entry in settings[KEY]["maps"]})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"the calibration on the head's card is broken ({error}): run headstart calibrate again, or take "
                f"{KEY!r} out of the card's drafter settings"
            ) from error


def _map_of(entry: Mapping[str, Any]) -> ShareMap:
    return ShareMap(**{name: value for name, value in entry.items() if name != "temperature"})


class Observation(NamedTuple):
    """A candidate at a node that the walk visited: its share as the drafter gave it, and whether it was the token."""

    share: float
    rank: int
    depth: int
    reached: bool


class _Columns(NamedTuple):
    shares: Tensor
    ranks: Tensor
    depths: Tensor
    reached: Tensor


def _columns(observations: Sequence[Observation]) -> _Columns:
    """Four float64 vectors [n]."""
    return _Columns(*(torch.tensor(column, dtype=torch.float64) for column in zip(*observations, strict=True)))


def fit_map(observations: Sequence[Observation]) -> ShareMap:
    """The likeliest map, with a weak prior around the one that changes nothing (Newton's method)."""
    columns = _columns(observations)
    inside = columns.shares.clamp(_LEAST_SHARE, 1 - _LEAST_SHARE)
    features = torch.stack(
        [torch.ones_like(inside), torch.logit(inside), torch.log1p(columns.ranks), columns.depths - 1], dim=1
    )  # [n, 4]
    start = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    prior = _PRIOR_PRECISION * torch.eye(4, dtype=torch.float64)
    weights = start.clone()
    for _ in range(30):
        predicted = torch.sigmoid(features @ weights)
        gradient = features.T @ (predicted - columns.reached) + prior @ (weights - start)
        curvature = (features * (predicted * (1 - predicted))[:, None]).T @ features + prior
        step = torch.linalg.solve(curvature, gradient)
        weights = weights - step.clamp(-1.0, 1.0)
        if float(step.abs().max()) < 1e-9:
            break
    intercept, slope, rank, depth = weights.tolist()
    return ShareMap(intercept=intercept, slope=max(slope, _LEAST_SLOPE), rank=rank, depth=depth)


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Candidates whose shares lie between two edges: what was predicted on average, and how often it came true."""

    num_observations: int
    predicted: float
    observed: float


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """How far shares are from frequencies. `calibration_error`: the mean gap over `bins`, by number of observations."""

    num_observations: int
    calibration_error: float
    brier: float
    log_loss: float
    bins: tuple[Bin, ...]

    @classmethod
    def of(cls, observations: Sequence[Observation], share_map: ShareMap | None = None) -> Reliability:
        """The reliability of the shares as they are, or as `share_map` would have made them."""
        shares, ranks, depths, reached = _columns(observations)
        predicted = shares if share_map is None else share_map(shares, ranks, depths)
        inside = predicted.clamp(_LEAST_SHARE, 1 - _LEAST_SHARE)
        places = torch.bucketize(predicted, torch.tensor(BIN_EDGES, dtype=torch.float64))
        bins = [_bin(predicted[places == place], reached[places == place]) for place in range(len(BIN_EDGES) + 1)]
        gaps = sum(one.num_observations * abs(one.predicted - one.observed) for one in bins)
        return cls(
            num_observations=len(observations),
            calibration_error=gaps / len(observations),
            brier=float((predicted - reached).square().mean()),
            log_loss=float(-torch.where(reached > 0, inside.log(), (1 - inside).log()).mean()),
            bins=tuple(bins),
        )


def _bin(predicted: Tensor, reached: Tensor) -> Bin:
    count = len(predicted)
    return Bin(
        num_observations=count,
        predicted=float(predicted.mean()) if count else 0.0,
        observed=float(reached.mean()) if count else 0.0,
    )


@dataclass(kw_only=True)
class Watched:
    """What the rounds of one answer showed: the tokens that each emitted, and those that its tree promised."""

    observations: list[Observation] = field(default_factory=list)
    round_lengths: tuple[int, ...] = ()
    predicted_lengths: list[float] = field(default_factory=list)


class ProposalLog:
    """Stands between an engine and its drafter, and watches what becomes of every candidate proposed.

    Candidates cut before verification are judged too: the emitted token tells whether they were right.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.name = drafter.name
        self.kinds: tuple[KindType, ...] = drafter.kinds
        self.taps = drafter.taps
        self.watched: dict[int, Watched] = {}
        self._proposed: dict[Request, DraftTree] = {}

    @property
    def spent_milliseconds(self) -> float:
        return self.drafter.spent_milliseconds

    def open(self, room: Room) -> None:
        self.drafter.open(room)

    def observe(self, request: Request, states: Tensor | None) -> None:
        self.drafter.observe(request, states)

    def propose(self, requests: Sequence[Request], limits: Sequence[DraftLimit]) -> list[DraftTree]:
        trees = self.drafter.propose(requests, limits)
        self._proposed.update(zip(requests, trees, strict=True))
        return trees

    def close(self, request: Request) -> None:
        self._proposed.pop(request, None)
        self.drafter.close(request)

    def verified(self, request: Request, tree: DraftTree, law: RequestLaw, verdict: Verdict) -> None:
        """The engine's observer."""
        proposed = self._proposed.pop(request, None)
        if proposed is None:
            return  # a prefill
        watched = self.watched.setdefault(request.seed, Watched())
        watched.observations += candidates_on_the_way(proposed, verdict.tokens(tree))
        watched.predicted_lengths.append(1 + sum(tree.values))


def candidates_on_the_way(proposed: DraftTree, tokens: Sequence[int]) -> Iterator[Observation]:
    """Every candidate that `proposed` has at the nodes through which a round's `tokens` lead."""
    node = ROOT
    for depth, token in enumerate(tokens, start=1):
        reach = 1.0 if node == ROOT else proposed.values[node]
        children = proposed.children(node)
        for rank, child in enumerate(children):
            yield Observation(proposed.values[child] / reach, rank, depth, proposed.tokens[child] == token)
        here = [child for child in children if proposed.tokens[child] == token]
        if not here:
            return
        node = here[0]


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """The mean number of tokens of a draft round: as emitted, and as the values of the verified trees promised."""

    num_rounds: int
    accepted: float
    predicted: float

    @classmethod
    def of(cls, answers: Iterable[Watched]) -> Lengths:
        answers = list(answers)
        accepted = [length for answer in answers for length in answer.round_lengths]
        predicted = [length for answer in answers for length in answer.predicted_lengths]
        assert len(accepted) == len(predicted) > 0
        return cls(
            num_rounds=len(accepted),
            accepted=sum(accepted) / len(accepted),
            predicted=sum(predicted) / len(predicted),
        )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What calibration changed at one temperature, on prompts that the map was not fitted on."""

    temperature: float
    share_map: ShareMap
    before: Reliability
    after: Reliability
    lengths_before: Lengths
    lengths_after: Lengths


@dataclass(frozen=True, kw_only=True)
class CalibrationReport:
    """What `calibrate` found; `num_fitted` and `num_held_out` count prompts."""

    comparisons: tuple[Comparison, ...]
    num_fitted: int
    num_held_out: int

    @property
    def improves(self) -> bool:
        """Whether calibrated shares tell more of held-out prompts, over all temperatures."""
        return sum(one.after.log_loss for one in self.comparisons) < sum(
            one.before.log_loss for one in self.comparisons
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "improves": self.improves}


def calibrate(
    engine: Engine,
    drafter: TreeGrower,
    prompts: Sequence[Sequence[int]],
    *,
    temperatures: Sequence[float],
    max_tokens: int,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> tuple[Calibration, CalibrationReport]:
    """Fit on every other prompt (the first, third, ...) and compare on the rest; `drafter` is left calibrated.

    `drafter` is the engine's own, or a part of it. Trees should be fixed (not adaptive), so that lengths before and
    after are those of one budget. `progress` is called with the tokens emitted by each step.
    """
    if len(prompts) < 2 or not temperatures:
        raise ValueError(
            f"calibration needs a temperature, and a prompt to fit on and another to judge by; got {len(prompts)} "
            f"prompts and {len(temperatures)} temperatures"
        )
    assert OneHot in engine.rule.kinds, "shares are guesses of the next token only where nothing else is drawn"
    temperatures = [0.0 if temperature < GREEDY_BELOW else temperature for temperature in temperatures]
    watch = partial(_watch, engine, prompts, max_tokens=max_tokens, seed=seed, progress=progress)
    fitted, held_out = range(0, len(prompts), 2), range(1, len(prompts), 2)
    drafter.calibration = None
    before = {temperature: watch(range(len(prompts)), temperature) for temperature in temperatures}
    maps = {temperature: fit_map(_pool(answers[i] for i in fitted)) for temperature, answers in before.items()}
    drafter.calibration = Calibration(maps=maps)
    comparisons = tuple(
        _compare(temperature, share_map, [before[temperature][i] for i in held_out], watch(held_out, temperature))
        for temperature, share_map in maps.items()
    )
    report = CalibrationReport(comparisons=comparisons, num_fitted=len(fitted), num_held_out=len(held_out))
    return drafter.calibration, report


def _watch(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    indices: Sequence[int],
    temperature: float,
    *,
    max_tokens: int,
    seed: int,
    progress: Callable[[int], None] | None,
) -> dict[int, Watched]:
    """Answer the prompts of these `indices`, and return what was seen of each."""
    params = [SamplingParams(temperature=temperature, seed=seed + i, max_tokens=max_tokens) for i in indices]
    with _logged(engine) as log:
        completions = engine.generate([prompts[i] for i in indices], params, progress=progress)
    answers = {i: log.watched.get(seed + i, Watched()) for i in indices}
    for answer, completion in zip(answers.values(), completions, strict=True):
        answer.round_lengths = completion.accepted_lengths[1:]
    return answers


def _compare(
    temperature: float, share_map: ShareMap, before: Sequence[Watched], after: Mapping[int, Watched]
) -> Comparison:
    """Shares are compared on the same candidates, lengths on the rounds that each kind of share led to."""
    observations = _pool(before)
    return Comparison(
        temperature=temperature,
        share_map=share_map,
        before=Reliability.of(observations),
        after=Reliability.of(observations, share_map),
        lengths_before=Lengths.of(before),
        lengths_after=Lengths.of(after.values()),
    )


def _pool(answers: Iterable[Watched]) -> list[Observation]:
    observations = [observation for answer in answers for observation in answer.observations]
    if not observations:
        raise ValueError("these answers were over before anything was drafted: take more prompts, or longer answers")
    return observations


@contextmanager
def _logged(engine: Engine) -> Iterator[ProposalLog]:
    """Watch the engine's drafter within the block."""
    drafter = engine.drafter
    assert drafter is not None
    log = ProposalLog(drafter)
    engine.drafter = log
    try:
        with engine.watched(log.verified):
            yield log
    finally:
        engine.drafter = drafter
