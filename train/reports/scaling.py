"""What twice the data would give: a straight line over the logarithm of the data, carried one doubling further.

Accepted length and agreement grow about linearly in log2 of the data for as long as a head has room to learn. The line
is fitted by least squares; the interval is that of a *new* observation, by Student's t: it covers the scatter around
the line, and not the chance that the line bends. With fewer than four points there is no prediction.

Two kinds of data are told apart. Within one run the data are token *visits*: the same text again, under a learning rate
that decays, so the line says what a longer run on this text would give. Between runs they are *unique* label tokens,
and the line says what more text would give.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from train.reports.evaluation import verification_in
from train.reports.statistics import student_quantile
from train.reports.story import Story

LEAST_POINTS = 4
CONFIDENCE = 0.95
WINDOW_DOUBLINGS = 3.0
"""Of one run the last doublings are fitted: what came before is warm-up and the first unrolled step. (More of it where
that leaves too few points.)"""

WITHIN_RUN = "the same text visited again, under a learning rate that had decayed: not what new text would give"
ACROSS_RUNS = "runs of other sizes, each measured on its own held-out prompts"


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A new observation is expected at `value`, and between `low` and `high` with the confidence of the fit."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class LogLinearFit:
    """value = intercept + slope * log2(amount); deviation: of the points from the line. mean and spread (a sum of
    squares) are of log2 of the amounts."""

    intercept: float
    slope: float
    num_points: int
    deviation: float
    mean: float
    spread: float

    @classmethod
    def of(cls, amounts: Sequence[float], values: Sequence[float]) -> LogLinearFit:
        if len(amounts) < LEAST_POINTS:
            raise ValueError(f"a fit needs at least {LEAST_POINTS} points, there are {len(amounts)}")
        x, y = np.log2(np.asarray(amounts, dtype=np.float64)), np.asarray(values, dtype=np.float64)
        mean, spread = float(x.mean()), float(((x - x.mean()) ** 2).sum())
        if spread < 1e-6:
            raise ValueError("all points have the same amount of data: give some of another size")
        slope = float(((x - mean) * y).sum()) / spread
        intercept = float(y.mean()) - slope * mean
        residuals = y - intercept - slope * x
        deviation = math.sqrt(float((residuals**2).sum()) / (len(x) - 2))
        return cls(intercept=intercept, slope=slope, num_points=len(x), deviation=deviation, mean=mean, spread=spread)

    def at(self, amount: float) -> float:
        return self.intercept + self.slope * math.log2(amount)

    def predict(self, amount: float, *, confidence: float = CONFIDENCE) -> Prediction:
        distance = (math.log2(amount) - self.mean) ** 2 / self.spread
        margin = student_quantile((1 + confidence) / 2, self.num_points - 2) * self.deviation
        margin *= math.sqrt(1 + 1 / self.num_points + distance)
        value = self.at(amount)
        return Prediction(value=value, low=value - margin, high=value + margin)


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What doubling the data would make of one figure. points: (amount, value)."""

    figure: str
    unit: str
    points: tuple[tuple[float, float], ...]
    fit: LogLinearFit
    caveat: str

    @property
    def largest(self) -> float:
        return max(amount for amount, _ in self.points)

    @property
    def now(self) -> float:
        """The line, not the last point, where the data end."""
        return self.fit.at(self.largest)

    @property
    def doubled(self) -> Prediction:
        return self.fit.predict(2 * self.largest)

    def describe(self) -> str:
        doubled = self.doubled
        return (
            f"twice the {self.unit} ({2 * self.largest:,.0f}): {self.figure} {self.now:.3f} -> {doubled.value:.3f}, "
            f"{CONFIDENCE:.0%} interval {doubled.low:.3f} to {doubled.high:.3f} "
            f"(log-linear fit of {self.fit.num_points} points)"
        )

    def to_dict(self) -> dict[str, object]:
        doubled = self.doubled
        return {
            "figure": self.figure,
            "unit": self.unit,
            "points": [list(point) for point in self.points],
            "slope_per_doubling": self.fit.slope,
            "deviation": self.fit.deviation,
            "now": self.now,
            "doubled": {"amount": 2 * self.largest, "value": doubled.value, "low": doubled.low, "high": doubled.high},
            "confidence": CONFIDENCE,
            "caveat": self.caveat,
        }


def outlooks_of_run(story: Story) -> list[Outlook]:
    """From the evaluations of one run; empty where there are too few."""
    measured = [record for record in story.evaluations if record.get("tokens")]
    if not measured:
        return []
    first = max(record["tokens"] for record in measured) / 2**WINDOW_DOUBLINGS
    num_used = max(LEAST_POINTS, sum(record["tokens"] >= first for record in measured))
    used = measured[-num_used:]
    lengths = [(float(record["tokens"]), float(record["accepted_length"])) for record in used]
    agreements = [
        (float(record["tokens"]), float(record["agreement"][0])) for record in used if record.get("agreement")
    ]
    return _outlooks(lengths, agreements, unit="token visits of this run", caveat=WITHIN_RUN)


def outlooks_across(stories: Sequence[Story]) -> list[Outlook]:
    """From the best heads of runs of different data sizes; ValueError where they do not tell."""
    lengths, agreements = [], []
    for story in stories:
        amount, best = story.unique_label_tokens, story.best
        if amount is None or best is None:
            raise ValueError(f"{story.folder} has no evaluation, or does not say how many label tokens it trained on")
        lengths.append((float(amount), float(best["accepted_length"])))
        if best.get("agreement"):
            agreements.append((float(amount), float(best["agreement"][0])))
    if len({bool((story.best or {}).get("simulated")) for story in stories}) > 1:
        raise ValueError("some runs decoded text and others simulated that: their accepted lengths are no one curve")
    if len({verification_in(story.best or {}) for story in stories}) > 1:
        raise ValueError(
            "the runs were measured under different verifications (eval.shape, eval.rule): their accepted lengths are "
            "no one curve"
        )
    LogLinearFit.of(*zip(*lengths, strict=True))  # says what is missing
    return _outlooks(lengths, agreements, unit="unique label tokens", caveat=ACROSS_RUNS)


def _outlooks(
    lengths: Sequence[tuple[float, float]], agreements: Sequence[tuple[float, float]], *, unit: str, caveat: str
) -> list[Outlook]:
    found = []
    for figure, points in (("accepted length", lengths), ("agreement at depth 1", agreements)):
        try:
            fit = LogLinearFit.of([amount for amount, _ in points], [value for _, value in points])
        except ValueError:
            continue
        found.append(Outlook(figure=figure, unit=unit, points=tuple(sorted(points)), fit=fit, caveat=caveat))
    return found
