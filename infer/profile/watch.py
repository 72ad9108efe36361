"""One round of an engine, timed part by part.

The engine's own timers tell drafting, forward, verification and commit apart; within those, wrappers around the target,
the drafter and its networks do. What is left of a step is the engine's own work. On a GPU the device is waited for at
the border of every part, so that each is charged what it started; without that a round is a little shorter.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from infer.cache import SlotCache
from infer.drafters.base import Drafter, DraftLimit, Room
from infer.drafters.growing import TreeGrower
from infer.drafters.hybrid import HybridDrafter
from infer.drafters.stepper import DraftRound, Frontier, Stepper
from infer.engine import Engine
from infer.profile.floors import layer_windows
from infer.request import Request
from infer.rows import PackedRows, RowGroup
from infer.target import TargetModel, TargetOutput
from infer.tree import DraftTree
from infer.verify import KindType

TARGET = "target forward"
BEGIN, STEPS, GROWING, LOOKUP = "draft: begin", "draft: steps", "draft: tree building", "draft: lookup"
FITTING, PACKING = "fitting", "packing rows"
VERIFYING, COMMITTING, HOST = "verification", "commit", "host"
PARTS: Mapping[str, str] = {
    BEGIN: "reading what the last round added, up to the logits below the root",
    STEPS: "the network's forwards for deeper nodes",
    GROWING: "candidates, and choosing which to expand",
    LOOKUP: "drafters without a network",
    FITTING: "limits, and cutting trees to the nodes that pay",
    PACKING: "rows, positions and masks of the forward",
    TARGET: "the forward that verifies, logits included",
    VERIFYING: "processing logits, noise, and the walk",
    COMMITTING: "emitting tokens, moving cache rows, handing states over",
    HOST: "what remains of the engine's step",
}
"""The parts of a round, in its order, and what each holds."""
_PROPOSING = "propose"


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round as measured: seconds by part and in all, and the rows of its forwards."""

    seconds: Mapping[str, float]
    total: float
    num_tokens: int
    num_steps: int
    num_step_rows: int
    groups: Sequence[RowGroup]
    is_drafted: bool


class Watch:
    """Times what an engine and its parts hand to each other.

    seconds, calls: by part, over all rounds so far. num_step_rows: likewise, of the draft network's steps. groups: of
    the target's last forward.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self.num_step_rows = 0
        self.groups: Sequence[RowGroup] = ()
        self._device = device

    @contextmanager
    def over(self, engine: Engine) -> Iterator[None]:
        """Let the engine's target, its drafter and the drafter's networks report here within the block."""
        drafter = engine.drafter
        with ExitStack() as stack:
            stack.enter_context(_exchanged(engine, "target", _TimedTarget(engine.target, self)))
            if isinstance(drafter, HybridDrafter):
                timed = tuple(self._timed_part(part, stack) for part in drafter.drafters)
                stack.enter_context(_exchanged(drafter, "drafters", timed))
            elif isinstance(drafter, TreeGrower):
                self._timed_part(drafter, stack)
            if drafter is not None:
                stack.enter_context(_exchanged(engine, "drafter", _TimedDrafter(drafter, self, _PROPOSING)))
            yield

    def _timed_part(self, drafter: Drafter, stack: ExitStack) -> Drafter:
        if not isinstance(drafter, TreeGrower):
            return _TimedDrafter(drafter, self, LOOKUP)
        stack.enter_context(_exchanged(drafter, "stepper", _TimedStepper(drafter.stepper, self)))
        return drafter

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        self._wait()
        start = time.perf_counter()
        yield
        self._wait()
        self.seconds[name] += time.perf_counter() - start
        self.calls[name] += 1

    def round(self, engine: Engine) -> Round:
        """One step of the engine, and how its time was spent."""
        seconds, calls, timers = self.seconds.copy(), self.calls.copy(), _timers(engine)
        num_step_rows = self.num_step_rows
        start = time.perf_counter()
        num_tokens = engine.step()
        self._wait()
        total = time.perf_counter() - start
        drafting, forwarding, verifying, committing = (
            after - before for after, before in zip(_timers(engine), timers, strict=True)
        )
        spent = {name: self.seconds[name] - seconds[name] for name in self.seconds}
        computing = spent[TARGET] - spent.get(PACKING, 0.0)  # rows are laid out within the target's forward
        parts = {
            PACKING: forwarding - computing,
            TARGET: computing,
            VERIFYING: verifying,
            COMMITTING: committing,
            HOST: total - drafting - forwarding - verifying - committing,
        }
        if engine.drafter is not None:
            proposing = spent.get(_PROPOSING, 0.0)
            inner = {name: spent[name] for name in (BEGIN, STEPS, LOOKUP) if name in spent}
            parts |= {**inner, GROWING: proposing - sum(inner.values())} if inner else {LOOKUP: proposing}
            parts[FITTING] = drafting - proposing
        return Round(
            seconds=parts,
            total=total,
            num_tokens=num_tokens,
            num_steps=self.calls[STEPS] - calls[STEPS],
            num_step_rows=self.num_step_rows - num_step_rows,
            groups=self.groups,
            is_drafted=self.calls[_PROPOSING] > calls[_PROPOSING],
        )

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _timers(engine: Engine) -> tuple[float, float, float, float]:
    return engine.draft_seconds, engine.forward_seconds, engine.verify_seconds, engine.commit_seconds


@contextmanager
def _exchanged(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another value of a public attribute within the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class _TimedTarget(TargetModel):
    """A target whose forwards are timed, and within them the laying out of rows, masks included."""

    def __init__(self, target: TargetModel, watch: Watch) -> None:
        self.__dict__.update(target.__dict__)
        self._watch = watch
        self._bias_windows = set(layer_windows(target))

    def forward(self, groups: Sequence[RowGroup], cache: SlotCache, **options: Any) -> TargetOutput:
        self._watch.groups = groups
        with self._watch.timing(TARGET):
            return super().forward(groups, cache, **options)

    def _packed(self, groups: Sequence[RowGroup], cache: SlotCache) -> PackedRows:
        """What the first layer's attention would make is made here, and kept for it and all others."""
        with self._watch.timing(PACKING):
            rows = super()._packed(groups, cache)
            if rows.use_kernel:
                assert rows.paths
            else:
                num_groups = int(self.config.num_attention_heads) // cache.keys.shape[1]
                for window in self._bias_windows:
                    rows.bias(window, self.dtype, num_groups)
            return rows


class _TimedDrafter:
    """A drafter whose proposals are timed."""

    def __init__(self, drafter: Drafter, watch: Watch, part: str) -> None:
        self._drafter, self._watch, self._part = drafter, watch, part

    @property
    def name(self) -> str:
        return self._drafter.name

    @property
    def kinds(self) -> tuple[KindType, ...]:
        return self._drafter.kinds

    @property
    def taps(self) -> tuple[int, ...]:
        return self._drafter.taps

    @property
    def spent_milliseconds(self) -> float:
        return self._drafter.spent_milliseconds

    def open(self, room: Room) -> None:
        self._drafter.open(room)

    def observe(self, request: Request, states: torch.Tensor | None) -> None:
        self._drafter.observe(request, states)

    def propose(self, requests: Sequence[Request], limits: Sequence[DraftLimit]) -> list[DraftTree]:
        with self._watch.timing(self._part):
            return self._drafter.propose(requests, limits)

    def close(self, request: Request) -> None:
        self._drafter.close(request)


class _TimedStepper:
    """A stepper whose forwards are timed; all else is the stepper's own."""

    def __init__(self, stepper: Stepper, watch: Watch) -> None:
        self._stepper, self._watch = stepper, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stepper, name)

    def begin(self, requests: Sequence[Request], depths: Sequence[int]) -> DraftRound:
        with self._watch.timing(BEGIN):
            return _TimedDraftRound(self._stepper.begin(requests, depths), self._watch)


class _TimedDraftRound:
    def __init__(self, draft_round: DraftRound, watch: Watch) -> None:
        self._round, self._watch = draft_round, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._round, name)

    def logits(self, frontiers: Sequence[Frontier], depth: int) -> torch.Tensor:
        if depth:
            self._watch.num_step_rows += sum(len(frontier.nodes) for frontier in frontiers)
        with self._watch.timing(STEPS if depth else BEGIN):
            return self._round.logits(frontiers, depth)
