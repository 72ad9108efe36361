"""The kernels of `infer.kernels.gpu.elementwise`.

All are bound by the cost of starting them, or by memory: a program holds what it computes in registers, and reads and
writes everything once. `enable_fp_fusion=False` keeps a product and a sum two roundings, as torch's operations have it.
"""

# mypy: disable-error-code="import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.kernels.gpu.elementwise import HeadNorms, NormForm

_GATE_TILE = 1024
"""Results a program: eight a thread, and 14 programs a row at the 14,336 of an 8B model."""
_HEADS = 8
"""Heads a program, so that a row of 48 heads takes six: enough to hide what reading a row takes."""
_NUMBERS_A_WARP = 512
"""Of a row that is normed: 16 a thread, in two loads of a 16-bit dtype."""


def rms_norm_triton(hidden: Tensor, weight: Tensor, *, epsilon: float, form: NormForm) -> Tensor:
    hidden = hidden.contiguous()
    normed = torch.empty_like(hidden)
    _launch_norm(hidden, hidden, weight, normed, normed, epsilon, form, has_residual=False)
    return normed


def add_rms_norm_triton(
    hidden: Tensor, residual: Tensor, weight: Tensor, *, epsilon: float, form: NormForm
) -> tuple[Tensor, Tensor]:
    hidden, residual = hidden.contiguous(), residual.contiguous()
    summed, normed = torch.empty_like(hidden), torch.empty_like(hidden)
    _launch_norm(hidden, residual, weight, summed, normed, epsilon, form, has_residual=True)
    return summed, normed


def silu_mul_triton(gate_and_up: Tensor) -> Tensor:
    gate_and_up = gate_and_up.contiguous()
    size = gate_and_up.shape[-1] // 2
    result = torch.empty((*gate_and_up.shape[:-1], size), dtype=gate_and_up.dtype, device=gate_and_up.device)
    if result.numel():
        _silu_mul[(result.numel() // size, triton.cdiv(size, _GATE_TILE))](
            gate_and_up, result, size, TILE=_GATE_TILE, num_warps=4, enable_fp_fusion=False
        )
    return result


def rotate_and_store_triton(
    projected: Tensor,
    cosines: Tensor,
    sines: Tensor,
    keys: Tensor,
    values: Tensor,
    columns: Tensor,
    norms: HeadNorms | None,
) -> Tensor:
    projected, cosines, sines = (
        each if each.stride(1) == 1 else each.contiguous() for each in (projected, cosines, sines)
    )
    assert keys.stride(2) == values.stride(2) == 1, "a layer's cache lies head by head"
    num_rows, size = cosines.shape
    num_key_heads = keys.shape[0]
    num_heads = projected.shape[1] // size
    num_query_heads = num_heads - 2 * num_key_heads
    query = torch.empty((num_query_heads, num_rows, size), dtype=projected.dtype, device=projected.device)
    if num_rows:
        _rotate_and_store[(num_rows, triton.cdiv(num_heads, _HEADS))](
            projected,
            projected.stride(0),
            cosines,
            cosines.stride(0),
            sines,
            sines.stride(0),
            columns,
            columns.stride(0),
            query,
            query.stride(0),
            keys,
            keys.stride(0),
            keys.stride(1),
            values,
            values.stride(0),
            values.stride(1),
            num_query_heads,
            num_key_heads,
            cosines if norms is None else norms.query,
            cosines if norms is None else norms.key,
            0.0 if norms is None else norms.epsilon,
            SIZE=size,
            HALF=triton.next_power_of_2(size // 2),
            HEADS=_HEADS,
            HAS_NORMS=norms is not None,
            ROUNDED_FIRST=norms is not None and norms.form is NormForm.ROUNDED_FIRST,
            ONE_MORE=norms is not None and norms.form is NormForm.ONE_MORE,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return query


def rotary_tables_triton(
    positions: Tensor, inverse_frequencies: Tensor, dtype: torch.dtype, *, amplitude: float
) -> tuple[Tensor, Tensor]:
    num_rows, half = positions.shape[0], inverse_frequencies.shape[0]
    cosines, sines = (torch.empty((num_rows, 2 * half), dtype=dtype, device=positions.device) for _ in range(2))
    if num_rows:
        _rotary_tables[(num_rows,)](
            positions,
            positions.stride(0),
            inverse_frequencies.contiguous(),
            cosines,
            sines,
            float(amplitude),
            SIZE=half,
            BLOCK=triton.next_power_of_2(half),
            num_warps=1,
            enable_fp_fusion=False,
        )
    return cosines, sines


def _launch_norm(
    hidden: Tensor,
    residual: Tensor,
    weight: Tensor,
    summed: Tensor,
    normed: Tensor,
    epsilon: float,
    form: NormForm,
    *,
    has_residual: bool,
) -> None:
    size = hidden.shape[-1]
    block = triton.next_power_of_2(size)
    if not hidden.numel():
        return
    _rms_norm[(hidden.numel() // size,)](
        hidden,
        residual,
        weight,
        summed,
        normed,
        epsilon,
        SIZE=size,
        BLOCK=block,
        HAS_RESIDUAL=has_residual,
        ROUNDED_FIRST=form is NormForm.ROUNDED_FIRST,
        ONE_MORE=form is NormForm.ONE_MORE,
        num_warps=norm_warps(block),
        enable_fp_fusion=False,
    )


def norm_warps(block: int) -> int:
    """Warps for rows of `block` numbers."""
    return min(16, max(1, block // _NUMBERS_A_WARP))


@triton.jit
def _rms_norm(
    hidden,
    residual,
    weight,
    summed,
    normed,
    epsilon,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROUNDED_FIRST: tl.constexpr,
    ONE_MORE: tl.constexpr,
):
    """A row a program."""
    dtype = normed.dtype.element_ty
    places = tl.arange(0, BLOCK)
    is_there = places < SIZE
    row = tl.program_id(0).to(tl.int64) * SIZE + places
    states = tl.load(hidden + row, mask=is_there, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        states = (tl.load(residual + row, mask=is_there, other=0.0).to(tl.float32) + states).to(dtype)
        tl.store(summed + row, states, mask=is_there)
        states = states.to(tl.float32)
    mean_square = tl.sum(states * states, axis=0) * (1.0 / SIZE)
    states = states * tl.rsqrt(mean_square + epsilon)
    states = _scaled(states, weight + places, is_there, dtype, ROUNDED_FIRST, ONE_MORE)
    tl.store(normed + row, states, mask=is_there)


@triton.jit
def _scaled(states, weight, is_there, dtype: tl.constexpr, ROUNDED_FIRST: tl.constexpr, ONE_MORE: tl.constexpr):
    """Normed states in float32 times their weight, as its form says, in `dtype`."""
    scale = tl.load(weight, mask=is_there, other=0.0).to(tl.float32)
    if ROUNDED_FIRST:
        states = states.to(dtype).to(tl.float32)
    if ONE_MORE:
        scale = scale + 1.0
    return (states * scale).to(dtype)


@triton.jit
def _silu_mul(gate_and_up, result, size, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_there = places < size
    dtype = result.dtype.element_ty
    gate = tl.load(gate_and_up + row * 2 * size + places, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(gate_and_up + row * 2 * size + size + places, mask=is_there, other=0.0).to(tl.float32)
    active = tl.div_rn(gate, 1.0 + tl.exp(-gate)).to(dtype).to(tl.float32)
    tl.store(result + row * size + places, (active * up).to(dtype), mask=is_there)


@triton.jit
def _rotate_and_store(
    projected,
    projected_stride,
    cosines,
    cosine_stride,
    sines,
    sine_stride,
    columns,
    columns_stride,
    query,
    query_stride,
    keys,
    key_head_stride,
    key_column_stride,
    values,
    value_head_stride,
    value_column_stride,
    num_query_heads,
    num_key_heads,
    query_weight,
    key_weight,
    epsilon,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    ROUNDED_FIRST: tl.constexpr,
    ONE_MORE: tl.constexpr,
):
    """Some heads of a row, whose halves [HEADS, HALF] turn into each other."""
    dtype = query.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, HALF)
    is_dim = dim < SIZE // 2
    is_query = head < num_query_heads
    is_key = (head >= num_query_heads) & (head < num_query_heads + num_key_heads)
    is_value = (head >= num_query_heads + num_key_heads) & (head < num_query_heads + 2 * num_key_heads)
    is_there = (is_query | is_key | is_value)[:, None] & is_dim[None, :]
    place = projected + row * projected_stride + head[:, None] * SIZE + dim[None, :]
    beyond = SIZE // 2
    first = tl.load(place, mask=is_there, other=0.0)
    second = tl.load(place + beyond, mask=is_there, other=0.0)
    cosines += row * cosine_stride
    sines += row * sine_stride
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    if HAS_NORMS:
        mean_square = tl.sum(wide_first * wide_first + wide_second * wide_second, axis=1) * (1.0 / SIZE)
        factor = tl.rsqrt(mean_square + epsilon)[:, None]
        weight = tl.where(is_query[:, None], query_weight, key_weight) + dim[None, :]
        wide_first = _scaled(wide_first * factor, weight, is_there, dtype, ROUNDED_FIRST, ONE_MORE).to(tl.float32)
        wide_second = _scaled(wide_second * factor, weight + beyond, is_there, dtype, ROUNDED_FIRST, ONE_MORE).to(
            tl.float32
        )
    new_first = _turned(wide_first, -wide_second, cosines, sines, dim, is_dim, dtype)
    new_second = _turned(wide_second, wide_first, cosines + beyond, sines + beyond, dim, is_dim, dtype)
    place = query + head[:, None].to(tl.int64) * query_stride + row * SIZE + dim[None, :]
    mask = is_query[:, None] & is_dim[None, :]
    tl.store(place, new_first, mask=mask)
    tl.store(place + beyond, new_second, mask=mask)
    column = tl.load(columns + row * columns_stride).to(tl.int64)
    of_key = (head - num_query_heads)[:, None].to(tl.int64)
    place = keys + of_key * key_head_stride + column * key_column_stride + dim[None, :]
    mask = is_key[:, None] & is_dim[None, :]
    tl.store(place, new_first, mask=mask)
    tl.store(place + beyond, new_second, mask=mask)
    of_value = (head - num_query_heads - num_key_heads)[:, None].to(tl.int64)
    place = values + of_value * value_head_stride + column * value_column_stride + dim[None, :]
    mask = is_value[:, None] & is_dim[None, :]
    tl.store(place, first, mask=mask)
    tl.store(place + beyond, second, mask=mask)


@triton.jit
def _turned(half, other, cosines, sines, dim, is_dim, dtype: tl.constexpr):
    """half * cos + other * sin [HEADS, HALF], with the roundings of three operations in `dtype`."""
    cosine = tl.load(cosines + dim, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sines + dim, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    kept = (half * cosine).to(dtype).to(tl.float32)
    brought = (other * sine).to(dtype).to(tl.float32)
    return (kept + brought).to(dtype)


@triton.jit
def _rotary_tables(
    positions, stride, inverse_frequencies, cosines, sines, amplitude, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """A row a program."""
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, BLOCK)
    is_dim = dim < SIZE
    dtype = cosines.dtype.element_ty
    frequency = tl.load(inverse_frequencies + dim, mask=is_dim, other=0.0)
    angle = tl.load(positions + row * stride).to(tl.float32) * frequency
    cosine, sine = (tl.cos(angle) * amplitude).to(dtype), (tl.sin(angle) * amplitude).to(dtype)
    place = row * 2 * SIZE + dim
    tl.store(cosines + place, cosine, mask=is_dim)
    tl.store(cosines + place + SIZE, cosine, mask=is_dim)
    tl.store(sines + place, sine, mask=is_dim)
    tl.store(sines + place + SIZE, sine, mask=is_dim)
