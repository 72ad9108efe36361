"""Drafting with an EAGLE-3 head: read the target's newest states, then step on the head's own.

The head keeps a cache of its own, row t for the pair (state of position t, token t + 1). Rows of committed text always
hold target states: after each round the accepted rows are computed afresh, so the head's next logits equal those of a
fresh prefill of the text. Rows of the tree lie behind them and are overwritten in the next round.

How the tree grows from the head's logits is `infer.drafters.growing`'s business.

Shapes: R packed rows, B requests, H hidden, C draft vocabulary, F frontier nodes of all requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from heads.eagle3 import Eagle3Head
from infer.attention import attend
from infer.cache import SlotCache
from infer.calibration import Calibration
from infer.cost import CostModel, median_milliseconds
from infer.drafters.base import TreeSettings
from infer.drafters.growing import TreeGrower
from infer.drafters.stepper import Frontier
from infer.request import Request
from infer.rows import GrowingRows, PackedRows, RowGroup


@dataclass
class _Memory:
    """The states of one request that the head has not read yet, and how many rows it has read."""

    pending: list[torch.Tensor] = field(default_factory=list)
    num_rows: int = 0


class Eagle3Stepper:
    """See the module (`infer.drafters.stepper` says what a stepper is)."""

    max_depth = None

    def __init__(self, head: Eagle3Head, *, name: str) -> None:
        self.head = head.eval().requires_grad_(False)
        self.name = name
        self.taps = head.config.taps
        self.target_ids: torch.Tensor = head.target_ids
        self.vocab_size: int = head.config.vocab_size
        self.step_milliseconds = 0.0
        self._dtype: torch.dtype = head.fc.weight.dtype
        self._device: torch.device = head.fc.weight.device
        self._cache: SlotCache | None = None
        self._branch = TreeSettings().branch

    @property
    def begin_milliseconds(self) -> float:
        return self.step_milliseconds

    def open(self, *, num_slots: int, num_columns: int, tree: TreeSettings, cost: CostModel) -> None:
        config = self.head.config
        self._branch = tree.branch
        self._cache = SlotCache(
            num_layers=1,
            num_heads=config.num_key_value_heads,
            key_size=config.head_dim,
            value_size=config.head_dim,
            num_slots=num_slots,
            num_columns=num_columns + tree.max_depth * tree.beam,
            dtype=self._dtype,
            device=self._device,
        )
        if tree.adaptive and not self.step_milliseconds:
            self.step_milliseconds = self.measure_step()

    def observe(self, request: Request, states: torch.Tensor | None) -> None:
        assert states is not None
        self.memory(request).pending.append(states)

    def begin(self, requests: Sequence[Request]) -> Eagle3Round:
        return Eagle3Round(self, self.read_committed(requests))

    def close(self, request: Request) -> None:
        request.draft_state.pop(self.name, None)

    def measure_step(self, *, width: int = 4, context: int = 128) -> float:
        """Milliseconds of one draft step, from states to candidates, on this machine."""
        cache = self._cache
        assert cache is not None
        context = min(context, cache.num_columns - width)
        group = RowGroup(slot=0, prefix=context, tokens=[int(self.target_ids[0])] * width)
        states = torch.zeros((width, self.head.config.hidden_size), dtype=self._dtype, device=self._device)

        @torch.inference_mode()
        def step() -> None:
            logits = self.head.logits(self.forward([group], states)).float()
            torch.softmax(logits, dim=-1).topk(min(self._branch, logits.shape[-1]))[1].tolist()

        milliseconds = median_milliseconds(step, repeats=7)
        cache.keys.zero_()
        cache.values.zero_()
        return milliseconds

    @torch.inference_mode()
    def next_logits(self, request: Request) -> torch.Tensor:
        """Draft logits [C] for the token after the last emitted one, from committed rows alone."""
        return self.head.logits(self.read_committed([request]))[0]

    def memory(self, request: Request) -> _Memory:
        memory = request.draft_state.setdefault(self.name, _Memory())
        assert isinstance(memory, _Memory)
        return memory

    def read_committed(self, requests: Sequence[Request]) -> torch.Tensor:
        """Run the head over states that came since the last round; returns the last new state [B, H] of each request.

        The last committed row pairs with the token emitted last. It is never stale: the engine commits the row of a
        token only in the round after it was emitted, so every request has at least one pending state here.
        """
        groups: list[RowGroup] = []
        taps: list[torch.Tensor] = []
        for request in requests:
            memory = self.memory(request)
            assert memory.pending, "a request is asked for a draft once after each commit"
            taps.extend(memory.pending)
            num_new = sum(len(states) for states in memory.pending)
            tokens = request.tokens_from(memory.num_rows + 1)
            assert len(tokens) == num_new, f"{num_new} states for {len(tokens)} tokens"
            groups.append(RowGroup(slot=request.slot, prefix=memory.num_rows, tokens=tokens))
            memory.num_rows += num_new
            memory.pending.clear()
        fused = self.head.fuse(torch.cat(taps).to(self._dtype))
        states = self.forward(groups, fused)
        last_rows = np.cumsum([len(group.tokens) for group in groups]) - 1
        return states[torch.from_numpy(last_rows).to(states.device)]

    def forward(self, groups: Sequence[RowGroup], states: torch.Tensor) -> torch.Tensor:
        """One head forward over packed rows [R, H] -> [R, H]."""
        assert self._cache is not None
        rows = PackedRows(groups, self._cache)
        cache = self._cache

        def attend_rows(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            cache.write(0, rows.columns, key.transpose(0, 1), value.transpose(0, 1))
            return attend(query.transpose(0, 1), 0, rows)

        return self.head(rows.token_ids, states, rows.positions, attend_rows)  # type: ignore[no-any-return]


class Eagle3Round:
    """The head's states [F, H] of the nodes expanded last, at first those of all requests' roots [B, H]."""

    def __init__(self, stepper: Eagle3Stepper, states: torch.Tensor) -> None:
        self._stepper = stepper
        self._states = states
        self._rows: dict[Request, GrowingRows] = {}

    def logits(self, frontiers: Sequence[Frontier], depth: int) -> torch.Tensor:
        """Below the roots, the head runs on each node's token beside its parent's state."""
        states = self._states[[row for frontier in frontiers for row in frontier.parent_rows]]
        if depth > 0:
            groups = [
                self._rows_of(each.request).add(each.nodes, each.parents, each.tokens, depth) for each in frontiers
            ]
            states = self._stepper.forward(groups, states)
        self._states = states
        return self._stepper.head.logits(states)

    def _rows_of(self, request: Request) -> GrowingRows:
        if request not in self._rows:
            num_committed = self._stepper.memory(request).num_rows
            self._rows[request] = GrowingRows(slot=request.slot, prefix=num_committed)
        return self._rows[request]


class HeadDrafter(TreeGrower):
    """Trees grown from an EAGLE-3 head. `name` tells heads of one hybrid apart."""

    stepper: Eagle3Stepper

    def __init__(self, head: Eagle3Head, *, calibration: Calibration | None = None, name: str = "eagle3") -> None:
        super().__init__(Eagle3Stepper(head, name=name), calibration=calibration)

    @property
    def head(self) -> Eagle3Head:
        return self.stepper.head
