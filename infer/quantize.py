"""A target with its weights rounded to 8 or 4 bits, to draft for itself.

Decoding a token reads every weight once, and that is what it costs; rounded weights are two to four times fewer bytes.
The rounded model guesses nearly what the model says, has its tokenizer, and reads its cache, so it needs no training
and no prefill: ML-SpecQD (Georganas et al. 2025, arXiv 2503.13565) drafts with weights rounded directly, as here, and
QuantSpec (Tiwari et al. 2025, arXiv 2502.10424) rounds the cache too. Rounding errors are the draft's alone: the target
verifies with its own weights.

    int8    one scale a row of the weight
    int4    groups of 32 columns of a row, each with a scale and a centre

`dequantized` is what the rounded weight stands for, and the reference for the kernels. Those are torch's for CPUs,
which take bfloat16 (in other types they run ten times slower than plain float32), so other inputs are cast to it and
back: a draft may be off by a rounding. They gain most at one row and nothing at sixteen.

Shapes: N output features, K input features, M rows, G = K / 32 groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from infer import views
from infer.fuse import SIBLINGS
from infer.placement import is_offloaded
from infer.target import TargetModel

BITS = (8, 4)
GROUP = 32
KERNEL_DTYPE = torch.bfloat16
_OUTPUT_GRAIN = 16
"""The int4 kernel takes output features by sixteens; weights are filled up with rows of zeros."""
_ALIGNMENT = 64
"""The int8 kernel loads whole vectors from addresses that must be aligned, without asking."""
_LEAST_SCALE = 1e-20


def quantized_copy(target: TargetModel, bits: int, *, kernels: bool = True) -> TargetModel:
    """`target` with its linear layers (attention, MLP, LM head) rounded to `bits`, sharing all else; it is not changed.

    Layers whose input features are not a multiple of 32 stay as they are (`unquantized_layers` names them). `kernels`:
    false computes with the weights that the rounded ones stand for, on any device and without gaining anything, as a
    reference.
    """
    if bits not in BITS:
        raise ValueError(f"weights are rounded to {' or '.join(map(str, BITS))} bits, {bits!r} were asked for")
    instead = "draft with the target's first layers (layers:N), a smaller model or a trained head instead"
    if target.quantization:
        raise ValueError(f"{target.name}'s weights are in {target.quantization} already: {instead}")
    if is_offloaded(target.model):
        raise ValueError(f"some of {target.name}'s weights are not in memory, so they cannot be rounded: {instead}")
    if kernels:
        _check_kernels(bits, target.device)
    new: dict[nn.Module, nn.Module] = {}
    for siblings in _linear_layers(target.model):
        if _sizes(siblings[0])[1] % GROUP == 0:
            make = _rounded if kernels else _reference
            new.update(zip(siblings, make(siblings, bits), strict=True))
    if not new:
        raise ValueError(
            f"{target.name} has no linear layer whose input features are a multiple of {GROUP}: it cannot be rounded "
            f"to {bits} bits"
        )
    copy = target.view(views.exchanged(target.model, new), num_layers=target.num_layers)
    copy.name = f"{target.name} in int{bits}"
    return copy


def unquantized_layers(target: TargetModel) -> list[str]:
    """The names of a copy's linear layers that stayed as they are."""
    return [name for name, module in target.model.named_modules() if isinstance(module, nn.Linear | Conv1D)]


def dequantized(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """What `weight` [N, K] is rounded to, in float32."""
    if bits == 8:
        codes, scales = _int8(weight)
        return codes.float() * scales.float()[:, None]
    codes, scales, centres = _int4(weight)
    return (codes.float() * scales.float()[..., None] + centres.float()[..., None]).view(weight.shape)


def _int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N, K] int8 and scales [N]."""
    wide = weight.float()
    # Codes are found for the scale as it is kept, so that its own rounding costs no more than a clipped end.
    scales = (wide.abs().amax(dim=-1) / 127).clamp_min(_LEAST_SCALE).to(KERNEL_DTYPE)
    codes = (wide / scales.float()[:, None]).round().clamp(-127, 127)
    return codes.to(torch.int8), scales


def _int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [N, G, 32] of -8..7, scales [N, G] and centres [N, G]."""
    wide = weight.float().unflatten(-1, (-1, GROUP))
    low, high = wide.aminmax(dim=-1)
    scales = ((high - low) / 15).clamp_min(_LEAST_SCALE).to(KERNEL_DTYPE)
    centres = (low + 8 * scales.float()).to(KERNEL_DTYPE)
    codes = ((wide - centres.float()[..., None]) / scales.float()[..., None]).round().clamp(-8, 7)
    return codes.to(torch.int8), scales, centres


class Int8Weight(nn.Module):
    """A weight [N, K] in 8 bits."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        codes, scales = _int8(weight)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [M, K] -> [M, N], both bfloat16."""
        return torch._weight_int8pack_mm(rows, self.codes, self.scales)


class Int4Weight(nn.Module):
    """A weight [N, K] in 4 bits, packed as the kernel reads it."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        codes, scales, centres = _int4(weight)
        packed = torch._convert_weight_to_int4pack_for_cpu((codes.int() + 8).flatten(1), 1)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.scales_and_centres = nn.Parameter(  # [G, N, 2]
            torch.stack([scales.T, centres.T], dim=-1).contiguous(), requires_grad=False
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [M, K] -> [M, N], both bfloat16."""
        return torch._weight_int4pack_mm_for_cpu(rows, self.packed, GROUP, self.scales_and_centres)


class RoundedProduct(nn.Module):
    """One product for sibling layers (`infer.fuse` says why), or for one alone; biases are kept as they were."""

    bias: torch.Tensor | None

    def __init__(self, layers: Sequence[nn.Module], bits: int) -> None:
        super().__init__()
        weights = [_weight(layer) for layer in layers]
        biases = [cast(torch.Tensor, layer.bias) for layer in layers if layer.bias is not None]
        self.sizes = [len(weight) for weight in weights]
        self.num_inputs = weights[0].shape[1]
        self.num_outputs = sum(self.sizes)
        self.dtype = weights[0].dtype
        weight = F.pad(torch.cat(weights), (0, 0, 0, -self.num_outputs % _OUTPUT_GRAIN))
        self.weight = Int8Weight(weight) if bits == 8 else Int4Weight(weight)
        self.register_buffer("bias", torch.cat(biases) if biases else None)
        self._input: torch.Tensor | None = None
        self._shares: tuple[torch.Tensor, ...] = ()

    def share(self, hidden: torch.Tensor, index: int) -> torch.Tensor:
        """Layer `index`'s result [..., its N] for hidden [..., K]. The first computes all, the others pick up theirs if
        they are given the same tensor."""
        if index and hidden is self._input:
            share = self._shares[index]
            if index == len(self.sizes) - 1:
                self._input, self._shares = None, ()  # nothing outlives the layer
            return share
        shares: tuple[torch.Tensor, ...] = self(hidden).split(self.sizes, dim=-1)
        if index == 0 and len(self.sizes) > 1:
            self._input, self._shares = hidden, shares
        return shares[index]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N]."""
        rows = hidden.reshape(-1, self.num_inputs).to(KERNEL_DTYPE).contiguous()
        if not len(rows):
            return hidden.new_zeros((*hidden.shape[:-1], self.num_outputs))
        if rows.data_ptr() % _ALIGNMENT:
            rows = rows.clone()
        product = self.multiply(rows).to(hidden.dtype)
        if self.bias is not None:
            product = product + self.bias
        return product.reshape(*hidden.shape[:-1], self.num_outputs)

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [M, K] -> [M, N], both bfloat16."""
        product: torch.Tensor = self.weight(rows)
        return product[:, : self.num_outputs]


class RoundedLinear(nn.Module):
    """Takes the place of a linear layer: its share of a product."""

    def __init__(self, product: RoundedProduct, index: int) -> None:
        super().__init__()
        self.product = product
        self.index = index
        self.in_features = product.num_inputs
        self.out_features = product.sizes[index]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.product.share(hidden, self.index)

    @property
    def weight(self) -> torch.Tensor:
        """What the layer multiplies by [N, K], as far as its kernel shows."""
        identity = torch.eye(self.in_features, dtype=KERNEL_DTYPE)
        columns: torch.Tensor = self.product.multiply(identity).split(self.product.sizes, dim=-1)[self.index]
        return columns.T.to(self.product.dtype)


def _linear_layers(model: nn.Module) -> Iterator[list[nn.Module]]:
    """The linear layers of a model, siblings of one input together."""
    seen: set[nn.Module] = set()
    for module in model.modules():
        for names in SIBLINGS:
            siblings = [getattr(module, name, None) for name in names]
            if all(isinstance(layer, nn.Linear) for layer in siblings):
                layers = cast(list[nn.Module], siblings)
                if len({(_sizes(layer)[1], layer.bias is None) for layer in layers}) == 1:
                    seen.update(layers)
                    yield layers
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D) and module not in seen:
            yield [module]


def _rounded(layers: Sequence[nn.Module], bits: int) -> list[nn.Module]:
    product = RoundedProduct(layers, bits)
    return [RoundedLinear(product, index).eval() for index in range(len(layers))]


def _reference(layers: Sequence[nn.Module], bits: int) -> list[nn.Module]:
    made: list[nn.Module] = []
    for layer in layers:
        weight = _weight(layer)
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=layer.bias is not None, device="meta")
        linear.weight = nn.Parameter(dequantized(weight, bits).to(weight.dtype), requires_grad=False)
        if layer.bias is not None:
            linear.bias = nn.Parameter(cast(torch.Tensor, layer.bias).data, requires_grad=False)
        made.append(linear.eval())
    return made


def _weight(layer: nn.Module) -> torch.Tensor:
    """[N, K]."""
    weight = cast(torch.Tensor, layer.weight).data
    return weight.T if isinstance(layer, Conv1D) else weight


def _sizes(layer: nn.Module) -> tuple[int, int]:
    """(N, K)."""
    rows, columns = _weight(layer).shape
    return int(rows), int(columns)


def _check_kernels(bits: int, device: torch.device) -> None:
    """Refuse devices and builds of torch that cannot multiply by rounded weights, or do it wrongly."""
    instead = "draft with the target's first layers (layers:N), a smaller model or a trained head instead"
    names = {8: ["_weight_int8pack_mm"], 4: ["_convert_weight_to_int4pack_for_cpu", "_weight_int4pack_mm_for_cpu"]}
    if device.type != "cpu":
        raise ValueError(f"int{bits} drafting multiplies on CPUs, and the target is on {device}: {instead}")
    missing = [name for name in names[bits] if not hasattr(torch, name)]
    if missing:
        raise ValueError(f"this torch ({torch.__version__}) has no {missing[0]} for int{bits} drafting: {instead}")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((_OUTPUT_GRAIN, 2 * GROUP), generator=generator)
    rows = torch.randn((3, 2 * GROUP), generator=generator).to(KERNEL_DTYPE)
    packed: Any = Int8Weight(weight) if bits == 8 else Int4Weight(weight)
    expected = rows.float() @ dequantized(weight, bits).T
    try:
        error = (packed(rows).float() - expected).abs().max() / expected.abs().max()
    except (RuntimeError, NotImplementedError) as problem:
        raise ValueError(f"this machine cannot multiply by int{bits} weights ({problem}): {instead}") from problem
    if not error < 0.02:
        raise ValueError(f"int{bits} products are off by a share of {float(error):.2g} on this machine: {instead}")
