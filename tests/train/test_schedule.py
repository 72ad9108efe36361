"""Schedules are functions of progress alone, so a resumed run has the learning rate of an uninterrupted one."""

from __future__ import annotations

from typing import Any

import pytest

from configs.schema import OptimConfig, TrainSettings
from train.schedule import Progress, fraction_done, is_due, learning_rate, num_unrolled


def rates(schedule: Any, *, first: int, last: int) -> list[float]:
    optim, settings = OptimConfig(schedule=schedule, warmup_steps=4), TrainSettings(steps=40)
    progress = [Progress(step=step) for step in range(first, last)]
    return [learning_rate(one, optim, fraction_done(one, settings, 10)) for one in progress]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_rates_after_a_restart_are_those_of_one_run(schedule: str) -> None:
    """A schedule once restarted from the epoch number: a rate near zero, then a second warm-up."""
    whole = rates(schedule, first=0, last=40)
    assert rates(schedule, first=0, last=17) + rates(schedule, first=17, last=40) == whole
    peak = whole.index(max(whole))
    assert whole[:peak] == sorted(whole[:peak])
    assert whole[peak:] == sorted(whole[peak:], reverse=True)


def test_rate_ends_at_the_smallest_share() -> None:
    optim = OptimConfig(lr=1.0, min_lr_fraction=0.1, warmup_steps=0)
    assert learning_rate(Progress(step=5), optim, 1.0) == pytest.approx(0.1)
    assert learning_rate(Progress(step=5), optim, 0.0) == pytest.approx(1.0)


def test_the_first_budget_to_end_decides() -> None:
    settings = TrainSettings(steps=100, minutes=1, epochs=2)
    assert fraction_done(Progress(step=10, visits=10, seconds=3), settings, 10) == 0.5
    assert fraction_done(Progress(step=10, visits=1, seconds=45), settings, 10) == 0.75
    assert fraction_done(Progress(step=300), settings, 10) == 1.0


def test_unrolling_begins_at_its_share_of_the_budget() -> None:
    settings = TrainSettings(steps=10, ttt_start=0.4, ttt_steps=3)
    assert [num_unrolled(settings, share) for share in (0.0, 0.39, 0.4, 1.0)] == [1, 1, 3, 3]


@pytest.mark.parametrize("count", [1, 3, 6, 7, 10, 49])
def test_evaluations_are_spread_and_counted(count: int) -> None:
    """As many as asked for, the last at the very end, whatever the rounding of 1/n."""
    steps = 997
    due = [step for step in range(1, steps + 1) if is_due(1 / count, (step - 1) / steps, step / steps)]
    assert len(due) in (count, count - 1)  # the trainer evaluates at the end in any case
    assert not is_due(None, 0, 1)
