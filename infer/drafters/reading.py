"""What drafting with trained heads of all shapes shares: the target's states that wait to be read, a cache for the
head's own layers, and the head as it decodes.

Shapes: R packed rows, B requests, H hidden, C draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from heads.base import DraftHead
from heads.block import BlockConfig
from heads.layers import Attend
from infer.cache import SlotCache
from infer.cost import median_milliseconds
from infer.drafters.base import Room, TreeSettings
from infer.drafters.fused import fused_view
from infer.drafters.packed import packed_view
from infer.kernels.gpu import runs_triton
from infer.kernels.paths import has_kernel
from infer.request import Request
from infer.rows import PackedRows, RowGroup, RowsAttend

_MOST_PENDING = 512
"""States of a text that wait to be read; more are read at once, so that no long text is held in states."""
_MOST_PIECES = 32
"""Pieces in which they wait; more are joined, for each keeps the states of all requests of its round alive."""


@dataclass
class _Memory:
    """The states of one request that the head has not read yet, and how many rows it has read."""

    pending: list[torch.Tensor] = field(default_factory=list)
    num_rows: int = 0

    @property
    def num_pending(self) -> int:
        return sum(map(len, self.pending))

    def add(self, states: torch.Tensor) -> None:
        self.pending.append(states)
        if len(self.pending) > _MOST_PIECES:
            self.pending = [torch.cat(self.pending)]

    def mark_read(self) -> None:
        """What waited is read."""
        self.num_rows += self.num_pending
        self.pending.clear()


Head = TypeVar("Head", bound=DraftHead)


def decoding_view(head: Head) -> Head:
    """The head as it decodes fastest where its weights are: on packed weights on a CPU, with fused operations on a GPU
    (or a CPU that interprets its kernels); the head itself where there is neither."""
    return fused_view(head) if runs_triton(head.device) else packed_view(head)


def head_cache(config: Any, *, num_slots: int, num_columns: int, dtype: torch.dtype, device: torch.device) -> SlotCache:
    """For the layers of a head that has `config` (one, where it does not say how many), with the sizes of their
    keys."""
    return SlotCache(
        num_layers=config.num_layers if isinstance(config, BlockConfig) else 1,
        num_heads=config.num_key_value_heads,
        key_size=config.head_dim,
        value_size=config.head_dim,
        num_slots=num_slots,
        num_columns=num_columns,
        dtype=dtype,
        device=device,
    )


class HeadStepper(ABC):
    """What steppers of all heads share: reading the text's states (`infer.drafters.stepper` says what a stepper is).

    network: the head as it decodes, from `open` on.
    """

    head: DraftHead
    network: DraftHead

    def __init__(self, head: DraftHead, *, name: str) -> None:
        self.head = self.network = head.eval().requires_grad_(False)
        self.name = name
        self.taps = head.config.taps
        self.target_ids: torch.Tensor = head.target_ids
        self.vocab_size: int = head.config.vocab_size
        self.max_depth: int | None = head.num_depths
        self.begin_milliseconds = self.step_milliseconds = 0.0
        self._dtype, self._device = head.dtype, head.device
        self._cache: SlotCache | None = None
        self._attends_by_kernel = False
        self._branch = TreeSettings().branch

    @property
    def cache(self) -> SlotCache | None:
        """Of the head's own layers, if it has any; made anew by `open`."""
        return self._cache

    def open(self, room: Room) -> None:
        self._branch = room.tree.branch
        if self.network is self.head:
            self.network = decoding_view(self.head)
        self._make_room(room)
        if room.tree.adaptive and not self.begin_milliseconds:
            self._measure()

    @abstractmethod
    def _make_room(self, room: Room) -> None:
        """The cache, if the head has layers of its own."""

    @abstractmethod
    def _measure(self) -> None:
        """Set `begin_milliseconds` and `step_milliseconds`."""

    def observe(self, request: Request, states: torch.Tensor | None) -> None:
        assert states is not None
        memory = self.memory(request)
        memory.add(states)
        if memory.num_pending >= _MOST_PENDING:
            self._read_up_to_last(request)

    def num_kept(self, request: Request) -> int:
        """Rows that were read, and those whose states wait."""
        memory = self.memory(request)
        return memory.num_rows + memory.num_pending

    def adopt(self, request: Request, source: Request, num_tokens: int) -> None:
        memory, theirs = self.memory(request), self.memory(source)
        memory.num_rows = min(num_tokens, theirs.num_rows)
        if self._cache is not None and source.slot != request.slot:
            self._cache.copy(source.slot, request.slot, memory.num_rows)
        if memory.num_rows < num_tokens:
            memory.add(torch.cat(theirs.pending)[: num_tokens - memory.num_rows])

    def close(self, request: Request) -> None:
        request.draft_state.pop(self.name, None)

    @abstractmethod
    def read(self, request: Request) -> None:
        """Read the states that wait."""

    def _read_up_to_last(self, request: Request) -> None:
        """Read the states that wait but for the last, behind which a draft may begin."""
        memory = self.memory(request)
        states = torch.cat(memory.pending)
        memory.pending = [states[:-1]]
        self.read(request)
        memory.pending = [states[-1:]]

    def memory(self, request: Request) -> _Memory:
        memory = request.draft_state.setdefault(self.name, _Memory())
        assert isinstance(memory, _Memory)
        return memory

    def _make_cache(self, config: Any, room: Room, num_tree_columns: int) -> None:
        """For layers with the sizes of `config`, a head's."""
        num_columns = room.num_columns + num_tree_columns
        self._cache = head_cache(
            config, num_slots=room.num_slots, num_columns=num_columns, dtype=self._dtype, device=self._device
        )
        self._attends_by_kernel = has_kernel(self._cache, config.num_attention_heads)

    def _take_pending(self, requests: Sequence[Request]) -> tuple[list[RowGroup], torch.Tensor]:
        """The rows of text that came since the last round, each state beside the token after it, and their taps.

        The last row pairs with the token emitted last. It is never stale: the engine commits the row of a token only
        in the round after it was emitted, so every request has at least one pending state here.
        """
        groups: list[RowGroup] = []
        taps: list[torch.Tensor] = []
        for request in requests:
            memory = self.memory(request)
            assert memory.pending, "a request is asked for a draft once after each commit"
            taps.extend(memory.pending)
            num_new = memory.num_pending
            tokens = request.tokens_from(memory.num_rows + 1)[:num_new]  # a prompt may go on behind them
            assert len(tokens) == num_new, f"{num_new} states for {len(tokens)} tokens"
            groups.append(RowGroup(slot=request.slot, prefix=memory.num_rows, tokens=tokens))
            memory.mark_read()
        return groups, (taps[0] if len(taps) == 1 else torch.cat(taps)).to(self._dtype)

    def _packed(self, groups: Sequence[RowGroup]) -> tuple[PackedRows, Attend]:
        """The rows of a forward, and the attention that lets them see the cache."""
        assert self._cache is not None
        rows = PackedRows(groups, self._cache, use_kernel=self._attends_by_kernel)
        return rows, RowsAttend(rows)

    def _milliseconds(self, logits: Callable[[], torch.Tensor]) -> float:
        """What `logits` costs on this machine, the choice of candidates included."""

        @torch.inference_mode()
        def step() -> None:
            rows = logits().float()
            torch.softmax(rows, dim=-1).topk(min(self._branch, rows.shape[-1]))[1].tolist()

        return median_milliseconds(step, repeats=7)


def last_rows(groups: Sequence[RowGroup], rows: torch.Tensor) -> torch.Tensor:
    """The last row of each group."""
    if len(groups) == 1:
        return rows[-1:]
    ends = np.cumsum([len(group.tokens) for group in groups]) - 1
    return rows[torch.from_numpy(ends).to(rows.device)]


def rows_at(rows: torch.Tensor, places: list[int]) -> torch.Tensor:
    return rows if places == list(range(len(rows))) else rows.index_select(0, torch.tensor(places, device=rows.device))
