"""Products with weights rounded to 8 or 4 bits (`rounded.cpp`), with rows that do not depend on each other.

Inputs are rounded as well, to 8 bits and a scale for every 32 of a row (as llama.cpp's quantised products do): a
group's products are of small integers, whose sum is exact.

Shapes: R rows, K inputs, N outputs, G = K / 32 groups, 32 outputs a tile.
"""

from __future__ import annotations

import ctypes

import torch
from torch.nn import functional

from infer.kernels.build import SUFFIXES, kernel, library

TILE = GROUP = 32
_ARGUMENTS = (ctypes.c_void_p, ctypes.c_long, *[ctypes.c_void_p] * 3, *[ctypes.c_int] * 4)
_STEPS = GROUP // 4
"""The processor multiplies four inputs at a time."""


def has_rounded_kernels() -> bool:
    """Whether they run here: they need AVX512-VNNI (and bfloat16 conversions) and a C++ compiler."""
    return library("rounded") is not None


def rounded_inputs(inputs: torch.Tensor) -> torch.Tensor:
    """What the kernels take inputs [..., K] for, in float32."""
    groups = inputs.float().unflatten(-1, (-1, GROUP))
    top = groups.abs().amax(dim=-1, keepdim=True)
    rounded: torch.Tensor = (groups * (127 / top.clamp_min(1e-30))).round() * (top / 127)
    return rounded.flatten(-2)


def tiled(codes: torch.Tensor, scales: torch.Tensor, centres: torch.Tensor | None) -> torch.Tensor:
    """A weight as the kernels read it: bytes [tiles, G, bytes a group]; outputs beyond N are zeros.

    codes: [N, G, 32]. scales, centres: [N, G]; centres make it a weight of 4 bits.
    """
    padding = -len(codes) % TILE
    codes = functional.pad(codes.int(), (0, 0, 0, 0, 0, padding))
    numbers = [
        functional.pad(each.to(torch.bfloat16), (0, 0, 0, padding)) for each in (scales, centres) if each is not None
    ]
    split = (codes + (128 if centres is None else 8)).to(torch.uint8).view(-1, TILE, codes.shape[1], _STEPS, 4)
    packed = split.permute(0, 2, 3, 1, 4)  # [tiles, G, 8, 32, 4]
    if centres is not None:
        low, high = packed.split(TILE // 2, dim=3)
        packed = low | (high << 4)
    behind = [each.view(-1, TILE, each.shape[1]).transpose(1, 2).contiguous().view(torch.uint8) for each in numbers]
    return torch.cat([packed.flatten(2), *behind], dim=-1)


def multiply(inputs: torch.Tensor, tiles: torch.Tensor, num_outputs: int, bias: torch.Tensor | None) -> torch.Tensor:
    """inputs [..., K] -> [..., N]. bias: [N] in float32."""
    if inputs.dtype not in SUFFIXES:
        return multiply(inputs.float(), tiles, num_outputs, bias).to(inputs.dtype)
    num_inputs = tiles.shape[1] * GROUP
    rows = inputs if inputs.is_contiguous() else inputs.contiguous()
    outputs = torch.empty((*inputs.shape[:-1], num_outputs), dtype=inputs.dtype)
    multiply_rows = kernel(f"multiply{8 if is_eight(tiles) else 4}", inputs.dtype, *_ARGUMENTS, name="rounded")
    multiply_rows(
        rows.data_ptr(),
        num_inputs,
        tiles.data_ptr(),
        None if bias is None else bias.data_ptr(),
        outputs.data_ptr(),
        rows.numel() // num_inputs,
        num_outputs,
        num_inputs,
        torch.get_num_threads(),
    )
    return outputs


def is_eight(tiles: torch.Tensor) -> bool:
    """Whether `tiles` is a weight in 8 bits."""
    return tiles.shape[-1] > TILE * GROUP
