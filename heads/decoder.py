"""The sizes of a head whose one layer is Llama's: what EAGLE's heads have in common in `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from heads.base import HeadConfig, TargetSizes, required
from heads.layers import check_attention_sizes
from heads.rope import read_rope


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(HeadConfig):
    """One decoder layer, its rotary embeddings (`heads.rope`), and what servers want to know besides."""

    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    max_position_embeddings: int = 2048
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_attention_sizes(self)


def decoder_of_target(sizes: TargetSizes) -> dict[str, Any]:
    """Fields of a `DecoderConfig` as wide as the target's layers."""
    return {
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_attention_heads": sizes.num_attention_heads,
        "num_key_value_heads": sizes.num_key_value_heads,
        "head_dim": sizes.head_dim,
        "rms_norm_eps": sizes.rms_norm_eps,
        "rope_theta": sizes.rope_theta,
        "rope_scaling": sizes.rope_scaling,
        "max_position_embeddings": sizes.max_position_embeddings,
        "bos_token_id": sizes.bos_token_id,
        "eos_token_id": sizes.eos_token_id,
    }


def decoder_of_native(native: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a `DecoderConfig` from `config.json`."""
    hidden_size = int(required(native, "hidden_size"))
    num_heads = int(required(native, "num_attention_heads"))
    theta, scaling = read_rope(native)
    return {
        "hidden_size": hidden_size,
        "intermediate_size": int(required(native, "intermediate_size")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(native.get("num_key_value_heads") or num_heads),
        "head_dim": int(native.get("head_dim") or hidden_size // num_heads),
        "vocab_size": int(required(native, "vocab_size")),
        "draft_vocab_size": int(native.get("draft_vocab_size") or required(native, "vocab_size")),
        "rms_norm_eps": float(native.get("rms_norm_eps", 1e-6)),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": int(native.get("max_position_embeddings", 2048)),
        "bos_token_id": native.get("bos_token_id"),
        "eos_token_id": native.get("eos_token_id"),
    }


def decoder_to_native(config: DecoderConfig) -> dict[str, Any]:
    """Keys of `config.json` that all readers of llama-like configurations call alike."""
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else dict(config.rope_scaling),
        "max_position_embeddings": config.max_position_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
    }


PLAIN_LAYERS: Mapping[str, Any] = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
"""What `config.json` may not say otherwise of decoder layers."""
ONE_LAYER: Mapping[str, Any] = {"num_hidden_layers": 1, **PLAIN_LAYERS}
"""The same where there is one."""
