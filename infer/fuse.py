"""Sibling projections of a stock model computed in one product: q/k/v, and the gate and up halves of an MLP.

At width 1 a layer's small matrices are bound by the cost of starting each product, not by arithmetic. The modules stay
where they are and keep their names: their weights become views of one tensor, the first sibling computes all of them,
and the others pick up their share if they are given the same input tensor (else they compute their own). Layers of
another kind (quantised ones) stay as they are, and so do those whose weights or inputs a device map moves about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class _Shared:
    """One fused weight [sum(out), in] and the results computed from the last input."""

    def __init__(self, projections: list[nn.Linear]) -> None:
        self.sizes = [projection.out_features for projection in projections]
        self.weight = torch.cat([projection.weight.data for projection in projections])
        biases = [projection.bias.data for projection in projections if projection.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        for projection, rows in zip(projections, self.weight.split(self.sizes), strict=True):
            projection.weight.data = rows
        self.input: torch.Tensor | None = None
        self.results: list[torch.Tensor] = []

    def lead(self, hidden: torch.Tensor) -> torch.Tensor:
        first, *rest = torch.split(F.linear(hidden, self.weight, self.bias), self.sizes, dim=-1)
        self.input, self.results = hidden, rest
        return first

    def follow(self, projection: nn.Linear, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(hidden: torch.Tensor) -> torch.Tensor:
            if hidden is not self.input:
                return F.linear(hidden, projection.weight, projection.bias)
            result = self.results[index]
            if index == len(self.results) - 1:
                self.input, self.results = None, []  # nothing outlives the layer
            return result

        return forward


class FusedProjections:
    """All sibling projections of a model, fused when built; `disable` and `enable` switch between the two ways of
    computing them (the weights are views of the fused tensors either way)."""

    def __init__(self, model: nn.Module) -> None:
        self._forwards: list[tuple[nn.Linear, Callable[[torch.Tensor], torch.Tensor]]] = []
        for projections in _sibling_projections(model):
            shared = _Shared(projections)
            lead, *followers = projections
            self._forwards.append((lead, shared.lead))
            self._forwards.extend((each, shared.follow(each, index)) for index, each in enumerate(followers))

    def enable(self) -> None:
        for projection, forward in self._forwards:
            projection.forward = forward  # type: ignore[method-assign,assignment]

    def disable(self) -> None:
        """Give every projection its own forward back."""
        for projection, _ in self._forwards:
            projection.__dict__.pop("forward", None)


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
