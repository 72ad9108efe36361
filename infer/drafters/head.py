"""Drafting with trained heads: read the target's newest states, then draft, each shape of head in its own way.

    RecurrentStepper   heads that go on from their own states (EAGLE): a cache of their own, row t for the pair (state
                       of position t, token t + 1). Rows of committed text always hold target states: after each round
                       the accepted rows are computed afresh, so the head's next logits equal those of a fresh prefill
                       of the text. Rows of the tree lie behind them and are overwritten in the next round.
    PathStepper        heads with a network a depth (Medusa, Hydra), which read the root's state and the drafted path; a
                       cache only for a layer that runs over the text
    BlockStepper       heads that draft all depths in one pass (P-EAGLE, DFlash): `infer.drafters.block`

How the tree grows from the head's logits is `infer.drafters.growing`'s business.

Shapes: R packed rows, B requests, H hidden, W what an LM head reads, C draft vocabulary, F frontier nodes of all
requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from heads.base import DraftHead, PathHead, RecurrentHead
from heads.block import BlockHead
from heads.registry import family_of_head
from infer.calibration import Calibration
from infer.drafters.base import Room
from infer.drafters.block import BlockStepper
from infer.drafters.growing import TreeGrower
from infer.drafters.reading import HeadStepper, last_rows, rows_at
from infer.drafters.stepper import DraftRound, Frontier, Stepper
from infer.request import Request
from infer.rows import GrowingRows, RowGroup


class RecurrentStepper(HeadStepper):
    """See the module."""

    head: RecurrentHead
    network: RecurrentHead

    def __init__(self, head: RecurrentHead, *, name: str) -> None:
        super().__init__(head, name=name)

    def _make_room(self, room: Room) -> None:
        self._make_cache(self.head.config, room, room.tree.max_depth * room.tree.beam)

    def _measure(self) -> None:
        self.begin_milliseconds = self.step_milliseconds = self.measure_step()

    def begin(self, requests: Sequence[Request], depths: Sequence[int]) -> DraftRound:
        return _RecurrentRound(self, self.read_committed(requests))

    def measure_step(self, *, width: int = 4, context: int = 128) -> float:
        """Milliseconds of one draft step, from states to candidates, on this machine."""
        cache = self._cache
        assert cache is not None
        context = min(context, cache.num_columns - width)
        group = RowGroup(slot=0, prefix=context, tokens=[int(self.target_ids[0])] * width)
        states = torch.zeros((width, self.head.config.hidden_size), dtype=self._dtype, device=self._device)
        milliseconds = self._milliseconds(lambda: self.logits(self.forward([group], states), 0))
        cache.keys.zero_()
        cache.values.zero_()
        return milliseconds

    @property
    def num_step_bytes(self) -> int:
        """Bytes of weights that a draft step reads. The fusion of the target's states runs once a round, and the
        embedding is looked up."""
        state = torch.zeros((1, self.head.config.hidden_size), dtype=self._dtype, device=self._device)
        own = {name: weight for name, weight in self.head.named_parameters() if not name.startswith("fc.")}
        _, lm_head = self.head.outputs(state, 0)
        lent = 0 if any(weight is lm_head for weight in own.values()) else lm_head.nbytes
        return sum(weight.nbytes for weight in own.values()) + lent

    @torch.inference_mode()
    def next_logits(self, request: Request) -> torch.Tensor:
        """Draft logits [C] for the token after the last emitted one, from committed rows alone."""
        return self.logits(self.read_committed([request]), 0)[0]

    @torch.inference_mode()
    def read(self, request: Request) -> None:
        self.read_committed([request])

    def read_committed(self, requests: Sequence[Request]) -> torch.Tensor:
        """Run the head over states that came since the last round; returns each request's last new state [B, H]."""
        groups, taps = self._take_pending(requests)
        return last_rows(groups, self.forward(groups, self.network.fuse(taps)))

    def forward(self, groups: Sequence[RowGroup], states: torch.Tensor) -> torch.Tensor:
        """One head forward over packed rows [R, H] -> [R, H]."""
        rows, attend_rows = self._packed(groups)
        return cast(torch.Tensor, self.network(rows.token_ids, states, rows.positions, attend_rows))

    def logits(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """Draft logits [F, C] of nodes at `depth`, from their states [F, H]."""
        return self.network.logits(states, depth)


class _RecurrentRound:
    """The head's states [F, H] of the nodes expanded last, at first those of all requests' roots [B, H]."""

    def __init__(self, stepper: RecurrentStepper, states: torch.Tensor) -> None:
        self._stepper = stepper
        self._states = states
        self._rows: dict[Request, GrowingRows] = {}

    def logits(self, frontiers: Sequence[Frontier], depth: int) -> torch.Tensor:
        """Below the roots, the head runs on each node's token beside its parent's state."""
        states = rows_at(self._states, [row for frontier in frontiers for row in frontier.parent_rows])
        if depth > 0:
            groups = [
                self._rows_of(each.request).add(each.nodes, each.parents, each.tokens, depth) for each in frontiers
            ]
            states = self._stepper.forward(groups, states)
        self._states = states
        return self._stepper.logits(states, depth)

    def _rows_of(self, request: Request) -> GrowingRows:
        if request not in self._rows:
            num_committed = self._stepper.memory(request).num_rows
            self._rows[request] = GrowingRows(slot=request.slot, prefix=num_committed)
        return self._rows[request]


class PathStepper(HeadStepper):
    """See the module."""

    head: PathHead
    network: PathHead

    def __init__(self, head: PathHead, *, name: str) -> None:
        super().__init__(head, name=name)

    def _make_room(self, room: Room) -> None:
        if self.head.has_prefix_layer:
            self._make_cache(self.head.config, room, 0)

    def _measure(self) -> None:
        self.begin_milliseconds = self.step_milliseconds = self.measure_step()

    def begin(self, requests: Sequence[Request], depths: Sequence[int]) -> DraftRound:
        return _PathRound(self, self.read_committed(requests), [request.output_ids[-1] for request in requests])

    def measure_step(self, *, width: int = 4) -> float:
        """Milliseconds of one draft step, from states to candidates, on this machine."""
        roots = torch.zeros((width, self.head.config.hidden_size), dtype=self._dtype, device=self._device)
        depth = (self.head.num_depths or 1) - 1
        path = self.target_ids[:1].expand(width, depth + 1)
        return self._milliseconds(lambda: self.draft_logits(roots, path, depth))

    @torch.inference_mode()
    def next_logits(self, request: Request) -> torch.Tensor:
        """Draft logits [C] for the token after the last emitted one, from committed rows alone."""
        path = torch.tensor([[request.output_ids[-1]]], device=self._device)
        return self.draft_logits(self.read_committed([request]), path, 0)[0]

    @torch.inference_mode()
    def read(self, request: Request) -> None:
        self.read_committed([request])

    def read_committed(self, requests: Sequence[Request]) -> torch.Tensor:
        """The roots' states [B, H] of the last committed rows."""
        groups, taps = self._take_pending(requests)
        if self.head.has_prefix_layer:
            rows, attend_rows = self._packed(groups)
            return last_rows(groups, self.network.roots(taps, rows.token_ids, rows.positions, attend_rows))
        taps = last_rows(groups, taps)
        tokens = torch.tensor([group.tokens[-1] for group in groups], device=self._device)
        return self.network.roots(taps, tokens, torch.zeros_like(tokens), _no_attention)

    def draft_logits(self, roots: torch.Tensor, path_tokens: torch.Tensor, depth: int) -> torch.Tensor:
        return self.network.logits(self.network.draft(roots, path_tokens, depth), depth)


class _PathRound:
    """The roots' states [B, H], and the tokens on the way to each node expanded last."""

    def __init__(self, stepper: PathStepper, roots: torch.Tensor, root_tokens: Sequence[int]) -> None:
        self._stepper = stepper
        self._roots = roots
        self._paths = [[token] for token in root_tokens]

    def logits(self, frontiers: Sequence[Frontier], depth: int) -> torch.Tensor:
        paths: list[list[int]] = []
        for frontier in frontiers:
            before = [self._paths[row] for row in frontier.parent_rows]
            paths.extend(before if depth == 0 else map(_extended, before, frontier.tokens))
        self._paths = paths
        roots = self._roots[[frontier.index for frontier in frontiers for _ in frontier.nodes]]
        return self._stepper.draft_logits(roots, torch.tensor(paths, device=roots.device), depth)


class HeadDrafter(TreeGrower):
    """Trees grown from a trained head. `name` tells heads of one hybrid apart (by default the family's)."""

    def __init__(self, head: DraftHead, *, calibration: Calibration | None = None, name: str | None = None) -> None:
        super().__init__(make_stepper(head, name=name or family_of_head(head)), calibration=calibration)
        self.head = head


def make_stepper(head: DraftHead, *, name: str) -> Stepper:
    """The way to draft with a head of its shape."""
    if isinstance(head, RecurrentHead):
        return RecurrentStepper(head, name=name)
    if isinstance(head, PathHead):
        return PathStepper(head, name=name)
    if isinstance(head, BlockHead):
        return BlockStepper(head, name=name)
    raise ValueError(f"there is no way to draft with a {type(head).__name__}")


def _extended(path: list[int], token: int) -> list[int]:
    return [*path, token]


def _no_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    raise AssertionError("a head without a layer over the text does not attend")
