"""Several drafters at once: their candidates become one tree, ranked by estimated value.

A head guesses what the target would say next; a lookup knows what was said before. Each proposes for every request,
and a node that both propose is verified once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infer.cost import CostModel
from infer.drafters.base import Drafter, DraftLimit, TreeSettings
from infer.growth import merge
from infer.request import Request
from infer.tree import DraftTree


class HybridDrafter:
    """The union of `drafters`, each of which must propose unsampled, valued trees."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        if len({drafter.name for drafter in drafters}) < len(drafters):
            raise ValueError(f"drafters of a hybrid need different names, got {[drafter.name for drafter in drafters]}")
        self.drafters = tuple(drafters)
        self.name = "+".join(drafter.name for drafter in drafters)
        self.taps = tuple(tap for drafter in drafters for tap in drafter.taps)

    @property
    def step_milliseconds(self) -> float:
        return sum(drafter.step_milliseconds for drafter in self.drafters)

    def open(self, *, num_slots: int, num_columns: int, tree: TreeSettings, cost: CostModel) -> None:
        for drafter in self.drafters:
            drafter.open(num_slots=num_slots, num_columns=num_columns, tree=tree, cost=cost)

    def observe(self, request: Request, states: torch.Tensor | None) -> None:
        widths = [len(drafter.taps) for drafter in self.drafters]
        size = 0 if states is None else states.shape[-1] // max(1, sum(widths))
        parts = [None] * len(widths) if states is None else states.split([width * size for width in widths], dim=-1)
        for drafter, width, part in zip(self.drafters, widths, parts, strict=True):
            drafter.observe(request, part if width else None)

    def propose(self, requests: Sequence[Request], limits: Sequence[DraftLimit]) -> list[DraftTree]:
        forests = [drafter.propose(requests, limits) for drafter in self.drafters]
        return [merge(trees) for trees in zip(*forests, strict=True)]

    def close(self, request: Request) -> None:
        for drafter in self.drafters:
            drafter.close(request)
