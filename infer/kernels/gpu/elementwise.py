"""What a decoder layer does between its products, in as few launches as it takes: each operation beside the PyTorch
operations that it equals, which also run where there is no Triton.

A launch costs about two microseconds, even in a CUDA graph, and a stock layer has some forty of them around four
products. Roundings are those of torch's own operations: every result that they would write is rounded to its dtype
here too, and products and sums are not contracted. What may differ is the last bit of a float32 on the way: sums of
squares run in another order, and exponentials and square roots are the device's fast ones.

Shapes: R rows, H hidden, I intermediate, Hq query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torch.nn import functional

from infer.kernels.gpu import launching_on, runs_triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class NormForm(Enum):
    """Where an RMSNorm applies its weight, and which."""

    ROUNDED_FIRST = "Llama's: the normed states are rounded to their dtype, then multiplied in it"
    ROUNDED_LAST = "multiplied in float32, then rounded"
    ONE_MORE = "Gemma's: multiplied by one plus the weight in float32, then rounded"


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadNorms:
    """RMSNorms of every query and of every key, with weights [D], before they are turned (as Qwen-3 has them)."""

    query: Tensor
    key: Tensor
    epsilon: float
    form: NormForm


def rms_norm(hidden: Tensor, weight: Tensor, *, epsilon: float, form: NormForm = NormForm.ROUNDED_FIRST) -> Tensor:
    """`hidden` [..., H] over the root of its mean square (in float32), times `weight` [H] of its dtype (Zhang and
    Sennrich 2019)."""
    _check_norm(hidden, weight)
    if runs_triton(hidden.device):
        from infer.kernels.gpu.elementwise_triton import rms_norm_triton

        with launching_on(hidden.device):
            return rms_norm_triton(hidden, weight, epsilon=epsilon, form=form)
    return rms_norm_reference(hidden, weight, epsilon=epsilon, form=form)


def add_rms_norm(
    hidden: Tensor, residual: Tensor, weight: Tensor, *, epsilon: float, form: NormForm = NormForm.ROUNDED_FIRST
) -> tuple[Tensor, Tensor]:
    """`residual` + `hidden` [..., H], in their dtype, and the same normed."""
    _check_norm(hidden, weight)
    assert residual.shape == hidden.shape, f"{tuple(residual.shape)} and {tuple(hidden.shape)}"
    assert residual.dtype == hidden.dtype, f"{residual.dtype} and {hidden.dtype}"
    if runs_triton(hidden.device):
        from infer.kernels.gpu.elementwise_triton import add_rms_norm_triton

        with launching_on(hidden.device):
            return add_rms_norm_triton(hidden, residual, weight, epsilon=epsilon, form=form)
    return add_rms_norm_reference(hidden, residual, weight, epsilon=epsilon, form=form)


def silu_mul(gate_and_up: Tensor) -> Tensor:
    """silu(gate) * up [..., I] of both side by side [..., 2I]."""
    assert gate_and_up.shape[-1] % 2 == 0, gate_and_up.shape
    if runs_triton(gate_and_up.device):
        from infer.kernels.gpu.elementwise_triton import silu_mul_triton

        with launching_on(gate_and_up.device):
            return silu_mul_triton(gate_and_up)
    return silu_mul_reference(gate_and_up)


def rotate_and_store(
    projected: Tensor,
    cosines: Tensor,
    sines: Tensor,
    keys: Tensor,
    values: Tensor,
    columns: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Rotary embeddings by halves (Su et al. 2021, as Llama has them) and the cache in one, after `norms` if there are
    any.

    projected [R, (Hq + 2K) * D]: queries, keys and values side by side. cosines, sines [R, D]. All of one dtype.
    keys, values [K, columns, D]: of one layer; the rows' rotated keys, and their values, are written to `columns` [R].
    Rows that share a column must hold the same. Returns the rotated queries [Hq, R, D].
    """
    num_rows, size = cosines.shape
    assert sines.shape == cosines.shape, f"{tuple(sines.shape)} and {tuple(cosines.shape)}"
    assert projected.shape[0] == columns.shape[0] == num_rows, f"{projected.shape[0]} rows, {columns.shape[0]} columns"
    assert keys.shape == values.shape, f"{tuple(keys.shape)} and {tuple(values.shape)}"
    assert size % 2 == 0, f"{size} numbers of a head have no halves"
    assert keys.shape[2] == size, f"keys of {keys.shape[2]} numbers, cosines of {size}"
    num_query_heads, rest = divmod(projected.shape[1] - 2 * keys.shape[0] * size, size)
    assert num_query_heads > 0 == rest, f"{projected.shape[1]} numbers a row, {keys.shape[0]} heads of {size}"
    dtypes = {each.dtype for each in (projected, cosines, sines, keys, values)}
    assert len(dtypes) == 1, dtypes
    assert norms is None or norms.query.shape == norms.key.shape == (size,), "norms are of heads"
    if runs_triton(projected.device):
        from infer.kernels.gpu.elementwise_triton import rotate_and_store_triton

        with launching_on(projected.device):
            return rotate_and_store_triton(projected, cosines, sines, keys, values, columns, norms)
    return rotate_and_store_reference(projected, cosines, sines, keys, values, columns, norms)


def rotary_tables(
    positions: Tensor, inverse_frequencies: Tensor, dtype: torch.dtype, *, amplitude: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [R, D] in `dtype` of whole `positions` [R] times `inverse_frequencies` [D / 2] in float32. Both
    halves are the same. `amplitude`: a factor on all of them."""
    assert positions.ndim == inverse_frequencies.ndim == 1, f"{positions.shape}, {inverse_frequencies.shape}"
    assert inverse_frequencies.dtype is torch.float32, inverse_frequencies.dtype
    if runs_triton(positions.device):
        from infer.kernels.gpu.elementwise_triton import rotary_tables_triton

        with launching_on(positions.device):
            return rotary_tables_triton(positions, inverse_frequencies, dtype, amplitude=amplitude)
    return rotary_tables_reference(positions, inverse_frequencies, dtype, amplitude=amplitude)


def rms_norm_reference(
    hidden: Tensor, weight: Tensor, *, epsilon: float, form: NormForm = NormForm.ROUNDED_FIRST
) -> Tensor:
    """The operations of stock modules."""
    wide = hidden.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    if form is NormForm.ROUNDED_FIRST:
        return weight * normed.to(hidden.dtype)
    scale = weight.float() + 1.0 if form is NormForm.ONE_MORE else weight.float()
    return (normed * scale).to(hidden.dtype)


def add_rms_norm_reference(
    hidden: Tensor, residual: Tensor, weight: Tensor, *, epsilon: float, form: NormForm = NormForm.ROUNDED_FIRST
) -> tuple[Tensor, Tensor]:
    summed = residual + hidden
    return summed, rms_norm_reference(summed, weight, epsilon=epsilon, form=form)


def silu_mul_reference(gate_and_up: Tensor) -> Tensor:
    gate, up = gate_and_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def rotate_and_store_reference(
    projected: Tensor,
    cosines: Tensor,
    sines: Tensor,
    keys: Tensor,
    values: Tensor,
    columns: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    num_key_heads, size = keys.shape[0], keys.shape[2]
    heads = projected.unflatten(-1, (-1, size)).transpose(0, 1)  # [Hq + 2K, R, D]
    query, key, value = heads.split([len(heads) - 2 * num_key_heads, num_key_heads, num_key_heads])
    if norms is not None:
        query = rms_norm_reference(query, norms.query, epsilon=norms.epsilon, form=norms.form)
        key = rms_norm_reference(key, norms.key, epsilon=norms.epsilon, form=norms.form)
    keys.index_copy_(1, columns, _rotated(key, cosines, sines))
    values.index_copy_(1, columns, value)
    return _rotated(query, cosines, sines)


def rotary_tables_reference(
    positions: Tensor, inverse_frequencies: Tensor, dtype: torch.dtype, *, amplitude: float = 1.0
) -> tuple[Tensor, Tensor]:
    half = positions.float()[:, None] * inverse_frequencies
    angles = torch.cat([half, half], dim=-1)
    return (angles.cos() * amplitude).to(dtype), (angles.sin() * amplitude).to(dtype)


def _rotated(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat([-second, first], dim=-1) * sines


def _check_norm(hidden: Tensor, weight: Tensor) -> None:
    assert weight.shape == hidden.shape[-1:], f"a weight of {tuple(weight.shape)} for states {tuple(hidden.shape)}"
    assert weight.dtype == hidden.dtype, f"a weight in {weight.dtype} for states in {hidden.dtype}"
