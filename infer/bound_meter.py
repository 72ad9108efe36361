"""How close verification comes to the best acceptance that any lossless rule could reach, measured in the decode loop.

At every node that a round visits (its root, and the nodes of the accepted path) candidates stood or did not, and one of
them was accepted or not. Whatever the rule, the chance of that is at most the bound of `infer.bound` for the target's
distribution there, the distribution that the candidates were drawn from, and their number. Both are summed over
nodes: the ratio of the sums says how much of what the draft offers is taken.

What is compared with what:
- Drawn children (`Sampled`, `GreedySet`): as many draws as there are children; that is settled before drawing.
- `Coupled`: the whole list that was proposed at the node, before it was cut to the tree's budget, and whether or not
  any of it was left. How many survive depends on the noise, so a bound for the survivors alone would be none. The ratio
  therefore counts what the budget cuts as lost.
- `OneHot`: the target's mass on the children, which the match walk attains: the ratio is 1 but for chance (and exactly
  1 at temperature 0), and the figure of interest is the bound itself.

Left out are nodes of coupled trees to which a lookup added candidates (their share is reported), all but the root under
rules that look ahead (they give up a step for the ones after it, so one step alone has no bound), and lossy rules.
Below the root, which nodes are in the tree at all depends a little on noise that their children share, by way of the
budget; at position 1 there is no such effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from infer import bound
from infer.noise import noise_key, uniform
from infer.request import Request, RequestLaw
from infer.tree import ROOT, Coupled, DraftTree, GreedySet, OneHot, Sampled
from infer.verify import Verdict

MAX_NODES = 1000
"""Nodes of each temperature whose bound is computed; a bound takes milliseconds."""

_THINNING_DOMAIN = 0x6D65746572000001
"""Keeps the choice of nodes apart from every other use of the noise."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Attainment:
    """Achieved and optimal acceptance of one pool of nodes, and their ratio with its standard error."""

    num_nodes: int
    achieved: float
    bound: float
    ratio: float
    standard_error: float

    @classmethod
    def of(cls, visits: Sequence[_Visit]) -> Attainment:
        num_nodes = len(visits)
        achieved, best = float(sum(visit.accepted for visit in visits)), sum(visit.bound for visit in visits)
        ratio = achieved / best if best else 1.0
        spread = math.sqrt(sum((visit.accepted - ratio * visit.bound) ** 2 for visit in visits))
        return cls(
            num_nodes=num_nodes,
            achieved=achieved / num_nodes,
            bound=best / num_nodes,
            ratio=ratio,
            standard_error=spread / best if best else 0.0,
        )


@dataclass(frozen=True, kw_only=True)
class BoundReport:
    """Attainment over a random choice of the visited nodes that had candidates: at most `max_nodes` a temperature.

    `by_position` counts positions in the draft from 1. `num_visited` are the nodes chosen from, `num_without_record`
    those among all visited ones that could not be.
    """

    overall: Attainment
    by_position: dict[int, Attainment]
    by_temperature: dict[float, Attainment]
    by_domain: dict[str, Attainment]
    num_visited: int
    num_without_record: int
    max_nodes: int


@dataclass(frozen=True)
class _Visit:
    chance: float
    position: int
    temperature: float
    domain: str
    accepted: bool
    bound: float


@dataclass
class _Sample:
    """A uniform choice of at most `max_nodes` of an unknown number of visits: those whose `chance` is below `share`."""

    share: float = 1.0
    num_visits: int = 0
    visits: list[_Visit] = field(default_factory=list)

    def next_chance(self) -> float:
        self.num_visits += 1
        return uniform(noise_key(_THINNING_DOMAIN, self.num_visits))

    def add(self, visit: _Visit, max_nodes: int) -> None:
        self.visits.append(visit)
        while len(self.visits) > max_nodes:
            self.share /= 2
            self.visits = [visit for visit in self.visits if visit.chance < self.share]


class BoundMeter:
    """An observer of an engine (`Engine.observer`). `domain_of` names the pool that a request belongs to."""

    def __init__(self, domain_of: Callable[[Request], str], *, max_nodes: int = MAX_NODES) -> None:
        self._domain_of = domain_of
        self._max_nodes = max_nodes
        self._samples: dict[float, _Sample] = {}
        self._num_without_record = 0

    def __call__(self, request: Request, tree: DraftTree, law: RequestLaw, verdict: Verdict) -> None:
        if not request.rule.lossless:
            return
        visited = (ROOT, *verdict.path)
        if isinstance(tree.kind, Sampled) and request.rule.looks_ahead:
            visited = visited[:1]
        for depth, node in enumerate(visited):
            if _has_record(tree, node):
                self._visit(request, tree, law, node, accepted=depth < len(verdict.path))
            elif tree.children(node):
                self._num_without_record += 1

    def report(self) -> BoundReport | None:
        """None if no visited node had candidates to compare."""
        visits = [visit for sample in self._samples.values() for visit in sample.visits]
        if not visits:
            return None
        return BoundReport(
            overall=Attainment.of(visits),
            by_position=dict(sorted(_pools(visits, lambda visit: visit.position).items())),
            by_temperature=_pools(visits, lambda visit: visit.temperature),
            by_domain=_pools(visits, lambda visit: visit.domain),
            num_visited=sum(sample.num_visits for sample in self._samples.values()),
            num_without_record=self._num_without_record,
            max_nodes=self._max_nodes,
        )

    def _visit(self, request: Request, tree: DraftTree, law: RequestLaw, node: int, *, accepted: bool) -> None:
        temperature = request.params.temperature
        sample = self._samples.setdefault(temperature, _Sample())
        chance = sample.next_chance()
        if chance >= sample.share:
            return
        visit = _Visit(
            chance=chance,
            position=1 if node == ROOT else tree.depths[node] + 1,
            temperature=temperature,
            domain=self._domain_of(request),
            accepted=accepted,
            bound=node_bound(tree, law, node),
        )
        sample.add(visit, self._max_nodes)


def node_bound(tree: DraftTree, law: RequestLaw, node: int) -> float:
    """The most that any lossless rule accepts at a node of `tree`, given how its candidates are made."""
    target_probs, kind, children = law.probs(node), tree.kind, tree.children(node)
    if isinstance(kind, OneHot):
        return bound.fixed_set_bound(target_probs, [tree.tokens[child] for child in children])
    draft_probs = kind.draft_probs[node]
    if isinstance(kind, Coupled):
        return bound.quick_without_replacement_bound(target_probs, draft_probs, kind.num_drawn)
    if isinstance(kind, GreedySet):
        return bound.greedy_set_acceptance(target_probs, draft_probs, len(children))
    if kind.replacement:
        return bound.independent_bound(target_probs, draft_probs, len(children))
    return bound.quick_without_replacement_bound(target_probs, draft_probs, len(children))


def _has_record(tree: DraftTree, node: int) -> bool:
    """Whether candidates were proposed at `node` in a way that has a bound."""
    return bool(tree.children(node)) if isinstance(tree.kind, OneHot) else node in tree.kind.draft_probs


def _pools(visits: Iterable[_Visit], key: Callable[[_Visit], Key]) -> dict[Key, Attainment]:
    pools: dict[Key, list[_Visit]] = {}
    for visit in visits:
        pools.setdefault(key(visit), []).append(visit)
    return {name: Attainment.of(pool) for name, pool in pools.items()}
