"""Growing, merging and pruning draft trees whose proposals are fixed by the position's noise (one-hot or coupled).

For such trees any choice of nodes is exact, so trees are grown by estimated value and cut to the size that pays.
Sampled children must never be pruned by what was drawn, so trees of other kinds pass through untouched.
"""

from __future__ import annotations

from collections.abc import Sequence

from infer.cost import CostModel
from infer.tree import ROOT, Coupled, DraftTree, OneHot, ProposalKind


class TreeBuilder:
    """Collects candidates with their estimated probability of being reached; parents before children."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.values: list[float] = []
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
        else:
            self.values[node] = max(self.values[node], value)
        return node

    def build(self, kind: ProposalKind) -> DraftTree:
        return DraftTree(tokens=tuple(self.tokens), parents=tuple(self.parents), values=tuple(self.values), kind=kind)


def is_prunable(tree: DraftTree) -> bool:
    return isinstance(tree.kind, OneHot | Coupled)


def merge(trees: Sequence[DraftTree]) -> DraftTree:
    """The union of trees over one request; a node that several propose keeps its largest value."""
    builder = TreeBuilder()
    for tree in trees:
        assert is_prunable(tree), "trees of sampled proposals cannot be merged"
        assert len(tree.values) == len(tree), "only trees with values can be merged"
        places: dict[int, int] = {ROOT: ROOT}
        for node, (token, parent, value) in enumerate(zip(tree.tokens, tree.parents, tree.values, strict=True)):
            places[node] = builder.add(places[parent], token, value)
    coupled = any(isinstance(tree.kind, Coupled) for tree in trees)
    return builder.build(Coupled() if coupled else OneHot())


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
        kind=tree.kind,
    )


def _monotone_values(tree: DraftTree) -> list[float]:
    """Values capped by the parent's: a node cannot be reached more often than its parent."""
    ceilings: list[float] = []
    for parent, value in zip(tree.parents, tree.values, strict=True):
        ceilings.append(value if parent == ROOT else min(value, ceilings[parent]))
    return ceilings


def fit(
    trees: Sequence[DraftTree],
    cost: CostModel,
    *,
    max_nodes: Sequence[int],
    adaptive: bool = True,
    spent_milliseconds: float = 0.0,
) -> list[DraftTree]:
    """Cut trees to at most `max_nodes[i]` nodes each and, if adaptive, to the nodes that pay in one shared forward.

    Nodes of all requests are ranked together; the number kept maximises expected tokens over the round's time,
    (requests + sum of values) / (spent + forward(width)).
    """
    trees = [
        keep_best(tree, limit) if is_prunable(tree) else tree for tree, limit in zip(trees, max_nodes, strict=True)
    ]
    if not adaptive or not all(is_prunable(tree) and tree.values for tree in trees if len(tree)):
        return trees
    ranked = sorted(
        ((value, index) for index, tree in enumerate(trees) for value in _monotone_values(tree)),
        key=lambda entry: -entry[0],
    )
    sizes = [0] * len(trees)
    best_sizes = list(sizes)
    width = expected = float(len(trees))
    best_rate = expected / (spent_milliseconds + cost.target_milliseconds(int(width)))
    for value, index in ranked:
        width += 1
        expected += value
        sizes[index] += 1
        rate = expected / (spent_milliseconds + cost.target_milliseconds(int(width)))
        if rate > best_rate:
            best_rate, best_sizes = rate, list(sizes)
    return [keep_best(tree, size) if size else DraftTree.empty() for tree, size in zip(trees, best_sizes, strict=True)]
