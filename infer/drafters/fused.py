"""A draft head as it decodes on a GPU: the same weights, with few launches around the products
(`infer.kernels.gpu.elementwise`).

A draft step has few rows, so it costs what reading its weights and starting its operations cost. Projections that read
the same inputs become one product, of a second copy of their weights; norms, gates, rotations and the cache take one
launch each. The modules are the heads' own (`heads.layers`), so nothing has to be tried out.

The head itself is left as it is: what decodes is a view of it. Weights that change later are copied again before the
view is next run, into the same memory: a graph captured before sees them from then on.

Shapes: R rows, H hidden, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn import functional

from heads.base import DraftHead
from heads.eagle1 import DecoderLayer
from heads.eagle3 import Eagle3Head, MidLayer
from heads.layers import Attend, Attention, Block, GatedMLP, RMSNorm, Rotary, RotaryTable
from heads.peagle import PlainLayer
from infer.kernels.gpu.elementwise import DTYPES, NormForm, rotary_tables, silu_mul
from infer.kernels.gpu.modules import FusedNorm, attend_stored
from infer.rows import PackedRows, Rows, RowsAttend
from infer.views import with_forwards

Head = TypeVar("Head", bound=DraftHead)


def fused_view(head: Head) -> Head:
    """A head that computes the same, to rounding, in fewer launches."""
    if head.dtype not in DTYPES:
        return head
    view = cast(Head, with_forwards(head, _forward_of))
    for layer in view.modules():
        if isinstance(layer, MidLayer | DecoderLayer | PlainLayer):
            layer.block = _block(layer, _norm_of(view) if isinstance(view, Eagle3Head) else None)
    table = getattr(view, "_rotary", None)
    if isinstance(table, RotaryTable):
        view.__dict__["_rotary"] = _FusedRotary(table)
    return view


def _forward_of(twin: nn.Module) -> Callable[..., torch.Tensor] | None:
    """A faster forward for a module of a view, if there is one."""
    if isinstance(twin, RMSNorm):
        return FusedNorm(twin, epsilon=twin.eps, form=NormForm.ROUNDED_FIRST)
    if isinstance(twin, GatedMLP):
        return _gate_forward(twin)
    return _attention_forward(twin) if isinstance(twin, Attention) else None


class _JoinedWeight:
    """The product with several weights that read the same inputs, side by side."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        assert all(layer.bias is None for layer in layers)
        self._layers = layers
        self._joined = torch.empty(0)
        self._joined_from: list[tuple[int, int | None]] = []

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., N1 + N2 + ...]."""
        weights = [layer.weight for layer in self._layers]
        now = [(weight.data_ptr(), None if weight.is_inference() else weight._version) for weight in weights]
        if now != self._joined_from:
            self._join(weights)
            self._joined_from = now
        return functional.linear(inputs, self._joined)

    def _join(self, weights: Sequence[torch.Tensor]) -> None:
        with torch.inference_mode(mode=False), torch.no_grad():
            joined = torch.cat([weight.detach() for weight in weights])
            fits = (self._joined.shape, self._joined.dtype, self._joined.device) == (
                joined.shape,
                joined.dtype,
                joined.device,
            )
            self._joined = self._joined.copy_(joined) if fits else joined


def _is_ordinary(states: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the class's own forward has to be taken."""
    return torch.is_grad_enabled() or states.dtype is not weight.dtype


def _gate_forward(twin: GatedMLP) -> Callable[..., torch.Tensor]:
    ordinary = twin.forward
    product = _JoinedWeight([twin.gate_proj, twin.up_proj])

    def forward(states: torch.Tensor) -> torch.Tensor:
        if _is_ordinary(states, twin.gate_proj.weight):
            return ordinary(states)
        return cast(torch.Tensor, twin.down_proj(silu_mul(product(states))))

    return forward


def _attention_forward(twin: Attention) -> Callable[..., torch.Tensor]:
    ordinary = twin.forward
    product = _JoinedWeight([twin.q_proj, twin.k_proj, twin.v_proj])

    def forward(inputs: torch.Tensor, rotary: Rotary, attend: Attend, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Where `attend` is over the rows of a cache, keys go there straight from the product."""
        own = attend if rows is None and isinstance(attend, RowsAttend) else None
        if own is None or _is_ordinary(inputs, twin.q_proj.weight) or not _goes_into(own.rows, inputs, rotary):
            return ordinary(inputs, rotary, attend, rows)
        cosines, sines = (table.squeeze(-2) for table in rotary)
        attended = attend_stored(product(inputs), (cosines, sines), own.rows, own.layer)
        return cast(torch.Tensor, twin.o_proj(attended.flatten(-2)))

    return forward


def _goes_into(rows: Rows, inputs: torch.Tensor, rotary: Rotary) -> bool:
    """Whether keys and values of `inputs` can be written to the rows' cache as they are."""
    keys = rows.cache.keys
    is_plain = not (isinstance(rows, PackedRows) and rows.use_kernel) and inputs.ndim == 2
    return is_plain and keys.device == inputs.device and keys.dtype is inputs.dtype is rotary[0].dtype


def _norm_of(module: nn.Module, name: str = "norm") -> FusedNorm:
    forward: Any = getattr(module, name).forward
    assert isinstance(forward, FusedNorm)
    return forward


def _block(layer: MidLayer | DecoderLayer | PlainLayer, following: FusedNorm | None) -> Block:
    """Attention and MLP of a layer of a view, each around a residual. `following`: the norm that reads its states."""
    norm = _norm_of(layer, "post_attention_layernorm")

    def block(inputs: torch.Tensor, residual: torch.Tensor, rotary: Rotary, attend: Attend) -> torch.Tensor:
        attended = layer.self_attn(inputs, rotary, attend)
        if not norm.can_compute(attended):
            states = residual + attended
            return cast(torch.Tensor, states + layer.mlp(norm(states)))
        states, normed = norm.of_sum(attended, residual)
        added = cast(torch.Tensor, layer.mlp(normed))
        return states + added if following is None else following.add_ahead(added, states)

    return block


class _FusedRotary:
    """What the head's table of rotary embeddings gives, in one launch."""

    def __init__(self, table: RotaryTable) -> None:
        self._table = table

    def __call__(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotary:
        """Of positions [R], each [R, 1, D]."""
        if positions.ndim != 1:
            return self._table(positions, dtype)
        frequencies = self._table.frequencies(positions.device)
        tables = rotary_tables(positions, frequencies, dtype, amplitude=self._table.amplitude)
        cosines, sines = (table[:, None] for table in tables)
        return cosines, sines
