"""Attention whose rows keep their bits, in Triton's interpreter and as the fallback: against the plain reference, and
against itself among other rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from infer.fixed import split
from infer.graphs.capture import NoSync
from infer.kernels.gpu.path_attention import (
    PathRows,
    path_attention,
    path_attention_blocks,
    path_attention_reference,
)
from tests.infer.kernels.gpu_scenes import Scene, close, filled, nan_memory, scene, with_fault

SETTINGS = [{}, {"window": 9}, {"window": 70, "scaling": 0.3}, {"softcap": 2.0}]
RAGGED = [(2, 47, 5), (0, 0, 1), (1, 129, 6)]
"""Slots out of order; splits at 0, and on both sides of one within a tree."""

Attention = Callable[..., torch.Tensor]


@pytest.fixture(params=["kernel", "fallback"])
def attention(request: pytest.FixtureRequest) -> Attention:
    if request.param == "fallback":
        return path_attention_blocks
    request.getfixturevalue("interpreter")
    return path_attention


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(
    ("heads", "sizes", "dtype"),
    [
        ((3, 1), (64, 64), torch.bfloat16),
        ((2, 2), (16, 48), torch.float32),
        ((4, 1), (80, 16), torch.float16),
        ((2, 1), (96, 128), torch.float32),
    ],
)
def test_equal_to_the_reference(attention, heads, sizes, dtype, settings) -> None:
    """Nothing of what no row sees, and all of the output is written."""
    case = scene(RAGGED, heads=heads, sizes=sizes, dtype=dtype)
    with nan_memory():
        found = attention(case.query, case.keys, case.values, case.path, **settings)
    close(found, path_attention_reference(case.query, case.keys, case.values, case.path, **settings))
    assert not found[-1].any(), "rows that are nobody's are zero"


@pytest.mark.parametrize("prefix", [0, 1, 63, 64, 513])
def test_any_prefix(attention, prefix) -> None:
    """Several chunks, and bounds that are exact."""
    case = scene([(0, prefix, 20)], heads=(1, 1), sizes=(16, 16), seed=prefix, nobodys=0)
    with nan_memory():
        found = attention(case.query, case.keys, case.values, case.path)
    close(found, path_attention_reference(case.query, case.keys, case.values, case.path))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("length", [0, 1, 256, 257, 4096, 4097, 5120, 5121, 33000])
def test_chunks_hold_every_position_once(length) -> None:
    """Where short ones end and long ones begin."""
    import triton
    import triton.language as tl

    from infer.kernels.gpu import path_attention_triton as kernels

    @triton.jit
    def bounds(found, length):
        tl.store(found, kernels._num_chunks(length))
        tl.store(found + 1, kernels._chunk_start(kernels._num_chunks(length) - 1))
        tl.store(found + 2, kernels._chunk_start(kernels._num_chunks(length)))

    bounds.fn.__globals__.update(tl=tl, kernels=kernels)
    found = torch.zeros(3, dtype=torch.int32)
    bounds[(1,)](found, length)
    count, last_start, end = found.tolist()
    assert count == kernels.num_chunks(length)
    assert (last_start < length <= end) if length else count == 0


def one_row(case: Scene, row: int, *, in_place: bool, max_prefix: int) -> tuple[torch.Tensor, Scene]:
    """The query of a row and a scene of that row alone, its path in place as in plain decoding, or where it lay."""
    path, prefix, base = case.paths[row], case.prefixes[row], case.bases[row]
    position = prefix + len(path) - 1
    keys, values = (torch.full_like(storage, torch.nan) for storage in (case.keys, case.values))
    columns = [*range(prefix), *(prefix + step for step in path)]
    places = list(range(position + 1)) if in_place else columns
    for new, old in ((keys, case.keys), (values, case.values)):
        new[:, [base + place for place in places]] = old[:, [base + column for column in columns]]
    tensor = torch.tensor
    rows = PathRows(
        row_starts=tensor([0, 1], dtype=torch.int32),
        bases=tensor([base]),
        positions=tensor([position], dtype=torch.int32),
        splits=tensor([split(position)], dtype=torch.int32),
        tails=tensor([filled(places[split(position) :])], dtype=torch.int32),
        max_rows=1,
        max_prefix=max_prefix,
    )
    return case.query[:, row : row + 1], dataclasses.replace(case, keys=keys, values=values, path=rows)


def check_bits(attention: Attention, dtype: torch.dtype, settings: dict[str, float]) -> None:
    """Rows of trees beside each other, against each alone: in place, and where it lay, under other bounds."""
    case = scene([(2, 46, 9), (0, 0, 2), (1, 300, 6)], heads=(3, 1), sizes=(16, 16), dtype=dtype, seed=3)
    together = attention(case.query, case.keys, case.values, case.path, **settings)
    for row in (0, 3, 7, 8, 10, 11, 14, 16):
        for in_place, max_prefix in ((True, 310), (False, 600)):
            query, alone = one_row(case, row, in_place=in_place, max_prefix=max_prefix)
            found = attention(query, alone.keys, alone.values, alone.path, **settings)[0]
            assert torch.equal(found, together[row]), f"row {row}, in place {in_place}"


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [(torch.bfloat16, {}), (torch.float32, {"window": 20}), (torch.float16, {"softcap": 2.0})],
)
def test_a_row_keeps_its_bits(attention, dtype, settings) -> None:
    """Whatever is beside it, wherever its path lies: what plain decoding computes and what a tree's verification does
    are the same numbers. In one tree there are rows on both sides of a split."""
    check_bits(attention, dtype, settings)


@pytest.mark.usefixtures("interpreter")
def test_bits_of_the_tree_kernel_are_not_kept() -> None:
    """So the test above can tell: cuts that follow the prefix's length show in the last bits."""
    from infer.kernels.gpu.tree_attention_triton import Sizes, tree_attention_triton

    case = scene([(0, 300, 3)], heads=(3, 1), sizes=(16, 16), nobodys=0)
    one, other = (
        tree_attention_triton(
            case.query,
            case.keys,
            case.values,
            case.tree,
            sizes=Sizes(rows=16, columns=32, splits=splits, warps=4, stages=2),
        )
        for splits in (2, 3)
    )
    close(one, other)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_fallback_asks_the_device_for_nothing(settings) -> None:
    case = scene(RAGGED, heads=(4, 2), sizes=(16, 16))
    with NoSync():
        path_attention_blocks(case.query, case.keys, case.values, case.path, **settings)


FAULTY_ROWS = {
    "a split one too far": lambda rows: dataclasses.replace(rows, splits=rows.splits + 1),
    "positions one too high": lambda rows: dataclasses.replace(rows, positions=rows.positions + 1),
    "a slot that begins a column later": lambda rows: dataclasses.replace(rows, bases=rows.bases + 1),
    "a neighbour's path": lambda rows: dataclasses.replace(rows, tails=rows.tails.roll(1, dims=0)),
}


@pytest.mark.parametrize("fault", FAULTY_ROWS)
def test_faults_in_what_rows_see_are_caught(attention, fault) -> None:
    case = scene([(1, 50, 6), (0, 20, 3)], heads=(1, 1), sizes=(16, 16), nobodys=0)
    expected = path_attention_reference(case.query, case.keys, case.values, case.path)
    with pytest.raises(AssertionError):
        close(attention(case.query, case.keys, case.values, FAULTY_ROWS[fault](case.path)), expected)


WRONG = {
    "tails without a window": ("visible &= split + steps > position - WINDOW", "pass"),
    "prefixes without a window": ("visible &= column[None, :] > position[:, None] - WINDOW", "pass"),
    "unseen values are read": ("value_mask = is_column[:, None] & ", "value_mask = (column >= 0)[:, None] & "),
    "tails beyond the row": (" & (split + steps <= position)", ""),
    "chunks not weighed": ("share[:, None] * chunk", "chunk"),
    "the last chunk left out": ("num_read = _num_chunks(split)", "num_read = _num_chunks(split - 32)"),
    "empty chunks not marked": ("tl.store(masses + place, top, mask=is_row)", "pass"),
}
BITS_LOST = {
    "blocks from where the tile's window begins": ("lowest // COLUMNS * COLUMNS", "lowest"),
    "blocks by the number of rows": (
        "    num_tiles = triton",
        "    columns = 16 if rows.max_rows > 1 else columns\n    num_tiles = triton",
    ),
}


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("fault", WRONG)
def test_faults_in_the_kernel_are_caught(fault, tmp_path: Path) -> None:
    """By comparison with the reference, on one of the cases above."""
    module = with_fault("path_attention_triton", *WRONG[fault], tmp_path)
    case = scene([(1, 310, 4), (0, 47, 3)], heads=(1, 1), sizes=(16, 16), dtype=torch.float16, max_prefix=600)

    def compare() -> None:
        for window in (None, 9, 30):
            with nan_memory():
                found = module.path_attention_triton(case.query, case.keys, case.values, case.path, window=window)
            close(found, path_attention_reference(case.query, case.keys, case.values, case.path, window=window))

    with pytest.raises(AssertionError):
        compare()


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("fault", BITS_LOST)
def test_cuts_that_follow_the_neighbours_are_caught(fault, tmp_path: Path) -> None:
    """Results within rounding of the reference, but other bits: a window of 100 begins elsewhere for every row."""
    module = with_fault("path_attention_triton", *BITS_LOST[fault], tmp_path)
    settings = {"window": 100}
    check_bits(path_attention, torch.float32, settings)
    with pytest.raises(AssertionError):
        check_bits(module.path_attention_triton, torch.float32, settings)
