"""Merging, pruning and fitting of trees, and what becomes of the record of their draws."""

from __future__ import annotations

import torch

from infer.cost import CostModel
from infer.growth import fit, keep_best, merge, nodes_that_pay
from infer.tree import ROOT, Coupled, DraftTree, OneHot, Sampled

Q = {node: torch.eye(8)[node + 1] for node in range(-1, 6)}


def tree(tokens, parents, values, kind) -> DraftTree:
    return DraftTree(tokens=tuple(tokens), parents=tuple(parents), values=tuple(values), kind=kind)


def recorded() -> DraftTree:
    """Root with children 0 and 1; 2 and 3 below 0; 4 below 1."""
    kind = Coupled(draft_probs={node: Q[node] for node in (ROOT, 0, 1)}, num_drawn=4)
    return tree([5, 6, 5, 6, 7], [ROOT, ROOT, 0, 0, 1], [0.3, 0.6, 0.1, 0.2, 0.5], kind)


def test_a_record_follows_its_node_through_pruning():
    """Nodes are renumbered; a node whose children were all cut keeps its record, for they were proposed."""
    cut = keep_best(recorded(), 2)
    assert (cut.tokens, cut.parents) == ((6, 7), (ROOT, 0))
    assert cut.kind.num_drawn == 4
    assert set(cut.kind.draft_probs) == {ROOT, 0}
    assert cut.kind.draft_probs[0] is Q[1]
    cut = keep_best(recorded(), 1)
    assert set(cut.kind.draft_probs) == {ROOT, 0}
    nothing = keep_best(recorded(), 0)
    assert len(nothing) == 0
    assert set(nothing.kind.draft_probs) == {ROOT}


def test_merging_keeps_records_of_nodes_that_one_tree_proposes_for():
    """A lookup that adds children below the root, the head's own among them, takes the root's record away."""
    lookup = tree([6, 7, 2], [ROOT, 0, 1], [0.9, 0.5, 0.4], OneHot())
    both = merge([recorded(), lookup])
    assert isinstance(both.kind, Coupled)
    assert both.kind.num_drawn == 4
    assert {both.tokens[node] for node in both.kind.draft_probs} == {5}
    assert both.values[both.tokens.index(6)] == 0.9
    alone = merge([recorded(), tree([], [], [], OneHot())])
    assert set(alone.kind.draft_probs) == {ROOT, 0, 1}
    assert type(merge([lookup, lookup]).kind) is OneHot


def test_nodes_that_pay_maximises_the_rate():
    """By hand: 1, 1.8, 2.4, 2.6 tokens in 10, 11, 12, 20 ms; with 10 ms spent before, all the same order."""
    cost = CostModel(widths=(1, 2, 3, 4), milliseconds=(10.0, 11.0, 12.0, 20.0))
    assert nodes_that_pay([0.8, 0.6, 0.2], cost, width=1, expected_tokens=1.0) == (2, 2.4 / 12)
    kept, rate = nodes_that_pay([0.8, 0.6, 0.2], cost, width=1, expected_tokens=1.0, spent_milliseconds=10.0)
    assert (kept, rate) == (2, 2.4 / 22)
    assert nodes_that_pay([], cost, width=1, expected_tokens=1.0) == (0, 0.1)


def test_fitting_beside_a_tree_that_must_not_be_cut():
    """Drawn children are kept whole and take their width; the other requests' trees are fitted around them."""
    drawn = tree([5, 6], [ROOT, ROOT], [0.5, 0.5], Sampled(draft_probs={ROOT: Q[ROOT]}))
    cost = CostModel(widths=(1, 4, 5, 20), milliseconds=(1.0, 1.0, 1.05, 9.0))
    kept, cut = fit([drawn, recorded()], cost, max_nodes=[1, 32])
    assert kept is drawn
    assert cut.tokens == (6,)
    free = fit([drawn, recorded()], CostModel.free(), max_nodes=[1, 3])
    assert [len(each) for each in free] == [2, 3]
    assert [len(each) for each in fit([recorded()], cost, max_nodes=[2], adaptive=False)] == [2]
