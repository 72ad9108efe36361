"""Draft trees as tensors say what `DraftTree` says, and the best candidates are those that the growth module keeps."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from infer.fixed import TAIL, split
from infer.graphs.rows import path_columns
from infer.graphs.shapes import RoundShape, context_for
from infer.graphs.trees import Candidates, DeviceTrees, best_nodes, packed_bits, trees_of
from infer.growth import keep_best
from infer.tree import ROOT, DraftTree, OneHot


def random_parents(rng: random.Random, num_nodes: int, *, depth: int) -> list[int]:
    parents: list[int] = []
    depths: list[int] = []
    for node in range(num_nodes):
        allowed = [ROOT, *(parent for parent in range(node) if depths[parent] < depth)]
        parents.append(rng.choice(allowed))
        depths.append(1 if parents[-1] == ROOT else depths[parents[-1]] + 1)
    return parents


def on_device(trees: Sequence[DraftTree], *, nodes: int, depth: int) -> DeviceTrees:
    tokens = torch.tensor([[*tree.tokens, *[0] * (nodes - len(tree))] for tree in trees])
    parents = torch.tensor([[*(parent + 1 for parent in tree.parents), *[-1] * (nodes - len(tree))] for tree in trees])
    return trees_of(torch.arange(len(trees)) + 100, tokens, parents, depth=depth)


def test_depths_and_ancestors_are_those_of_the_tree() -> None:
    """Trees of several sizes side by side; a place without a node is nobody's child and sees itself alone."""
    rng = random.Random(1)
    sizes = [0, 1, 9, 33]
    trees = [
        DraftTree(tokens=tuple(range(size)), parents=tuple(random_parents(rng, size, depth=5)), kind=OneHot())
        for size in sizes
    ]
    found = on_device(trees, nodes=33, depth=5)
    for tree, depths, sees, tokens in zip(trees, found.depths, found.sees, found.tokens, strict=True):
        assert depths[1 : 1 + len(tree)].tolist() == list(tree.depths)
        assert tokens[1 : 1 + len(tree)].tolist() == list(tree.tokens)
        for node in range(len(tree)):
            assert sees[1 + node].nonzero().flatten().tolist() == [0, *(1 + above for above in tree.path(node))]
        for place in range(1 + len(tree), 34):
            assert depths[place] == 0
            assert sees[place].nonzero().flatten().tolist() == [place]
        assert sees[0].nonzero().flatten().tolist() == [0]


@pytest.mark.parametrize("num_bits", [1, 31, 32, 33, 64, 65])
def test_bits_are_packed_by_thirty_two(num_bits: int) -> None:
    bits = torch.rand(3, num_bits, generator=torch.Generator().manual_seed(num_bits)) < 0.5
    bits[0], bits[1] = True, False  # the sign bit too
    words = packed_bits(bits)
    assert words.dtype == torch.int32
    assert words.shape == (3, -(-num_bits // 32))
    for row, row_words in zip(bits.tolist(), words.tolist(), strict=True):
        assert row == [bool(row_words[j // 32] >> (j % 32) & 1) for j in range(num_bits)]


def test_the_best_candidates_are_kept_with_their_ancestors() -> None:
    """As `keep_best` has them, ties included: equal values are as common here as they are with a share of 1."""
    rng = random.Random(2)
    for _ in range(50):
        num_candidates = rng.randint(1, 40)
        parents = random_parents(rng, num_candidates, depth=6)
        values: list[float] = []
        for parent in parents:
            above = 1.0 if parent == ROOT else values[parent]
            values.append(above * rng.choice([1.0, 0.5, 0.25]))
        tokens = tuple(range(10, 10 + num_candidates))
        tree = DraftTree(tokens=tokens, parents=tuple(parents), values=tuple(values), kind=OneHot())
        num_nodes = rng.randint(1, num_candidates)
        kept = keep_best(tree, num_nodes)
        candidates = Candidates(
            tokens=torch.tensor([tokens]), values=torch.tensor([values]), parents=torch.tensor([parents])
        )
        found_tokens, found_parents = best_nodes(candidates, num_nodes)
        assert found_tokens[0].tolist() == list(kept.tokens)
        assert found_parents[0].tolist() == [parent + 1 for parent in kept.parents]


def test_a_head_that_has_gone_wrong_makes_no_node_too_many() -> None:
    candidates = Candidates(
        tokens=torch.arange(6)[None],
        values=torch.tensor([[0.5, torch.nan, 0.2, torch.nan, torch.nan, 0.1]]),
        parents=torch.tensor([[-1, -1, -1, 0, 1, 2]]),
    )
    tokens, parents = best_nodes(candidates, 4)
    assert tokens.tolist() == [[0, 1, 2, 5]]
    assert parents.tolist() == [[0, 0, 0, 3]]


def test_the_tail_of_a_row_is_its_own_path() -> None:
    """Columns of positions split(t) .. t: in place below the root, by the tree's own rows from there on."""
    rng = random.Random(3)
    prefixes = [0, 7, 16, 47, 48, 100]
    trees = [
        DraftTree(tokens=(1,) * 20, parents=tuple(random_parents(rng, 20, depth=8)), kind=OneHot()) for _ in prefixes
    ]
    found = on_device(trees, nodes=20, depth=8)
    starts = torch.tensor(prefixes)[:, None] + found.depths
    splits = starts.clone().apply_(split)
    columns = path_columns(torch.tensor(prefixes), found.depths, found.sees, splits)
    assert columns.shape == (len(prefixes), 21, TAIL)
    for place, (prefix, tree) in enumerate(zip(prefixes, trees, strict=True)):
        for row in range(21):
            path = [0] if row == 0 else [0, *(1 + node for node in tree.path(row - 1))]
            whole = [*range(prefix), *(prefix + each for each in path)]
            expected = whole[split(len(whole) - 1) :]
            assert columns[place, row, : len(expected)].tolist() == expected
            assert set(columns[place, row, len(expected) :].tolist()) <= {prefix + row}


def test_shapes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="batch of a round must be a whole number of at least 1, got 0"):
        RoundShape(batch=0, nodes=4, depth=2, context=64)
    with pytest.raises(ValueError, match="nodes and a depth, or neither: got 0 nodes, depth 2"):
        RoundShape(batch=1, nodes=0, depth=2, context=64)
    with pytest.raises(ValueError, match="a tree of 2 nodes cannot be 3 deep"):
        RoundShape(batch=1, nodes=2, depth=3, context=64)


def test_contexts_grow_by_steps() -> None:
    assert [context_for(longest) for longest in (1, 1024, 1025, 4097)] == [1024, 1024, 4096, 16384]
    shape = RoundShape(batch=2, nodes=8, depth=4, context=64, branch=3, beam=4)
    assert shape.widths == (1, 3, 4, 4)
    assert shape.num_candidates == 36
    assert shape.num_rows == 18
