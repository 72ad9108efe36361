"""Drafting with an EAGLE-3 head: read the target's newest states, then grow a tree on the head's own states.

The head keeps a cache of its own, row t for the pair (state of position t, token t + 1). Rows of committed text always
hold target states: after each round the accepted rows are computed afresh, so the head's next logits equal those of a
fresh prefill of the text. Rows of the tree lie behind them and are overwritten in the next round.

Shapes: R packed rows, H hidden, C draft vocabulary, F frontier nodes of all requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from heads.eagle3 import Eagle3Head
from infer.attention import attend
from infer.cache import SlotCache
from infer.cost import CostModel, median_milliseconds
from infer.drafters.base import DraftLimit, TreeSettings
from infer.growth import TreeBuilder
from infer.noise import gumbel, noise_key
from infer.request import Request
from infer.rows import PackedRows, RowGroup
from infer.tree import ROOT, Coupled, DraftTree, OneHot, Sampled

_DRAFT_DOMAIN = 0x6472616674000001
"""First part of the keys of sampled drafts, which keeps them apart from every number the verification uses."""

# A depth is drafted if its best nodes, discounted by this for the step still to come, pay for the step.
_NEXT_DEPTH_SHARE = 0.6
_NEGLIGIBLE = 2e-3
"""Candidates less likely than this to be reached are not worth a place in any list."""


@dataclass
class _Memory:
    """Of one request: states not yet read by the head, and how many rows it has read."""

    pending: list[torch.Tensor] = field(default_factory=list)
    num_rows: int = 0


@dataclass
class _Growth:
    """A tree under construction.

    rows: an expanded node's row behind the committed ones. frontier: nodes whose children come next, and state_rows
    their rows among the states of all requests. num_seen: nodes that have had their chance to be expanded.
    """

    request: Request
    limit: DraftLimit
    num_committed: int
    builder: TreeBuilder = field(default_factory=TreeBuilder)
    rows: dict[int, int] = field(default_factory=dict)
    masks: list[np.ndarray] = field(default_factory=list)
    frontier: list[int] = field(default_factory=lambda: [ROOT])
    state_rows: dict[int, int] = field(default_factory=dict)
    row_slice: slice = field(default_factory=lambda: slice(0, 1))
    num_seen: int = 0
    draft_probs: dict[int, torch.Tensor] = field(default_factory=dict)

    def expand(self, nodes: Sequence[int], depth: int) -> RowGroup:
        """The rows of `nodes` (all at `depth`): each sees the committed rows, its expanded ancestors and itself."""
        offset = len(self.masks)
        ancestors = np.zeros((len(nodes), offset + len(nodes)), dtype=bool)
        for i, node in enumerate(nodes):
            parent = self.builder.parents[node]
            if parent != ROOT:
                parent_mask = self.masks[self.rows[parent]]
                ancestors[i, : len(parent_mask)] = parent_mask
            ancestors[i, offset + i] = True
            self.rows[node] = offset + i
            self.masks.append(ancestors[i])
        return RowGroup(
            slot=self.request.slot,
            prefix=self.num_committed,
            offset=offset,
            tokens=[self.builder.tokens[node] for node in nodes],
            depths=[depth - 1] * len(nodes),
            ancestors=ancestors,
        )


class HeadDrafter:
    """See the module. `sampled` proposals are draws from the head's distribution, for the rejection rules; otherwise
    candidates are the head's best under the noise of the position they are for (greedy: its most likely)."""

    name = "eagle3"

    def __init__(self, head: Eagle3Head, *, sampled: bool = False) -> None:
        self.head = head.eval().requires_grad_(False)
        self.taps = head.config.taps
        self.sampled = sampled
        self._dtype: torch.dtype = head.fc.weight.dtype
        self._device: torch.device = head.fc.weight.device
        self._target_ids: torch.Tensor = head.target_ids
        self._target_id_list: list[int] = self._target_ids.tolist()
        self._cache: SlotCache | None = None
        self._tree = TreeSettings()
        self._cost = CostModel.free()
        self.step_milliseconds = 0.0

    def open(self, *, num_slots: int, num_columns: int, tree: TreeSettings, cost: CostModel) -> None:
        config = self.head.config
        self._tree = tree
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
        self._cost = cost
        if tree.adaptive and not self.step_milliseconds:
            self.step_milliseconds = self.measure_step()

    def observe(self, request: Request, states: torch.Tensor | None) -> None:
        assert states is not None
        self._memory(request).pending.append(states)

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request], limits: Sequence[DraftLimit]) -> list[DraftTree]:
        states = self._read_committed(requests)  # [B, H]
        growths = [
            _Growth(request=request, limit=limit, num_committed=self._memory(request).num_rows)
            for request, limit in zip(requests, limits, strict=True)
        ]
        active = [i for i, growth in enumerate(growths) if growth.limit.max_depth > 0 and growth.limit.max_nodes > 0]
        states = states[active]
        growing = [growths[i] for i in active]
        for depth in range(1, self._tree.max_depth + 1):
            if not growing:
                break
            _number_rows(growing)
            self._add_candidates(growing, states, depth)
            growing = self._choose_frontiers(growing, depth)
            if not growing or (self._tree.adaptive and not self._pays(growths, growing, depth)):
                break
            states = self._step(growing, states, depth)
        return [self._build(growth) for growth in growths]

    def close(self, request: Request) -> None:
        request.draft_state.pop(self.name, None)

    def measure_step(self, *, width: int = 4, context: int = 128) -> float:
        """Milliseconds of one draft step, from states to candidates, on this machine."""
        cache = self._cache
        assert cache is not None
        context = min(context, cache.num_columns - width)
        group = RowGroup(slot=0, prefix=context, tokens=[self._target_id_list[0]] * width)
        states = torch.zeros((width, self.head.config.hidden_size), dtype=self._dtype, device=self._device)

        @torch.inference_mode()
        def step() -> None:
            logits = self.head.logits(self._forward([group], states)).float()
            torch.softmax(logits, dim=-1).topk(min(self._tree.branch, logits.shape[-1]))[1].tolist()

        milliseconds = median_milliseconds(step, repeats=7)
        cache.keys.zero_()
        cache.values.zero_()
        return milliseconds

    @torch.inference_mode()
    def next_logits(self, request: Request) -> torch.Tensor:
        """Draft logits [C] for the token after the last emitted one, from committed rows alone."""
        return self.head.logits(self._read_committed([request]))[0]

    def _memory(self, request: Request) -> _Memory:
        memory = request.draft_state.setdefault(self.name, _Memory())
        assert isinstance(memory, _Memory)
        return memory

    def _read_committed(self, requests: Sequence[Request]) -> torch.Tensor:
        """Run the head over states that came since the last round; returns the last new state [B, H] of each request.

        The last committed row pairs with the token emitted last. It is never stale: the engine commits the row of a
        token only in the round after it was emitted, so every request has at least one pending state here.
        """
        groups: list[RowGroup] = []
        taps: list[torch.Tensor] = []
        for request in requests:
            memory = self._memory(request)
            assert memory.pending, "a request is asked for a draft once after each commit"
            taps.extend(memory.pending)
            num_new = sum(len(states) for states in memory.pending)
            tokens = request.tokens_from(memory.num_rows + 1)
            assert len(tokens) == num_new, f"{num_new} states for {len(tokens)} tokens"
            groups.append(RowGroup(slot=request.slot, prefix=memory.num_rows, tokens=tokens))
            memory.num_rows += num_new
            memory.pending.clear()
        fused = self.head.fuse(torch.cat(taps).to(self._dtype))
        states = self._forward(groups, fused)
        last_rows = np.cumsum([len(group.tokens) for group in groups]) - 1
        return states[torch.from_numpy(last_rows).to(states.device)]

    def _forward(self, groups: Sequence[RowGroup], states: torch.Tensor) -> torch.Tensor:
        """One head forward over packed rows [R, H] -> [R, H]."""
        assert self._cache is not None
        rows = PackedRows(groups, self._cache)
        cache = self._cache

        def attend_rows(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            cache.write(0, rows.columns, key.transpose(0, 1), value.transpose(0, 1))
            return attend(query.transpose(0, 1), 0, rows)

        return self.head(rows.token_ids, states, rows.positions, attend_rows)  # type: ignore[no-any-return]

    def _add_candidates(self, growing: Sequence[_Growth], states: torch.Tensor, depth: int) -> None:
        """Children of every frontier node; `states` [F, H] are the nodes' own, request by request."""
        logits = self.head.logits(states).float()  # [F, C]
        scores = torch.cat([self._scores(growth, logits, depth) for growth in growing])  # [F, C]
        if self.sampled:
            shares = torch.cat([_draft_probs(growth, logits) for growth in growing])
        else:
            shares = torch.softmax(scores, dim=-1)
        num_candidates = min(self._tree.branch, scores.shape[-1])
        if self.sampled:  # every child drawn is kept, so no more may be drawn than the smallest budget holds
            num_candidates = min(num_candidates, min(growth.limit.max_nodes for growth in growing))
        places = scores.topk(num_candidates, dim=-1).indices  # [F, branch]
        place_lists, share_lists = places.tolist(), shares.gather(-1, places).tolist()
        least = _NEGLIGIBLE if self._tree.adaptive and not self.sampled else 0.0
        for growth in growing:
            for node, row in growth.state_rows.items():
                reach = growth.builder.value(node)
                for place, share in zip(place_lists[row], share_lists[row], strict=True):
                    if reach * share > least:
                        growth.builder.add(node, self._target_id_list[place], reach * share)
                if not self._prunes(growth):
                    growth.draft_probs[node] = self._full_size(shares[row])

    def _scores(self, growth: _Growth, logits: torch.Tensor, depth: int) -> torch.Tensor:
        """What a request's candidates are ranked by [.., C]: logits, or logits over temperature plus noise."""
        request = growth.request
        rows = logits[growth.row_slice]
        temperature = request.params.temperature
        if request.params.greedy:
            return rows
        if not self.sampled:
            noise = request.noise.at(request.num_tokens + depth - 1)
            return rows / temperature + noise.index_select(0, self._target_ids)
        identity = (request.seed, request.sample, request.attempt, len(request.accepted_lengths))
        keys = [noise_key(_DRAFT_DOMAIN, *identity, node - ROOT) for node in growth.frontier]
        return rows / temperature + torch.stack([gumbel(key, rows.shape[-1], self._device) for key in keys])

    def _full_size(self, shares: torch.Tensor) -> torch.Tensor:
        """Draft probabilities [C] over the target's vocabulary [V]."""
        full = torch.zeros(self.head.config.vocab_size, device=self._device)
        return full.index_copy_(0, self._target_ids, shares)

    def _prunes(self, growth: _Growth) -> bool:
        """Whether candidates may be left out for what they are: not if they were drawn, for that changes the law."""
        return not self.sampled or growth.request.params.greedy

    def _choose_frontiers(self, growing: Sequence[_Growth], depth: int) -> list[_Growth]:
        """Pick the nodes at `depth` to expand, and return the requests that have any."""
        for growth in growing:
            builder = growth.builder
            newest = [
                node for node in range(growth.num_seen, len(builder)) if builder.parents[node] in growth.state_rows
            ]
            newest.sort(key=lambda node: (-builder.values[node], node))
            num_expanded = self._tree.beam
            if not self._prunes(growth):  # every child drawn is kept, so none may be drawn beyond the budget
                num_expanded = min(num_expanded, (growth.limit.max_nodes - len(builder)) // self._tree.branch)
            growth.frontier = sorted(newest[: max(0, num_expanded)]) if depth < growth.limit.max_depth else []
            growth.num_seen = len(builder)
        return [growth for growth in growing if growth.frontier]

    def _pays(self, growths: Sequence[_Growth], growing: Sequence[_Growth], depth: int) -> bool:
        """Whether the tokens that another draft step may add outweigh what the round makes in the same time."""
        width = len(growths)
        expected = float(width)
        spent = depth * self.step_milliseconds
        best_rate = expected / (spent + self._cost.target_milliseconds(width))
        for value in sorted((value for growth in growths for value in growth.builder.values), reverse=True):
            width, expected = width + 1, expected + value
            rate = expected / (spent + self._cost.target_milliseconds(width))
            if rate < best_rate:
                break
            best_rate = rate
        reach = sum(growth.builder.values[node] for growth in growing for node in growth.frontier)
        return _NEXT_DEPTH_SHARE * reach > best_rate * self.step_milliseconds

    def _step(self, growing: Sequence[_Growth], states: torch.Tensor, depth: int) -> torch.Tensor:
        """Run the head on the frontier nodes, at `depth`: a node's token beside its parent's state."""
        parent_rows = [
            growth.state_rows[growth.builder.parents[node]] for growth in growing for node in growth.frontier
        ]
        groups = [growth.expand(growth.frontier, depth) for growth in growing]
        return self._forward(groups, states[parent_rows])

    def _build(self, growth: _Growth) -> DraftTree:
        if not self._prunes(growth):
            return growth.builder.build(Sampled(draft_probs=growth.draft_probs))
        return growth.builder.build(OneHot() if growth.request.params.greedy else Coupled())


def _number_rows(growing: Sequence[_Growth]) -> None:
    """Tell every frontier node its row among the states of all requests."""
    row = 0
    for growth in growing:
        growth.row_slice = slice(row, row + len(growth.frontier))
        growth.state_rows = {node: row + i for i, node in enumerate(growth.frontier)}
        row = growth.row_slice.stop


def _draft_probs(growth: _Growth, logits: torch.Tensor) -> torch.Tensor:
    """The distribution [.., C] that a request's sampled children are drawn from."""
    temperature = growth.request.params.temperature
    return torch.softmax(logits[growth.row_slice] / (1.0 if growth.request.params.greedy else temperature), dim=-1)
