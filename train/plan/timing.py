"""How long a run takes: what its budget comes to in visits, and what these take at measured rates."""

from __future__ import annotations

import math
from dataclasses import dataclass

from configs.schema import RunConfig
from train.evaluation import NUM_TIMED_PROMPTS
from train.plan.calibration import Rates
from train.plan.needs import DiskNeeds
from train.plan.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Visits until the run ends, and optimiser steps; None where only a clock says it. by: the setting that ends it."""

    visits: int | None
    steps: int | None
    epochs: float | None
    tokens: int | None
    by: str


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds: of the run's own clock (features and training), and of evaluations, which no budget counts."""

    features: float
    training: float
    evaluations: float
    num_evaluations: int

    @property
    def total(self) -> float:
        return self.features + self.training + self.evaluations


def budget_of(config: RunConfig, work: Workload, rates: Rates | None, disk: DiskNeeds, *, speedup: float) -> Budget:
    """The setting that is reached first; a budget in minutes needs rates."""
    settings, conversations = config.train, config.optim.conversations_per_step
    limits: dict[str, int] = {}
    if settings.steps is not None:
        limits["train.steps"] = settings.steps * conversations
    if settings.epochs is not None and work.num_rows is not None:
        limits["train.epochs"] = math.ceil(settings.epochs * work.num_rows)
    if settings.minutes is not None and rates is not None:
        limits["train.minutes"] = _visits_within(60 * settings.minutes, config, work, rates, disk, speedup=speedup)
    if not limits:
        return Budget(visits=None, steps=None, epochs=None, tokens=None, by="train.minutes")
    by = min(limits, key=lambda name: limits[name])
    steps = max(1, math.ceil(limits[by] / conversations))
    visits = steps * conversations
    return Budget(
        visits=visits,
        steps=steps,
        epochs=visits / work.num_rows if work.num_rows else None,
        tokens=round(visits * work.mean_length),
        by=by,
    )


def times_of(
    config: RunConfig, work: Workload, budget: Budget, rates: Rates, disk: DiskNeeds, *, speedup: float
) -> Times:
    """`speedup`: of several processes over one."""
    assert budget.visits is not None
    assert budget.steps is not None
    features, training = _clock(budget.visits, config, work, rates, disk)
    every = config.train.eval_every
    num_evaluations = (
        config.train.num_evaluations if every is None else budget.steps // every + bool(budget.steps % every)
    )
    return Times(
        features=features / speedup,
        training=training / speedup,
        evaluations=num_evaluations * _evaluation_seconds(config, work, rates),
        num_evaluations=num_evaluations,
    )


def _clock(visits: int, config: RunConfig, work: Workload, rates: Rates, disk: DiskNeeds) -> tuple[float, float]:
    """(seconds of features, of training) of one process."""
    mean = work.mean_length
    first = visits if work.num_rows is None else min(visits, work.num_rows)
    computed = first + (visits - first) * (1 - disk.features_share)
    by_clock = config.train.minutes is not None
    start = config.train.ttt_start
    tokens = visits * mean
    if by_clock:  # the share is one of time
        training = tokens / (start * rates.first_steps + (1 - start) * rates.all_steps)
    else:
        training = tokens * (start / rates.first_steps + (1 - start) / rates.all_steps)
    features = 0.0 if config.target.features is not None else computed * mean / rates.features
    return features, training


def _visits_within(
    seconds: float, config: RunConfig, work: Workload, rates: Rates, disk: DiskNeeds, *, speedup: float
) -> int:
    low, high = 1, 2
    while sum(_clock(high, config, work, rates, disk)) / speedup < seconds and high < 1 << 40:
        low, high = high, 2 * high
    while high - low > max(1, low // 1000):
        middle = (low + high) // 2
        low, high = (
            (middle, high) if sum(_clock(middle, config, work, rates, disk)) / speedup < seconds else (low, middle)
        )
    return low


def _evaluation_seconds(config: RunConfig, work: Workload, rates: Rates) -> float:
    """Answers at each temperature together, a few alone with the head and without, and head against target on
    held-out text (a forward alone is about a third of a training step)."""
    settings = config.eval
    answers = settings.prompts * settings.max_tokens * len(settings.temperatures) / rates.decoding
    timed = 2 * min(NUM_TIMED_PROMPTS, settings.prompts) * settings.max_tokens / rates.decoding_alone
    held_out = work.held_out_tokens / (3 * rates.all_steps)
    return answers + timed + held_out
