"""Weights laid out for the matrix product of the CPU at hand: what decoding's narrow products are bound by.

A product of a few rows reads its weight once and does little else. `functional.linear` multiplies by the weight as it
is stored. With a weight laid out for it (*packed*, once) the product takes half the time or less: headstart's own
kernel (`infer.kernels.products`) where it runs, else oneDNN's. In bfloat16 oneDNN's packed product without a bias is
the plain one to the bit wherever that was tried; the others are the same to rounding.

The packed weight is a second copy, beside the module's own, which stays what is saved, trained and read. A weight that
is changed in place, or whose `.data` is exchanged, is packed again before it is next used. What torch does not count is
not seen: writes through `.data` (`weight.data.mul_(2)`), and another Parameter or module in the place of the old one.

Shapes: R rows, K inputs, N outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from infer.kernels.products import TiledWeight, is_tileable

_LAID_OUT_FOR = 8
"""Rows for which oneDNN chooses the layout; it serves any number (for one, it would choose a layout for one)."""


@cache
def packable_dtypes() -> frozenset[torch.dtype]:
    """The dtypes whose weights this machine's CPU can pack; none where torch was built without oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return frozenset()
    return frozenset(dtype for dtype in (torch.float32, torch.bfloat16) if _multiplies_packed(dtype))


def is_packable(weight: torch.Tensor) -> bool:
    """Whether it is a plain matrix that can be packed here (those of quantised layers are of other types)."""
    plain = type(weight) in (torch.Tensor, nn.Parameter) and weight.layout is torch.strided and weight.ndim == 2
    return plain and weight.device.type == "cpu" and bool(weight.numel()) and weight.dtype in packable_dtypes()


class PackedWeight:
    """Multiplies inputs [..., K] by one weight [N, K], or by several that read the same inputs, side by side.

    biases: one for each weight, or none. kernels: false for oneDNN's product even where headstart's own runs. Where
    gradients are wanted, or inputs are of another dtype, the product is the plain one. Copies (of a module that holds
    one, too) pack anew.
    """

    def __init__(
        self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None] = (), *, kernels: bool = True
    ) -> None:
        assert all(map(is_packable, weights)), "ask is_packable first"
        assert len({(weight.shape[1], weight.dtype) for weight in weights}) == 1, "weights read the same inputs"
        self.weights = tuple(weights)
        self.biases = tuple(bias for bias in biases if bias is not None)
        assert len(self.biases) in (0, len(self.weights)), "all have a bias, or none has"
        self.sizes = [weight.shape[0] for weight in self.weights]
        self._kernels = kernels and is_tileable(self.weights[0])
        self._dtype = self.weights[0].dtype
        self._tensors = (*self.weights, *self.biases)
        # Before the first use: an address that no tensor has.
        self._packed_from: list[tuple[torch.Tensor, int, int | None]] = [(self._tensors[0], -1, None)]
        self._product: Callable[[torch.Tensor], torch.Tensor] = self._plain

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Products [..., N], or [..., N1 + N2 + ...]."""
        if torch.is_grad_enabled() or inputs.dtype is not self._dtype:
            return self._plain(inputs)
        self._refresh()
        return self._product(inputs)

    def tiles(self) -> TiledWeight:
        """The weight as headstart's kernels read it; only where `has_tiles`."""
        self._refresh()
        assert isinstance(self._product, TiledWeight), "ask has_tiles first"
        return self._product

    @property
    def has_tiles(self) -> bool:
        return self._kernels

    def _refresh(self) -> None:
        """Pack what has changed since it was packed."""
        for tensor, address, version in self._packed_from:
            if tensor.data_ptr() != address or (version is not None and tensor._version != version):
                self._pack()
                return

    def _pack(self) -> None:
        self._packed_from = [(tensor, *_version(tensor)) for tensor in self._tensors]
        with torch.no_grad():
            weight = (self.weights[0] if len(self.weights) == 1 else torch.cat(self.weights)).detach()
            bias = torch.cat(self.biases).detach() if self.biases else None
            self._product = TiledWeight(weight, bias) if self._kernels else _OneDnnWeight(weight, bias)

    def _plain(self, inputs: torch.Tensor) -> torch.Tensor:
        biases = self.biases or (None,) * len(self.weights)
        products = [functional.linear(inputs, weight, bias) for weight, bias in zip(self.weights, biases, strict=True)]
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:
        weights, biases = (copy.deepcopy(tensors, memo) for tensors in (self.weights, self.biases))
        return PackedWeight(weights, biases, kernels=self._kernels)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return partial(PackedWeight, kernels=self._kernels), (self.weights, self.biases)


class _OneDnnWeight:
    """A weight as oneDNN multiplies by it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _LAID_OUT_FOR)  # opaque
        self.bias = bias

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return _product(inputs, self.packed, self.bias)


def pack_linear(*modules: nn.Linear, kernels: bool = True) -> PackedWeight | None:
    """A packed product of one linear layer, or of several that read the same inputs; None where it cannot be made."""
    if not all(type(module) is nn.Linear and is_packable(module.weight) for module in modules):
        return None
    if len({(module.in_features, module.weight.dtype, module.bias is None) for module in modules}) > 1:
        return None
    weights, biases = [module.weight for module in modules], [module.bias for module in modules]
    return PackedWeight(weights, biases, kernels=kernels)


def _product(inputs: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """oneDNN's product, without anything done to it after."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(inputs, packed, bias, "none", [], "")
    return product


def _version(tensor: torch.Tensor) -> tuple[int, int | None]:
    """Changes with the tensor's values (but for those of tensors made in inference mode, which are not counted)."""
    return tensor.data_ptr(), None if tensor.is_inference() else tensor._version


def _multiplies_packed(dtype: torch.dtype) -> bool:
    """Whether the packed product is there (it is internal to torch) and right."""
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    weight = torch.arange(-6.0, 6.0).view(4, 3).to(dtype)
    inputs = torch.tensor([[1.0, -2.0, 3.0]] * 2).to(dtype)
    try:
        with torch.inference_mode():
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, _LAID_OUT_FOR)
            found = _product(inputs, packed, None)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return torch.equal(found, functional.linear(inputs, weight))
