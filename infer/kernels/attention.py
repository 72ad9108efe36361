"""Whole attention modules of stock models on the kernels: projections in one product, rotation, cache and attention in
one call, and the output's product.

A module is taken for what it computes, not for its name: it must have Llama's parts and no others, and put random
results of theirs together as the kernel does, else it stays as it is and only its attention function runs on the
kernel.

Shapes: R rows, H hidden, Hq query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from infer.kernels.paths import attend_paths
from infer.kernels.trial import attends_alike
from infer.rows import PACKED_ROWS, PackedRows

Forward = Callable[[torch.Tensor], torch.Tensor]
ModuleForward = Callable[..., tuple[torch.Tensor, None]]

_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}


def attention_forward(
    module: nn.Module, project: Forward, output: Forward, *, window: int | None
) -> ModuleForward | None:
    """A forward for `module`; None if it is of another kind. `project` computes queries, keys and values side by side,
    `output` is the product after attention. `window`: what the module hands to its attention function."""
    own = {name for name, _ in (*module.named_children(), *module.named_parameters(recurse=False))}
    softcap = getattr(module, "attn_logit_softcapping", None)
    if own != _PARTS or not hasattr(module, "layer_idx") or softcap is not None:
        return None
    head_size, layer = int(getattr(module, "head_dim", 0)), int(module.layer_idx)  # type: ignore[arg-type]
    widths = [int(getattr(module, name).out_features) for name in ("q_proj", "k_proj", "v_proj")]
    if not head_size or any(width % head_size for width in widths) or widths[1] != widths[2]:
        return None
    head_counts = [width // head_size for width in widths]
    scaling = getattr(module, "scaling", None)
    original = module.forward

    def forward_with(project: Forward, output: Forward) -> ModuleForward:
        def forward(
            hidden_states: torch.Tensor,
            position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
            attention_mask: torch.Tensor | None = None,
            **kwargs: Any,
        ) -> tuple[torch.Tensor, None]:
            asked = asked_of_kernel(kwargs, position_embeddings, hidden_states.dtype, head_size)
            if asked is None:
                return original(  # type: ignore[no-any-return]
                    hidden_states=hidden_states,
                    position_embeddings=position_embeddings,
                    attention_mask=attention_mask,
                    **kwargs,
                )
            rows, rotary = asked
            projected = project(hidden_states).view(-1, sum(head_counts), head_size).transpose(0, 1)
            query, key, value = projected.split(head_counts)
            attended = attend_paths(
                query,
                key,
                value,
                layer,
                rows,
                scaling=scaling,
                sliding_window=window,
                rotary=rotary,
            )
            return output(attended.view(*hidden_states.shape[:-1], -1)), None

        return forward

    dtype: torch.dtype = module.q_proj.weight.dtype  # type: ignore[union-attr, assignment]
    alike = attends_alike(module, forward_with, layer=layer, widths=widths, head_size=head_size, dtype=dtype)
    return forward_with(project, output) if alike else None


def asked_of_kernel(
    kwargs: Mapping[str, Any],
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None,
    dtype: torch.dtype,
    head_size: int,
) -> tuple[PackedRows, tuple[torch.Tensor, torch.Tensor]] | None:
    """The rows of a stock module's call, and its cosines and sines [R, D]; None where kernels cannot answer it.

    Kernels read those [1, R, D] for all numbers of a head, in the states' own dtype.
    """
    rows = kwargs.get(PACKED_ROWS)
    if isinstance(rows, PackedRows) and rows.use_kernel and position_embeddings is not None:
        cosines, sines = position_embeddings
        if all(each.dtype is dtype and each.shape[-1] == head_size for each in position_embeddings):
            return rows, (cosines[0], sines[0])
    return None
