"""Weights rounded to 8 or 4 bits, and products with them on a CPU.

    int8    codes of -127..127, a scale for every 32 inputs of an output
    int4    codes of -8..7, for every 32 inputs a scale and a centre

headstart's own kernels (`infer.kernels.rounded`) multiply by these, at any number of rows, with inputs that are rounded
to 8 bits too. Where they do not run, torch's kernels do it with inputs in bfloat16 (other dtypes are cast, and take ten
times as long): they gain most at one row and nothing at sixteen, and those for int8 take one scale an output.

`dequantized` is what a rounded weight stands for, and the reference for both.

Shapes: N output features, K input features, M rows, G groups of inputs that share a scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from infer.kernels import rounded as own_kernels

BITS = (8, 4)
GROUP = own_kernels.GROUP
KERNEL_DTYPE = torch.bfloat16
_OUTPUT_GRAIN = 16
"""torch's int4 kernel takes output features by sixteens; weights are filled up with rows of zeros."""
_ALIGNMENT = 64
"""torch's int8 kernel loads whole vectors from addresses that must be aligned, without asking."""
_LEAST_SCALE = 1e-20


@dataclass(frozen=True, kw_only=True)
class Codes:
    """A rounded weight: `codes` [N, G, K / G] int8, `scales` [N, G] and (int4) `centres` [N, G] in bfloat16."""

    codes: torch.Tensor
    scales: torch.Tensor
    centres: torch.Tensor | None = None

    def weight(self) -> torch.Tensor:
        """What it stands for [N, K], in float32."""
        values = self.codes.float() * self.scales.float()[..., None]
        if self.centres is not None:
            values = values + self.centres.float()[..., None]
        return values.flatten(1)


def rounded(weight: torch.Tensor, bits: int, *, by_rows: bool = False) -> Codes:
    """`weight` [N, K] in `bits`. by_rows: one scale an output (8 bits)."""
    wide = weight.float().unflatten(-1, (-1, weight.shape[-1] if by_rows else GROUP))
    if bits == 8:
        # Codes are found for the scale as it is kept, so that its own rounding costs no more than a clipped end.
        scales = (wide.abs().amax(dim=-1) / 127).clamp_min(_LEAST_SCALE).to(KERNEL_DTYPE)
        codes = (wide / scales.float()[..., None]).round().clamp(-127, 127)
        return Codes(codes=codes.to(torch.int8), scales=scales)
    low, high = wide.aminmax(dim=-1)
    scales = ((high - low) / 15).clamp_min(_LEAST_SCALE).to(KERNEL_DTYPE)
    centres = (low + 8 * scales.float()).to(KERNEL_DTYPE)
    codes = ((wide - centres.float()[..., None]) / scales.float()[..., None]).round().clamp(-8, 7)
    return Codes(codes=codes.to(torch.int8), scales=scales, centres=centres)


def dequantized(weight: torch.Tensor, bits: int, *, by_rows: bool = False) -> torch.Tensor:
    """What `weight` [N, K] is rounded to, in float32."""
    return rounded(weight, bits, by_rows=by_rows).weight()


class TiledCodes(nn.Module):
    """A rounded weight [N, K] for headstart's kernels, which round their inputs too."""

    def __init__(self, weight: torch.Tensor, bits: int) -> None:
        super().__init__()
        codes = rounded(weight, bits)
        self.num_outputs = len(weight)
        self.tiles = nn.Parameter(own_kernels.tiled(codes.codes, codes.scales, codes.centres), requires_grad=False)

    def forward(self, inputs: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """inputs [..., K] -> [..., N]; bias [N] in float32."""
        return own_kernels.multiply(inputs, self.tiles, self.num_outputs, bias)


class TorchCodes(nn.Module):
    """A rounded weight [N, K] for torch's kernels, which take bfloat16."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.num_outputs, self.num_inputs = weight.shape

    def forward(self, inputs: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """inputs [..., K] -> [..., N]."""
        rows = inputs.reshape(-1, self.num_inputs).to(KERNEL_DTYPE).contiguous()
        if not len(rows):
            return inputs.new_zeros((*inputs.shape[:-1], self.num_outputs))
        if rows.data_ptr() % _ALIGNMENT:
            rows = rows.clone()
        products = self.multiply(rows)[:, : self.num_outputs].to(inputs.dtype)
        if bias is not None:
            products = products + bias.to(inputs.dtype)
        return products.reshape(*inputs.shape[:-1], self.num_outputs)

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [M, K] -> [M, at least N], both bfloat16."""
        raise NotImplementedError


class TorchInt8(TorchCodes):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight)
        codes = rounded(weight, 8, by_rows=True)
        self.codes = nn.Parameter(codes.codes.flatten(1), requires_grad=False)
        self.scales = nn.Parameter(codes.scales.flatten(), requires_grad=False)

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        return torch._weight_int8pack_mm(rows, self.codes, self.scales)


class TorchInt4(TorchCodes):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight)
        codes = rounded(F.pad(weight, (0, 0, 0, -len(weight) % _OUTPUT_GRAIN)), 4)
        assert codes.centres is not None
        packed = torch._convert_weight_to_int4pack_for_cpu((codes.codes.int() + 8).flatten(1), 1)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.scales_and_centres = nn.Parameter(  # [G, N, 2]
            torch.stack([codes.scales.T, codes.centres.T], dim=-1).contiguous(), requires_grad=False
        )

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        return torch._weight_int4pack_mm_for_cpu(rows, self.packed, GROUP, self.scales_and_centres)


class PlainCodes(nn.Module):
    """A rounded weight [N, K] as the matrix that it stands for: the reference for `TiledCodes`, in any dtype and on any
    device, and without gaining anything."""

    def __init__(self, weight: torch.Tensor, bits: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(dequantized(weight, bits).to(weight.dtype), requires_grad=False)

    def forward(self, inputs: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """inputs [..., K] -> [..., N]."""
        return F.linear(own_kernels.rounded_inputs(inputs).to(inputs.dtype), self.weight, bias)


class RoundedProduct(nn.Module):
    """One product for sibling layers (`infer.fuse` says why), or for one alone; biases are kept as they were."""

    bias: torch.Tensor | None

    def __init__(self, layers: Sequence[nn.Module], bits: int, *, kernels: bool = True) -> None:
        super().__init__()
        weights = [weight_of(layer) for layer in layers]
        biases = [cast(torch.Tensor, layer.bias).data for layer in layers if layer.bias is not None]
        self.sizes = [len(weight) for weight in weights]
        self.num_inputs = weights[0].shape[1]
        self.dtype = weights[0].dtype
        weight = torch.cat(weights)
        self.weight = weight_for_kernels(weight, bits) if kernels else PlainCodes(weight, bits)
        bias = torch.cat(biases) if biases else None
        self.register_buffer("bias", bias.float() if bias is not None and kernels else bias)
        self._input: torch.Tensor | None = None
        self._shares: tuple[torch.Tensor, ...] = ()

    def share(self, hidden: torch.Tensor, index: int) -> torch.Tensor:
        """Layer `index`'s result [..., its N] for hidden [..., K]. The first computes all, the others pick up theirs if
        they are given the same tensor."""
        if len(self.sizes) == 1:
            return self.weight.forward(hidden, self.bias)
        if index and hidden is self._input:
            share = self._shares[index]
            if index == len(self.sizes) - 1:
                self._input, self._shares = None, ()  # nothing outlives the layer
            return share
        shares: tuple[torch.Tensor, ...] = self.forward(hidden).split(self.sizes, dim=-1)
        if index == 0:
            self._input, self._shares = hidden, shares
        return shares[index]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N]."""
        return self.weight.forward(hidden, self.bias)

    def matrix(self, index: int) -> torch.Tensor:
        """What layer `index` multiplies by [N, K], as far as its kernel shows."""
        if isinstance(self.weight, PlainCodes):
            matrix: torch.Tensor = self.weight.weight
        else:  # one input at a time is not changed by being rounded
            matrix = self.weight.forward(torch.eye(self.num_inputs, dtype=self.dtype), None).T
        own: torch.Tensor = matrix.split(self.sizes)[index]
        return own


class RoundedLinear(nn.Module):
    """Takes the place of a linear layer: its share of a product."""

    def __init__(self, product: RoundedProduct, index: int) -> None:
        super().__init__()
        self.product = product
        self.index = index
        self.in_features = product.num_inputs
        self.out_features = product.sizes[index]
        self.dtype = product.dtype

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.product.share(hidden, self.index)

    @property
    def bias(self) -> torch.Tensor | None:
        """The layer's own share of the product's [N]."""
        bias = self.product.bias
        return None if bias is None else bias.split(self.product.sizes)[self.index].to(self.dtype)

    @property
    def weight(self) -> torch.Tensor:
        """What the layer multiplies by [N, K]: made anew each time it is asked for."""
        return self.product.matrix(self.index)


def weight_for_kernels(weight: torch.Tensor, bits: int) -> TiledCodes | TorchInt8 | TorchInt4:
    """`weight` for the best kernels that run here."""
    if own_kernels.has_rounded_kernels():
        return TiledCodes(weight, bits)
    return TorchInt8(weight) if bits == 8 else TorchInt4(weight)


def check_kernels(bits: int, device: torch.device, *, purpose: str, instead: str) -> None:
    """Refuse devices and builds of torch that cannot multiply by rounded weights, or do it wrongly."""
    names = {8: ["_weight_int8pack_mm"], 4: ["_convert_weight_to_int4pack_for_cpu", "_weight_int4pack_mm_for_cpu"]}
    if device.type != "cpu":
        raise ValueError(f"int{bits} {purpose} multiplies on CPUs, and the target is on {device}: {instead}")
    missing = [] if own_kernels.has_rounded_kernels() else [name for name in names[bits] if not hasattr(torch, name)]
    if missing:
        raise ValueError(f"this torch ({torch.__version__}) has no {missing[0]} for int{bits} {purpose}: {instead}")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((_OUTPUT_GRAIN, 2 * GROUP), generator=generator)
    rows = torch.randn((3, 2 * GROUP), generator=generator).to(KERNEL_DTYPE)
    product = weight_for_kernels(weight, bits)
    expected = rows.float() @ dequantized(weight, bits).T
    try:
        error = (product(rows, None).float() - expected).abs().max() / expected.abs().max()
    except (RuntimeError, NotImplementedError) as problem:
        raise ValueError(f"this machine cannot multiply by int{bits} weights ({problem}): {instead}") from problem
    if not error < 0.02:
        raise ValueError(f"int{bits} products are off by a share of {float(error):.2g} on this machine: {instead}")


def weight_of(layer: nn.Module) -> torch.Tensor:
    """[N, K]."""
    weight = cast(torch.Tensor, layer.weight).data
    return weight.T if isinstance(layer, Conv1D) else weight
