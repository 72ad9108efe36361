"""A draft head as it decodes on a CPU: the same weights, laid out for products of a few rows (`infer.packing`).

A draft step costs what reading its weights and starting its operations cost. Projections that read the same inputs
become one product, and norms, gates and attention run on headstart's own kernels where those do (`infer.kernels`).

The head itself is left as it is: what decodes is a view of it, with modules of its own over the same parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar, cast

import torch
from torch import nn
from torch.nn import functional

from heads.base import DraftHead
from heads.block import BlockHead
from heads.eagle1 import DecoderLayer
from heads.eagle3 import MidLayer
from heads.layers import Attend, Attention, Block, GatedMLP, RMSNorm, Rotary
from heads.peagle import PlainLayer
from infer.kernels.decoder import DecoderKernel
from infer.kernels.layers import gate_forward, norm_forward
from infer.packing import PackedWeight, is_packable, pack_linear
from infer.rows import PackedRows, RowsAttend
from infer.views import with_forwards

Head = TypeVar("Head", bound=DraftHead)


def packed_view(head: Head) -> Head:
    """A head that computes the same, to rounding, on packed weights; the head itself where none can be packed.

    Weights that change later are packed anew. What is lent or exchanged later (`bind`) is not seen.
    """
    if not any(is_packable(weight) for weight in head.parameters()):
        return head
    view = cast(Head, with_forwards(head, _forward_of))
    view.multiply = _LMHeads(_lm_heads(view))
    return view


class _LMHeads:
    """`functional.linear` without a bias for these weights, packed; for others it is the plain one."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self._products = {id(weight): PackedWeight([weight]) for weight in weights if is_packable(weight)}

    def __call__(self, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        product = self._products.get(id(weight))  # which holds its weight, so that no other can have this id
        return functional.linear(inputs, weight) if product is None else product(inputs)


@torch.inference_mode()
def _lm_heads(head: DraftHead) -> list[torch.Tensor]:
    """The LM heads' weights at all depths, but for those that a head makes anew whenever it is asked."""
    state = torch.zeros((1, head.config.hidden_size), dtype=head.dtype)
    if isinstance(head, BlockHead):
        return [head.base_outputs(state)[1], *([head.markov.output.weight] if head.config.markov_rank else [])]
    weights = [head.outputs(state, depth)[1] for depth in range(head.num_depths or 1)]
    return [weight for depth, weight in enumerate(weights) if head.outputs(state, depth)[1] is weight]


def _forward_of(twin: nn.Module) -> Callable[..., torch.Tensor] | None:
    """A faster forward for a module of a view, if there is one. A layer is given its block."""
    if isinstance(twin, nn.Linear):
        return pack_linear(twin)
    if isinstance(twin, RMSNorm):
        return norm_forward(twin)
    if isinstance(twin, Attention | GatedMLP):
        return _side_by_side(twin)
    if isinstance(twin, MidLayer | DecoderLayer | PlainLayer):
        twin.block = _block(twin)
    return None


def _block(twin: MidLayer | DecoderLayer | PlainLayer) -> Block | None:
    """Attention and MLP of a layer in one call, where all of it runs on kernels."""
    attention, mlp, norm = twin.self_attn, twin.mlp, twin.post_attention_layernorm
    parts = [attention.side_by_side, attention.o_proj.forward, mlp.side_by_side, mlp.down_proj.forward]
    weights = [part for part in parts if isinstance(part, PackedWeight) and part.has_tiles]
    if len(weights) < len(parts) or norm_forward(norm) is None:
        return None
    project, output, gate_and_up, down = weights
    kernel = DecoderKernel(
        project=project.tiles,
        output=output.tiles,
        gate_and_up=gate_and_up.tiles,
        down=down.tiles,
        norm=norm.weight,
        epsilon=norm.eps,
        num_heads=attention.num_query_heads,
        head_size=attention.head_dim,
    )

    def block(inputs: torch.Tensor, residual: torch.Tensor, rotary: Rotary, attend: Attend) -> torch.Tensor:
        rows = attend.rows if isinstance(attend, RowsAttend) else None
        if isinstance(rows, PackedRows) and rows.use_kernel and not torch.is_grad_enabled():
            assert isinstance(attend, RowsAttend)
            cosines, sines = (table.squeeze(-2) for table in rotary)
            return kernel(residual, (cosines, sines), rows, attend.layer, inputs=inputs)
        states = residual + attention(inputs, rotary, attend)
        return cast(torch.Tensor, states + mlp(norm(states)))

    return block


def _side_by_side(twin: Attention | GatedMLP) -> Callable[..., torch.Tensor] | None:
    """Give the module one product for its siblings, and a forward of its own where there is a kernel for all of it."""
    product = pack_linear(*(getattr(twin, name) for name in twin.siblings))
    forward = None
    if product is not None and isinstance(twin, GatedMLP):
        forward = gate_forward(twin, product, twin.down_proj)  # which tries the twin without it
    twin.side_by_side = product
    return forward
