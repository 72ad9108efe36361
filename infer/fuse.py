"""How the modules of a stock model are computed: each by itself as ever, or faster.

    eager     sibling projections (q/k/v, and the gate and up halves of an MLP) in one product; torch's operations
    packed    these, and every other linear layer, with weights laid out for oneDNN (`infer.packing`): a second copy
    kernels   the same on headstart's own kernels (`infer.kernels`), and with them norms, gates and attention. A row's
              result is then the same to the last bit whatever else is in the forward
    triton    for GPUs: siblings in one product as in `eager`, and what lies between products in few launches
              (`infer.kernels.gpu.modules`)

At width 1 a layer's small matrices are bound by the cost of starting each product and by reading weights, not by
arithmetic. The modules stay where they are and keep their names and weights; only their `forward` is replaced. Of
siblings the first computes all, and the others pick up their share if they are given the same input tensor (else they
compute their own). Layers of another kind (quantised ones) stay as they are, and so do those whose weights or inputs a
device map moves about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from infer.kernels.attention import attention_forward
from infer.kernels.build import has_kernels
from infer.kernels.decoder import DecoderKernel, layer_forward
from infer.kernels.gpu import modules as gpu
from infer.kernels.gpu import runs_triton
from infer.kernels.layers import epsilon_of, gate_forward, norm_forward
from infer.kernels.products import is_tileable
from infer.packing import PackedWeight, is_packable, pack_linear
from infer.rounding import RoundedLinear, RoundedProduct, TiledCodes

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
WAYS = ("eager", "packed", "kernels", "triton")
COPYING_WAYS = ("packed", "kernels")
"""Those that keep a second copy of weights."""

_LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
_LAYER_PARTS = ("self_attn", "mlp", *_LAYER_NORMS)
"""Of a decoder layer of Llama's form."""

Forward = Callable[[torch.Tensor], torch.Tensor]
SideBySide = PackedWeight | RoundedProduct
"""Products that give the results of siblings in one tensor."""


def possible_ways(model: nn.Module) -> tuple[str, ...]:
    """Those of `WAYS` that can be had for this model on this machine, the fastest last; memory for the second copy of
    its weights aside."""
    device = _only_device(model)
    if device is not None and device.type != "cpu":
        return ("eager", "triton") if runs_triton(device) else ("eager",)
    interpreted = ("triton",) if device is not None and runs_triton(device) else ()
    return (*interpreted, *WAYS[: 1 + WAYS.index(_available_on_cpu(model))])


def _only_device(model: nn.Module) -> torch.device | None:
    """Where all weights are; None for a model that is spread."""
    devices = {weight.device for weight in model.parameters()}
    is_spread = len(set(getattr(model, "hf_device_map", None) or {0: 0})) > 1
    return devices.pop() if len(devices) == 1 and not is_spread else None


def _available_on_cpu(model: nn.Module) -> str:
    linears, rounded = list(_plain_linears(model)), list(_rounded_linears(model))
    if rounded:
        own = all(isinstance(linear.product.weight, TiledCodes) for linear in rounded)
        return "kernels" if own and has_kernels(rounded[0].dtype) else "eager"
    if not linears or not all(is_packable(linear.weight) for linear in linears):
        return "eager"
    return "kernels" if all(is_tileable(linear.weight) for linear in linears) else "packed"


class FusedModules:
    """The modules of a model that are computed in a faster `way`; `disable` and `enable` switch between that and the
    modules' own."""

    def __init__(self, model: nn.Module, way: str = "eager") -> None:
        assert way in WAYS, way
        self.way = way
        self._forwards: list[tuple[nn.Module, Callable[..., Any]]] = []
        self._products: dict[nn.Module, Forward] = {}
        for projections in _sibling_projections(model):
            copies = way in COPYING_WAYS
            product = pack_linear(*projections, kernels=way == "kernels") if copies else _fused(projections)
            if product is not None:
                siblings = _Siblings(projections, product)
                self._products[projections[0]] = product
                self._forwards.append((projections[0], siblings.lead))
                self._forwards += [(each, siblings.follow(each, i)) for i, each in enumerate(projections[1:])]
        if way == "triton":
            self._forwards += _norms_and_gates_on_gpu(model, self._products)
        if way not in COPYING_WAYS:
            return
        fused = {module for module, _ in self._forwards}
        for linear in _plain_linears(model):
            product = None if linear in fused else pack_linear(linear, kernels=way == "kernels")
            if product is not None:
                self._products[linear] = product
                self._forwards.append((linear, product))
        if way == "kernels":
            self._products.update({linear: linear.product for linear in _rounded_linears(model)})
            self._forwards += _norms_and_gates(model, self._products)

    def add_layers(self, layers: Sequence[nn.Module], windows: Mapping[int, int | None]) -> None:
        """Compute attention modules and whole decoder layers by kernel, those that have Llama's form. The model must
        attend through headstart's function already: its results are what they are held against. `windows`: what each
        layer hands to that function, as models keep it in different places."""
        assert self.way in ("kernels", "triton")
        if self.way == "triton":
            self._add_layers_on_gpu(layers, windows)
            return
        for index, layer in enumerate(layers):
            window = windows.get(index)
            for module in layer.modules():
                project, output = (self._products.get(_child(module, name)) for name in ("q_proj", "o_proj"))
                if isinstance(project, PackedWeight) and len(project.sizes) == len(SIBLINGS[0]) and output:
                    self._replace(module, attention_forward(module, project, output, window=window))
            kernel = self._decoder_kernel(layer, window)
            if kernel is not None:
                self._replace(layer, layer_forward(layer, kernel))

    def _add_layers_on_gpu(self, layers: Sequence[nn.Module], windows: Mapping[int, int | None]) -> None:
        norms = {module: forward for module, forward in self._forwards if isinstance(forward, gpu.FusedNorm)}
        pairs = [[norms.get(_child(layer, name)) for name in _LAYER_NORMS] for layer in layers]
        for index, layer in enumerate(layers):
            for module in layer.modules():
                project = self._products.get(_child(module, "q_proj"))
                if project is not None:
                    of_heads = [norms.get(_child(module, name)) for name in ("q_norm", "k_norm")]
                    forward = gpu.attention_forward(module, project, norms=of_heads, window=windows.get(index))
                    self._replace(module, forward)
            first, second = pairs[index]
            if first and second and {name for name, _ in layer.named_children()} == set(_LAYER_PARTS):
                following = pairs[index + 1][0] if index + 1 < len(layers) else None
                self._replace(layer, gpu.layer_forward(layer, first, second, following))

    def _replace(self, module: nn.Module, forward: Callable[..., Any] | None) -> None:
        if forward is not None:
            self._forwards.append((module, forward))
            module.forward = forward

    def _decoder_kernel(self, layer: nn.Module, window: int | None) -> DecoderKernel | None:
        """A layer whose parts all run on kernels, in one."""
        replaced = {module for module, _ in self._forwards}
        if {name for name, _ in layer.named_children()} != set(_LAYER_PARTS):
            return None
        attention, mlp, first_norm, norm = (_child(layer, name) for name in _LAYER_PARTS)
        if not replaced.issuperset((attention, mlp, first_norm, norm)):
            return None
        of_attention = (self._products.get(_child(attention, name)) for name in ("q_proj", "o_proj"))
        of_mlp = (self._products.get(_child(mlp, name)) for name in ("gate_proj", "down_proj"))
        parts = [part for part in (*of_attention, *of_mlp) if isinstance(part, PackedWeight) and part.has_tiles]
        if len(parts) != len(_LAYER_PARTS) or parts[2].biases or parts[3].biases:
            return None
        project, output, gate_and_up, down = parts
        head_size = int(attention.head_dim)  # type: ignore[arg-type]
        return DecoderKernel(
            project=project.tiles,
            output=output.tiles,
            gate_and_up=gate_and_up.tiles,
            down=down.tiles,
            first_norm=first_norm.weight,  # type: ignore[arg-type]
            first_epsilon=epsilon_of(first_norm),
            norm=norm.weight,  # type: ignore[arg-type]
            epsilon=epsilon_of(norm),
            head_size=head_size,
            num_heads=project.sizes[0] // head_size,
            scaling=getattr(attention, "scaling", None),
            window=window,
        )

    def enable(self) -> None:
        for module, forward in self._forwards:
            module.forward = forward

    def disable(self) -> None:
        """Give every module its own forward back."""
        for module, _ in self._forwards:
            module.__dict__.pop("forward", None)


class _Siblings:
    """The results of projections that were computed together from the last input."""

    def __init__(self, projections: list[nn.Linear], product: Forward) -> None:
        self.sizes = [projection.out_features for projection in projections]
        self.product = product
        self.last: tuple[torch.Tensor | None, list[torch.Tensor]] = (None, [])  # in one: another thread may exchange it

    def lead(self, hidden: torch.Tensor) -> torch.Tensor:
        first, *rest = torch.split(self.product(hidden), self.sizes, dim=-1)
        self.last = hidden, rest
        return first

    def follow(self, projection: nn.Linear, index: int) -> Forward:
        def forward(hidden: torch.Tensor) -> torch.Tensor:
            last, results = self.last
            if hidden is not last:
                return F.linear(hidden, projection.weight, projection.bias)
            if index == len(results) - 1:
                self.last = None, []  # nothing outlives the layer
            return results[index]

        return forward


def _fused(projections: list[nn.Linear]) -> Forward:
    """One product with a weight [sum(out), in] of which the projections' own become views."""
    weight = torch.cat([projection.weight.data for projection in projections])
    biases = [projection.bias.data for projection in projections if projection.bias is not None]
    bias = torch.cat(biases) if biases else None
    sizes = [projection.out_features for projection in projections]
    for projection, rows in zip(projections, weight.split(sizes), strict=True):
        projection.weight.data = rows
    return lambda hidden: F.linear(hidden, weight, bias)


def _norms_and_gates(model: nn.Module, products: dict[nn.Module, Forward]) -> Iterator[tuple[nn.Module, Forward]]:
    for module in model.modules():
        gate, down = (products.get(_child(module, name)) for name in ("gate_proj", "down_proj"))
        forward = norm_forward(module)
        if forward is None and isinstance(gate, SideBySide) and len(gate.sizes) == len(SIBLINGS[1]) and down:
            forward = gate_forward(module, gate, down)
        if forward is not None:
            yield module, forward


def _norms_and_gates_on_gpu(
    model: nn.Module, products: Mapping[nn.Module, Forward]
) -> Iterator[tuple[nn.Module, Forward]]:
    for module in model.modules():
        gate = products.get(_child(module, "gate_proj"))
        forward = gpu.norm_forward(module) if gate is None else gpu.gate_forward(module, gate)
        if forward is not None:
            yield module, forward


def _child(module: nn.Module, name: str) -> nn.Module:
    """The child of that name; one that is nobody's if there is none."""
    child = getattr(module, name, None)
    return child if isinstance(child, nn.Module) else nn.Identity()


def _plain_linears(model: nn.Module) -> Iterator[nn.Linear]:
    for module in model.modules():
        if type(module) is nn.Linear and not hasattr(module, "_hf_hook") and not module.weight.is_meta:
            yield module


def _rounded_linears(model: nn.Module) -> Iterator[RoundedLinear]:
    return (module for module in model.modules() if isinstance(module, RoundedLinear))


def _sibling_projections(model: nn.Module) -> Iterator[list[nn.Linear]]:
    for module in model.modules():
        for names in SIBLINGS:
            projections = [getattr(module, name, None) for name in names]
            if all(type(projection) is nn.Linear for projection in projections):
                linears = [projection for projection in projections if isinstance(projection, nn.Linear)]
                if _alike(linears):
                    yield linears


def _alike(projections: list[nn.Linear]) -> bool:
    first = projections[0]
    return all(
        not hasattr(projection, "_hf_hook")  # accelerate's: it moves the layer's inputs, or fetches its weights
        and not projection.weight.is_meta
        and projection.in_features == first.in_features
        and (projection.bias is None) == (first.bias is None)
        and projection.weight.dtype == first.weight.dtype
        and projection.weight.device == first.weight.device
        for projection in projections
    )
