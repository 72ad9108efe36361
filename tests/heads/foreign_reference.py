"""Draft layers in plain torch, by the public descriptions of their files: no cache, no code of headstart's.

Everything works on one sequence as a whole: states [T, H].
"""

from __future__ import annotations

import math
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]


def norm(vectors: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * vectors / (vectors.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def frequencies(layer: Config) -> tuple[torch.Tensor, float]:
    """Turns a position of each pair of features [D/2], and the factor on the rotated vectors.

    linear: positions are divided. llama3 (Llama 3.1's own code): wave lengths beyond `original / low_freq_factor` are
    stretched by the factor, those within `original / high_freq_factor` stay, between them it goes over smoothly in
    original / wave length. yarn (Peng et al. 2023, arXiv 2309.00071): pairs that turn less than beta_slow times over
    the original length are stretched, those that turn more than beta_fast times stay, between them linearly in the
    pair's number; and the logits are scaled by (0.1 ln factor + 1)^2.
    """
    size, scaling = layer["head_dim"], layer.get("rope_scaling") or {}
    base = layer["rope_theta"] if "rope_theta" in layer else layer["rope_parameters"]["rope_theta"]
    plain = torch.tensor([base ** (-2 * pair / size) for pair in range(size // 2)], dtype=torch.float64)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return plain.float(), 1.0
    factor = scaling["factor"]
    if kind == "linear":
        return (plain / factor).float(), 1.0
    original = scaling["original_max_position_embeddings"]
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turned = []
        for turn in plain.tolist():
            per_length = original * turn / (2 * math.pi)  # original / wave length
            if per_length > high:
                turned.append(turn)
            elif per_length < low:
                turned.append(turn / factor)
            else:
                share = (per_length - low) / (high - low)
                turned.append((1 - share) * turn / factor + share * turn)
        return torch.tensor(turned), 1.0
    assert kind == "yarn"

    def pair_that_turns(times: float) -> float:
        return size * math.log(original / (times * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair_that_turns(scaling.get("beta_fast", 32)), pair_that_turns(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    turned = []
    for pair, turn in enumerate(plain.tolist()):
        stretched = min(max((pair - first) / ((last - first) or 0.001), 0.0), 1.0)
        turned.append(stretched * turn / factor + (1 - stretched) * turn)
    return torch.tensor(turned), 0.1 * math.log(factor) + 1


def decoder_layer(
    attention_input: torch.Tensor, residual: torch.Tensor, tensors: Tensors, prefix: str, layer: Config
) -> torch.Tensor:
    """Causal attention on `attention_input`, added to `residual`; then the gated MLP behind its norm."""
    size, count = layer["head_dim"], layer["num_attention_heads"]
    groups = layer.get("num_key_value_heads", count)
    eps, length = layer["rms_norm_eps"], len(residual)
    query, key, value = (
        (attention_input @ tensors[f"{prefix}.self_attn.{one}_proj.weight"].T).view(length, -1, size) for one in "qkv"
    )
    assert (query.shape[1], key.shape[1]) == (count, groups)
    query, key = turned(query, torch.arange(length), layer), turned(key, torch.arange(length), layer)
    mixed = []
    for one in range(count):
        group = one // (count // groups)
        scores = query[:, one] @ key[:, group].T / size**0.5
        scores = scores + torch.full_like(scores, -math.inf).triu(1)
        mixed.append(scores.softmax(-1) @ value[:, group])
    return _with_mlp(residual, mixed, tensors, prefix, eps)


def block_layer(
    block: torch.Tensor, context: torch.Tensor, tensors: Tensors, prefix: str, layer: Config
) -> torch.Tensor:
    """DFlash's: a block [P, H] behind the context [T, H], of which keys and values are made as of the block's own
    normed states; Qwen3's norms of each query and key; the block looks at everything, ahead of itself too."""
    size, count = layer["head_dim"], layer["num_attention_heads"]
    groups, eps = layer["num_key_value_heads"], layer["rms_norm_eps"]
    normed = norm(block, tensors[f"{prefix}.input_layernorm.weight"], eps)
    both = torch.cat([context, normed])
    query, key, value = (
        (read @ tensors[f"{prefix}.self_attn.{one}_proj.weight"].T).view(len(read), -1, size)
        for one, read in (("q", normed), ("k", both), ("v", both))
    )
    positions = torch.arange(len(both))
    query = turned(norm(query, tensors[f"{prefix}.self_attn.q_norm.weight"], eps), positions[len(context) :], layer)
    key = turned(norm(key, tensors[f"{prefix}.self_attn.k_norm.weight"], eps), positions, layer)
    mixed = []
    for one in range(count):
        group = one // (count // groups)
        scores = query[:, one] @ key[:, group].T / size**0.5
        mixed.append(scores.softmax(-1) @ value[:, group])
    return _with_mlp(block, mixed, tensors, prefix, eps)


def turned(vectors: torch.Tensor, positions: torch.Tensor, layer: Config) -> torch.Tensor:
    """[T, heads, D]: the first half and the second are the real and imaginary parts of D/2 complex numbers."""
    size = layer["head_dim"]
    turns, amplitude = frequencies(layer)
    angles = positions[:, None] * turns
    complex_ = torch.complex(vectors[..., : size // 2], vectors[..., size // 2 :])
    complex_ = complex_ * torch.polar(torch.full_like(angles, amplitude), angles)[:, None]
    return torch.cat([complex_.real, complex_.imag], dim=-1)


def _with_mlp(
    residual: torch.Tensor, mixed: list[torch.Tensor], tensors: Tensors, prefix: str, eps: float
) -> torch.Tensor:
    states = residual + torch.cat(mixed, dim=-1) @ tensors[f"{prefix}.self_attn.o_proj.weight"].T
    normed = norm(states, tensors[f"{prefix}.post_attention_layernorm.weight"], eps)
    gate, up, down = (tensors[f"{prefix}.mlp.{one}_proj.weight"] for one in ("gate", "up", "down"))
    return states + (torch.nn.functional.silu(normed @ gate.T) * (normed @ up.T)) @ down.T
