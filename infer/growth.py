"""Growing, merging and pruning draft trees whose proposals are fixed by the position's noise (one-hot or coupled).

For such trees any choice of nodes is exact, so trees are grown by estimated value and cut to the size that pays.
Sampled children must never be pruned by what was drawn, so trees of other kinds pass through untouched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from infer.cost import CostModel
from infer.tree import ROOT, Coupled, DraftTree, OneHot, ProposalKind

_TIMES = 64
"""Tables of times are made for a multiple of so many widths, so that rounds share them."""

_NEXT_DEPTH_SHARE = 0.5
"""Of what a next depth promises, what it is taken to give: of shares between 0.2 and 1.2 about the best on recorded
answers, for drafts that cost little and much."""


class TreeBuilder:
    """Collects candidates with their estimated probability of being reached; parents before children."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.values: list[float] = []
        self.depths: list[int] = []
        self._index: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def value(self, node: int) -> float:
        return 1.0 if node == ROOT else self.values[node]

    def add(self, parent: int, token: int, value: float) -> int:
        """The node that proposes `token` below `parent`: a new one, or the one already there with the larger value."""
        key = (parent, token)
        node = self._index.get(key)
        if node is None:
            node = self._index[key] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.values.append(value)
            self.depths.append(1 if parent == ROOT else self.depths[parent] + 1)
        else:
            self.values[node] = max(self.values[node], value)
        return node

    def build(self, kind: ProposalKind) -> DraftTree:
        return DraftTree(tokens=tuple(self.tokens), parents=tuple(self.parents), values=tuple(self.values), kind=kind)


def is_prunable(tree: DraftTree) -> bool:
    return isinstance(tree.kind, OneHot | Coupled)


def merge(trees: Sequence[DraftTree]) -> DraftTree:
    """The union of trees over one request; a node that several propose keeps its largest value.

    A coupled tree says what the children of each node were drawn from. If two trees propose children of one node the
    record is dropped: it would describe only some of the candidates.
    """
    builder = TreeBuilder()
    records: list[Coupled] = []
    num_proposers: Counter[int] = Counter()
    for tree in trees:
        assert is_prunable(tree), "trees of sampled proposals cannot be merged"
        assert len(tree.values) == len(tree), "only trees with values can be merged"
        places: dict[int, int] = {ROOT: ROOT}
        for node, (token, parent, value) in enumerate(zip(tree.tokens, tree.parents, tree.values, strict=True)):
            places[node] = builder.add(places[parent], token, value)
        record = _renumber(tree.kind, places)
        if isinstance(record, Coupled):
            records.append(record)
        num_proposers.update({places[node] for node in tree.parents} | set(_recorded(record)))
    if not records:
        return builder.build(OneHot())
    draft_probs = {
        node: probs for record in records for node, probs in record.draft_probs.items() if num_proposers[node] == 1
    }
    return builder.build(Coupled(draft_probs=draft_probs, num_drawn=max(record.num_drawn for record in records)))


def keep_best(tree: DraftTree, num_nodes: int) -> DraftTree:
    """The `num_nodes` nodes of largest value, with all their ancestors (values never grow along a path)."""
    if len(tree) <= num_nodes or not tree.values:
        return tree
    ceilings = _monotone_values(tree)
    order = sorted(range(len(tree)), key=lambda node: (-ceilings[node], node))
    kept = sorted(order[:num_nodes])
    places = {ROOT: ROOT, **{node: place for place, node in enumerate(kept)}}
    return DraftTree(
        tokens=tuple(tree.tokens[node] for node in kept),
        parents=tuple(places[tree.parents[node]] for node in kept),
        values=tuple(tree.values[node] for node in kept),
        kind=_renumber(tree.kind, places),
    )


def _recorded(kind: ProposalKind) -> Mapping[int, object]:
    return kind.draft_probs if isinstance(kind, Coupled) else {}


def _renumber(kind: ProposalKind, places: Mapping[int, int]) -> ProposalKind:
    """The kind of a tree whose node `u` has become node `places[u]`, or has gone."""
    if not isinstance(kind, Coupled) or not kind.draft_probs:
        return kind
    draft_probs = {places[node]: probs for node, probs in kind.draft_probs.items() if node in places}
    return Coupled(draft_probs=draft_probs, num_drawn=kind.num_drawn)


def _monotone_values(tree: DraftTree) -> list[float]:
    """Values capped by the parent's: a node cannot be reached more often than its parent."""
    ceilings: list[float] = []
    for parent, value in zip(tree.parents, tree.values, strict=True):
        ceilings.append(value if parent == ROOT else min(value, ceilings[parent]))
    return ceilings


def nodes_that_pay(
    values: Sequence[float],
    cost: CostModel,
    *,
    width: int,
    expected_tokens: float,
    spent_milliseconds: float = 0.0,
) -> tuple[int, float]:
    """How many of `values` (descending) to add to a forward of `width` rows, and the tokens per millisecond then.

    Maximises (expected_tokens + sum of the values kept) / (spent + forward(width + number kept)).
    """
    num_kept = 0
    times = _times(cost, -(-(width + len(values) + 1) // _TIMES) * _TIMES)
    best_rate = expected_tokens / (spent_milliseconds + times[width])
    for num_nodes, value in enumerate(values, start=1):
        expected_tokens += value
        rate = expected_tokens / (spent_milliseconds + times[width + num_nodes])
        if rate > best_rate:
            num_kept, best_rate = num_nodes, rate
    return num_kept, best_rate


def next_depth_pays(
    nodes: Iterable[tuple[float, int]],
    cost: CostModel,
    *,
    depth: int,
    num_requests: int,
    max_nodes: int,
    spent_milliseconds: float,
    step_milliseconds: float,
) -> bool:
    """Whether the tokens that another draft step may add outweigh what the round makes in the same time.

    `nodes`: (value, depth) of all so far, `depth` deep at most. What would be kept of the next depth is taken to be to
    what is kept of this one as that is to the depth above, times `_NEXT_DEPTH_SHARE`.
    """
    ranked = sorted(nodes, key=lambda node: -node[0])[:max_nodes]
    num_kept, best_rate = nodes_that_pay(
        [value for value, _ in ranked],
        cost,
        width=num_requests,
        expected_tokens=num_requests,
        spent_milliseconds=spent_milliseconds,
    )
    newest = sum(value for value, at in ranked[:num_kept] if at == depth)
    above = num_requests if depth == 1 else sum(value for value, at in ranked[:num_kept] if at == depth - 1)
    promised = newest * min(1.0, newest / above) if newest else 0.0
    return _NEXT_DEPTH_SHARE * promised > best_rate * step_milliseconds


@lru_cache(maxsize=64)
def _times(cost: CostModel, num_widths: int) -> tuple[float, ...]:
    """Milliseconds of a forward of 0, 1, ... rows (the first for the sake of the index)."""
    return tuple(cost.target_milliseconds(width) for width in range(num_widths))


def fit(
    trees: Sequence[DraftTree],
    cost: CostModel,
    *,
    max_nodes: Sequence[int],
    adaptive: bool = True,
    spent_milliseconds: float = 0.0,
) -> list[DraftTree]:
    """Cut trees to at most `max_nodes[i]` nodes each and, if adaptive, to the nodes that pay in one shared forward.

    Nodes of all requests are ranked together (`nodes_that_pay`). Trees that must not be cut count with all their nodes.
    """
    trees = [
        keep_best(tree, limit) if is_prunable(tree) else tree for tree, limit in zip(trees, max_nodes, strict=True)
    ]
    if not adaptive:
        return trees
    cut = [index for index, tree in enumerate(trees) if is_prunable(tree) and len(tree) and tree.values]
    whole = [tree for index, tree in enumerate(trees) if index not in cut]
    ranked = sorted(
        ((value, index) for index in cut for value in _monotone_values(trees[index])), key=lambda entry: -entry[0]
    )
    num_kept, _ = nodes_that_pay(
        [value for value, _ in ranked],
        cost,
        width=len(trees) + sum(map(len, whole)),
        expected_tokens=len(trees) + sum(value for tree in whole for value in tree.values),
        spent_milliseconds=spent_milliseconds,
    )
    sizes = Counter(index for _, index in ranked[:num_kept])
    return [keep_best(tree, sizes[index]) if index in cut else tree for index, tree in enumerate(trees)]
