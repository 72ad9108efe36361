"""Tests of what was drawn against the probabilities that it should have had.

The *probability integral transform*: if token y was drawn from p, then u = F(y-) + v p(y), with F(y-) the mass of
the tokens before y in some fixed order and v an independent uniform number, is uniform on [0, 1) and independent of
everything before it. So the numbers of all tokens of all answers, at whatever contexts, are one uniform sample.

The order decides what the test can see. Here it is by descending probability: a fault that sharpens or flattens
the law, or favours what a draft likes, moves mass between likely and unlikely tokens and so shifts all the numbers
the same way. By token id, say, likely tokens stand anywhere, the shifts of different contexts cancel, and a sample
at the wrong temperature passes.

Knows nothing about models or engines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Transform:
    """The numbers that the tests take of a run of tokens, one entry a token.

    uniforms: u as above. surprises: -log p(y). means, variances: what a surprise has at its context.
    """

    uniforms: Floats
    surprises: Floats
    means: Floats
    variances: Floats

    @classmethod
    def join(cls, parts: Sequence[Transform]) -> Transform:
        """The parts, one after the other."""
        return cls(**{item.name: np.concatenate([getattr(part, item.name) for part in parts]) for item in fields(cls)})


def transform(scores: Tensor, tokens: Tensor, fractions: Floats) -> Transform:
    """`scores` [T, V] are logits over the temperature, `tokens` [T] what was drawn, `fractions` [T] the v's."""
    log_probs = torch.log_softmax(scores.float(), dim=-1)
    probs = log_probs.exp()
    own_log = log_probs.gather(1, tokens[:, None])  # [T, 1]
    ids = torch.arange(scores.shape[-1], device=scores.device)
    before = (log_probs > own_log) | ((log_probs == own_log) & (ids < tokens[:, None]))
    # Rows in float32, which is what was drawn from, and sums in float64, for a vocabulary's worth of terms.
    below = (probs * before).sum(dim=-1, dtype=torch.float64)
    uniforms = below.cpu().numpy() + fractions * own_log.squeeze(1).exp().double().cpu().numpy()
    surprises = torch.where(probs > 0, -log_probs, 0.0)
    means = (probs * surprises).sum(dim=-1, dtype=torch.float64)
    squares = (probs * surprises.square()).sum(dim=-1, dtype=torch.float64)
    variances = (squares - means.square()).clamp_min(0)
    return Transform(
        uniforms=np.asarray(uniforms),
        surprises=-own_log.squeeze(1).double().cpu().numpy(),
        means=means.cpu().numpy(),
        variances=variances.cpu().numpy(),
    )


def uniformity(uniforms: Floats) -> tuple[float, float]:
    """The test of Kolmogorov and Smirnov: the largest gap between the sample's distribution and the uniform one, and
    its p."""
    count = len(uniforms)
    if not count:
        return 0.0, 1.0
    ordered = np.sort(uniforms)
    steps = np.arange(count + 1) / count
    gap = float(max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max()))
    return gap, _kolmogorov(gap, count)


def _kolmogorov(gap: float, count: int) -> float:
    """Chance of a gap at least this large, by the limit law at Stephens's scale, which holds from about ten numbers
    on."""
    scaled = (math.sqrt(count) + 0.12 + 0.11 / math.sqrt(count)) * gap
    if scaled < 0.2:
        return 1.0  # where the series converges slowly and the chance is 1 to twelve digits
    tail = 2 * math.fsum((1 if k % 2 else -1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, tail))


def surprise(sample: Transform) -> tuple[float, float]:
    """The standard score of the sum of surprises, and its two-sided p: the sharpest test of a wrong temperature.

    The derivative of log p at inverse temperature 1 is the mean surprise less the surprise, so no test has more
    power against temperatures close by. Surprises less their means are a martingale, whose sum is near normal.
    """
    variance = float(sample.variances.sum())
    if variance == 0:
        return 0.0, 1.0
    score = float((sample.surprises - sample.means).sum()) / math.sqrt(variance)
    return score, math.erfc(abs(score) / math.sqrt(2))


def independence(pairs: Floats) -> tuple[float, float]:
    """Chi-square of disjoint pairs [N, 2] on a grid of 8 by 8 (coarser, if a cell would expect less than 5), and its p.

    Overlapping pairs are not independent of each other, and their chi-square has another law.
    """
    num_cells = min(8, math.isqrt(len(pairs) // 5))
    if num_cells < 2:
        return 0.0, 1.0
    cells = np.minimum((pairs * num_cells).astype(np.int64), num_cells - 1)
    counts = np.bincount(cells[:, 0] * num_cells + cells[:, 1], minlength=num_cells**2)
    expected = len(pairs) / num_cells**2
    statistic = float(((counts - expected) ** 2).sum() / expected)
    return statistic, chi_square_tail(statistic, num_cells**2 - 1)


def chi_square_tail(statistic: float, degrees: int) -> float:
    """Chance that a chi-square number of that many degrees of freedom is at least `statistic`."""
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
