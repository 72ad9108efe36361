"""What little statistics the figures of a run need: a bootstrap, and Student's t."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

NUM_RESAMPLES = 1000


def ratio_standard_error(
    numerators: Sequence[float], denominators: Sequence[float], *, num_resamples: int = NUM_RESAMPLES
) -> float | None:
    """Standard error of sum(numerators) / sum(denominators), by resampling whole pairs; None with fewer than two.

    Rounds of one answer are alike, so an answer, not a round, is what another draw of prompts would change.
    """
    count = len(numerators)
    if count < 2:
        return None
    chance = np.random.default_rng(0)
    picks = chance.integers(count, size=(num_resamples, count))
    tops = np.asarray(numerators, dtype=np.float64)[picks].sum(axis=1)
    bottoms = np.asarray(denominators, dtype=np.float64)[picks].sum(axis=1)
    used = bottoms > 0
    return float(np.std(tops[used] / bottoms[used], ddof=1)) if used.sum() > 1 else None


def student_quantile(probability: float, degrees: int) -> float:
    """The t that a Student variable of so many degrees of freedom stays below with this probability."""
    if not 0 < probability < 1 or degrees < 1:
        raise ValueError(
            f"a quantile needs a probability between 0 and 1 and at least 1 degree of freedom, "
            f"got {probability} and {degrees}"
        )
    if probability < 0.5:
        return -student_quantile(1 - probability, degrees)
    low, high = 0.0, 1.0
    while _student_cdf(high, degrees) < probability:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_cdf(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def _student_cdf(t: float, degrees: int) -> float:
    """For t >= 0, in closed form (Abramowitz and Stegun 26.7.3-4)."""
    angle = math.atan2(t, math.sqrt(degrees))
    sine, cosine_squared = math.sin(angle), math.cos(angle) ** 2
    if degrees % 2:
        total, term = 0.0, math.cos(angle)
        for k in range(1, (degrees - 1) // 2 + 1):
            total += term
            term *= cosine_squared * 2 * k / (2 * k + 1)
        return 0.5 + (angle + sine * total) / math.pi
    total, term = 0.0, 1.0
    for k in range(1, degrees // 2 + 1):
        total += term
        term *= cosine_squared * (2 * k - 1) / (2 * k)
    return 0.5 + sine * total / 2


def is_credible(speed: Mapping[str, float]) -> bool:
    """Whether a measured speed-up can be more than noise: no draft gains more than the tokens that it adds."""
    return "speedup" in speed and speed["speedup"] <= speed.get("tree_accepted_length", float("inf"))
