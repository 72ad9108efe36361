"""Products with weights (`multiply` in `cpu.cpp`): `functional.linear` to rounding, with rows that do not depend on
each other.

Shapes: R rows, K inputs, N outputs.
"""

from __future__ import annotations

import ctypes

import torch
from torch.nn import functional

from infer.kernels.build import has_kernels, kernel

TILE = 32
"""Outputs of a tile, as in `cpu.cpp`."""


class _Call(ctypes.Structure):
    """`ProductCall` of `cpu.cpp`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "y")),
        *((name, ctypes.c_int32) for name in ("rows", "outputs", "inputs", "threads")),
    )


def is_tileable(weight: torch.Tensor) -> bool:
    """Whether products with `weight` [N, K] run on these kernels here (bfloat16 takes inputs in pairs)."""
    pairs = weight.shape[1] % 2 == 0 or weight.dtype is torch.float32
    return weight.device.type == "cpu" and has_kernels(weight.dtype) and pairs


class TiledWeight:
    """A weight [N, K], and a bias [N] if there is one, laid out in tiles (a copy)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        assert is_tileable(weight), "ask is_tileable first"
        self.num_outputs, self.num_inputs = weight.shape
        self.dtype = weight.dtype
        self.tiles = _tiled(weight.detach())
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self.addresses = self.tiles.data_ptr(), None if self.bias is None else self.bias.data_ptr()
        self._multiply = kernel("multiply", self.dtype, ctypes.POINTER(_Call))  # takes a `_Call` by reference

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """inputs [..., K] -> [..., N]."""
        assert inputs.dtype is self.dtype, f"inputs are {inputs.dtype}, the weight is {self.dtype}"
        inputs = inputs.contiguous()
        outputs = inputs.new_empty((*inputs.shape[:-1], self.num_outputs))
        weight, bias = self.addresses
        num_rows = inputs.numel() // self.num_inputs
        self._multiply(
            _Call(
                inputs.data_ptr(),
                weight,
                bias,
                outputs.data_ptr(),
                num_rows,
                self.num_outputs,
                self.num_inputs,
                torch.get_num_threads(),
            )
        )
        return outputs


def _tiled(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] -> bfloat16: [N / 32, K / 2, 32, 2]; float32: [N / 32, K, 32]. Outputs beyond N are zeros."""
    num_outputs, num_inputs = weight.shape
    padded = functional.pad(weight, (0, 0, 0, -num_outputs % TILE)).view(-1, TILE, num_inputs)
    if weight.dtype is torch.float32:
        return padded.transpose(1, 2).contiguous()
    pairs: torch.Tensor = padded.unflatten(-1, (-1, 2))
    return pairs.transpose(1, 2).contiguous()
