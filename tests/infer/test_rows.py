"""Packed rows of trees that grow depth by depth, where layers see no further back than a window."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from infer.rows import GrowingRows, PackedRows, RowGroup
from infer.target import TargetModel
from infer.tree import ROOT

TEXT = [5, 17, 3, 99, 42, 8, 77, 23, 61, 12, 4, 90]
# Ten deep, so that a node's first ancestors are out of its window, two or three wide, and turning from side to side.
TOKENS = list(range(11, 33))
PARENTS = [ROOT, ROOT, 0, 1, 3, 2, 2, 5, 4, 7, 7, 9, 8, 12, 11, 13, 13, 15, 15, 17, 18, 20]
TOLERANCE = 1e-4
"""Float32 sums in another order: observed up to 1e-6 on logits of size 1."""


def path_of(node: int) -> list[int]:
    return [] if node == ROOT else [*path_of(PARENTS[node]), node]


def nodes_by_depth() -> list[list[int]]:
    depths = [len(path_of(node)) for node in range(len(TOKENS))]
    return [[node for node in range(len(TOKENS)) if depths[node] == depth] for depth in range(1, max(depths) + 1)]


def stock_logits(target: TargetModel, tokens: Sequence[int]) -> torch.Tensor:
    with target.stock() as model, torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -1]
    return logits


@pytest.mark.parametrize("kind", ["gemma3", "gemma2", "llama"])
@pytest.mark.parametrize("num_text", [2, 5, 7, 12])
def test_growing_trees_keep_to_the_window(tiny_model, kind, num_text):
    """Logits of every node, fed depth by depth, equal those of its path run alone by the stock model: for texts before,
    across and beyond the window's end (8), with a node's first ancestors out of it and its siblings' rows between. In
    one forward with another slot's rows, which have a text and a tree of another size."""
    target = TargetModel.wrap(tiny_model(kind))
    cache = target.new_cache(num_slots=3, num_columns=40)
    text, other = TEXT[:num_text], TEXT[::-1]
    target.forward(
        [RowGroup(slot=2, prefix=0, tokens=text), RowGroup(slot=0, prefix=0, tokens=other)],
        cache,
    )
    rows, other_rows = GrowingRows(slot=2, prefix=len(text)), GrowingRows(slot=0, prefix=len(other))
    parent_of_other = ROOT
    for depth, nodes in enumerate(nodes_by_depth(), start=1):
        group = rows.add(nodes, [PARENTS[node] for node in nodes], [TOKENS[node] for node in nodes], depth)
        other_group = other_rows.add([depth], [parent_of_other], [depth], depth)
        parent_of_other = depth
        logits = target.forward([other_group, group], cache).logits
        expected = [stock_logits(target, [*other, *range(1, depth + 1)])]
        expected += [stock_logits(target, [*text, *(TOKENS[each] for each in path_of(node))]) for node in nodes]
        torch.testing.assert_close(logits, torch.stack(expected), atol=TOLERANCE, rtol=TOLERANCE)


def test_what_a_row_sees_is_its_path_within_the_window():
    """Written a second time, by positions: a row sees its path's columns whose positions are less than a window back.
    Without the depths of the columns between, rows of a depth would be taken for a chain, and see other columns."""
    rows = GrowingRows(slot=0, prefix=3)
    cache = CacheStub(num_columns=32)
    columns: dict[int, int] = {}
    for depth, nodes in enumerate(nodes_by_depth(), start=1):
        group = rows.add(nodes, [PARENTS[node] for node in nodes], [0] * len(nodes), depth)
        columns.update(zip(nodes, range(3 + len(columns), 3 + len(columns) + len(nodes)), strict=True))
        for window in (None, 1, 2, 4, 6):
            bias = PackedRows([group], cache).bias(window, torch.float32)
            visible = (
                np.ones((len(nodes), group.num_columns), dtype=bool) if bias is None else (bias[0, 0] == 0).numpy()
            )
            for row, node in enumerate(nodes):
                positions = {column: column for column in range(3)}
                positions.update({columns[each]: 3 + i for i, each in enumerate(path_of(node))})
                oldest = -1 if window is None else 3 + depth - 1 - window
                expected = [column for column, position in sorted(positions.items()) if position > oldest]
                assert visible[row].nonzero()[0].tolist() == expected


def test_a_window_needs_the_depth_of_every_column():
    """Rows behind an offset whose depths are not said are refused where a window is reached, not masked by guess."""
    hidden = RowGroup(slot=0, prefix=4, tokens=[1], depths=[2], ancestors=np.ones((1, 3), dtype=bool), offset=2)
    packed = PackedRows([hidden], CacheStub(num_columns=16))
    assert packed.bias(None, torch.float32) is None
    with pytest.raises(AssertionError, match="position of every column"):
        packed.bias(4, torch.float32)


class CacheStub:
    """The part of a cache that packed rows read."""

    def __init__(self, *, num_columns: int) -> None:
        self.keys = torch.empty(0)
        self.num_columns = num_columns
