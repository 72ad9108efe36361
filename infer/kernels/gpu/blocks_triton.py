"""What the attention kernels share: one block of columns added to what rows have gathered so far (Dao et al. 2022,
FlashAttention; Milakov and Gimelshein 2018 for the running softmax), and the rows that a program takes.

Shapes: M rows of a program (rows of a request times query heads of a group), N columns of a block, D and DV head sizes,
padded to powers of two.
"""

# Parameters of kernels are Triton's own.
# mypy: disable-error-code="import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
"""Scores are kept in powers of two: that is the exponential which GPUs have."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """num_processors: streaming multiprocessors. has_wide_memory: a program may have 160 KiB of shared memory, as on
    the GPUs of a data centre; others have about 100."""

    num_processors: int
    has_wide_memory: bool


@cache
def machine_of(device: torch.device) -> Machine:
    """Where kernels are interpreted: few processors, so that prefixes are split as on a GPU, but not often."""
    if device.type != "cuda":
        return Machine(num_processors=16, has_wide_memory=True)
    properties = torch.cuda.get_device_properties(device)
    return Machine(
        num_processors=properties.multi_processor_count,
        has_wide_memory=properties.shared_memory_per_block_optin >= 163840,  # type: ignore[attr-defined]
    )


def padded(size: int) -> int:
    """A head size as tiles hold it: a power of two, 16 at least."""
    return max(16, int(triton.next_power_of_2(size)))


def with_unit_stride(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def score_scales(scaling: float, softcap: float | None) -> tuple[float, float]:
    """The `scale` and `softcap` that `attend_block` takes."""
    return (scaling * LOG2_E, 1.0) if softcap is None else (scaling / softcap, softcap * LOG2_E)


def check_offsets(keys: Tensor, values: Tensor, num_columns: int) -> None:
    """Within a slot, kernels count in 32 bits."""
    widest = max(keys.stride(1), values.stride(1))
    assert num_columns * widest < 1 << 31, f"{num_columns} columns of {widest} numbers are beyond 32 bits"


@triton.jit
def attend_block(
    query, key, value, visible, output, top, total, scale, softcap, HAS_SOFTCAP: tl.constexpr, KEEPS_BITS: tl.constexpr
):
    """Add the columns of a block to `output` [M, DV], the largest scores `top` [M] and the sums of weights `total` [M].

    query [M, D], key [D, N], value [N, DV], visible [M, N]. `value` is finite wherever a row sees anything, and zero in
    columns that none sees. scale: of products to scores in powers of two, or, with a softcap, to multiples of it;
    softcap: in powers of two. A row that sees nothing of the block is left as it is: by arithmetic (times one, plus
    zeros), or with KEEPS_BITS, which takes as many registers again as `output`, by not touching it.
    """
    scores = tl.dot(query, key, input_precision="ieee") * scale
    if HAS_SOFTCAP:
        scores = softcap * tanh(scores)
    scores = tl.where(visible, scores, float("-inf"))
    block_top = tl.max(scores, axis=1)
    new_top = tl.maximum(top, block_top)
    finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
    decay = tl.exp2(top - finite_top)
    weights = tl.exp2(scores - finite_top[:, None])
    grown = output * decay[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    total = total * decay + tl.sum(weights, axis=1)
    output = tl.where((block_top > float("-inf"))[:, None], grown, output) if KEEPS_BITS else grown
    return output, new_top, total


@triton.jit
def tanh(x):
    """From an exponential that cannot overflow; absolute error about 1e-7."""
    small = tl.exp2(-2.8853900817779268 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -size, size)


@triton.jit
def store_part(
    parts, masses, place, is_row, output, top, total, VALUE_SIZE: tl.constexpr, PADDED_VALUE_SIZE: tl.constexpr
):
    """Write a split's result: its output of every row at `place` [M], and its log-sum-exp in powers of two."""
    value_dims = tl.arange(0, PADDED_VALUE_SIZE)
    is_empty = total == 0.0
    output = output / tl.where(is_empty, 1.0, total)[:, None]
    mass = tl.where(is_empty, float("-inf"), top + tl.log2(tl.where(is_empty, 1.0, total)))
    tl.store(masses + place, mass, mask=is_row)
    # Nobody reads the output of a part without mass.
    is_written = (is_row & (total > 0.0))[:, None] & (value_dims < VALUE_SIZE)[None, :]
    tl.store(parts + place[:, None] * VALUE_SIZE + value_dims[None, :], output, mask=is_written)
