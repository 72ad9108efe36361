"""Growing draft trees from draft logits, depth by depth, for many requests at once.

Where the logits come from is the stepper's business (`infer.drafters.stepper`): nothing here knows about networks,
caches or states.

What a node's children are follows the request's rule, so that one batch may hold requests of several:
  one-hot      (greedy requests) the most likely draft tokens
  coupled      the best under the noise of the position they are for
  sampled      draws without replacement from the draft distribution, by noise of their own
  greedy set   the most likely tokens but one, and one drawn from the others
Of the first two any choice of nodes is exact, so many are proposed and the best kept. Draws are all kept, and how many
there are is settled before the first.

Shapes: C draft vocabulary, V target vocabulary, F frontier nodes of all requests, f of one request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from infer.calibration import Calibration
from infer.cost import CostModel
from infer.drafters.base import DraftLimit, Room, TreeSettings, at_depth
from infer.drafters.stepper import Frontier, PrefixStepper, Stepper
from infer.growth import TreeBuilder, next_depth_pays
from infer.noise import gumbel, noise_key
from infer.request import Request
from infer.tree import ROOT, Coupled, DraftTree, GreedySet, OneHot, ProposalKind, Sampled
from infer.verify import KindType

_DRAFT_DOMAIN = 0x6472616674000001
"""First part of the keys of drawn children, which keeps them apart from every number the verification uses."""
_BEFORE_DRAWS = 1e3
"""Puts the fixed tokens of a greedy set before any drawn one: no log-probability and noise in float32 come near it."""

NEGLIGIBLE = 2e-3
"""Candidates less likely than this to be reached are not worth a place in any list."""


@dataclass
class Growth:
    """A tree under construction.

    index: the request's place in the round. num_drawn: children of each expanded node, before any is left out.
    frontier: nodes whose children come next. rows: the rows of the nodes expanded last among the logits of all
    requests, and row_slice the same as a slice. num_seen: nodes that have had their chance to be expanded.
    draft_probs: what an expanded node's children were drawn from [V].
    """

    request: Request
    index: int
    limit: DraftLimit
    kind: KindType
    num_drawn: int
    builder: TreeBuilder = field(default_factory=TreeBuilder)
    frontier: list[int] = field(default_factory=lambda: [ROOT])
    rows: dict[int, int] = field(default_factory=dict)
    row_slice: slice = field(default_factory=lambda: slice(0, 0))
    num_seen: int = 0
    draft_probs: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        """Of the deepest node that it may have."""
        return self.limit.max_depth if self.limit.max_nodes > 0 else 0

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

    def worths(self) -> list[float]:
        """The nodes' values, with what values have been worth in this request."""
        builder, trust = self.builder, self.limit.trust
        if not trust or not len(builder):
            return builder.values
        shares = [at_depth(trust, depth) for depth in range(1, max(builder.depths) + 1)]
        return [value * shares[depth - 1] for value, depth in zip(builder.values, builder.depths, strict=True)]

    def asked(self) -> Frontier:
        """The frontier as the stepper is asked about it."""
        nodes, builder = self.frontier, self.builder
        is_root = nodes == [ROOT]
        parents = [] if is_root else [builder.parents[node] for node in nodes]
        return Frontier(
            request=self.request,
            index=self.index,
            nodes=nodes,
            tokens=[] if is_root else [builder.tokens[node] for node in nodes],
            parents=parents,
            parent_rows=[self.index] if is_root else [self.rows[parent] for parent in parents],
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


class TreeGrower:
    """A drafter whose trees grow from the logits of `stepper`.

    calibration: turns the shares of candidates that may be left out into probabilities. records: let coupled trees say
    what they were drawn from, for comparison with the bound.
    """

    kinds: tuple[KindType, ...] = (OneHot, Coupled, Sampled, GreedySet)

    def __init__(self, stepper: Stepper, *, calibration: Calibration | None = None) -> None:
        self.stepper = stepper
        self.name = stepper.name
        self.taps = stepper.taps
        self.calibration = calibration
        self.records = False
        self.spent_milliseconds = 0.0
        self._target_ids = stepper.target_ids
        self._device = stepper.target_ids.device
        self._target_id_list: list[int] = stepper.target_ids.tolist()
        self._tree = TreeSettings()
        self._cost = CostModel.free()

    def open(self, room: Room) -> None:
        self._tree, self._cost = room.tree, room.cost
        self.stepper.open(room)

    def observe(self, request: Request, states: torch.Tensor | None) -> None:
        self.stepper.observe(request, states)

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request], limits: Sequence[DraftLimit]) -> list[DraftTree]:
        growths = [self._start(i, request, limits[i]) for i, request in enumerate(requests)]
        draft_round = self.stepper.begin(requests, [growth.depth for growth in growths])
        self.spent_milliseconds = self.stepper.begin_milliseconds
        growing = [growth for growth in growths if growth.depth]
        depth = 0
        while growing:
            logits = draft_round.logits([growth.asked() for growth in growing], depth)  # [F, C]
            self.spent_milliseconds += self.stepper.step_milliseconds if depth else 0.0
            depth += 1
            self._add_candidates(growing, logits.float(), depth)
            growing = self._choose_frontiers(growing, depth)
            if growing and self._tree.adaptive and not self._pays(growths, depth):
                break
        return [growth.build() for growth in growths]

    def num_kept(self, request: Request) -> int:
        return self.stepper.num_kept(request) if isinstance(self.stepper, PrefixStepper) else 0

    def adopt(self, request: Request, source: Request, num_tokens: int) -> None:
        assert isinstance(self.stepper, PrefixStepper), f"{self.name} keeps nothing of a text"
        self.stepper.adopt(request, source, num_tokens)

    def close(self, request: Request) -> None:
        self.stepper.close(request)

    def _start(self, index: int, request: Request, limit: DraftLimit) -> Growth:
        kind = _proposal_kind(request)
        num_drawn = min(self._tree.branch, len(self._target_id_list))
        if kind in (Sampled, GreedySet):
            num_drawn = 1 if request.rule.needs_chain else min(num_drawn, max(1, limit.max_nodes))
        bounds = (limit.max_depth, self._tree.max_depth, self.stepper.max_depth)
        max_depth = min(bound for bound in bounds if bound is not None)
        limit = replace(limit, max_depth=max_depth)
        return Growth(request=request, index=index, limit=limit, kind=kind, num_drawn=num_drawn)

    def _add_candidates(self, growing: Sequence[Growth], logits: torch.Tensor, depth: int) -> None:
        """Children, at `depth`, of every frontier node, from the nodes' `logits` [F, C], request by request."""
        _number_rows(growing)
        assert len(logits) == growing[-1].row_slice.stop, f"{len(logits)} rows of logits"
        candidates = [self._candidates(growth, logits[growth.row_slice], depth) for growth in growing]
        scores = _stacked([one.scores for one in candidates])  # [F, C]
        shares = _stacked([one.shares for one in candidates])
        places = scores.topk(max(growth.num_drawn for growth in growing), dim=-1).indices  # [F, most children]
        shares = shares.gather(-1, places)
        for growth in growing:
            self._calibrate(growth, shares[growth.row_slice], depth)
        place_lists, share_lists = places.tolist(), shares.tolist()
        for growth, one in zip(growing, candidates, strict=True):
            for node, row in growth.rows.items():
                self._add_children(growth, node, place_lists[row], share_lists[row])
            if one.draft_probs is not None:
                growth.draft_probs.update(zip(growth.frontier, one.draft_probs, strict=True))

    def _calibrate(self, growth: Growth, shares: torch.Tensor, depth: int) -> None:
        """Make probabilities of a request's `shares` [f, most children], best first, in place."""
        if self.calibration is None or not growth.may_prune:
            return
        share_map = self.calibration.map_for(growth.request.params)
        if share_map is not None:
            shares.copy_(share_map(shares, torch.arange(shares.shape[1], device=self._device), depth))

    def _add_children(self, growth: Growth, node: int, places: Sequence[int], shares: Sequence[float]) -> None:
        builder, may_prune = growth.builder, growth.may_prune
        reach = builder.value(node)
        least = NEGLIGIBLE if self._tree.adaptive else 0.0
        for place, share in zip(places[: growth.num_drawn], shares[: growth.num_drawn], strict=True):
            # A token of no probability has not been drawn: the draws ended before it, with the distribution's support.
            if reach * share > least if may_prune else share > 0:
                builder.add(node, self._target_id_list[place], reach * share)

    def _candidates(self, growth: Growth, logits: torch.Tensor, depth: int) -> _Candidates:
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

    def _fresh_noise(self, growth: Growth) -> torch.Tensor:
        """Gumbel noise [f, C] that nothing else sees: ranked by it and log q, tokens are draws without replacement."""
        request = growth.request
        round_index = len(request.accepted_lengths)
        keys = [noise_key(_DRAFT_DOMAIN, *request.identity, round_index, node - ROOT) for node in growth.frontier]
        return torch.stack([gumbel(key, len(self._target_id_list), self._device) for key in keys])

    def _full_size(self, draft_probs: torch.Tensor) -> torch.Tensor:
        """Draft probabilities [f, C] over the target's vocabulary [f, V]."""
        full = torch.zeros((len(draft_probs), self.stepper.vocab_size), device=self._device)
        return full.index_copy_(1, self._target_ids, draft_probs)

    def _choose_frontiers(self, growing: Sequence[Growth], depth: int) -> list[Growth]:
        """Pick the nodes at `depth` to expand, and return the requests that have any."""
        for growth in growing:
            builder = growth.builder
            newest = sorted(range(growth.num_seen, len(builder)), key=builder.values.__getitem__, reverse=True)
            num_expanded = self._tree.beam
            if not growth.may_prune:  # every child drawn is kept, so none may be drawn beyond the budget
                num_expanded = min(num_expanded, (growth.limit.max_nodes - len(builder)) // growth.num_drawn)
            growth.frontier = sorted(newest[: max(0, num_expanded)]) if depth < growth.limit.max_depth else []
            growth.num_seen = len(builder)
        return [growth for growth in growing if growth.frontier]

    def _pays(self, growths: Sequence[Growth], depth: int) -> bool:
        """Whether another draft step does, below nodes at `depth`."""
        return next_depth_pays(
            (node for growth in growths for node in zip(growth.worths(), growth.builder.depths, strict=True)),
            self._cost,
            depth=depth,
            num_requests=len(growths),
            max_nodes=sum(growth.limit.max_nodes for growth in growths),
            spent_milliseconds=self.spent_milliseconds,
            step_milliseconds=self.stepper.step_milliseconds,
        )


def _proposal_kind(request: Request) -> KindType:
    """What a request's children are: one-hot where nothing is random, else a kind its rule takes, `Coupled`
    preferred."""
    if request.params.greedy:
        return OneHot
    return next(kind for kind in (Coupled, Sampled, GreedySet, OneHot) if kind in request.rule.kinds)


def _stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    """The rows of all requests; of one alone, its own without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _number_rows(growing: Sequence[Growth]) -> None:
    """Tell every frontier node its row among the logits of all requests."""
    row = 0
    for growth in growing:
        growth.row_slice = slice(row, row + len(growth.frontier))
        growth.rows = {node: row + i for i, node in enumerate(growth.frontier)}
        row = growth.row_slice.stop
