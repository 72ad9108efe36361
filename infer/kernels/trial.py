"""Whether a kernel computes what a stock module does: tried out, as names say little.

A module's parts are known by then, and what is tried is how it puts them together, with stand-ins whose results are of
a size that tells factors, clips and activations apart. With its own parts a small model's residual would hide them, as
the differences are below the rounding of the result. All of it runs where the module's weights are.

Shapes: R rows, H hidden, I intermediate, D head size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from infer.cache import SlotCache
from infer.kernels.paths import has_kernel
from infer.rows import PACKED_ROWS, PackedRows, RowGroup

Forward = Callable[[torch.Tensor], torch.Tensor]

_NUM_ROWS = 5
_ATTENTION_TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 0.004, torch.float32: 1e-4}
"""Rotations that are rounded at another place, as a share of the largest result."""
_REFUSALS = (TypeError, RuntimeError, ValueError, AttributeError, IndexError, KeyError)
"""What a module of another kind raises: it wants other arguments, or does other things with results."""


@torch.inference_mode()
def attends_alike(
    module: nn.Module,
    forward_with: Callable[[Forward, Forward], Callable[..., Any]],
    *,
    layer: int,
    widths: Sequence[int],
    head_size: int,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> bool:
    """Whether the attention `module` does with its projections' results what `forward_with` (the product of all three,
    the product after attention) does: for scores that differ a good deal, at places that turn queries and keys as much,
    and for values that no clip lets through. `widths`: of queries, keys and values. `device`: where `forward_with` runs
    by itself; None for headstart's CPU kernel, which there must be."""
    use_kernel, device = device is None, device or torch.device("cpu")
    num_heads, num_kv_heads, _ = (width // head_size for width in widths)
    cache = SlotCache(
        num_layers=layer + 1,
        num_heads=num_kv_heads,
        key_size=head_size,
        value_size=head_size,
        num_slots=1,
        num_columns=_NUM_ROWS,
        dtype=dtype,
        device=device,
    )
    if use_kernel and not has_kernel(cache, num_heads):
        return False
    hidden = _random(int(module.q_proj.in_features), dtype, device, seed=0)  # type: ignore[union-attr, arg-type]
    query, key, value = (
        _random(width, dtype, device, seed=seed, scale=scale)
        for seed, width, scale in zip((1, 2, 3), widths, (2.0, 2.0, 1000.0), strict=True)
    )
    half = 6 * torch.rand((1, _NUM_ROWS, head_size // 2), generator=torch.Generator().manual_seed(0))
    angles = torch.cat([half, half], dim=-1)  # [1, R, D]
    rotary = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
    parts: dict[str, Forward] = {"q_proj": _given(query, hidden), "k_proj": _given(key, hidden)}
    parts |= {"v_proj": _given(value, hidden), "o_proj": _unchanged}
    side_by_side = _given(torch.cat([query, key, value], dim=-1), hidden)
    results = []
    for forward in (module.forward, forward_with(side_by_side, _unchanged)):
        rows = PackedRows([RowGroup(slot=0, prefix=0, tokens=[0] * _NUM_ROWS)], cache, use_kernel=use_kernel)
        try:
            with _exchanged(module, parts):
                result = forward(hidden, position_embeddings=rotary, attention_mask=None, **{PACKED_ROWS: rows})
        except _REFUSALS:
            return False
        results.append(result[0].float())
    expected, found = results
    error = (found - expected).abs().max()
    return bool(error <= _ATTENTION_TOLERANCE[dtype] * expected.abs().max())


@torch.inference_mode()
def adds_up(layer: nn.Module, dtype: torch.dtype) -> bool:
    """Whether the decoder `layer` is two residuals, around attention and an MLP after norms: to the bit, and without a
    factor on any of them."""
    weight: torch.Tensor = layer.input_layernorm.weight  # type: ignore[union-attr, assignment]
    device = weight.device
    hidden, attended, added, first, then = (_random(len(weight), dtype, device, seed=seed) for seed in range(5))
    attention = _given(attended, first)
    parts: dict[str, Callable[..., Any]] = {
        "input_layernorm": _given(first, hidden),
        "self_attn": lambda hidden_states, *_, **__: (attention(hidden_states), None),
        "post_attention_layernorm": _given(then, hidden + attended),
        "mlp": _given(added, then),
    }
    rotary = torch.zeros((2, 1, _NUM_ROWS, 2), dtype=dtype, device=device)
    try:
        with _exchanged(layer, parts):
            result = layer.forward(hidden, position_embeddings=(rotary[0], rotary[1]))
    except _REFUSALS:
        return False
    return isinstance(result, torch.Tensor) and torch.equal(result, hidden + attended + added)


@torch.inference_mode()
def gates_alike(
    mlp: nn.Module, gated: Forward, *, sizes: tuple[int, int], dtype: torch.dtype, device: torch.device | None = None
) -> bool:
    """Whether `mlp` does with its projections' results what `gated` does with them side by side, over the range where
    activations differ. `sizes`: H and I. `device`: None for the CPU."""
    num_inputs, size = sizes
    device = device or torch.device("cpu")
    hidden = _random(num_inputs, dtype, device, seed=0)
    gate, up = (_random(size, dtype, device, seed=seed, scale=2.0) for seed in (1, 2))
    parts = {"gate_proj": _given(gate, hidden), "up_proj": _given(up, hidden), "down_proj": _unchanged}
    try:
        with _exchanged(mlp, parts):
            expected = mlp.forward(hidden)
    except _REFUSALS:
        return False
    found = gated(torch.cat([gate, up], dim=-1))
    tolerance = max(2 * torch.finfo(dtype).eps, 1e-5)
    return found.shape == expected.shape and torch.allclose(found.float(), expected.float(), rtol=tolerance, atol=1e-6)


@torch.inference_mode()
def norms_alike(
    norm: nn.Module,
    formula: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    dtype: torch.dtype,
    rtol: float,
    atol: float = 0.0,
) -> bool:
    """Whether `norm` computes `formula` (rows, its weight) in `dtype`. With a random weight, so that a weight is told
    from one plus a weight, and a row so small that what is added to its mean square matters."""
    twin = copy.deepcopy(norm).to(dtype)
    twin.__dict__.pop("forward", None)  # a faster one computes with the original's weight
    own: torch.Tensor = twin.weight  # type: ignore[assignment]
    weight = _random(len(own), dtype, own.device, seed=1)[0, 0]
    twin.weight = nn.Parameter(weight, requires_grad=False)
    rows = _random(len(own), dtype, own.device, seed=0)
    rows[:, 0] *= 1e-3
    try:
        found = twin(rows)
    except _REFUSALS:  # not a module of one input
        return False
    if not isinstance(found, torch.Tensor) or found.dtype is not dtype or found.shape != rows.shape:
        return False
    return torch.allclose(found.float(), formula(rows, weight).float(), rtol=rtol, atol=atol)


@torch.inference_mode()
def keeps_shape(module: nn.Module, size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `module` makes one tensor of states [1, R, size] of such states."""
    states = _random(size, dtype, device, seed=0)
    try:
        found = module(states)
    except _REFUSALS:
        return False
    return isinstance(found, torch.Tensor) and found.shape == states.shape and found.dtype is dtype


@contextmanager
def _exchanged(module: nn.Module, forwards: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Other forwards for `module`'s children, by name, for a while."""
    children = {name: getattr(module, name) for name in forwards}
    kept = {name: child.__dict__.get("forward") for name, child in children.items()}
    try:
        for name, child in children.items():
            child.forward = forwards[name]
        yield
    finally:
        for name, child in children.items():
            child.__dict__.pop("forward", None)
            if kept[name] is not None:
                child.forward = kept[name]


def _given(result: torch.Tensor, expected: torch.Tensor) -> Forward:
    """A forward with that result, which takes `expected` only."""

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        if not torch.equal(inputs, expected):
            raise ValueError("the module changes what it hands to its part")
        return result

    return forward


def _unchanged(inputs: torch.Tensor) -> torch.Tensor:
    return inputs


def _random(size: int, dtype: torch.dtype, device: torch.device, *, seed: int, scale: float = 1.0) -> torch.Tensor:
    """[1, R, size]."""
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn((1, _NUM_ROWS, size), generator=generator)).to(device, dtype)
