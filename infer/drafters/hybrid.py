"""Several drafters at once: their candidates become one tree, ranked by estimated value.

A head guesses what the target would say next; a lookup knows what was said before. Each proposes for every request,
and a node that both propose is verified once.

Only trees of fixed or coupled proposals can be joined: for a request whose rule takes draws, the first drafter that
makes them proposes alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infer.drafters.base import Drafter, DraftLimit, PrefixDrafter, RecordingDrafter, Room
from infer.growth import merge
from infer.request import Request
from infer.tree import Coupled, DraftTree, OneHot
from infer.verify import KindType


def parts_of(drafter: Drafter | None) -> tuple[Drafter, ...]:
    """The drafters that propose: those of a hybrid, the one that there is, or none."""
    if isinstance(drafter, HybridDrafter):
        return drafter.drafters
    return () if drafter is None else (drafter,)


class HybridDrafter:
    """The union of `drafters`, each of which must give its nodes values."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        if len({drafter.name for drafter in drafters}) < len(drafters):
            raise ValueError(f"drafters of a hybrid need different names, got {[drafter.name for drafter in drafters]}")
        self.drafters = tuple(drafters)
        self.name = "+".join(drafter.name for drafter in drafters)
        self.kinds: tuple[KindType, ...] = tuple(dict.fromkeys(kind for drafter in drafters for kind in drafter.kinds))
        self.taps = tuple(tap for drafter in drafters for tap in drafter.taps)
        self.spent_milliseconds = 0.0

    @property
    def records(self) -> bool:
        return any(part.records for part in self._recording_parts())

    @records.setter
    def records(self, value: bool) -> None:
        for part in self._recording_parts():
            part.records = value

    def open(self, room: Room) -> None:
        for drafter in self.drafters:
            drafter.open(room)

    def observe(self, request: Request, states: torch.Tensor | None) -> None:
        widths = [len(drafter.taps) for drafter in self.drafters]
        size = 0 if states is None else states.shape[-1] // max(1, sum(widths))
        parts = [None] * len(widths) if states is None else states.split([width * size for width in widths], dim=-1)
        for drafter, width, part in zip(self.drafters, widths, parts, strict=True):
            drafter.observe(request, part if width else None)

    def propose(self, requests: Sequence[Request], limits: Sequence[DraftLimit]) -> list[DraftTree]:
        trees: list[list[DraftTree]] = [[] for _ in requests]
        self.spent_milliseconds = 0.0
        for drafter in self.drafters:
            mine = [index for index, request in enumerate(requests) if drafter in self._proposers(request)]
            if mine:
                proposed = drafter.propose([requests[index] for index in mine], [limits[index] for index in mine])
                self.spent_milliseconds += drafter.spent_milliseconds
                for index, tree in zip(mine, proposed, strict=True):
                    trees[index].append(tree)
        return [parts[0] if len(parts) == 1 else merge(parts) for parts in trees]

    def num_kept(self, request: Request) -> int:
        return min(drafter.num_kept(request) if isinstance(drafter, PrefixDrafter) else 0 for drafter in self.drafters)

    def adopt(self, request: Request, source: Request, num_tokens: int) -> None:
        for drafter in self.drafters:
            assert isinstance(drafter, PrefixDrafter), f"{drafter.name} keeps nothing of a text"
            drafter.adopt(request, source, num_tokens)

    def close(self, request: Request) -> None:
        for drafter in self.drafters:
            drafter.close(request)

    def _proposers(self, request: Request) -> tuple[Drafter, ...]:
        """Who proposes for a request: all where their trees can be joined, else the first that makes what is taken."""
        if request.params.greedy or OneHot in request.rule.kinds or Coupled in request.rule.kinds:
            return tuple(drafter for drafter in self.drafters if {OneHot, Coupled} & set(drafter.kinds))
        return tuple(drafter for drafter in self.drafters if set(drafter.kinds) & set(request.rule.kinds))[:1]

    def _recording_parts(self) -> list[RecordingDrafter]:
        return [drafter for drafter in self.drafters if isinstance(drafter, RecordingDrafter)]
