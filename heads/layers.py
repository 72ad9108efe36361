"""Building blocks of draft heads, as Llama has them. Attention itself is the caller's (`Attend`): it differs between
training and decoding, and nothing else does.

Shapes: ... any leading dimensions, H hidden, D head dimension, Hq query heads, Hkv key-value heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import nn
from torch.nn import functional

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(query [..., Hq, D], key [..., Hkv, D], value [..., Hkv, D]), rotated, not scaled -> [..., Hq, D]."""

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, each [..., 1, D]."""

Product = Callable[[torch.Tensor], torch.Tensor]
"""The product with one weight, or with several that read the same inputs, whose results stand side by side."""

Block = Callable[[torch.Tensor, torch.Tensor, Rotary, Attend], torch.Tensor]
"""(what attention reads, residual, rotary, attend) -> states: a layer's attention and MLP, each around a residual."""

RANDOM_SHARE = 0.3
"""What is left of random values in tensors that are filled from the target in part."""


class RMSNorm(nn.Module):
    """Llama's: the mean square in float32, the weight applied in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        wide = states.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(states.dtype) * normed.to(states.dtype)


class GatedMLP(nn.Module):
    """Llama's SiLU-gated MLP, [..., H] -> [..., H].

    side_by_side: the product with all of `siblings`, where decoding has made one (`infer.packing`).
    """

    siblings = ("gate_proj", "up_proj")
    side_by_side: Product | None = None

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if self.side_by_side is None:
            gate, up = self.gate_proj(states), self.up_proj(states)
        else:
            gate, up = self.side_by_side(states).chunk(2, dim=-1)
        return cast(torch.Tensor, self.down_proj(functional.silu(gate) * up))


class AttentionSizes(Protocol):
    """What a head's config says of its attention layer."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_attention_heads(self) -> int: ...

    @property
    def num_key_value_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


def check_attention_sizes(sizes: AttentionSizes) -> None:
    """ValueError for heads that cannot be shared, or whose halves cannot turn. All may be 0 where there is no layer."""
    if sizes.num_key_value_heads and sizes.num_attention_heads % sizes.num_key_value_heads:
        raise ValueError(
            f"{sizes.num_attention_heads} query heads cannot share {sizes.num_key_value_heads} key-value heads evenly"
        )
    if sizes.head_dim % 2:
        raise ValueError(f"rotary embeddings need an even head dimension, got {sizes.head_dim}")


class Attention(nn.Module):
    """Projections around the caller's attention, [..., input size] -> [..., H]. side_by_side: as in `GatedMLP`."""

    siblings = ("q_proj", "k_proj", "v_proj")
    side_by_side: Product | None = None

    def __init__(self, sizes: AttentionSizes, *, input_size: int) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        self.num_query_heads, self.num_key_heads = sizes.num_attention_heads, sizes.num_key_value_heads
        query_size, key_size = (n * sizes.head_dim for n in (self.num_query_heads, self.num_key_heads))
        self.q_proj = nn.Linear(input_size, query_size, bias=False)
        self.k_proj = nn.Linear(input_size, key_size, bias=False)
        self.v_proj = nn.Linear(input_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, sizes.hidden_size, bias=False)

    def forward(
        self, inputs: torch.Tensor, rotary: Rotary, attend: Attend, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """With `rows` (indices into the first dimension), only those attend; all give keys and values."""
        if self.side_by_side is not None and rows is None:
            return self._attend_side_by_side(self.side_by_side(inputs), rotary, attend)
        key = self.k_proj(inputs).unflatten(-1, (-1, self.head_dim))  # [..., Hkv, D]
        value = self.v_proj(inputs).unflatten(-1, (-1, self.head_dim))  # [..., Hkv, D]
        key = rotate(key, rotary)
        if rows is not None:
            inputs, rotary = inputs[rows], (rotary[0][rows], rotary[1][rows])
        query = self.q_proj(inputs).unflatten(-1, (-1, self.head_dim))  # [..., Hq, D]
        attended = attend(rotate(query, rotary), key, value)
        return cast(torch.Tensor, self.o_proj(attended.flatten(-2).to(inputs.dtype)))

    def _attend_side_by_side(self, projected: torch.Tensor, rotary: Rotary, attend: Attend) -> torch.Tensor:
        """The same from all three projections [..., (Hq + 2 Hkv) * D]."""
        num_query_heads, num_key_heads = self.num_query_heads, self.num_key_heads
        heads = projected.unflatten(-1, (-1, self.head_dim))
        turned, value = heads.split([num_query_heads + num_key_heads, num_key_heads], dim=-2)
        query, key = rotate(turned, rotary).split([num_query_heads, num_key_heads], dim=-2)
        return cast(torch.Tensor, self.o_proj(attend(query, key, value).flatten(-2).to(projected.dtype)))


class RotaryTable:
    """Cosines and sines of positions.

    Not a module: `to(bfloat16)` would round its frequencies, and angles at position 1,000 would be off by a radian.
    """

    amplitude = 1.0
    """A factor on all cosines and sines."""

    def __init__(self, head_dim: int, theta: float) -> None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        self._inverse_frequencies = (theta**-exponents).float()
        self._on_device: dict[torch.device, torch.Tensor] = {}
        self._known: dict[torch.dtype, Rotary] = {}

    def __call__(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotary:
        """Of positions [...], each [..., 1, D]. On a CPU they are looked up, once computed."""
        if positions.device.type != "cpu" or not positions.numel():
            return self.compute(positions, dtype)
        while True:
            cosines, sines = self._known.get(dtype) or self._extend(dtype)
            try:
                return cosines[positions], sines[positions]
            except IndexError:  # later positions than were ever asked for; to look for the last would be a sync
                self._extend(dtype)

    def _extend(self, dtype: torch.dtype) -> Rotary:
        """Compute twice as many positions as are known."""
        num_known = len(self._known[dtype][0]) if dtype in self._known else 0
        with torch.inference_mode(mode=False):  # for training takes them too
            self._known[dtype] = self.compute(torch.arange(max(256, 2 * num_known)), dtype)
        return self._known[dtype]

    def compute(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotary:
        """The same, anew."""
        angles = positions.float()[..., None] * self.frequencies(positions.device)  # [..., D/2]
        angles = torch.cat([angles, angles], dim=-1)[..., None, :]  # [..., 1, D]
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def frequencies(self, device: torch.device) -> torch.Tensor:
        """Radians a position [D/2] float32, copied to a device once: a copy from the host cannot be in a CUDA graph."""
        if device not in self._on_device:
            with torch.inference_mode(mode=False):
                self._on_device[device] = self._inverse_frequencies.float().to(device)
        return self._on_device[device]


def rotate(vectors: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Llama's rotary embedding (halves, not pairs): vectors [..., heads, D]."""
    cos, sin = (table.to(vectors.dtype) for table in rotary)
    first, second = vectors.chunk(2, dim=-1)
    return vectors * cos + torch.cat([-second, first], dim=-1) * sin


def fill(module: nn.Module, weight: torch.Tensor | None, columns: slice = slice(None)) -> list[torch.Tensor]:
    """Fill a module's weight (or some of its columns, scaling down the others) where the shapes agree; returns what was
    filled."""
    own = cast(torch.Tensor, module.weight)
    if weight is None or own[..., columns].shape != weight.shape:
        return []
    with torch.no_grad():
        if own.ndim > 1 and own.shape != weight.shape:
            own.mul_(RANDOM_SHARE)
        own[..., columns] = weight.to(own)
    return [own]


def norm_scale(norm: nn.Module | None) -> torch.Tensor | None:
    """What a target's RMSNorm multiplies by [H], however it stores that (Gemma's weight is one less); None for other
    norms."""
    weight = getattr(norm, "weight", None)
    if norm is None or not isinstance(weight, torch.Tensor) or getattr(norm, "bias", None) is not None:
        return None
    with torch.no_grad():
        return cast(torch.Tensor, norm(torch.ones_like(weight)[None])[0])
