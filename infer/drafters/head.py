"""Drafting with trained heads: read the target's newest states, then draft, each shape of head in its own way.

    RecurrentStepper   heads that go on from their own states (EAGLE): a cache of their own, row t for the pair (state
                       of position t, token t + 1). Rows of committed text always hold target states: after each round
                       the accepted rows are computed afresh, so the head's next logits equal those of a fresh prefill
                       of the text. Rows of the tree lie behind them and are overwritten in the next round.
    PathStepper        heads with a network a depth (Medusa, Hydra), which read the root's state and the drafted path; a
                       cache only for a layer that runs over the text

How the tree grows from the head's logits is `infer.drafters.growing`'s business.

Shapes: R packed rows, B requests, H hidden, W what an LM head reads, C draft vocabulary, F frontier nodes of all
requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np
import torch

from heads.base import DraftHead, PathHead, RecurrentHead
from heads.layers import Attend
from heads.registry import family_of_head
from infer.cache import SlotCache
from infer.calibration import Calibration
from infer.cost import median_milliseconds
from infer.drafters.base import Room, TreeSettings
from infer.drafters.fused import fused_view
from infer.drafters.growing import TreeGrower
from infer.drafters.packed import packed_view
from infer.drafters.stepper import DraftRound, Frontier, Stepper
from infer.kernels.gpu import runs_triton
from infer.kernels.paths import has_kernel
from infer.request import Request
from infer.rows import GrowingRows, PackedRows, RowGroup, RowsAttend

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


def layer_cache(
    config: Any, *, num_slots: int, num_columns: int, dtype: torch.dtype, device: torch.device
) -> SlotCache:
    """For the one layer of a head that has `config`, with the sizes of its keys."""
    return SlotCache(
        num_layers=1,
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

    network: DraftHead

    def __init__(self, head: DraftHead, *, name: str) -> None:
        head.eval().requires_grad_(False)
        self.name = name
        self.taps = head.config.taps
        self.target_ids: torch.Tensor = head.target_ids
        self.vocab_size: int = head.config.vocab_size
        self.max_depth: int | None = head.num_depths
        self.step_milliseconds = 0.0
        self._dtype, self._device = head.dtype, head.device
        self._cache: SlotCache | None = None
        self._attends_by_kernel = False
        self._branch = TreeSettings().branch

    @property
    def begin_milliseconds(self) -> float:
        return self.step_milliseconds

    @property
    def cache(self) -> SlotCache | None:
        """Of the head's own layer, if it has one; made anew by `open`."""
        return self._cache

    def observe(self, request: Request, states: torch.Tensor | None) -> None:
        assert states is not None
        memory = self.memory(request)
        memory.add(states)
        if memory.num_pending >= _MOST_PENDING:
            self._read(request)

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
    def read_committed(self, requests: Sequence[Request]) -> torch.Tensor:
        """Read the states that came since the last round; returns what each request's last new one gives [B, H]."""

    @torch.inference_mode()
    def _read(self, request: Request) -> None:
        self.read_committed([request])

    def memory(self, request: Request) -> _Memory:
        memory = request.draft_state.setdefault(self.name, _Memory())
        assert isinstance(memory, _Memory)
        return memory

    def _make_cache(self, config: Any, room: Room, num_tree_columns: int) -> None:
        """For one layer with the sizes of `config`, a head's."""
        num_columns = room.num_columns + num_tree_columns
        self._cache = layer_cache(
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


class RecurrentStepper(HeadStepper):
    """See the module."""

    network: RecurrentHead

    def __init__(self, head: RecurrentHead, *, name: str) -> None:
        super().__init__(head, name=name)
        self.head = self.network = head

    def open(self, room: Room) -> None:
        self._branch = room.tree.branch
        if self.network is self.head:
            self.network = decoding_view(self.head)
        self._make_cache(self.head.config, room, room.tree.max_depth * room.tree.beam)
        if room.tree.adaptive and not self.step_milliseconds:
            self.step_milliseconds = self.measure_step()

    def begin(self, requests: Sequence[Request]) -> DraftRound:
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

    def read_committed(self, requests: Sequence[Request]) -> torch.Tensor:
        """Run the head over states that came since the last round; returns each request's last new state [B, H]."""
        groups, taps = self._take_pending(requests)
        return _last_rows(groups, self.forward(groups, self.network.fuse(taps)))

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
        states = _rows_at(self._states, [row for frontier in frontiers for row in frontier.parent_rows])
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

    network: PathHead

    def __init__(self, head: PathHead, *, name: str) -> None:
        super().__init__(head, name=name)
        self.head = self.network = head

    def open(self, room: Room) -> None:
        self._branch = room.tree.branch
        if self.network is self.head:
            self.network = decoding_view(self.head)
        if self.head.has_prefix_layer:
            self._make_cache(self.head.config, room, 0)
        if room.tree.adaptive and not self.step_milliseconds:
            self.step_milliseconds = self.measure_step()

    def begin(self, requests: Sequence[Request]) -> DraftRound:
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

    def read_committed(self, requests: Sequence[Request]) -> torch.Tensor:
        """The roots' states [B, H] of the last committed rows."""
        groups, taps = self._take_pending(requests)
        if self.head.has_prefix_layer:
            rows, attend_rows = self._packed(groups)
            return _last_rows(groups, self.network.roots(taps, rows.token_ids, rows.positions, attend_rows))
        taps = _last_rows(groups, taps)
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
    raise ValueError(f"there is no way to draft with a {type(head).__name__}")


def _last_rows(groups: Sequence[RowGroup], rows: torch.Tensor) -> torch.Tensor:
    """The last row of each group."""
    if len(groups) == 1:
        return rows[-1:]
    ends = np.cumsum([len(group.tokens) for group in groups]) - 1
    return rows[torch.from_numpy(ends).to(rows.device)]


def _rows_at(rows: torch.Tensor, places: list[int]) -> torch.Tensor:
    return rows if places == list(range(len(rows))) else rows.index_select(0, torch.tensor(places, device=rows.device))


def _extended(path: list[int], token: int) -> list[int]:
    return [*path, token]


def _no_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    raise AssertionError("a head without a layer over the text does not attend")
