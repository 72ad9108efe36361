"""Norms, gated MLPs, attention modules and decoder layers of stock models on the fused operations (`elementwise`).

A module is taken for what it computes, not for its name, else it stays as it is (`infer.kernels.trial`). Products
remain torch's, and attention is that of the rows at hand. Where gradients are wanted, and for other dtypes than the
weights', a module computes as ever.

A layer ends with a sum that the next layer norms: the sum and the norm are one launch, made by the layer, and the norm
gives what is there already if it is asked for the very same numbers in memory.

Shapes: R rows, H hidden, Hq query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from infer.kernels.attention import AttentionShape, ModuleForward, rotary_of
from infer.kernels.gpu.elementwise import (
    DTYPES,
    HeadNorms,
    NormForm,
    add_rms_norm,
    rms_norm,
    rms_norm_reference,
    rotate_and_store,
    silu_mul,
)
from infer.kernels.layers import epsilon_of
from infer.kernels.trial import adds_up, attends_alike, gates_alike, keeps_shape, norms_alike
from infer.rows import PACKED_ROWS, Rows

Forward = Callable[[torch.Tensor], torch.Tensor]


class FusedNorm:
    """The forward of the RMSNorm `norm`, which has a weight [H]."""

    def __init__(self, norm: nn.Module, *, epsilon: float, form: NormForm) -> None:
        self._norm, self.epsilon, self.form = norm, epsilon, form
        self._original = norm.forward
        self._ahead: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)  # in one: of another thread

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` [..., H], normed."""
        summed, normed = self._ahead
        if summed is not None:
            self._ahead = None, None  # nothing outlives the layer
            if normed is not None and _are_same(hidden, summed):
                return normed.view(hidden.shape)
        if not self.can_compute(hidden):
            return self._original(hidden)  # type: ignore[no-any-return]
        return rms_norm(hidden, self.weight, epsilon=self.epsilon, form=self.form)

    @property
    def weight(self) -> torch.Tensor:
        return self._norm.weight  # type: ignore[return-value]

    def can_compute(self, hidden: torch.Tensor) -> bool:
        return not torch.is_grad_enabled() and hidden.dtype is self.weight.dtype

    def of_sum(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`residual` + `hidden`, and the same normed."""
        return add_rms_norm(hidden, residual, self.weight, epsilon=self.epsilon, form=self.form)

    def add_ahead(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """`residual` + `hidden`; if that is what will be normed next, it is normed already."""
        summed, normed = self.of_sum(hidden, residual)
        self._ahead = summed, normed
        return summed


def _are_same(hidden: torch.Tensor, summed: torch.Tensor) -> bool:
    """Whether `hidden` is another look at `summed`, which is contiguous."""
    is_there = hidden.data_ptr() == summed.data_ptr() and hidden.is_contiguous()
    return is_there and (hidden.numel(), hidden.shape[-1]) == (summed.numel(), summed.shape[-1])


def norm_forward(norm: nn.Module) -> FusedNorm | None:
    """A forward for `norm`; None if it is no RMSNorm."""
    weight, epsilon = getattr(norm, "weight", None), epsilon_of(norm)
    if not isinstance(weight, nn.Parameter) or weight.ndim != 1 or not isinstance(epsilon, float):
        return None
    if weight.dtype not in DTYPES or getattr(norm, "bias", None) is not None or hasattr(norm, "_hf_hook"):
        return None
    form = _form_of(norm, epsilon, weight.dtype)
    return None if form is None else FusedNorm(norm, epsilon=epsilon, form=form)


def _form_of(norm: nn.Module, epsilon: float, dtype: torch.dtype) -> NormForm | None:
    """The form that gives the module's results to the bit in its dtype, else one that gives them to rounding."""

    def computes(form: NormForm, dtype: torch.dtype, rtol: float, atol: float = 0.0) -> bool:
        def formula(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return rms_norm_reference(rows, weight, epsilon=epsilon, form=form)

        return norms_alike(norm, formula, dtype=dtype, rtol=rtol, atol=atol)

    forms = [form for form in NormForm if computes(form, torch.float32, 1e-5, 1e-6)]
    for rtol in (0.0, 2 * torch.finfo(dtype).eps):
        for form in forms:
            if computes(form, dtype, rtol):
                return form
    return None


def gate_forward(mlp: nn.Module, gate_and_up: Forward) -> Forward | None:
    """A forward for `mlp` if it is down(silu(gate(x)) * up(x)). `gate_and_up` computes both, side by side."""
    gate, down = getattr(mlp, "gate_proj", None), getattr(mlp, "down_proj", None)
    if not isinstance(gate, nn.Linear) or not isinstance(down, nn.Module) or hasattr(mlp, "_hf_hook"):
        return None
    original: Forward = mlp.forward
    weight = gate.weight

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() or hidden.dtype is not weight.dtype:
            return original(hidden)
        return down(silu_mul(gate_and_up(hidden)))  # type: ignore[no-any-return]

    sizes = gate.in_features, gate.out_features
    alike = weight.dtype in DTYPES and gates_alike(mlp, silu_mul, sizes=sizes, dtype=weight.dtype, device=weight.device)
    return forward if alike else None


def _head_norms(norms: Sequence[FusedNorm | None], head_size: int) -> HeadNorms | None:
    """What queries and keys are normed by, if both are, alike, and head by head."""
    query, key = norms
    if query is None or key is None or not query.weight.shape == key.weight.shape == (head_size,):
        return None
    if (query.epsilon, query.form, query.weight.dtype) != (key.epsilon, key.form, key.weight.dtype):
        return None
    return HeadNorms(query=query.weight, key=key.weight, epsilon=query.epsilon, form=query.form)


def attention_forward(
    module: nn.Module, project: Forward, *, norms: Sequence[FusedNorm | None], window: int | None
) -> ModuleForward | None:
    """A forward for the attention `module`; None if it is of another kind. `project` computes queries, keys and values
    side by side. norms: of queries and of keys, where there are any. `window`: what the module hands to its attention
    function."""
    shape = AttentionShape.of(module)
    if shape is None or shape.head_size % 2 or hasattr(module, "_hf_hook"):
        return None
    if shape.has_norms and _head_norms(norms, shape.head_size) is None:
        return None
    settings: dict[str, Any] = {"scaling": shape.scaling, "sliding_window": window}
    original = module.forward

    def forward_with(project: Forward, output: Forward) -> ModuleForward:
        def forward(
            hidden_states: torch.Tensor,
            position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
            attention_mask: torch.Tensor | None = None,
            **kwargs: Any,
        ) -> tuple[torch.Tensor, None]:
            rows = _rows_beside(hidden_states, kwargs)
            rotary = rotary_of(position_embeddings, hidden_states.dtype, shape.head_size)
            if rows is None or rotary is None or attention_mask is not None:
                return original(  # type: ignore[no-any-return]
                    hidden_states=hidden_states,
                    position_embeddings=position_embeddings,
                    attention_mask=attention_mask,
                    **kwargs,
                )
            of_heads = _head_norms(norms, shape.head_size)
            attended = attend_stored(project(hidden_states)[0], rotary, rows, shape.layer, norms=of_heads, **settings)
            return output(attended.reshape(*hidden_states.shape[:-1], -1)), None

        return forward

    weight: torch.Tensor = module.q_proj.weight  # type: ignore[union-attr, assignment]
    alike = weight.dtype in DTYPES and attends_alike(
        module,
        forward_with,
        layer=shape.layer,
        widths=shape.widths,
        head_size=shape.head_size,
        dtype=weight.dtype,
        device=weight.device,
    )
    return forward_with(project, module.o_proj) if alike else None  # type: ignore[arg-type]


def attend_stored(
    projected: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    rows: Rows,
    layer: int,
    *,
    norms: HeadNorms | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Attention [R, Hq, D] of `projected` queries, keys and values [R, (Hq + 2K) * D], turned by `rotary` [R, D] each
    (after `norms`) and stored in the rows' cache."""
    query = rotate_and_store(projected, *rotary, *rows.cache.layer(layer), rows.columns, norms)
    return rows.attend(query, layer, scaling=scaling, sliding_window=sliding_window)


def _rows_beside(hidden: torch.Tensor, kwargs: Mapping[str, Any]) -> Rows | None:
    """The rows of a stock module's call, if their cache lies where the states are, in their dtype, and nobody asks for
    gradients."""
    rows = kwargs.get(PACKED_ROWS)
    if not isinstance(rows, Rows) or torch.is_grad_enabled():
        return None
    keys = rows.cache.keys
    return rows if keys.device == hidden.device and keys.dtype is hidden.dtype else None


def layer_forward(
    module: nn.Module, first: FusedNorm, second: FusedNorm, following: FusedNorm | None
) -> Callable[..., torch.Tensor] | None:
    """A forward for the decoder layer `module`, None unless it joins its parts as Llama's does. `first`, `second`: its
    norms before attention and the MLP. `following`: the norm that reads the layer's states next, if known."""
    dtype, size = first.weight.dtype, len(first.weight)
    if hasattr(module, "_hf_hook") or not keeps_shape(module.mlp, size, dtype, first.weight.device):  # type: ignore[arg-type]
        return None
    original = module.forward

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args or not isinstance(kwargs.get(PACKED_ROWS), Rows) or not first.can_compute(hidden_states):
            return original(hidden_states, *args, **kwargs)  # type: ignore[no-any-return]
        normed = module.input_layernorm(hidden_states)  # type: ignore[operator]
        attended, _ = module.self_attn(hidden_states=normed, **kwargs)  # type: ignore[operator]
        states, normed = second.of_sum(attended, hidden_states)
        added = module.mlp(normed)  # type: ignore[operator]
        return states + added if following is None else following.add_ahead(added, states)

    return forward if adds_up(module, dtype) else None
