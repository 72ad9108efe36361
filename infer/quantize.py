"""A target with its weights rounded to 8 or 4 bits: to draft for itself, or to be the target that is decoded.

Decoding a token reads every weight once, and that is what it costs; rounded weights are two to three times fewer bytes.
As a draft (`quantized_copy`) the rounded model guesses nearly what the model says, has its tokenizer, and reads its
cache, so it needs no training and no prefill: ML-SpecQD (Georganas et al. 2025, arXiv 2503.13565) drafts with weights
rounded directly, as here, and QuantSpec (Tiwari et al. 2025, arXiv 2502.10424) rounds the cache too. Rounding errors
are then the draft's alone. As a target (`round_in_place`) it is another model than the whole one, and all that holds of
drafts and their verification holds of it.

The LM head is rounded to 8 bits in either case: in 4 it alone cost SmolLM2-135M twenty times what all other layers did
(0.047 of 0.049 nats from the whole model's law), for 4 % of the time. Embeddings, norms and biases stay as they are.
`infer.rounding` says what a rounded weight is and what multiplies by it.

Shapes: N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from infer import views
from infer.fuse import SIBLINGS
from infer.placement import ROUNDED, is_offloaded
from infer.rounding import BITS, GROUP, KERNEL_DTYPE, RoundedLinear, RoundedProduct, check_kernels, weight_of

if TYPE_CHECKING:
    from infer.target import TargetModel

_HEAD_BITS = 8


def quantized_copy(target: TargetModel, bits: int, *, kernels: bool = True) -> TargetModel:
    """`target` with its linear layers rounded to `bits`, sharing all else; it is not changed.

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
        check_kernels(bits, target.device, purpose="drafting", instead=instead)
    new = dict(_rounded_layers(target.model, bits, kernels=kernels, name=target.name))
    copy = target.view(views.exchanged(target.model, new), num_layers=target.num_layers)
    copy.name = f"{target.name} in int{bits}"
    if kernels and target.forward_kind == "kernels":
        copy.compute_own_modules()
    return copy


def round_in_place(model: Any, bits: int, *, kernels: bool = True, name: str = "the model") -> None:
    """Replace a stock model's linear layers by rounded ones, whose originals are freed.

    Weights go through bfloat16, so that a target is one and the same in every dtype.
    """
    if kernels:
        check_kernels(bits, torch.device("cpu"), purpose="decoding", instead="leave quantization out on this machine")
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D):
            module.weight.data = module.weight.data.to(KERNEL_DTYPE).to(module.weight.dtype)
    places = {child: (parent, role) for parent in model.modules() for role, child in parent.named_children()}
    for layer, new in _rounded_layers(model, bits, kernels=kernels, name=name):
        parent, role = places[layer]
        setattr(parent, role, new)
        layer._parameters.clear()  # freed now, not when all layers are done (a tied embedding keeps its own)
    setattr(model, ROUNDED, f"int{bits}")


def unquantized_layers(target: TargetModel) -> list[str]:
    """The names of a copy's linear layers that stayed as they are."""
    return [name for name, module in target.model.named_modules() if isinstance(module, nn.Linear | Conv1D)]


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


def _rounded_layers(model: Any, bits: int, *, kernels: bool, name: str) -> Iterator[tuple[nn.Module, RoundedLinear]]:
    """Each layer that can be rounded, and what takes its place."""
    head = model.get_output_embeddings()
    groups = [siblings for siblings in _linear_layers(model) if _sizes(siblings[0])[1] % GROUP == 0]
    if not groups:
        raise ValueError(
            f"{name} has no linear layer whose input features are a multiple of {GROUP}: it cannot be rounded "
            f"to {bits} bits"
        )
    for siblings in groups:
        product = RoundedProduct(siblings, _HEAD_BITS if siblings[0] is head else bits, kernels=kernels).eval()
        yield from [(layer, RoundedLinear(product, index).eval()) for index, layer in enumerate(siblings)]


def _sizes(layer: nn.Module) -> tuple[int, int]:
    """(N, K)."""
    rows, columns = weight_of(layer).shape
    return int(rows), int(columns)
