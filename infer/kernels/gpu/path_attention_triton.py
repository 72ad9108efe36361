"""`infer.kernels.gpu.path_attention` as two Triton kernels: chunks of the prefix, and tails with the merge.

The first is split-KV as in `tree_attention_triton`, with cuts at absolute positions and tiles of one shape, so that a
row goes through the same operations in any batch; that a product's row on tensor cores does not depend on the rows
beside it is taken for granted. The second, a program a row and head, gathers the tail along the row's path, without
tensor cores, and merges the chunks in order.

Shapes: as in `infer.kernels.gpu.path_attention`; M rows of a tile.
"""

# Parameters of kernels are Triton's own.
# mypy: disable-error-code="import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

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
    tanh,
    with_unit_stride,
)
from infer.kernels.gpu.path_attention import PathRows

_SHORT_CHUNK = tl.constexpr(256)
_NUM_SHORT = tl.constexpr(16)
_LONG_CHUNK = tl.constexpr(1024)
"""Positions a chunk: short ones first, so that short texts make programs enough for a GPU; long ones from position 4096
on, so that what is merged does not grow beyond what is read."""
_MERGED_AT_ONCE = tl.constexpr(16)
_FAR = tl.constexpr(2**31 - 1)


def num_chunks(length: int) -> int:
    """Chunks that hold the first `length` positions."""
    short = _SHORT_CHUNK.value * _NUM_SHORT.value
    if length <= short:
        return int(triton.cdiv(length, _SHORT_CHUNK.value))
    return int(_NUM_SHORT.value + triton.cdiv(length - short, _LONG_CHUNK.value))


def tile_for(head_size: int, element_size: int, machine: Machine) -> tuple[int, int, int, int]:
    """Rows and columns of a tile, warps and stages: by head size, dtype and GPU, never by how many rows there are."""
    if element_size == 4:
        return 16, 32, 4, 2
    if padded(head_size) > 128:
        return 32, 32, 8, 2
    return (64, 64, 8, 3) if machine.has_wide_memory else (64, 32, 4, 2)


def path_attention_triton(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: PathRows,
    *,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """As `infer.kernels.gpu.path_attention.path_attention`."""
    num_heads, num_rows, size = query.shape
    num_kv_heads, _, value_size = values.shape
    num_groups = num_heads // num_kv_heads
    query, keys, values = (with_unit_stride(tensor) for tensor in (query, keys, values))
    tile, columns, warps, stages = tile_for(max(size, value_size), query.element_size(), machine_of(query.device))
    check_offsets(keys, values, rows.max_prefix + 1)
    chunks = num_chunks(rows.max_prefix + 1)
    parts = torch.empty((num_rows, num_heads, chunks, value_size), dtype=torch.float32, device=query.device)
    masses = torch.empty((num_rows, num_heads, chunks), dtype=torch.float32, device=query.device)
    output = torch.empty((num_rows, num_heads, value_size), dtype=query.dtype, device=query.device)
    scale, cap = score_scales(scale_of(query, scaling), softcap)
    strides = (
        *(query.stride(0), query.stride(1)),
        *(keys.stride(0), keys.stride(1)),
        *(values.stride(0), values.stride(1)),
    )
    shapes = {
        "SIZE": size,
        "VALUE_SIZE": value_size,
        "PADDED_SIZE": padded(size),
        "PADDED_VALUE_SIZE": padded(value_size),
        "WINDOW": window or 0,
        "HAS_SOFTCAP": softcap is not None,
    }
    num_tiles = triton.cdiv(rows.max_rows * num_groups, tile)
    _chunk[(num_tiles * chunks, num_kv_heads, rows.num_requests)](
        *(query, keys, values),
        *(rows.row_starts, rows.bases, rows.positions, rows.splits),
        *(parts, masses),
        *strides,
        *(chunks, num_heads),
        *(scale, cap),
        GROUPS=num_groups,
        ROWS=tile,
        COLUMNS=columns,
        **shapes,
        num_warps=warps,
        num_stages=stages,
    )
    tail_size = rows.tails.shape[1]
    _tail[(num_rows, num_heads)](
        *(query, keys, values),
        *(rows.row_starts, rows.bases, rows.positions, rows.splits, rows.tails.contiguous()),
        *(parts, masses, output),
        *strides,
        *(chunks, rows.num_requests),
        *(scale, cap),
        GROUPS=num_groups,
        TAIL=tail_size,
        PADDED_TAIL=triton.next_power_of_2(tail_size),
        PADDED_REQUESTS=triton.next_power_of_2(rows.num_requests),
        **shapes,
        num_warps=4,
    )
    return output


@triton.jit
def _chunk_start(chunk):
    """The position at which a chunk begins."""
    return tl.minimum(chunk, _NUM_SHORT) * _SHORT_CHUNK + tl.maximum(chunk - _NUM_SHORT, 0) * _LONG_CHUNK


@triton.jit
def _num_chunks(length):
    """`num_chunks` on the device."""
    num_short = tl.minimum(tl.cdiv(length, _SHORT_CHUNK), _NUM_SHORT)
    return num_short + tl.cdiv(tl.maximum(length - _NUM_SHORT * _SHORT_CHUNK, 0), _LONG_CHUNK)


@triton.jit(do_not_specialize=["num_chunks"])
def _chunk(
    query,
    keys,
    values,
    row_starts,
    bases,
    positions,
    splits,
    parts,
    masses,
    query_head_stride,
    query_row_stride,
    key_head_stride,
    key_column_stride,
    value_head_stride,
    value_column_stride,
    num_chunks,
    num_heads,
    scale,
    softcap,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    PADDED_VALUE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """One chunk of positions, for a tile of a request's rows."""
    chunk = tl.program_id(0) % num_chunks
    tile = tl.program_id(0) // num_chunks
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
    place = (row * num_heads + head) * num_chunks + chunk
    position = tl.load(positions + row, mask=is_row, other=_FAR)
    split = tl.load(splits + row, mask=is_row, other=0)

    # What any row of the tile sees. Blocks begin at multiples of their size, whoever is in the tile.
    start = _chunk_start(chunk)
    end = tl.minimum(_chunk_start(chunk + 1), tl.max(split, axis=0))
    if WINDOW:
        lowest = tl.maximum(tl.min(position, axis=0) - WINDOW + 1, 0)
        start = tl.maximum(start, lowest // COLUMNS * COLUMNS)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    if start >= end:
        tl.store(masses + place, top, mask=is_row)
        return

    dims = tl.arange(0, PADDED_SIZE)
    value_dims = tl.arange(0, PADDED_VALUE_SIZE)
    query_mask = is_row[:, None] & (dims < SIZE)[None, :]
    query_place = head[:, None] * query_head_stride + row[:, None] * query_row_stride + dims[None, :]
    rows = tl.load(query + query_place, mask=query_mask, other=0.0)
    base = tl.load(bases + request)
    keys += kv_head * key_head_stride + base * key_column_stride
    values += kv_head * value_head_stride + base * value_column_stride
    output = tl.zeros([ROWS, PADDED_VALUE_SIZE], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(start, end, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        visible = column[None, :] < split[:, None]
        is_column = column < end
        if WINDOW:
            visible &= column[None, :] > position[:, None] - WINDOW
            is_column = tl.max(visible.to(tl.int32), axis=0) > 0
        key_mask = is_column[None, :] & (dims < SIZE)[:, None]
        value_mask = is_column[:, None] & (value_dims < VALUE_SIZE)[None, :]
        key = tl.load(keys + column[None, :] * key_column_stride + dims[:, None], mask=key_mask, other=0.0)
        value = tl.load(
            values + column[:, None] * value_column_stride + value_dims[None, :], mask=value_mask, other=0.0
        )
        output, top, total = attend_block(
            rows, key, value, visible, output, top, total, scale, softcap, HAS_SOFTCAP, True
        )
    store_part(parts, masses, place, is_row, output, top, total, VALUE_SIZE, PADDED_VALUE_SIZE)


@triton.jit(do_not_specialize=["num_chunks", "num_requests"])
def _tail(
    query,
    keys,
    values,
    row_starts,
    bases,
    positions,
    splits,
    tails,
    parts,
    masses,
    output,
    query_head_stride,
    query_row_stride,
    key_head_stride,
    key_column_stride,
    value_head_stride,
    value_column_stride,
    num_chunks,
    num_requests,
    scale,
    softcap,
    GROUPS: tl.constexpr,
    TAIL: tl.constexpr,
    PADDED_TAIL: tl.constexpr,
    PADDED_REQUESTS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    PADDED_VALUE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """A row and head: its tail, then the chunks that it sees, in order."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    value_dims = tl.arange(0, PADDED_VALUE_SIZE)
    is_value_dim = value_dims < VALUE_SIZE
    place = row * tl.num_programs(1) + head
    requests = tl.arange(0, PADDED_REQUESTS)
    ends = tl.load(row_starts + 1 + requests, mask=requests < num_requests, other=_FAR)
    request = tl.sum((row >= ends).to(tl.int32), axis=0)
    if request >= num_requests:
        zeros = tl.zeros([PADDED_VALUE_SIZE], tl.float32)
        tl.store(output + place * VALUE_SIZE + value_dims, zeros.to(output.dtype.element_ty), mask=is_value_dim)
        return

    base = tl.load(bases + request)
    position = tl.load(positions + row)
    split = tl.load(splits + row)
    steps = tl.arange(0, PADDED_TAIL)
    visible = (steps < TAIL) & (split + steps <= position)
    if WINDOW:
        visible &= split + steps > position - WINDOW
    column = base + tl.load(tails + row * TAIL + steps, mask=visible, other=0)
    dims = tl.arange(0, PADDED_SIZE)
    is_dim = dims < SIZE
    query_place = head * query_head_stride + row * query_row_stride
    own = tl.load(query + query_place + dims, mask=is_dim, other=0.0).to(tl.float32)
    key_place = (head // GROUPS) * key_head_stride + column * key_column_stride
    key = tl.load(keys + key_place[:, None] + dims[None, :], mask=visible[:, None] & is_dim[None, :], other=0.0)
    scores = tl.sum(own[None, :] * key.to(tl.float32), axis=1) * scale
    if HAS_SOFTCAP:
        scores = softcap * tanh(scores)
    scores = tl.where(visible, scores, float("-inf"))
    top = tl.max(scores, axis=0)

    masses += place * num_chunks
    parts += place * num_chunks * VALUE_SIZE
    num_read = _num_chunks(split)
    for first in range(0, num_read, _MERGED_AT_ONCE):
        part = first + tl.arange(0, _MERGED_AT_ONCE)
        mass = tl.load(masses + part, mask=part < num_read, other=float("-inf"))
        top = tl.maximum(top, tl.max(mass, axis=0))
    top = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(scores - top)
    total = tl.sum(weights, axis=0)
    value_place = (head // GROUPS) * value_head_stride + column * value_column_stride
    value_mask = visible[:, None] & is_value_dim[None, :]
    value = tl.load(values + value_place[:, None] + value_dims[None, :], mask=value_mask, other=0.0)
    result = tl.sum(weights[:, None] * value.to(tl.float32), axis=0)
    for first in range(0, num_read, _MERGED_AT_ONCE):
        part = first + tl.arange(0, _MERGED_AT_ONCE)
        mass = tl.load(masses + part, mask=part < num_read, other=float("-inf"))
        share = tl.exp2(mass - top)
        mask = (mass > float("-inf"))[:, None] & is_value_dim[None, :]
        chunk = tl.load(parts + part[:, None] * VALUE_SIZE + value_dims[None, :], mask=mask, other=0.0)
        result += tl.sum(share[:, None] * chunk, axis=0)
        total += tl.sum(share, axis=0)
    result = result / tl.where(total == 0.0, 1.0, total)
    tl.store(output + place * VALUE_SIZE + value_dims, result.to(output.dtype.element_ty), mask=is_value_dim)
