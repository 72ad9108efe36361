"""How far a run has come, and what follows from it: learning rate, unrolled steps, and what is due.

Everything is a function of `Progress`, which is saved with every checkpoint; nothing counts in memory alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from configs.schema import OptimConfig, TrainSettings


@dataclass(frozen=True, kw_only=True)
class Progress:
    """step: optimiser steps done. visits: training rows seen. seconds: time in training steps, evaluation excluded."""

    step: int = 0
    visits: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def advanced(self, *, visits: int, tokens: int, seconds: float) -> Progress:
        return Progress(
            step=self.step + 1,
            visits=self.visits + visits,
            tokens=self.tokens + tokens,
            seconds=self.seconds + seconds,
        )


def fraction_done(progress: Progress, settings: TrainSettings, num_rows: int | None) -> float:
    """Share of the budget used, 1 at its end; the budget nearest its end decides."""
    shares = []
    if settings.steps is not None:
        shares.append(progress.step / settings.steps)
    if settings.minutes is not None:
        shares.append(progress.seconds / (60 * settings.minutes))
    if settings.epochs is not None and num_rows is not None:
        shares.append(progress.visits / (settings.epochs * num_rows))
    return min(1.0, max(shares))


def learning_rate(progress: Progress, optim: OptimConfig, fraction: float) -> float:
    """Linear warm-up over the first steps, then decay over the whole budget."""
    warm_up = min(1.0, (progress.step + 1) / (optim.warmup_steps + 1))
    low = optim.min_lr_fraction
    decayed = {
        "constant": 1.0,
        "linear": low + (1 - low) * (1 - fraction),
        "cosine": low + (1 - low) * 0.5 * (1 + math.cos(math.pi * fraction)),
    }[optim.schedule]
    return optim.lr * warm_up * decayed


def num_unrolled(settings: TrainSettings, fraction: float) -> int:
    """One step at first, which is cheap and teaches most; all of them later."""
    return 1 if fraction < settings.ttt_start else settings.ttt_steps


def is_due(every: float | None, before: float, after: float) -> bool:
    """Whether a multiple of `every` lies in (before, after]."""
    return every is not None and math.floor(after / every) > math.floor(before / every)
