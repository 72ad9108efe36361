"""Drafting with heads that draft all depths in one pass (`heads.block`): P-EAGLE, DFlash.

A round is one pass over the rows of text that came since the last round and, behind them, the places of the block. The
text's rows stay in the cache, which has as many layers as the head; the next round writes its own rows over the places.
So the cache holds what a fresh prefill of the text would leave. What the pass gives is a state and draft logits a
depth: further down the tree a node's logits are looked up, and corrected by the node's token where the head does that.

Shapes: N rows of the pass, M places, P places of a whole block, Q states that are wanted, B requests, X what the first
layer reads, H hidden, C draft vocabulary, F frontier nodes of all requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from heads.block import BlockHead
from heads.transfer import sent
from infer.drafters.base import Room
from infer.drafters.reading import HeadStepper, rows_at
from infer.drafters.stepper import Frontier
from infer.request import Request
from infer.rows import BlockAttend, PackedRows, RowGroup

_LONG_TEXT = 32
"""Rows of text that are worth a pass of their own, which asks for no states."""
_NEW_ROWS, _CONTEXT, _NUM_NODES = 3, 128, 4
"""What costs are measured at: rows of text that a round brings, rows before them, nodes of a depth."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Layout:
    """Where the rows of a pass lie: those of a request side by side, its text first.

    text, blocks, groups: the rows of text, the places, and both. order [N]: of each row its number among all rows of
    text and, behind these, P places of each request. places [M]: rows, ascending. wanted [Q]: of those that have a
    state, likewise: of all rows, or of the places where these alone have one. starts: of each request, the number of
    its first state.
    """

    text: Sequence[RowGroup]
    blocks: Sequence[RowGroup]
    groups: Sequence[RowGroup]
    order: np.ndarray
    places: np.ndarray
    wanted: np.ndarray
    starts: Sequence[int]

    @classmethod
    def of(cls, head: BlockHead, text: Sequence[RowGroup], depths: Sequence[int]) -> _Layout:
        """The rows of `text` and the places that drafts of these `depths` need."""
        num_text = sum(len(group.tokens) for group in text)
        blocks: list[RowGroup] = []
        groups: list[RowGroup] = []
        orders: list[np.ndarray] = []
        places: list[np.ndarray] = []
        wanted: list[np.ndarray] = []
        starts = [0]
        first = first_text = first_place = 0
        for number, (group, depth) in enumerate(zip(text, depths, strict=True)):
            num_new, num_places = len(group.tokens), head.num_places_for(depth)
            root = first + num_new - 1
            groups.append(_with_places(group, num_places))
            blocks += [_block(group, num_places)] if num_places else []
            orders.append(np.arange(first_text, first_text + num_new))
            orders.append(np.arange(num_places) + num_text + number * head.num_places)
            places.append(np.arange(num_places) + root + 1)
            before = first_place - 1 if head.sees_ahead else root
            wanted.append(np.arange(depth) + before + head.first_place)
            starts.append(starts[-1] + depth)
            first, first_text, first_place = root + 1 + num_places, first_text + num_new, first_place + num_places
        return cls(
            text=text,
            blocks=blocks,
            groups=groups,
            order=np.concatenate(orders),
            places=np.concatenate(places),
            wanted=np.concatenate(wanted),
            starts=starts,
        )


def _with_places(text: RowGroup, num_places: int) -> RowGroup:
    """Rows of text and places in a chain. Places have no tokens that anybody reads."""
    return RowGroup(slot=text.slot, prefix=text.prefix, tokens=[*text.tokens, *[0] * num_places])


def _block(text: RowGroup, num_places: int) -> RowGroup:
    """The places behind rows of text, which see the text and each other."""
    return RowGroup(
        slot=text.slot,
        prefix=text.prefix + len(text.tokens),
        tokens=[0] * num_places,
        depths=range(num_places),
        ancestors=np.ones((num_places, num_places), dtype=bool),
    )


class BlockStepper(HeadStepper):
    """See the module."""

    head: BlockHead
    network: BlockHead

    def __init__(self, head: BlockHead, *, name: str) -> None:
        super().__init__(head, name=name)
        self._most_depth = head.num_depths

    def begin(self, requests: Sequence[Request], depths: Sequence[int]) -> BlockRound:
        for request in requests:
            if self.memory(request).num_pending > _LONG_TEXT:
                self._read_up_to_last(request)
        text, taps = self._take_pending(requests)
        return self.draft(text, taps, [min(depth, self.head.num_depths) for depth in depths])

    def draft(self, text: Sequence[RowGroup], taps: torch.Tensor, depths: Sequence[int]) -> BlockRound:
        """The pass over new rows of `text` and their `taps`, for drafts of these `depths`."""
        layout = _Layout.of(self.head, text, depths)
        return BlockRound(
            self.network,
            self._states(layout, taps),
            starts=layout.starts,
            root_tokens=[group.tokens[-1] for group in text],
        )

    @torch.inference_mode()
    def read(self, request: Request) -> None:
        text, taps = self._take_pending([request])
        self._states(_Layout.of(self.head, text, [0]), taps)

    @torch.inference_mode()
    def next_logits(self, request: Request) -> torch.Tensor:
        """Draft logits [C] for the token after the last emitted one, from committed rows alone."""
        text, taps = self._take_pending([request])
        return self.draft(text, taps, [1]).at([0], [request.output_ids[-1]])[0]

    def _states(self, layout: _Layout, taps: torch.Tensor) -> torch.Tensor:
        """One pass: the wanted states [Q, H]."""
        assert self._cache is not None
        rows = PackedRows(layout.groups, self._cache, use_kernel=self._attends_by_kernel)
        inputs = self._inputs(layout, taps)
        places, wanted = (sent(torch.from_numpy(each), self._device) for each in (layout.places, layout.wanted))
        if not len(wanted):
            return cast(
                torch.Tensor, self.network(inputs, rows.positions, BlockAttend(rows), places=places, wanted=wanted)
            )
        blocks = None
        if self.head.sees_ahead:
            blocks = PackedRows(layout.blocks, self._cache, use_kernel=self._attends_by_kernel)
        attend = BlockAttend(rows, blocks, places)
        # Few rows are not wanted, so the layers run over all of them in one go.
        return cast(torch.Tensor, self.network(inputs, rows.positions, attend, places=places, wanted=None)[wanted])

    def _inputs(self, layout: _Layout, taps: torch.Tensor) -> torch.Tensor:
        """What the first layer reads [N, X]."""
        tokens = [token for group in layout.text for token in group.tokens]
        text = self.network.text_inputs(taps, sent(torch.tensor(tokens), self._device))
        if not layout.blocks:
            return text
        roots = [group.tokens[-1] for group in layout.text]
        places = self.network.place_inputs(sent(torch.tensor(roots), self._device), text.dtype)
        inputs = torch.cat([text, places.flatten(0, 1)])
        if len(layout.text) == 1:
            return inputs[: len(layout.order)]
        return inputs.index_select(0, sent(torch.from_numpy(layout.order), self._device))

    def _make_room(self, room: Room) -> None:
        self._most_depth = min(self.head.num_depths, room.tree.max_depth)
        # On static shapes the places lie behind as many rows of text as a round may bring.
        self._make_cache(self.head.config, room, 1 + room.tree.max_depth + self.head.num_places)

    def _measure(self) -> None:
        self.begin_milliseconds = self._milliseconds(lambda: self._draft_anything().at([0], self._some_tokens(1)))
        with torch.inference_mode():
            drafted = self._draft_anything()
        rows = [self._most_depth - 1] * _NUM_NODES
        self.step_milliseconds = self._milliseconds(lambda: drafted.at(rows, self._some_tokens(_NUM_NODES)))
        assert self._cache is not None
        self._cache.keys.zero_()
        self._cache.values.zero_()

    def _draft_anything(self) -> BlockRound:
        """The pass of a round as rounds usually are."""
        assert self._cache is not None
        num_rows = _NEW_ROWS + self.head.num_places
        prefix = min(_CONTEXT, self._cache.num_columns - num_rows)
        text = RowGroup(slot=0, prefix=prefix, tokens=self._some_tokens(_NEW_ROWS))
        size = len(self.taps) * self.head.config.hidden_size
        taps = torch.zeros((_NEW_ROWS, size), dtype=self._dtype, device=self._device)
        return self.draft([text], taps, [self._most_depth])

    def _some_tokens(self, count: int) -> list[int]:
        return [int(self.target_ids[0])] * count


class BlockRound:
    """States [Q, H] and draft logits [Q, C] of all depths of each request, from its `starts` on; the roots' tokens."""

    def __init__(
        self, network: BlockHead, states: torch.Tensor, *, starts: Sequence[int], root_tokens: Sequence[int]
    ) -> None:
        self._network, self._states = network, states
        self._starts, self._root_tokens = starts, root_tokens
        self._logits = network.base_logits(states)

    def logits(self, frontiers: Sequence[Frontier], depth: int) -> torch.Tensor:
        """A look-up, and what the nodes' tokens add."""
        return self.at(*self._asked(frontiers, depth))

    def outputs(self, frontiers: Sequence[Frontier], depth: int) -> torch.Tensor:
        """What the LM head and the correction read [F, W] to the same end."""
        rows, tokens = self._asked(frontiers, depth)
        states = self._network.joined(rows_at(self._states, rows), torch.tensor(tokens, device=self._states.device))
        return self._network.outputs(states, depth)[0]

    def _asked(self, frontiers: Sequence[Frontier], depth: int) -> tuple[list[int], list[int]]:
        """The state and the token of each node."""
        rows: list[int] = []
        tokens: list[int] = []
        for frontier in frontiers:
            rows += [self._starts[frontier.index] + depth] * len(frontier.nodes)
            tokens += frontier.tokens if depth else [self._root_tokens[frontier.index]]
        return rows, tokens

    def at(self, rows: list[int], tokens: Sequence[int]) -> torch.Tensor:
        """Draft logits [F, C] from the states `rows`, after `tokens` [F]."""
        logits = rows_at(self._logits, rows)
        if not self._network.config.markov_rank:
            return logits
        previous = sent(torch.tensor(tokens), logits.device)
        return logits + self._network.correction(rows_at(self._states, rows), previous)
