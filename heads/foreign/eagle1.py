"""EAGLE and EAGLE-2 heads: the forms of SafeAILab (HASS's too), vLLM and SGLang.

All hold the same tensors, `fc` and `layers.0.*`; the LM head and the embedding are the target's, and a file may have
copies of them. They differ in the architecture that the configuration names, and in what becomes of the bias of `fc`:
SafeAILab's code follows the key `bias` (true where it is missing), vLLM has none, and SGLang always has one, which it
leaves random where the file lacks it. No form knows a reduced draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from heads.base import DraftHead, TargetSizes, TargetWeights
from heads.checkpoint import TargetReference
from heads.decoder import decoder_to_native
from heads.eagle1 import ARCHITECTURE, Eagle1Config
from heads.foreign.common import (
    EMBEDDING,
    LM_HEAD,
    Config,
    Format,
    Tensors,
    check_architectures,
    check_keys,
    check_positive,
    check_whole_numbers,
    full_vocabulary,
)
from heads.vocab import DraftVocabulary

BASE_ARCHITECTURE = "LlamaForCausalLM"
SGLANG_ARCHITECTURE = "LlamaForCausalLMEagle"
BIAS = "fc.bias"

_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings")
_READ = (
    *_SIZES,
    *_OPTIONAL_SIZES,
    "architectures",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",  # the embedding and the LM head are the target's own, tied or not
)
_ONE_VALUE: Mapping[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "qkv_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "use_sliding_window": False,
    "layer_types": ["full_attention"],
}


def _build(config: Config, target: TargetReference, *, bias: bool) -> Eagle1Config:
    check_whole_numbers(config, _SIZES, _OPTIONAL_SIZES)
    check_positive(config, "rms_norm_eps")
    eos = config.get("eos_token_id")
    native = {key: value for key, value in config.items() if key not in ("architectures", "draft_vocab_size")}
    native |= {"architectures": [ARCHITECTURE], "bias": bias}
    native["eos_token_id"] = eos[0] if isinstance(eos, list) and eos else eos
    return Eagle1Config.from_native(native, num_target_layers=target.num_layers)


def _refuse_reduced(config: Eagle1Config) -> None:
    if config.draft_vocab_size != config.vocab_size:
        raise ValueError(
            f"this form drafts with the target's whole LM head, and this head was made for {config.draft_vocab_size} "
            f"of {config.vocab_size} tokens: train one with head.draft_vocab_size=null"
        )


def _vocabulary(tensors: Tensors, config: Eagle1Config, target: TargetReference) -> DraftVocabulary:
    return full_vocabulary(target)


def _looks_alike(tensors: Tensors) -> bool:
    """`fc` reads [embedding; state], and the layer what `fc` writes, without a norm between."""
    fusion, query = tensors.get("fc.weight"), tensors.get("layers.0.self_attn.q_proj.weight")
    if fusion is None or query is None or not fusion.ndim == query.ndim == 2:
        return False
    alike = fusion.shape[1] == 2 * fusion.shape[0] and query.shape[1] == fusion.shape[0]
    return alike and "layers.0.input_layernorm.weight" not in tensors


def _names(config: Config, architecture: str) -> bool:
    return config.get("architectures") == [architecture]


# SafeAILab


_MODEL_TYPES = ("llama", "mixtral")
"""Its code makes a Llama layer of either."""


def _detect_safeailab(config: Config) -> bool:
    """EAGLE-3's files by the same authors have a draft_vocab_size."""
    one_layer = config.get("num_hidden_layers") == 1 and config.get("draft_vocab_size") is None
    return _names(config, BASE_ARCHITECTURE) and one_layer


def _read_safeailab(config: Config, target: TargetReference) -> Eagle1Config:
    check_architectures(config, BASE_ARCHITECTURE)
    check_keys(config, *_READ, "bias", "model_type", **_ONE_VALUE)
    if config.get("model_type") not in (*_MODEL_TYPES, None):
        raise ValueError(f"model_type is {config['model_type']!r:.80}, expected {' or '.join(_MODEL_TYPES)}")
    bias = config.get("bias")
    if not isinstance(bias, bool | None):
        raise ValueError(f"bias is {bias!r:.80}, expected true or false")
    return _build(config, target, bias=bias is not False)


def _write_safeailab(config: Eagle1Config, target: TargetReference) -> dict[str, Any]:
    _refuse_reduced(config)
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        raise ValueError(
            f"SafeAILab's code divides hidden size {config.hidden_size} among {config.num_attention_heads} heads, and "
            f"this head's are {config.head_dim} wide: export it as vllm-eagle1 or sglang-eagle1"
        )
    native = _plain(config, BASE_ARCHITECTURE) | {"bias": config.bias}
    if config.rope_scaling is not None:
        if config.rope_scaling["rope_type"] != "linear":
            raise ValueError(
                f"SafeAILab's code has no rotary embeddings of type {config.rope_scaling['rope_type']!r}: export it as "
                "vllm-eagle1 or sglang-eagle1"
            )
        native["rope_scaling"] = {"type": "linear", "factor": config.rope_scaling["factor"]}
    return native


def _plain(config: Eagle1Config, architecture: str) -> dict[str, Any]:
    return {"architectures": [architecture], **decoder_to_native(config), "tie_word_embeddings": False}


# vLLM


def _detect_vllm(config: Config) -> bool:
    return _names(config, ARCHITECTURE)


def _read_vllm(config: Config, target: TargetReference) -> Eagle1Config:
    check_architectures(config, ARCHITECTURE)
    own = ("draft_vocab_size", "feature_loss", "feature_noise")
    check_keys(config, *_READ, *own, model_type="llama", bias=False, **_ONE_VALUE)
    said = config.get("draft_vocab_size")
    if said is not None and said != config.get("vocab_size"):
        raise ValueError(f"draft_vocab_size is {said!r}, but vLLM drafts with all {config.get('vocab_size')!r} tokens")
    return _build(config, target, bias=False)


def _write_vllm(config: Eagle1Config, target: TargetReference) -> dict[str, Any]:
    _refuse_reduced(config)
    if config.bias:
        raise ValueError(
            "vLLM has no bias in fc, and this head has one: export it as safeailab-eagle1 or sglang-eagle1"
        )
    return config.to_native()


# SGLang


def _detect_sglang(config: Config) -> bool:
    return _names(config, SGLANG_ARCHITECTURE)


def _read_sglang(config: Config, target: TargetReference) -> Eagle1Config:
    check_architectures(config, SGLANG_ARCHITECTURE)
    check_keys(config, *_READ, model_type="llama", bias=False, **_ONE_VALUE)
    return _build(config, target, bias=True)


def _settle_bias(config: Eagle1Config, tensors: Tensors, sizes: TargetSizes | None) -> Eagle1Config:
    """SGLang's files need a bias. One of zeros is none."""
    bias = tensors.get(BIAS)
    return replace(config, bias=bias is not None and bool(bias.any()))


def _without_zeros(
    tensors: dict[str, torch.Tensor], head: DraftHead, weights: TargetWeights
) -> dict[str, torch.Tensor]:
    assert isinstance(head.config, Eagle1Config)
    if head.config.bias or BIAS not in tensors:
        return tensors
    bias = tensors[BIAS]
    if list(bias.shape) != [head.config.hidden_size]:
        raise ValueError(f"{BIAS} has shape {list(bias.shape)}, expected [{head.config.hidden_size}]")
    return {name: tensor for name, tensor in tensors.items() if name != BIAS}


def _with_zeros(tensors: dict[str, torch.Tensor], head: DraftHead) -> dict[str, torch.Tensor]:
    if BIAS not in tensors:
        weight = tensors["fc.weight"]
        return {**tensors, BIAS: weight.new_zeros(weight.shape[0])}
    if not tensors[BIAS].any():
        raise ValueError(f"{BIAS} of this head is zero throughout, which this form has for heads without one")
    return tensors


def _write_sglang(config: Eagle1Config, target: TargetReference) -> dict[str, Any]:
    _refuse_reduced(config)
    return _plain(config, SGLANG_ARCHITECTURE)


_COPIES = {EMBEDDING: "embedding", LM_HEAD: "lm_head"}

EAGLE1_FORMATS: Mapping[str, Format[Eagle1Config]] = {
    "safeailab-eagle1": Format(
        title="SafeAILab EAGLE and EAGLE-2, and HASS",
        family="eagle1",
        conventions=(
            "fc, layers.0.*; reads the target's state after its final norm; no input norm, no norm and no LM head of "
            "its own; fc has a bias unless the configuration says bias: false; may hold copies of the target's "
            "embedding and LM head; the full vocabulary"
        ),
        detect=_detect_safeailab,
        looks_alike=_looks_alike,
        read=_read_safeailab,
        write=_write_safeailab,
        vocabulary=_vocabulary,
        copies=_COPIES,
        may_carry_embedding=True,
    ),
    "vllm-eagle1": Format(
        title="vLLM EAGLE",
        family="eagle1",
        conventions=(
            "headstart's own files without the card, where the vocabulary is full and fc has no bias: fc, layers.0.*, "
            "as SafeAILab's, by an architecture of vLLM's"
        ),
        detect=_detect_vllm,
        looks_alike=_looks_alike,
        read=_read_vllm,
        write=_write_vllm,
        vocabulary=_vocabulary,
        copies=_COPIES,
    ),
    "sglang-eagle1": Format(
        title="SGLang EAGLE",
        family="eagle1",
        conventions=(
            "fc, layers.0.*, as SafeAILab's, by an architecture of SGLang's; fc.bias is always there, of zeros for "
            "heads without one, since SGLang would leave it random"
        ),
        detect=_detect_sglang,
        looks_alike=_looks_alike,
        read=_read_sglang,
        write=_write_sglang,
        settle=_settle_bias,
        vocabulary=_vocabulary,
        to_ours=_without_zeros,
        from_ours=_with_zeros,
        copies=_COPIES,
    ),
}
