"""Whole attention modules of stock models on the kernels: projections in one product, rotation, cache and attention in
one call, and the output's product.

A module is taken for what it computes, not for its name: it must have Llama's parts and no others, and put random
results of theirs together as the kernel does, else it stays as it is and only its attention function runs on the
kernel.

Shapes: R rows, H hidden, Hq query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infer.kernels.paths import attend_paths
from infer.kernels.trial import attends_alike
from infer.rows import PACKED_ROWS, PackedRows

Forward = Callable[[torch.Tensor], torch.Tensor]
ModuleForward = Callable[..., tuple[torch.Tensor, None]]

_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_NORMS = {"q_norm", "k_norm"}


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Of a module with Llama's parts and no others, but for norms of queries and keys perhaps (has_norms). head_counts:
    of queries, keys and values."""

    layer: int
    head_size: int
    head_counts: tuple[int, int, int]
    scaling: float | None
    has_norms: bool

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(count * self.head_size for count in self.head_counts)

    @classmethod
    def of(cls, module: nn.Module) -> AttentionShape | None:
        own = {name for name, _ in (*module.named_children(), *module.named_parameters(recurse=False))}
        softcap = getattr(module, "attn_logit_softcapping", None)
        if own - _NORMS != _PARTS or not hasattr(module, "layer_idx") or softcap is not None:
            return None
        head_size = int(getattr(module, "head_dim", 0))
        query, key, value = (int(getattr(module, name).out_features) for name in ("q_proj", "k_proj", "v_proj"))
        if not head_size or query % head_size or key % head_size or key != value:
            return None
        return cls(
            layer=int(module.layer_idx),  # type: ignore[arg-type]
            head_size=head_size,
            head_counts=(query // head_size, key // head_size, value // head_size),
            scaling=getattr(module, "scaling", None),
            has_norms=not own.isdisjoint(_NORMS),
        )


def attention_forward(
    module: nn.Module, project: Forward, output: Forward, *, window: int | None
) -> ModuleForward | None:
    """A forward for `module`; None if it is of another kind. `project` computes queries, keys and values side by side,
    `output` is the product after attention. `window`: what the module hands to its attention function."""
    shape = AttentionShape.of(module)
    if shape is None or shape.has_norms:
        return None
    layer, head_size, head_counts, scaling = shape.layer, shape.head_size, shape.head_counts, shape.scaling
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
    alike = attends_alike(module, forward_with, layer=layer, widths=shape.widths, head_size=head_size, dtype=dtype)
    return forward_with(project, output) if alike else None


def asked_of_kernel(
    kwargs: Mapping[str, Any],
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None,
    dtype: torch.dtype,
    head_size: int,
) -> tuple[PackedRows, tuple[torch.Tensor, torch.Tensor]] | None:
    """The rows of a stock module's call, and its cosines and sines [R, D]; None where kernels cannot answer it."""
    rows = kwargs.get(PACKED_ROWS)
    rotary = rotary_of(position_embeddings, dtype, head_size)
    return (rows, rotary) if isinstance(rows, PackedRows) and rows.use_kernel and rotary is not None else None


def rotary_of(
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None, dtype: torch.dtype, head_size: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Cosines and sines [R, D] of a stock module's call; None where kernels cannot read them.

    They do [1, R, D] for all numbers of a head, in the states' own dtype.
    """
    if position_embeddings is None:
        return None
    cosines, sines = position_embeddings
    if all(each.dtype is dtype and each.shape[-1] == head_size for each in position_embeddings):
        return cosines[0], sines[0]
    return None
