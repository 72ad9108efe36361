"""Whole decoder layers as Llama has them, in one call (`run_layer` in `cpu.cpp`): attention around a residual, then a
normed, gated MLP around another.

What is saved is the cost of starting a dozen operations; the arithmetic is that of `products`, `paths` and `layers`.

Shapes: R rows, H hidden, I intermediate, Hq query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infer.kernels.attention import asked_of_kernel
from infer.kernels.build import kernel as kernel_of
from infer.kernels.paths import AttentionCall
from infer.kernels.products import TiledWeight
from infer.kernels.trial import adds_up
from infer.rows import PackedRows


class _Call(ctypes.Structure):
    """`LayerCall` of `cpu.cpp`."""

    _fields_ = (
        ("attention", AttentionCall),
        *((name, ctypes.c_void_p) for name in ("inputs", "residual", "result", "first_norm", "norm")),
        *((name, ctypes.c_void_p) for name in ("project", "output", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("project_bias", "output_bias")),
        *((name, ctypes.c_int32) for name in ("input_size", "hidden", "intermediate")),
        *((name, ctypes.c_float) for name in ("first_epsilon", "epsilon")),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class DecoderKernel:
    """A layer's weights, each as a function that gives the tiles as they are now (`infer.packing`).

    project: queries, keys and values side by side. norm, epsilon: before the MLP. first_norm, first_epsilon: before
    attention, where the layer's input is its residual.
    """

    project: Callable[[], TiledWeight]
    output: Callable[[], TiledWeight]
    gate_and_up: Callable[[], TiledWeight]
    down: Callable[[], TiledWeight]
    norm: torch.Tensor
    epsilon: float
    num_heads: int
    head_size: int
    first_norm: torch.Tensor | None = None
    first_epsilon: float = 0.0
    scaling: float | None = None
    window: int | None = None

    def __call__(
        self,
        residual: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        rows: PackedRows,
        layer: int,
        *,
        inputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """States [..., H] after the layer, from `residual` [..., H] and what attention reads: `inputs` [..., its size],
        or the residual, normed. `rotary`: cosines and sines [R, D]."""
        residual, rotary = residual.contiguous(), (rotary[0].contiguous(), rotary[1].contiguous())
        inputs = None if inputs is None else inputs.contiguous()
        project, output, gate_and_up, down = self.project(), self.output(), self.gate_and_up(), self.down()
        result = torch.empty_like(residual)
        call = _Call()
        call.attention = rows.paths.call(
            layer, num_heads=self.num_heads, scaling=self.scaling, window=self.window, rotary=rotary
        )
        call.inputs = None if inputs is None else inputs.data_ptr()
        call.residual, call.result = residual.data_ptr(), result.data_ptr()
        call.first_norm = None if self.first_norm is None else self.first_norm.data_ptr()
        call.norm, call.first_epsilon, call.epsilon = self.norm.data_ptr(), self.first_epsilon, self.epsilon
        call.project, call.project_bias = project.addresses
        call.output, call.output_bias = output.addresses
        call.gate_up, call.down = gate_and_up.addresses[0], down.addresses[0]
        call.input_size, call.hidden, call.intermediate = project.num_inputs, residual.shape[-1], down.num_inputs
        refused = kernel_of("layer", residual.dtype, ctypes.c_void_p, returns=ctypes.c_int)(ctypes.byref(call))
        assert not refused, "ask has_kernel first"
        return result


def layer_forward(module: nn.Module, kernel: DecoderKernel) -> Callable[..., torch.Tensor] | None:
    """A forward for the decoder layer `module`, whose parts are known; None unless it joins them as Llama's does."""
    layer = int(module.self_attn.layer_idx)  # type: ignore[union-attr, arg-type]
    dtype = kernel.norm.dtype
    original = module.forward

    def forward(
        hidden_states: torch.Tensor,
        *args: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        asked = asked_of_kernel(kwargs, position_embeddings, dtype, kernel.head_size)
        if asked is not None and hidden_states.dtype is dtype and not torch.is_grad_enabled():
            rows, rotary = asked
            return kernel(hidden_states, rotary, rows, layer)
        return original(  # type: ignore[no-any-return]
            hidden_states, *args, position_embeddings=position_embeddings, **kwargs
        )

    return forward if adds_up(module, dtype) else None
