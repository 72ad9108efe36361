"""Norms and gated MLPs of stock models on the kernels (`normalise` and `gate` in `cpu.cpp`).

A module is taken for what it computes, not for its name, else it stays as it is: a norm must equal the formula on
random rows, an MLP do with stand-ins for its parts what the kernel does (`infer.kernels.trial`).

Shapes: R rows, H hidden, I intermediate.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from infer.kernels.build import has_kernels, kernel
from infer.kernels.trial import gates_alike, norms_alike

Forward = Callable[[torch.Tensor], torch.Tensor]


def epsilon_of(norm: nn.Module) -> Any:
    """What an RMSNorm adds to the mean square, by either name that stock models have for it."""
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def norm_forward(norm: nn.Module) -> Forward | None:
    """A forward for `norm` if it is an RMSNorm as Llama has it: normalised, rounded, then multiplied by its weight."""
    weight, eps = getattr(norm, "weight", None), epsilon_of(norm)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 1 or not isinstance(eps, float):
        return None
    if weight.device.type != "cpu" or not has_kernels(weight.dtype) or getattr(norm, "bias", None) is not None:
        return None
    size, dtype = len(weight), weight.dtype
    normalise = kernel("normalise", dtype, *[ctypes.c_void_p] * 3, ctypes.c_int, ctypes.c_int, ctypes.c_float)
    original = norm.forward

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() or hidden.dtype is not dtype:
            return original(hidden)  # type: ignore[no-any-return]
        hidden = hidden.contiguous()
        normed = torch.empty_like(hidden)
        address = weight.data_ptr()
        normalise(hidden.data_ptr(), address, normed.data_ptr(), hidden.numel() // size, size, eps)
        return normed

    return forward if _is_rms_norm(norm, eps) else None


def _is_rms_norm(norm: nn.Module, eps: float) -> bool:
    def formula(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * weight

    return norms_alike(norm, formula, dtype=torch.float32, rtol=1e-5, atol=1e-6)


def gate_forward(mlp: nn.Module, gate_and_up: Forward, down: Forward) -> Forward | None:
    """A forward for `mlp` if it is down(silu(gate(x)) * up(x)). `gate_and_up` computes both, side by side."""
    projection = getattr(mlp, "gate_proj", None)
    dtype = projection.weight.dtype if isinstance(projection, nn.Linear) else getattr(projection, "dtype", None)
    if projection is None or dtype is None or not has_kernels(dtype) or projection.bias is not None:
        return None
    size = projection.out_features
    gate = kernel("gate", dtype, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int] * 3)
    original: Forward = mlp.forward

    def gated(halves: torch.Tensor) -> torch.Tensor:
        result = torch.empty((*halves.shape[:-1], size), dtype=dtype)
        gate(halves.data_ptr(), result.data_ptr(), result.numel() // size, size, torch.get_num_threads())
        return result

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() or hidden.dtype is not dtype:
            return original(hidden)
        return down(gated(gate_and_up(hidden)))

    return forward if gates_alike(mlp, gated, sizes=(projection.in_features, size), dtype=dtype) else None
