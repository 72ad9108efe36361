"""Rounds of the real engine: what each was made of, and the time that it took."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from infer.drafters.stepper import DraftRound, Frontier
from infer.engine import Engine
from infer.request import Request, RequestLaw
from infer.sampling import SamplingParams
from infer.tree import DraftTree
from infer.tune.record import Parts
from infer.tune.replay import Meter, Round
from infer.verify import Verdict


@dataclass(frozen=True, kw_only=True)
class TimedRound:
    """A round and its milliseconds: all of them, and those of drafting and of the target's forward."""

    round: Round
    milliseconds: float
    draft: float
    forward: float

    @property
    def rest(self) -> float:
        return max(0.0, self.milliseconds - self.draft - self.forward)


def timed_rounds(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[TimedRound]:
    """Answer the prompts side by side (as many as the engine runs at once); all of their rounds."""
    if len(prompts) > engine.max_requests:
        raise ValueError(f"{len(prompts)} prompts for an engine that runs {engine.max_requests} at once")
    seen: list[tuple[Request, int, int, int]] = []

    def observe(request: Request, tree: DraftTree, law: RequestLaw, verdict: Verdict) -> None:
        if request.accepted_lengths:  # else its prefill
            seen.append((request, len(tree), request.num_cached, len(request.accepted_lengths)))

    rounds: list[TimedRound] = []
    with engine.watched(observe), metered(engine) as meter:
        requests = engine.submit(prompts, params)
        while any(request.finish_reason is None for request in requests):
            seen.clear()
            before, start = (engine.draft_seconds, engine.forward_seconds), time.perf_counter()
            engine.step()
            seconds = time.perf_counter() - start
            draft, forward = engine.draft_seconds - before[0], engine.forward_seconds - before[1]
            num_steps, num_step_rows = meter.take()
            if not seen:
                continue
            made = Round(
                num_requests=len(seen),
                num_asked=0 if engine.drafter is None else engine.adaptation.num_drafted,
                num_rows=len(seen) + sum(size for _, size, _, _ in seen),
                context=sum(context for _, _, context, _ in seen) // len(seen),
                num_steps=num_steps,
                num_step_rows=num_step_rows,
                lengths=tuple(request.accepted_lengths[index] for request, _, _, index in seen),
                is_first=not rounds,
            )
            rounds.append(TimedRound(round=made, milliseconds=1e3 * seconds, draft=1e3 * draft, forward=1e3 * forward))
    return rounds


@contextmanager
def metered(engine: Engine) -> Iterator[Meter]:
    """Count the draft steps of the engine's networks within the block."""
    meter = Meter()
    networks = () if engine.drafter is None else Parts.of(engine.drafter).networks
    steppers = [network.stepper for network in networks]
    for network, stepper in zip(networks, steppers, strict=True):
        network.stepper = _MeteredStepper(stepper, meter)
    try:
        yield meter
    finally:
        for network, stepper in zip(networks, steppers, strict=True):
            network.stepper = stepper


class _MeteredStepper:
    """A stepper whose steps are counted."""

    def __init__(self, stepper: Any, meter: Meter) -> None:
        self._stepper, self._meter = stepper, meter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stepper, name)

    def begin(self, requests: Sequence[Request], depths: Sequence[int]) -> DraftRound:
        return _MeteredRound(self._stepper.begin(requests, depths), self._meter)


class _MeteredRound:
    def __init__(self, drawn: DraftRound, meter: Meter) -> None:
        self._drawn, self._meter = drawn, meter

    def logits(self, frontiers: Sequence[Frontier], depth: int) -> torch.Tensor:
        if depth:
            self._meter.num_steps += 1
            self._meter.num_rows += sum(len(frontier.nodes) for frontier in frontiers)
        return self._drawn.logits(frontiers, depth)
