"""Draft trees of static shape, grown on the device by a trained head.

What `infer.drafters.growing` does for the engine's ordinary rounds, with the choice of nodes by value alone: every
depth expands `beam` nodes (or all there are) into `branch` children each, and the best of all are kept. Fixed proposals
only, greedy or coupled, of which any choice is exact.

The rows of the text come first, as in `infer.drafters.head`: the target's states that came since the last round lie in
`pending`, beside the tokens after them.

Shapes: B requests, P pending rows, F frontier nodes of a request, T rows of the tree so far, H hidden, C draft
vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch

from heads.base import DraftHead, PathHead, RecurrentHead
from heads.block import BlockHead
from infer.cache import SlotCache
from infer.graphs.inputs import DeviceInputs
from infer.graphs.rows import tree_rows
from infer.graphs.shapes import RoundShape
from infer.graphs.trees import Candidates, best_nodes
from infer.noise import gumbel_rows, position_keys
from infer.rows import BlockAttend, RowsAttend


class StaticDraft:
    """Grows trees with `head`. cache: of its own layers, if it has any. pending [slots, P, taps * H]: the states of
    each slot's newest rows, which a round writes and the next one reads."""

    def __init__(self, head: DraftHead, *, cache: SlotCache | None, pending: torch.Tensor) -> None:
        if not isinstance(head, RecurrentHead | PathHead | BlockHead):
            raise ValueError(f"there is no way to draft with a {type(head).__name__} on static shapes")
        self.head = head
        self.target_ids = head.target_ids  # once: a copy from the host cannot be captured in a graph
        self.cache = cache
        self.pending = pending

    @property
    def max_pending(self) -> int:
        return self.pending.shape[1]

    def grow(self, inputs: DeviceInputs, shape: RoundShape) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and parents (as rows) [B, N] of a tree for each request."""
        return best_nodes(_candidates(self._network(inputs, shape), self.target_ids, inputs, shape), shape.nodes)

    def _network(self, inputs: DeviceInputs, shape: RoundShape) -> _Network:
        head = self.head
        if isinstance(head, RecurrentHead):
            return _Recurrent(head, self, inputs, shape)
        if isinstance(head, BlockHead):
            return _Blocks(head, self, inputs, shape)
        assert isinstance(head, PathHead)
        return _Paths(head, self, inputs, shape)

    def newest_rows(self, inputs: DeviceInputs, shape: RoundShape) -> tuple[torch.Tensor, RowsAttend, torch.Tensor]:
        """The pending rows' states [B * P, taps * H], their attention and their positions [B * P]. Places without a row
        are computed too, behind the others, where the tree's rows will overwrite them."""
        assert self.cache is not None
        num_requests, num_rows = inputs.pending_tokens.shape
        places = torch.arange(num_rows, device=inputs.slots.device)
        rows = tree_rows(
            self.cache,
            slots=inputs.slots,
            prefixes=inputs.num_read,
            token_ids=inputs.pending_tokens,
            depths=places.expand(num_requests, -1),
            sees=(places <= places[:, None]).expand(num_requests, -1, -1),
            max_prefix=shape.context,
        )
        return self.states_of(inputs).flatten(0, 1), RowsAttend(rows), rows.positions

    def states_of(self, inputs: DeviceInputs) -> torch.Tensor:
        """[B, P, taps * H] in the head's dtype."""
        return self.pending.index_select(0, inputs.slots).to(self.head.dtype)


class _Network(Protocol):
    """Draft logits [B, F, C] for the children of a depth's frontier: of the root at depth 0, then of `tokens` [B, F],
    whose parents were `parents` [B, F] of the frontier before."""

    def logits(self, depth: int, tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor: ...


def _candidates(network: _Network, target_ids: torch.Tensor, inputs: DeviceInputs, shape: RoundShape) -> Candidates:
    """All nodes that are looked at, depth by depth."""
    num_requests = len(inputs.slots)
    branch = min(shape.branch, len(target_ids))
    reach = torch.ones((num_requests, 1), device=target_ids.device)
    numbers = torch.full((num_requests, 1), -1, device=target_ids.device)  # the frontier's, among candidates
    tokens, rows = inputs.tokens[:, None], torch.zeros_like(numbers)
    found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    num_found = newest = 0
    for depth, width in enumerate(shape.widths):
        if depth:
            reach, places = reach.topk(width, dim=1)  # of the newest candidates
            tokens, rows = tokens.gather(1, places), places // branch
            numbers = places + num_found - newest
        scores = _scores(network.logits(depth, tokens, rows), target_ids, inputs, depth)
        shares, best = _best_children(scores, branch)
        values = reach[..., None] * shares
        tokens, parents = target_ids[best].flatten(1), numbers[..., None].expand_as(values).flatten(1)
        reach = values.flatten(1)
        found.append((tokens, reach, parents))
        newest = reach.shape[1]
        num_found += newest
    tokens, values, parents = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    return Candidates(tokens=tokens, values=values, parents=parents)


def _scores(logits: torch.Tensor, target_ids: torch.Tensor, inputs: DeviceInputs, depth: int) -> torch.Tensor:
    """What tokens are ranked by [B, F, C]: the logits, or their tempered form under the noise of the position."""
    logits = logits.float()
    keys = position_keys(inputs.streams, inputs.num_cached + 1 + depth)
    noise = gumbel_rows(keys, target_ids)[:, None]
    temperatures = inputs.temperatures[:, None, None]
    is_greedy = temperatures == 0
    return torch.where(is_greedy, logits, logits / temperatures.masked_fill(is_greedy, 1.0) + noise)


def _best_children(scores: torch.Tensor, branch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimated chances and draft ids [B, F, branch] of the best tokens of each node."""
    best, places = scores.topk(branch, dim=-1)
    return torch.exp(best - torch.logsumexp(scores, dim=-1, keepdim=True)), places


class _Recurrent:
    """A head on its own states: each depth is one forward over the frontier's tokens."""

    def __init__(self, head: RecurrentHead, draft: StaticDraft, inputs: DeviceInputs, shape: RoundShape) -> None:
        self._head, self._draft, self._inputs, self._shape = head, draft, inputs, shape
        self._prefixes = inputs.num_read + inputs.num_pending
        self._states = torch.empty(0)
        self._sees = torch.empty(0)
        self._offset = 0

    def logits(self, depth: int, tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        self._states = self._step(depth, tokens, parents) if depth else self._roots()
        return self._head.logits(self._states, depth)

    def _roots(self) -> torch.Tensor:
        """The states [B, 1, H] that the newest rows of the text leave."""
        taps, attend, positions = self._draft.newest_rows(self._inputs, self._shape)
        tokens = self._inputs.pending_tokens.flatten()
        states = self._head(tokens, self._head.fuse(taps), positions, attend)
        return _last_of(states, self._inputs)

    def _step(self, depth: int, tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        num_requests, width = tokens.shape
        cache = self._draft.cache
        assert cache is not None
        own = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(num_requests, -1, -1)
        above = _rows_of(self._sees, parents) if depth > 1 else own[:, :, :0]
        self._sees = torch.cat([above, own], dim=2)  # [B, F, T]
        rows = tree_rows(
            cache,
            slots=self._inputs.slots,
            prefixes=self._prefixes,
            token_ids=tokens,
            depths=torch.full_like(tokens, depth - 1),
            sees=self._sees,
            max_prefix=self._shape.context,
            offset=self._offset,
        )
        self._offset += width
        states = _rows_of(self._states, parents).flatten(0, 1)
        new: torch.Tensor = self._head(rows.token_ids, states, rows.positions, RowsAttend(rows))
        return new.view(num_requests, width, -1)


class _Paths:
    """One network a depth, which reads the root's state and the drafted path."""

    def __init__(self, head: PathHead, draft: StaticDraft, inputs: DeviceInputs, shape: RoundShape) -> None:
        self._head = head
        self._roots = _roots_of(head, draft, inputs, shape)  # [B, H]
        self._paths = inputs.tokens[:, None, None]  # [B, F, depth + 1]

    def logits(self, depth: int, tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        if depth:
            self._paths = torch.cat([_rows_of(self._paths, parents), tokens[..., None]], dim=2)
        num_requests, width, _ = self._paths.shape
        roots = self._roots[:, None].expand(-1, width, -1).flatten(0, 1)
        states = self._head.draft(roots, self._paths.flatten(0, 1), depth)
        return self._head.logits(states, depth).view(num_requests, width, -1)


def _roots_of(head: PathHead, draft: StaticDraft, inputs: DeviceInputs, shape: RoundShape) -> torch.Tensor:
    if head.has_prefix_layer:
        taps, attend, positions = draft.newest_rows(inputs, shape)
        return _last_of(head.roots(taps, inputs.pending_tokens.flatten(), positions, attend), inputs)[:, 0]
    taps = _last_of(draft.states_of(inputs).flatten(0, 1), inputs)[:, 0]
    return head.roots(taps, inputs.tokens, torch.zeros_like(inputs.tokens), _no_attention)


class _Blocks:
    """One pass for all depths: a depth is a look-up, and what the frontier's tokens add."""

    def __init__(self, head: BlockHead, draft: StaticDraft, inputs: DeviceInputs, shape: RoundShape) -> None:
        self._head = head
        self._states = _block_states(head, draft, inputs, shape)  # [B, depths, H]
        self._logits = head.base_logits(self._states)  # [B, depths, C]

    def logits(self, depth: int, tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        width = tokens.shape[1]
        logits, states = (of_depths[:, depth : depth + 1] for of_depths in (self._logits, self._states))
        logits = logits.expand(-1, width, -1)
        if not self._head.config.markov_rank:
            return logits
        return logits + self._head.correction(states.expand(-1, width, -1), tokens)


def _block_states(head: BlockHead, draft: StaticDraft, inputs: DeviceInputs, shape: RoundShape) -> torch.Tensor:
    """The states [B, depths, H] of one pass over the newest rows of the text and, behind all of these, the places."""
    assert draft.cache is not None
    (num_requests, num_rows), device = inputs.pending_tokens.shape, inputs.slots.device
    num_places = head.num_places_for(shape.depth)
    text, places = torch.arange(num_rows, device=device), torch.arange(num_places, device=device)
    is_text = text < inputs.num_pending[:, None]  # [B, rows]
    sees = torch.zeros((num_requests, num_rows + num_places, num_rows + num_places), dtype=torch.bool, device=device)
    sees[:, :num_rows, :num_rows] = text <= text[:, None]
    sees[:, num_rows:, :num_rows] = is_text[:, None]
    sees[:, num_rows:, num_rows:] = True if head.sees_ahead else places <= places[:, None]
    depths = torch.cat([text.expand(num_requests, -1), inputs.num_pending[:, None] + places], dim=1)
    tokens = inputs.tokens[:, None].expand(-1, num_places)
    laid = partial(tree_rows, draft.cache, slots=inputs.slots, prefixes=inputs.num_read, max_prefix=shape.context)
    rows = laid(token_ids=torch.cat([inputs.pending_tokens, tokens], dim=1), depths=depths, sees=sees)
    read = head.text_inputs(draft.states_of(inputs).flatten(0, 1), inputs.pending_tokens.flatten())
    behind = head.place_inputs(inputs.tokens, read.dtype)[:, :num_places]
    network_inputs = torch.cat([read.unflatten(0, (num_requests, -1)), behind], dim=1).flatten(0, 1)
    firsts = torch.arange(num_requests, device=device)[:, None] * (num_rows + num_places) + num_rows
    among = (firsts + places).flatten()
    order = torch.arange(shape.depth, device=device) + head.first_place - 1  # among the places; -1 is the root
    if head.sees_ahead:
        blocks = laid(token_ids=tokens, depths=depths[:, num_rows:], sees=sees[:, num_rows:], offset=num_rows)
        attend = BlockAttend(rows, blocks, among)
        states = head(network_inputs, rows.positions, attend, places=among, wanted=None)
        return _rows_of(states.unflatten(0, (num_requests, -1)), order.expand(num_requests, -1))
    states = head(network_inputs, rows.positions, BlockAttend(rows), places=among, wanted=None)
    wanted = torch.where(order < 0, inputs.num_pending[:, None] - 1, num_rows + order)
    return _rows_of(states.unflatten(0, (num_requests, -1)), wanted.clamp_min(0))


def _last_of(rows: torch.Tensor, inputs: DeviceInputs) -> torch.Tensor:
    """The last pending row of each request [B, 1, ...], of rows [B * P, ...]."""
    by_request = rows.view(len(inputs.slots), -1, rows.shape[-1])
    return _rows_of(by_request, (inputs.num_pending - 1).clamp_min(0)[:, None])


def _rows_of(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Rows `places` [B, F] of each request's [B, n, size]: [B, F, size]."""
    return rows.gather(1, places[..., None].expand(-1, -1, rows.shape[-1]))


def _no_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    raise AssertionError("a head without a layer over the text does not attend")
