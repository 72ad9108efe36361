"""The attention kernel of draft trees, in Triton's interpreter, and its fallback, against the plain reference."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from infer.graphs.capture import NoSync
from infer.kernels.gpu.tree_attention import (
    TreeRows,
    tree_attention,
    tree_attention_reference,
    tree_attention_sdpa,
)
from tests.infer.kernels.gpu_scenes import close, nan_memory, scene, with_fault

SETTINGS = [{}, {"window": 5, "scaling": 0.3}, {"window": 70}, {"softcap": 2.0}]
RAGGED = [(2, 127, 5), (0, 0, 1), (1, 65, 9)]
"""Slots out of order, a prompt's first token beside trees, prefixes around a block."""


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(
    ("heads", "sizes", "dtype"),
    [
        ((3, 1), (64, 64), torch.float32),
        ((6, 2), (16, 48), torch.bfloat16),
        ((2, 2), (80, 80), torch.float16),
        ((8, 1), (96, 128), torch.bfloat16),
        ((2, 1), (128, 16), torch.float32),
    ],
)
def test_the_kernel_equals_the_reference(heads, sizes, dtype, settings) -> None:
    """Ragged rows, heads in groups of any size, head sizes that are no power of two, values of another size; nothing of
    columns that no row sees, and all of the output is written."""
    case = scene(RAGGED, heads=heads, sizes=sizes, dtype=dtype, max_prefix=150)
    with nan_memory():
        found = tree_attention(case.query, case.keys, case.values, case.tree, **settings)
    close(found, tree_attention_reference(case.query, case.keys, case.values, case.tree, **settings))
    assert not found[-1].any(), "rows that are nobody's are zero"


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("prefix", "num_rows"), [(0, 1), (0, 65), (1, 2), (63, 33), (64, 1), (64, 32), (127, 2), (513, 1), (513, 65)]
)
def test_any_prefix_and_tree(prefix, num_rows) -> None:
    """Up to three words of ancestors, up to more splits than the merge reads at once; bounds that are exact."""
    case = scene([(0, prefix, num_rows)], heads=(2, 1), sizes=(16, 16), seed=num_rows, nobodys=0)
    with nan_memory():
        found = tree_attention(case.query, case.keys, case.values, case.tree)
    close(found, tree_attention_reference(case.query, case.keys, case.values, case.tree))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("rows", "columns", "splits"), [(16, 16, 1), (32, 64, 3), (64, 32, 40), (128, 64, 63)])
def test_sizes_change_rounding_alone(rows, columns, splits) -> None:
    from infer.kernels.gpu.tree_attention_triton import Sizes, tree_attention_triton

    case = scene([(1, 200, 11), (0, 7, 3)], heads=(3, 1), sizes=(32, 32), max_prefix=600)
    sizes = Sizes(rows=rows, columns=columns, splits=splits, warps=4, stages=2)
    with nan_memory():
        found = tree_attention_triton(case.query, case.keys, case.values, case.tree, window=90, sizes=sizes)
    close(found, tree_attention_reference(case.query, case.keys, case.values, case.tree, window=90))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("scale", [1e-3, 300.0])
def test_extreme_scores(scale) -> None:
    """Scores far apart leave one weight, equal ones the mean; nothing overflows."""
    case = scene(RAGGED, heads=(2, 2), sizes=(16, 16))
    query = scale * case.query
    found = tree_attention(query, case.keys, case.values, case.tree)
    close(found, tree_attention_reference(query, case.keys, case.values, case.tree))


def test_rows_that_see_nothing_are_zero() -> None:
    """Never NaN, which would spread through a model's state to places that do count."""
    case = scene([(0, 0, 3)], heads=(2, 1), sizes=(16, 16), nobodys=0)
    blind = dataclasses.replace(case.tree, ancestors=torch.zeros_like(case.tree.ancestors))
    for function in (tree_attention_reference, tree_attention_sdpa):
        assert not function(case.query, case.keys, case.values, blind).any()


@pytest.mark.usefixtures("interpreter")
def test_the_kernels_rows_that_see_nothing_are_zero() -> None:
    case = scene([(0, 0, 3)], heads=(2, 1), sizes=(16, 16), nobodys=0)
    blind = dataclasses.replace(case.tree, ancestors=torch.zeros_like(case.tree.ancestors))
    with nan_memory():
        assert not tree_attention(case.query, case.keys, case.values, blind).any()


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(
    ("heads", "sizes", "dtype"),
    [((9, 3), (64, 64), torch.float32), ((4, 4), (80, 16), torch.bfloat16), ((8, 1), (128, 128), torch.float32)],
)
def test_the_fallback_equals_the_reference(heads, sizes, dtype, settings) -> None:
    case = scene([*RAGGED, (3, 513, 65)], heads=heads, sizes=sizes, dtype=dtype, nobodys=3)
    found = tree_attention_sdpa(case.query, case.keys, case.values, case.tree, **settings)
    close(found, tree_attention_reference(case.query, case.keys, case.values, case.tree, **settings))


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_fallback_asks_the_device_for_nothing(settings) -> None:
    """A CUDA graph can hold it, if no number has to reach the host."""
    case = scene(RAGGED, heads=(4, 2), sizes=(16, 16))
    with NoSync():
        tree_attention_sdpa(case.query, case.keys, case.values, case.tree, **settings)


def _shifted(rows: TreeRows, name: str, by: int) -> TreeRows:
    return dataclasses.replace(rows, **{name: getattr(rows, name) + by})


FAULTY_ROWS = {
    "a prefix too long by one": lambda rows: _shifted(rows, "prefixes", 1),
    "a slot that begins a column later": lambda rows: _shifted(rows, "bases", 1),
    "positions one too high, in a window": lambda rows: _shifted(rows, "positions", 1),
    "tree columns one too deep, in a window": lambda rows: dataclasses.replace(
        rows, column_positions=rows.column_positions - 1
    ),
    "an ancestor left out": lambda rows: dataclasses.replace(rows, ancestors=rows.ancestors & ~1),
    "a neighbour's ancestors": lambda rows: dataclasses.replace(rows, ancestors=rows.ancestors.roll(1, dims=0)),
}


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("fault", FAULTY_ROWS)
def test_faults_in_what_rows_see_are_caught(fault) -> None:
    """The comparison above tells such a fault from rounding, for the kernel as well as the fallback."""
    case = scene([(1, 40, 9), (0, 20, 4)], heads=(2, 2), sizes=(16, 16), nobodys=0)
    expected = tree_attention_reference(case.query, case.keys, case.values, case.tree, window=3)
    for function in (tree_attention, tree_attention_sdpa):
        close(function(case.query, case.keys, case.values, case.tree, window=3), expected)
        with pytest.raises(AssertionError):
            close(function(case.query, case.keys, case.values, FAULTY_ROWS[fault](case.tree), window=3), expected)


FAULTY_KERNELS = {
    "unseen values are read": ("value_mask = is_column[:, None] & ", "value_mask = (column >= 0)[:, None] & "),
    "a window one too wide": ("position[:, None] - WINDOW", "position[:, None] - WINDOW - 1"),
    "no window on tree columns": (
        "visible &= column_position[None, :] >",
        "visible &= column_position[None, :] + 999 >",
    ),
    "every word the first": ("(column // 32)[None, :]", "(column // 999)[None, :]"),
    "the last split left out": ("part < num_parts, other", "part < num_parts - 1, other"),
    "parts not weighed": ("share[:, None] * values", "values"),
    "queries of another head": ("query_place = head[:, None]", "query_place = (num_heads - 1 - head)[:, None]"),
    "a split that ends early": ("tl.minimum(start + size, prefix)", "tl.minimum(start + size, prefix) - 1"),
    "empty splits not marked": ("tl.store(masses + place, top, mask=is_row)", "pass"),
}


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("fault", FAULTY_KERNELS)
def test_faults_in_the_kernel_are_caught(fault, tmp_path: Path) -> None:
    """On one of the cases above."""
    module = with_fault("tree_attention_triton", *FAULTY_KERNELS[fault], tmp_path)
    case = scene([(1, 70, 40), (0, 0, 3)], heads=(2, 1), sizes=(16, 16), max_prefix=130)
    expected = {
        window: tree_attention_reference(case.query, case.keys, case.values, case.tree, window=window)
        for window in (None, 5)
    }

    def compare() -> None:
        for window, reference in expected.items():
            with nan_memory():
                found = module.tree_attention_triton(case.query, case.keys, case.values, case.tree, window=window)
            close(found, reference)

    with pytest.raises(AssertionError):
        compare()
