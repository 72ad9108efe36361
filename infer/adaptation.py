"""Drafting that follows what a request's rounds have shown, and the load.

Trees are grown and cut by values, the drafter's estimate of how often a node is reached. How far they can be trusted
differs by text, so the rounds of a request correct them: at each depth, accepted nodes over what the verified nodes
promised. Where the draft is poor trees shrink, where it is good they grow. What a round with a draft made for its time,
by the cost table at the round's batch and context, is held against a round without; where it makes less, the request
rests from drafting for some rounds. What is known of a request fades as it rests, so that it tries again.

A request begins with what those that have left the engine had shown. Only trees that may be cut are touched
(`infer.growth`): what is drawn for a rejection rule is verified as it is. Tokens cannot depend on any of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from infer.cost import CostModel
from infer.drafters.base import Drafter, DraftLimit, at_depth
from infer.growth import fit, is_prunable
from infer.request import Request
from infer.tree import Coupled, DraftTree, OneHot

_MEMORY, _RESTING_MEMORY = 0.97, 0.985
"""What a round, with a draft or without, leaves of a request's evidence before it."""
_POOL_MEMORY = 0.9
"""What a request that leaves keeps of the evidence of those before it."""
_PRIOR_TOKENS = 3.0
"""Promised tokens that the belief before a request's own evidence counts for."""
_PRIOR_ROUNDS = 6.0
_PRIOR_GAIN = 1.3
"""Speed-up that a draft is believed to bring before any round has shown it."""
_LEAST_GAIN = 0.98
"""A request rests below this speed-up: a little under 1, since trees that do not pay are also cut."""
_TRUST = (0.2, 3.0)
"""Bounds of a correction."""
_REST = (4, 64)
"""Rounds of the first rest, and of the longest: each that follows a failed try is twice the last."""


@dataclass
class Evidence:
    """Fading sums over rounds. promised, kept: values of verified nodes, and how many of them were accepted, by depth.
    num_rounds, tokens: rounds with a draft and what they emitted. drafted, plain: milliseconds that they took, and that
    as many rounds without a draft would have taken."""

    promised: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    num_rounds: float = 0.0
    tokens: float = 0.0
    drafted: float = 0.0
    plain: float = 0.0

    def fade(self, share: float) -> None:
        self.promised = [share * each for each in self.promised]
        self.kept = [share * each for each in self.kept]
        self.num_rounds *= share
        self.tokens *= share
        self.drafted *= share
        self.plain *= share

    def add(self, other: Evidence) -> None:
        depth = max(len(self.promised), len(other.promised))
        for mine, theirs in ((self.promised, other.promised), (self.kept, other.kept)):
            mine += [0.0] * (depth - len(mine))
            for place, value in enumerate(theirs):
                mine[place] += value
        self.num_rounds += other.num_rounds
        self.tokens += other.tokens
        self.drafted += other.drafted
        self.plain += other.plain

    def see(self, promised: Sequence[float], num_kept: int) -> None:
        """A tree whose verified nodes at depth d promised `promised[d - 1]`, and gave one at each of `num_kept`."""
        missing = len(promised) - len(self.promised)
        self.promised += [0.0] * missing
        self.kept += [0.0] * missing
        for place, value in enumerate(promised):
            self.promised[place] += value
            self.kept[place] += place < num_kept

    def trust(self, depth: int, before: Sequence[float]) -> tuple[float, ...]:
        """What values at depths 1 to `depth` are worth, from what was believed `before` (1 at each depth if it says
        nothing). Where little was seen at a depth, it follows the depth above it, half of the way."""
        low, high = _TRUST
        found: list[float] = []
        lean = 1.0  # how much better or worse than believed the depth above was
        for place in range(depth):
            believed = before[place] if place < len(before) else (before[-1] if before else 1.0)
            promised, kept = (each[place] if place < len(each) else 0.0 for each in (self.promised, self.kept))
            expected = believed * lean
            worth = (_PRIOR_TOKENS * expected + kept) / (_PRIOR_TOKENS + promised)
            found.append(min(high, max(low, worth)))
            lean = (found[-1] / believed) ** 0.5
        return tuple(found)

    def gain(self, before: float) -> float:
        """Speed-up of rounds with a draft over rounds without, from what was believed `before`."""
        seen = self.tokens * self.plain / self.drafted if self.drafted and self.num_rounds else 0.0
        return (_PRIOR_ROUNDS * before + seen) / (_PRIOR_ROUNDS + self.num_rounds)


@dataclass
class _Record:
    """A request's evidence, what its values were last multiplied by at each depth, the rounds it still rests, and how
    long it will rest next."""

    evidence: Evidence = field(default_factory=Evidence)
    trust: tuple[float, ...] = ()
    resting: int = 0
    next_rest: int = _REST[0]


class Adaptation:
    """What an engine's rounds have shown, of each request that runs and of those that have left."""

    def __init__(self) -> None:
        self._pool = Evidence()
        self._records: dict[Request, _Record] = {}
        self._spent = 0.0
        self._cost = CostModel.free()
        self._drafted: frozenset[Request] = frozenset()

    @property
    def num_drafted(self) -> int:
        """Requests that the last `draft` asked the drafter for."""
        return len(self._drafted)

    def draft(
        self,
        drafter: Drafter,
        requests: Sequence[Request],
        limits: Sequence[DraftLimit],
        cost: CostModel,
        *,
        adaptive: bool,
    ) -> list[DraftTree]:
        """A tree for each request, cut to the size that pays. `cost`: of forwards at the round's batch and context."""
        asked = [
            place
            for place, request in enumerate(requests)
            if request.draft.enabled and not (adaptive and self._rests(request))
        ]
        trees = [DraftTree.empty()] * len(requests)
        self._spent, self._cost = 0.0, cost
        self._drafted = frozenset(requests[place] for place in asked)
        if not asked:
            return trees
        if adaptive:
            limits = [self._trusted(request, limit) for request, limit in zip(requests, limits, strict=True)]
        proposed = drafter.propose([requests[place] for place in asked], [limits[place] for place in asked])
        self._spent = drafter.spent_milliseconds
        for place, tree in zip(asked, proposed, strict=True):
            trees[place] = self._corrected(requests[place], tree) if adaptive else tree
        return fit(
            trees,
            cost,
            max_nodes=[limit.max_nodes for limit in limits],
            adaptive=adaptive,
            spent_milliseconds=self._spent,
        )

    def learn(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> None:
        """What became of the trees that `draft` returned for `requests`, now that their round is over."""
        num_rows = len(requests) + sum(map(len, trees))
        drafted = (self._spent + self._cost.target_milliseconds(num_rows)) / len(requests)
        plain = self._cost.target_milliseconds(len(requests)) / len(requests)
        for request, tree in zip(requests, trees, strict=True):
            if request.finish_reason is None and request.draft.enabled and _adapts(request):
                self._learn(request, tree, drafted=drafted, plain=plain)

    def forget(self, request: Request) -> None:
        """The request has left; what it showed is what the next begin with."""
        record = self._records.pop(request, None)
        if record is not None and record.evidence.num_rounds:
            self._pool.fade(_POOL_MEMORY)
            self._pool.add(record.evidence)

    def _learn(self, request: Request, tree: DraftTree, *, drafted: float, plain: float) -> None:
        record = self._record(request)
        evidence = record.evidence
        if request not in self._drafted:
            evidence.fade(_RESTING_MEMORY)
            record.resting -= 1
            return
        evidence.fade(_MEMORY)
        num_tokens = request.accepted_lengths[-1]
        evidence.see(_promised(tree, record.trust), num_tokens - 1)
        evidence.num_rounds += 1.0
        evidence.tokens += num_tokens
        evidence.drafted += drafted
        evidence.plain += plain
        if evidence.gain(self._pool.gain(_PRIOR_GAIN)) >= _LEAST_GAIN:
            record.next_rest = max(_REST[0], record.next_rest // 2)
            return
        if num_tokens * plain >= drafted:
            return  # a round that pays is followed by another, or a bad past would outweigh lone tries for ever
        record.resting, record.next_rest = record.next_rest, min(2 * record.next_rest, _REST[1])

    def _record(self, request: Request) -> _Record:
        return self._records.setdefault(request, _Record())

    def _rests(self, request: Request) -> bool:
        return request in self._records and self._records[request].resting > 0

    def _trusted(self, request: Request, limit: DraftLimit) -> DraftLimit:
        """The limit, with what values have been worth so far."""
        if not _adapts(request):
            return limit
        record = self._record(request)
        depth = max(1, len(record.evidence.promised), len(self._pool.promised))
        record.trust = record.evidence.trust(depth, self._pool.trust(depth, ()))
        return replace(limit, trust=record.trust)

    def _corrected(self, request: Request, tree: DraftTree) -> DraftTree:
        trust = self._record(request).trust if _adapts(request) else ()
        if not trust or not tree.values or not is_prunable(tree):
            return tree
        values = (min(1.0, value * at_depth(trust, d)) for value, d in zip(tree.values, tree.depths, strict=True))
        return replace(tree, values=tuple(values))


def _promised(tree: DraftTree, trust: Sequence[float]) -> list[float]:
    """The values of a tree's nodes summed by depth, as they were before they were multiplied by `trust`."""
    if not tree.values:
        return []
    sums = [0.0] * max(tree.depths)
    for value, depth in zip(tree.values, tree.depths, strict=True):
        sums[depth - 1] += value / at_depth(trust, depth)
    return sums


def _adapts(request: Request) -> bool:
    """Whether a request's trees may be cut: not if its children are drawn."""
    return request.params.greedy or OneHot in request.rule.kinds or Coupled in request.rule.kinds
