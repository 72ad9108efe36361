"""`infer.kernels.gpu.tree_attention` as two Triton kernels: split-KV (Flash-Decoding, Dao et al. 2023), and the merge.

Programs of the first: (request, key/value head, tile of rows) x split. Query heads of a group are rows of the same
tile, so that keys are read once for all of them. The request's prefix is cut into splits evenly, so that a bound on its
length that is far too high leaves no processor idle; the last program of all takes the tree columns, which alone need
the bits. Each writes its output and log-sum-exp in float32; the second kernel, a program a row and head, merges them.

Shapes: as in `infer.kernels.gpu.tree_attention`; M rows of a tile, S splits of a prefix.
"""

# Parameters of kernels are Triton's own.
# mypy: disable-error-code="import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.kernels.gpu.attention_rows import scale_of
from infer.kernels.gpu.blocks_triton import (
    Machine,
    attend_block,
    check_offsets,
    machine_of,
    padded,
    score_scales,
    store_part,
    with_unit_stride,
)
from infer.kernels.gpu.tree_attention import TreeRows

_MOST_SPLITS = 63
"""Prefix splits; with the tree's a merge reads at most 64 parts a row."""
_MERGED_AT_ONCE = tl.constexpr(16)
_FAR = tl.constexpr(2**31 - 1)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """rows: of a tile. columns: of a block. splits: of a prefix. warps, stages: of a program."""

    rows: int
    columns: int
    splits: int
    warps: int
    stages: int


def sizes_for(
    rows: TreeRows, *, num_heads: int, num_kv_heads: int, head_size: int, element_size: int, machine: Machine
) -> Sizes:
    """Sizes by shape alone.

    A tile holds all rows of a request if it can, so that keys are read from memory once: up to 128 in half precision,
    where arithmetic still takes less time than reading. Tensor cores want 16 rows at least. Blocks, stages and warps
    are such that nothing spills (as compiled for compute capability 9.0) and that some 64 KiB of loads are under way on
    a processor: two programs with tiles of up to 64 rows, one with larger ones. In float32 products run without tensor
    cores and registers bound the tile. Splits: as many programs as run at once, but no split below a block.
    """
    num_folded = rows.max_rows * (num_heads // num_kv_heads)
    is_wide = padded(head_size) > 128
    warps, stages = 4, 3
    if element_size == 4:
        tile, columns, stages = 16, 32, 2
    else:
        tile = min(max(16, triton.next_power_of_2(num_folded)), 64 if is_wide else 128)
        columns = 32 if is_wide or tile >= 64 or not machine.has_wide_memory else 64
        if tile == 128 or (is_wide and tile == 64):
            warps = 8
        if is_wide or not machine.has_wide_memory:
            stages = 2
    num_tiles = triton.cdiv(num_folded, tile)
    num_resident = machine.num_processors * (2 if warps == 4 else 1)
    most = min(_MOST_SPLITS, triton.cdiv(rows.max_prefix, columns))
    splits = min(most, num_resident // (rows.num_requests * num_kv_heads * num_tiles))
    return Sizes(rows=tile, columns=columns, splits=max(1, splits), warps=warps, stages=stages)


def tree_attention_triton(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: TreeRows,
    *,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sizes: Sizes | None = None,
) -> Tensor:
    """As `infer.kernels.gpu.tree_attention.tree_attention`. `sizes`: others than those chosen by shape."""
    num_heads, num_rows, size = query.shape
    num_kv_heads, _, value_size = values.shape
    query, keys, values = (with_unit_stride(tensor) for tensor in (query, keys, values))
    if sizes is None:
        sizes = sizes_for(
            rows,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=max(size, value_size),
            element_size=query.element_size(),
            machine=machine_of(query.device),
        )
    check_offsets(keys, values, rows.max_prefix + rows.num_tree_columns)
    num_groups = num_heads // num_kv_heads
    num_tiles = triton.cdiv(rows.max_rows * num_groups, sizes.rows)
    num_parts = sizes.splits + 1
    parts = torch.empty((num_rows, num_heads, num_parts, value_size), dtype=torch.float32, device=query.device)
    masses = torch.empty((num_rows, num_heads, num_parts), dtype=torch.float32, device=query.device)
    output = torch.empty((num_rows, num_heads, value_size), dtype=query.dtype, device=query.device)
    scale, cap = score_scales(scale_of(query, scaling), softcap)
    _split[(num_tiles * num_parts, num_kv_heads, rows.num_requests)](
        query,
        keys,
        values,
        rows.row_starts,
        rows.bases,
        rows.prefixes,
        rows.positions,
        rows.ancestors.contiguous(),
        (rows.ancestors if rows.column_positions is None else rows.column_positions).contiguous(),
        parts,
        masses,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        rows.ancestors.shape[1],
        rows.num_tree_columns,
        sizes.splits,
        num_heads,
        scale,
        cap,
        GROUPS=num_groups,
        SIZE=size,
        VALUE_SIZE=value_size,
        PADDED_SIZE=padded(size),
        PADDED_VALUE_SIZE=padded(value_size),
        ROWS=sizes.rows,
        COLUMNS=sizes.columns,
        WINDOW=window or 0,
        HAS_SOFTCAP=softcap is not None,
        num_warps=sizes.warps,
        num_stages=sizes.stages,
    )
    _merge[(num_rows, num_heads)](
        parts,
        masses,
        rows.row_starts,
        output,
        rows.num_requests,
        num_parts,
        VALUE_SIZE=value_size,
        PADDED_VALUE_SIZE=padded(value_size),
        num_warps=2,
    )
    return output


@triton.jit(do_not_specialize=["num_words", "num_tree_columns", "num_splits"])
def _split(
    query,
    keys,
    values,
    row_starts,
    bases,
    prefixes,
    positions,
    ancestors,
    column_positions,
    parts,
    masses,
    query_head_stride,
    query_row_stride,
    key_head_stride,
    key_column_stride,
    value_head_stride,
    value_column_stride,
    num_words,
    num_tree_columns,
    num_splits,
    num_heads,
    scale,
    softcap,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    PADDED_VALUE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """One split of the columns that a tile of a request's rows sees."""
    # Tiles of a split are neighbours: what one reads, the next finds in the cache.
    split = tl.program_id(0) % (num_splits + 1)
    tile = tl.program_id(0) // (num_splits + 1)
    kv_head = tl.program_id(1).to(tl.int64)
    request = tl.program_id(2)
    first_row = tl.load(row_starts + request)
    num_rows = tl.load(row_starts + request + 1) - first_row
    if tile * ROWS >= num_rows * GROUPS:
        return

    folded = tile * ROWS + tl.arange(0, ROWS)
    is_row = folded < num_rows * GROUPS
    row = (first_row + folded // GROUPS).to(tl.int64)
    head = kv_head * GROUPS + folded % GROUPS
    place = (row * num_heads + head) * (num_splits + 1) + split
    position = tl.load(positions + row, mask=is_row, other=_FAR)
    prefix = tl.load(prefixes + request)
    base = tl.load(bases + request)

    start = 0
    if WINDOW:
        start = tl.maximum(tl.min(position, axis=0) - WINDOW + 1, 0)
    size = tl.cdiv(tl.cdiv(tl.maximum(prefix - start, 0), num_splits), COLUMNS) * COLUMNS
    start += split * size
    end = tl.minimum(start + size, prefix)
    if split == num_splits:
        start = 0
        end = num_tree_columns

    top = tl.full([ROWS], float("-inf"), tl.float32)
    if start >= end:
        tl.store(masses + place, top, mask=is_row)
        return

    dims = tl.arange(0, PADDED_SIZE)
    value_dims = tl.arange(0, PADDED_VALUE_SIZE)
    query_mask = is_row[:, None] & (dims < SIZE)[None, :]
    query_place = head[:, None] * query_head_stride + row[:, None] * query_row_stride + dims[None, :]
    rows = tl.load(query + query_place, mask=query_mask, other=0.0)
    # Within a slot 32 bits are enough, and addresses take half the registers.
    keys += kv_head * key_head_stride + base * key_column_stride
    values += kv_head * value_head_stride + base * value_column_stride
    output = tl.zeros([ROWS, PADDED_VALUE_SIZE], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if split < num_splits:
        for first in range(start, end, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            is_column = column < end
            visible = is_row[:, None] & is_column[None, :]
            if WINDOW:
                visible &= column[None, :] > position[:, None] - WINDOW
            key_mask = is_column[None, :] & (dims < SIZE)[:, None]
            value_mask = is_column[:, None] & (value_dims < VALUE_SIZE)[None, :]
            key = tl.load(keys + column[None, :] * key_column_stride + dims[:, None], mask=key_mask, other=0.0)
            value = tl.load(
                values + column[:, None] * value_column_stride + value_dims[None, :], mask=value_mask, other=0.0
            )
            output, top, total = attend_block(
                rows, key, value, visible, output, top, total, scale, softcap, HAS_SOFTCAP, False
            )
    else:
        for first in range(start, end, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            bit_mask = is_row[:, None] & (column < num_tree_columns)[None, :]
            word_place = row[:, None] * num_words + (column // 32)[None, :]
            word = tl.load(ancestors + word_place, mask=bit_mask, other=0)
            visible = ((word >> (column % 32)[None, :]) & 1) != 0
            if WINDOW:
                column_position = tl.load(
                    column_positions + request * num_tree_columns + column, mask=column < num_tree_columns, other=0
                )
                visible &= column_position[None, :] > position[:, None] - WINDOW
            # What no row sees may not be in the cache at all.
            is_column = tl.max(visible.to(tl.int32), axis=0) > 0
            column += prefix
            key_mask = is_column[None, :] & (dims < SIZE)[:, None]
            value_mask = is_column[:, None] & (value_dims < VALUE_SIZE)[None, :]
            key = tl.load(keys + column[None, :] * key_column_stride + dims[:, None], mask=key_mask, other=0.0)
            value = tl.load(
                values + column[:, None] * value_column_stride + value_dims[None, :], mask=value_mask, other=0.0
            )
            output, top, total = attend_block(
                rows, key, value, visible, output, top, total, scale, softcap, HAS_SOFTCAP, False
            )
    store_part(parts, masses, place, is_row, output, top, total, VALUE_SIZE, PADDED_VALUE_SIZE)


@triton.jit(do_not_specialize=["num_requests", "num_parts"])
def _merge(
    parts,
    masses,
    row_starts,
    output,
    num_requests,
    num_parts,
    VALUE_SIZE: tl.constexpr,
    PADDED_VALUE_SIZE: tl.constexpr,
):
    """The parts of a row and head as one, in order; zeros where none has mass, or the row is nobody's."""
    row = tl.program_id(0).to(tl.int64)
    place = row * tl.num_programs(1) + tl.program_id(1)
    dims = tl.arange(0, PADDED_VALUE_SIZE)
    num_read = tl.where(row < tl.load(row_starts + num_requests), num_parts, 0)
    top = tl.full([], float("-inf"), tl.float32)
    for first in range(0, num_read, _MERGED_AT_ONCE):
        part = first + tl.arange(0, _MERGED_AT_ONCE)
        mass = tl.load(masses + place * num_parts + part, mask=part < num_parts, other=float("-inf"))
        top = tl.maximum(top, tl.max(mass, axis=0))
    top = tl.where(top == float("-inf"), 0.0, top)
    result = tl.zeros([PADDED_VALUE_SIZE], tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for first in range(0, num_read, _MERGED_AT_ONCE):
        part = first + tl.arange(0, _MERGED_AT_ONCE)
        mass = tl.load(masses + place * num_parts + part, mask=part < num_parts, other=float("-inf"))
        share = tl.exp2(mass - top)
        mask = (mass > float("-inf"))[:, None] & (dims < VALUE_SIZE)[None, :]
        values = tl.load(parts + (place * num_parts + part)[:, None] * VALUE_SIZE + dims[None, :], mask=mask, other=0.0)
        result += tl.sum(share[:, None] * values, axis=0)
        total += tl.sum(share, axis=0)
    result = result / tl.where(total == 0.0, 1.0, total)
    tl.store(output + place * VALUE_SIZE + dims, result.to(output.dtype.element_ty), mask=dims < VALUE_SIZE)
