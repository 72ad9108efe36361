"""Other looks at a stock model: the same modules with some of them exchanged, nothing copied and nothing changed.

A view has modules of its own only on the way to what was exchanged; the rest, and with it nearly all weights, is the
original's. So a target's first layers, or the target with fewer tokens to choose from, cost no memory to speak of.

Shapes: V rows of the LM head, C of those kept, H hidden.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn


def exchanged(module: nn.Module, new: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """`module` with each key of `new` that lies in it replaced by its value."""
    if module in new:
        return new[module]
    children = {name: None if child is None else exchanged(child, new) for name, child in module._modules.items()}
    if all(child is module._modules[name] for name, child in children.items()):
        return module
    if hasattr(module, "_hf_hook"):  # accelerate's forward is bound to the module, and a copy would run the original
        raise ValueError(
            "a target that is spread by a device map or quantised cannot run in parts, changed or adapted: take "
            "another draft (a trained head, ngram, model:FOLDER), or load it whole"
        )
    twin = copy.copy(module)
    twin._modules = children  # a dict of its own: the copy above still shared the original's
    twin.__dict__.pop("forward", None)  # a faster one (`infer.fuse`) computes with the original's children
    return twin


def with_forwards(module: nn.Module, forward_of: Callable[[Any], Callable[..., Any] | None]) -> Any:
    """A module of its own over the same parameters, and so its children, each with the forward that `forward_of` gives
    for it (its own where that is None). Children come before what they are in."""
    twin = copy.copy(module)
    children = module._modules.items()
    twin._modules = {name: None if child is None else with_forwards(child, forward_of) for name, child in children}
    forward = forward_of(twin)
    if forward is not None:
        twin.forward = forward
    return twin


def with_first_layers(model: Any, layers: Sequence[nn.Module], num_layers: int) -> Any:
    """`model` with only the first of its decoder `layers`; its final norm and LM head follow them."""
    stacks = [child for child in model.base_model.children() if isinstance(child, nn.ModuleList)]
    (stack,) = [child for child in stacks if list(child) == list(layers)]
    return exchanged(model, {stack: nn.ModuleList(layers[:num_layers])})


def with_output_rows(model: Any, token_ids: torch.Tensor) -> Any:
    """`model` with only the rows `token_ids` [C] of its LM head [V, H], which alone are copied."""
    output = model.get_output_embeddings()
    assert isinstance(output, nn.Linear), "reduce an LM head before it is rounded"
    size = len(token_ids)
    with torch.inference_mode(mode=False):
        rows = nn.Linear(output.in_features, size, bias=output.bias is not None, device="meta")
        token_ids = token_ids.to(output.weight.device)
        rows.weight = nn.Parameter(output.weight.data[token_ids], requires_grad=False)
        if output.bias is not None:
            rows.bias = nn.Parameter(output.bias.data[token_ids], requires_grad=False)
    return exchanged(model, {output: rows.train(output.training)})
