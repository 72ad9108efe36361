"""Drafting with an EAGLE-3 head: read the target's newest states, then grow a tree on the head's own states.

The head keeps a cache of its own, row t for the pair (state of position t, token t + 1). Rows of committed text always
hold target states: after each round the accepted rows are computed afresh, so the head's next logits equal those of a
fresh prefill of the text. Rows of the tree lie behind them and are overwritten in the next round.

What a node's children are follows the request's rule, so that one batch may hold requests of several:
  one-hot      (greedy requests) the head's most likely tokens
  coupled      its best under the noise of the position they are for
  sampled      draws without replacement from its distribution, by noise of their own
  greedy set   its most likely tokens but one, and one drawn from the others
Of the first two any choice of nodes is exact, so many are proposed and the best kept. Draws are all kept, and how many
there are is settled before the first.

Shapes: R packed rows, H hidden, C draft vocabulary, F frontier nodes of all requests, f of one request.
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
from infer.drafters.base import DraftLimit, TreeSettings
from infer.growth import TreeBuilder, nodes_that_pay
from infer.noise import gumbel, noise_key
from infer.request import Request
from infer.rows import PackedRows, RowGroup
from infer.tree import ROOT, Coupled, DraftTree, GreedySet, OneHot, ProposalKind, Sampled
from infer.verify import KindType

_DRAFT_DOMAIN = 0x6472616674000001
"""First part of the keys of drawn children, which keeps them apart from every number the verification uses."""
_BEFORE_DRAWS = 1e3
"""Puts the fixed tokens of a greedy set before any drawn one: no log-probability and noise in float32 come near it."""

# A depth is drafted if its best nodes, discounted by this for the step still to come, pay for the step.
_NEXT_DEPTH_SHARE = 0.6
_NEGLIGIBLE = 2e-3
"""Candidates less likely than this to be reached are not worth a place in any list."""


@dataclass
class _Memory:
    """The states of one request that the head has not read yet, and how many rows it has read."""

    pending: list[torch.Tensor] = field(default_factory=list)
    num_rows: int = 0


@dataclass
class _Growth:
    """A tree under construction.

    num_drawn: children of each expanded node, before any is left out. rows: an expanded node's row behind the committed
    ones. frontier: nodes whose children come next, and state_rows their rows among the states of all requests.
    num_seen: nodes that have had their chance to be expanded. draft_probs: what an expanded node's children were drawn
    from [V].
    """

    request: Request
    limit: DraftLimit
    kind: KindType
    num_drawn: int
    num_committed: int
    builder: TreeBuilder = field(default_factory=TreeBuilder)
    rows: dict[int, int] = field(default_factory=dict)
    masks: list[np.ndarray] = field(default_factory=list)
    frontier: list[int] = field(default_factory=lambda: [ROOT])
    state_rows: dict[int, int] = field(default_factory=dict)
    row_slice: slice = field(default_factory=lambda: slice(0, 1))
    num_seen: int = 0
    draft_probs: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def may_prune(self) -> bool:
        """Whether candidates may be left out for what they are: not if they were drawn, for that changes the law."""
        return self.kind in (OneHot, Coupled)

    def build(self) -> DraftTree:
        kinds: dict[KindType, ProposalKind] = {
            OneHot: OneHot(),
            Coupled: Coupled(draft_probs=self.draft_probs, num_drawn=self.num_drawn),
            Sampled: Sampled(draft_probs=self.draft_probs),
            GreedySet: GreedySet(draft_probs=self.draft_probs),
        }
        return self.builder.build(kinds[self.kind])

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


@dataclass(frozen=True, kw_only=True)
class _Candidates:
    """The candidates below a request's frontier nodes.

    scores [f, C]: what tokens are ranked by. shares [f, C]: their estimated chance of being the next token. draft_probs
    [f, V]: what they were drawn from, where it is kept.
    """

    scores: torch.Tensor
    shares: torch.Tensor
    draft_probs: torch.Tensor | None = None


class HeadDrafter:
    """See the module. `calibration`: turns the shares of candidates that may be left out into probabilities.
    `records`: let coupled trees say what they were drawn from, for comparison with the bound."""

    name = "eagle3"
    kinds: tuple[KindType, ...] = (OneHot, Coupled, Sampled, GreedySet)

    def __init__(self, head: Eagle3Head, *, calibration: Calibration | None = None) -> None:
        self.head = head.eval().requires_grad_(False)
        self.taps = head.config.taps
        self.calibration = calibration
        self.records = False
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
        growths = [self._start(request, limit) for request, limit in zip(requests, limits, strict=True)]
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
        return [growth.build() for growth in growths]

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

    def _start(self, request: Request, limit: DraftLimit) -> _Growth:
        kind = _proposal_kind(request)
        num_drawn = min(self._tree.branch, len(self._target_id_list))
        if kind in (Sampled, GreedySet):
            num_drawn = 1 if request.rule.needs_chain else min(num_drawn, max(1, limit.max_nodes))
        return _Growth(
            request=request,
            limit=limit,
            kind=kind,
            num_drawn=num_drawn,
            num_committed=self._memory(request).num_rows,
        )

    def _add_candidates(self, growing: Sequence[_Growth], states: torch.Tensor, depth: int) -> None:
        """Children of every frontier node; `states` [F, H] are the nodes' own, request by request."""
        logits = self.head.logits(states).float()  # [F, C]
        candidates = [self._candidates(growth, logits[growth.row_slice], depth) for growth in growing]
        scores = torch.cat([one.scores for one in candidates])  # [F, C]
        shares = torch.cat([one.shares for one in candidates])
        places = scores.topk(max(growth.num_drawn for growth in growing), dim=-1).indices  # [F, most children]
        shares = shares.gather(-1, places)
        for growth in growing:
            self._calibrate(growth, shares[growth.row_slice], depth)
        place_lists, share_lists = places.tolist(), shares.tolist()
        for growth, one in zip(growing, candidates, strict=True):
            for node, row in growth.state_rows.items():
                self._add_children(growth, node, place_lists[row], share_lists[row])
            if one.draft_probs is not None:
                growth.draft_probs.update(zip(growth.frontier, one.draft_probs, strict=True))

    def _calibrate(self, growth: _Growth, shares: torch.Tensor, depth: int) -> None:
        """Make probabilities of a request's `shares` [f, most children], best first, in place."""
        if self.calibration is None or not growth.may_prune:
            return
        share_map = self.calibration.map_for(growth.request.params)
        if share_map is not None:
            shares.copy_(share_map(shares, torch.arange(shares.shape[1], device=self._device), depth))

    def _add_children(self, growth: _Growth, node: int, places: Sequence[int], shares: Sequence[float]) -> None:
        reach = growth.builder.value(node)
        least = _NEGLIGIBLE if self._tree.adaptive else 0.0
        for place, share in zip(places[: growth.num_drawn], shares[: growth.num_drawn], strict=True):
            # A token of no probability has not been drawn: the draws ended before it, with the distribution's support.
            if reach * share > least if growth.may_prune else share > 0:
                growth.builder.add(node, self._target_id_list[place], reach * share)

    def _candidates(self, growth: _Growth, logits: torch.Tensor, depth: int) -> _Candidates:
        """How the next tokens of a request's frontier nodes rank, from draft logits [f, C]."""
        request = growth.request
        if growth.kind is OneHot:
            return _Candidates(scores=logits, shares=torch.softmax(logits, dim=-1))
        logits = logits / request.params.temperature
        if growth.kind is Coupled:
            noise = request.noise.at(request.num_tokens + depth - 1)
            scores = logits + noise.index_select(0, self._target_ids)
            record = self._full_size(torch.softmax(logits, dim=-1)) if self.records else None
            return _Candidates(scores=scores, shares=torch.softmax(scores, dim=-1), draft_probs=record)
        draft_probs = torch.softmax(logits, dim=-1)
        # Drawn from the very numbers that are handed over: what float32 makes of a small probability, 0 included, is
        # then the law of the draw.
        log_probs = draft_probs.log()
        scores = log_probs + self._fresh_noise(growth)
        if growth.kind is GreedySet:
            fixed = draft_probs.topk(growth.num_drawn - 1, dim=-1).indices
            scores.scatter_(-1, fixed, log_probs.gather(-1, fixed) + _BEFORE_DRAWS)
        return _Candidates(scores=scores, shares=draft_probs, draft_probs=self._full_size(draft_probs))

    def _fresh_noise(self, growth: _Growth) -> torch.Tensor:
        """Gumbel noise [f, C] that nothing else sees: ranked by it and log q, tokens are draws without replacement."""
        request = growth.request
        round_index = len(request.accepted_lengths)
        keys = [noise_key(_DRAFT_DOMAIN, *request.identity, round_index, node - ROOT) for node in growth.frontier]
        return torch.stack([gumbel(key, len(self._target_id_list), self._device) for key in keys])

    def _full_size(self, draft_probs: torch.Tensor) -> torch.Tensor:
        """Draft probabilities [f, C] over the target's vocabulary [f, V]."""
        full = torch.zeros((len(draft_probs), self.head.config.vocab_size), device=self._device)
        return full.index_copy_(1, self._target_ids, draft_probs)

    def _choose_frontiers(self, growing: Sequence[_Growth], depth: int) -> list[_Growth]:
        """Pick the nodes at `depth` to expand, and return the requests that have any."""
        for growth in growing:
            builder = growth.builder
            newest = [
                node for node in range(growth.num_seen, len(builder)) if builder.parents[node] in growth.state_rows
            ]
            newest.sort(key=lambda node: (-builder.values[node], node))
            num_expanded = self._tree.beam
            if not growth.may_prune:  # every child drawn is kept, so none may be drawn beyond the budget
                num_expanded = min(num_expanded, (growth.limit.max_nodes - len(builder)) // growth.num_drawn)
            growth.frontier = sorted(newest[: max(0, num_expanded)]) if depth < growth.limit.max_depth else []
            growth.num_seen = len(builder)
        return [growth for growth in growing if growth.frontier]

    def _pays(self, growths: Sequence[_Growth], growing: Sequence[_Growth], depth: int) -> bool:
        """Whether the tokens that another draft step may add outweigh what the round makes in the same time."""
        values = sorted((value for growth in growths for value in growth.builder.values), reverse=True)
        _, best_rate = nodes_that_pay(
            values[: sum(growth.limit.max_nodes for growth in growths)],
            self._cost,
            width=len(growths),
            expected_tokens=len(growths),
            spent_milliseconds=depth * self.step_milliseconds,
        )
        reach = sum(growth.builder.values[node] for growth in growing for node in growth.frontier)
        return _NEXT_DEPTH_SHARE * reach > best_rate * self.step_milliseconds

    def _step(self, growing: Sequence[_Growth], states: torch.Tensor, depth: int) -> torch.Tensor:
        """Run the head on the frontier nodes, at `depth`: a node's token beside its parent's state."""
        parent_rows = [
            growth.state_rows[growth.builder.parents[node]] for growth in growing for node in growth.frontier
        ]
        groups = [growth.expand(growth.frontier, depth) for growth in growing]
        return self._forward(groups, states[parent_rows])


def _proposal_kind(request: Request) -> KindType:
    """What a request's children are: one-hot where nothing is random, else a kind its rule takes, `Coupled`
    preferred."""
    if request.params.greedy:
        return OneHot
    return next(kind for kind in (Coupled, Sampled, GreedySet, OneHot) if kind in request.rule.kinds)


def _number_rows(growing: Sequence[_Growth]) -> None:
    """Tell every frontier node its row among the states of all requests."""
    row = 0
    for growth in growing:
        growth.row_slice = slice(row, row + len(growth.frontier))
        growth.state_rows = {node: row + i for i, node in enumerate(growth.frontier)}
        row = growth.row_slice.stop
