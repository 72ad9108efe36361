"""EAGLE-3 heads: the forms of SafeAILab, SpecForge, speculators, NVIDIA's Model-Optimizer, and vLLM and SGLang.

All hold the same network, so a conversion keeps every weight and the draft logits. They differ in names, in how they
number the target's layers, and in where their configuration says what. In common they have `fc`, `norm` and `lm_head`
without biases, `d2t` as differences, Llama's rotary embeddings, and the variants of `Eagle3Config` by the same names,
as far as they know them. Relatives that differ elsewhere are told by the keys in `LAYER`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from heads.base import DraftHead, TargetWeights
from heads.checkpoint import TargetReference
from heads.decoder import decoder_to_native
from heads.eagle3 import ARCHITECTURE, NUM_TAPS, VARIANTS, Eagle3Config
from heads.foreign.common import (
    LM_HEAD,
    Config,
    Format,
    Tensors,
    check_architectures,
    check_keys,
    check_positive,
    check_whole_numbers,
    part_of,
    speculators_algorithm,
    speculators_layer,
    verifier_note,
    vocabulary_from_maps,
)
from heads.vocab import DraftVocabulary

TAPS_KEY = "eagle_aux_hidden_state_layer_ids"
RESIDUAL_KEY = "norm_before_residual"
ARCHITECTURES = (ARCHITECTURE, "Eagle3LlamaForCausalLM")
BASE_ARCHITECTURE = "LlamaForCausalLM"
"""What SafeAILab's own files name; they are told from EAGLE's by their draft_vocab_size."""
SPECULATIVE_TOKENS = 5
"""What a speculators checkpoint proposes to its server. A server's own setting overrules it."""

SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
OPTIONAL_SIZES = (
    "num_key_value_heads",
    "head_dim",
    "draft_vocab_size",
    "max_position_embeddings",
    "target_hidden_size",
)
READ = (
    *SIZES,
    *OPTIONAL_SIZES,
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "bos_token_id",
    "eos_token_id",
)
LAYER: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "bias": False,
    "tie_word_embeddings": False,
    "partial_rotary_factor": 1.0,
    "use_sliding_window": False,
    "layer_types": ["full_attention"],
}
_ONE_LAYER: Mapping[str, Any] = {**LAYER, "num_hidden_layers": 1}
_PLAIN: Mapping[str, Any] = {"input_norm": False, RESIDUAL_KEY: False, **dict.fromkeys(VARIANTS, False)}
"""Of forms that know no variants."""


def _build(config: Config, taps: Sequence[int], num_layers: int) -> Eagle3Config:
    """A head's sizes from keys that all forms call alike."""
    check_whole_numbers(config, SIZES, OPTIONAL_SIZES)
    check_positive(config, "rms_norm_eps")
    if max(taps) > num_layers:
        raise ValueError(f"taps are hidden_states {list(taps)}, but the target has {num_layers} layers")
    eos = config.get("eos_token_id")
    native = {key: config[key] for key in (*READ, RESIDUAL_KEY, *VARIANTS) if key in config}
    native |= {"architectures": [ARCHITECTURE], TAPS_KEY: list(taps)}
    native["eos_token_id"] = eos[0] if isinstance(eos, list) and eos else eos
    return Eagle3Config.from_native(native)


def layer_ids(config: Config, key: str = TAPS_KEY) -> list[int] | None:
    ids = config.get(key)
    if ids is None:
        return None
    whole = isinstance(ids, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in ids)
    if not whole or len(ids) != NUM_TAPS:
        raise ValueError(f"{key} is {ids!r:.80}, expected {NUM_TAPS} whole numbers")
    return list(ids)


def reference_taps(num_layers: int) -> tuple[int, int, int]:
    """What is tapped where a form says nothing: the inputs of decoder layers 2, n//2 and n-3, as hidden_states."""
    taps = (2, num_layers // 2, num_layers - 3)
    if not taps[0] < taps[1] < taps[2]:
        raise ValueError(
            f"the checkpoint names no layers, and the target's {num_layers} are too few for the usual three: "
            f"2, n//2 and n-3 would be {list(taps)}, expected ascending numbers"
        )
    return taps


def _refuse_variants(config: Eagle3Config, *known: str, way_out: str) -> None:
    """What a form cannot say of a head."""
    given = [key for key in (RESIDUAL_KEY, *VARIANTS) if getattr(config, key) and key not in known]
    if given:
        raise ValueError(f"this form has no {' and no '.join(given)}, which this head has: export it as {way_out}")


def vocabulary(tensors: Tensors, config: Eagle3Config, target: TargetReference) -> DraftVocabulary:
    return vocabulary_from_maps(tensors, size=config.draft_vocab_size, target=target)


def to_ours(tensors: dict[str, torch.Tensor], head: DraftHead, weights: TargetWeights) -> dict[str, torch.Tensor]:
    """The maps have been read. A full vocabulary's LM head may be left out: then it is the target's, as servers have
    it."""
    ours = {name: tensor for name, tensor in tensors.items() if name not in head.vocabulary_buffers(head.vocabulary)}
    if LM_HEAD not in ours and "norm.weight" in ours and len(head.vocabulary) == head.vocabulary.vocab_size:
        ours[LM_HEAD] = weights.lm_head.to(device="cpu", dtype=ours["norm.weight"].dtype)
    return ours


def without_maps(tensors: dict[str, torch.Tensor], head: DraftHead) -> dict[str, torch.Tensor]:
    """vLLM has no place for a map where the vocabulary is full."""
    if len(head.vocabulary) < head.vocabulary.vocab_size:
        return tensors
    return {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}


def tap_notes(config: Config, head: Eagle3Config, target: TargetReference) -> list[str]:
    notes = []
    for shift, other in ((1, "hidden_states indices"), (-1, "layers counted from 0")):
        usual = (2, target.num_layers // 2, target.num_layers - 3)
        if head.taps == tuple(tap + shift for tap in usual):
            notes.append(
                f"taps are hidden_states {list(head.taps)}, each {'one above' if shift > 0 else 'one below'} the usual "
                f"{list(usual)}: if the file's ids are {other}, it is off by one and the head will accept little"
            )
    return [*notes, *verifier_note(config, target)]


def _looks_alike(tensors: Tensors, layer: str) -> bool:
    """q, k and v read [embedding; state], twice as wide as what o writes."""
    query, output = (tensors.get(f"{layer}.self_attn.{one}_proj.weight") for one in "qo")
    return (
        query is not None
        and output is not None
        and query.ndim == output.ndim == 2
        and query.shape[1] == 2 * output.shape[0]
        and "mask_hidden" not in tensors  # P-EAGLE's
    )


def _is_eagle3(config: Config) -> bool:
    architectures = config.get("architectures") or []
    if drafts_in_parallel(config):
        return False
    if BASE_ARCHITECTURE in architectures:
        return config.get("draft_vocab_size") is not None
    return any(one in ARCHITECTURES for one in architectures)


def drafts_in_parallel(config: Config) -> bool:
    """P-EAGLE's files name EAGLE-3's architecture."""
    said = [config.get(key) for key in ("parallel_drafting", "ptd_token_id", "pard_token")]
    return any(value is not None and value is not False for value in said)


# SafeAILab


def _detect_safeailab(config: Config) -> bool:
    marks = (TAPS_KEY, "eagle_config", *VARIANTS)
    return _is_eagle3(config) and all(config.get(key) is None for key in marks)


def _read_safeailab(config: Config, target: TargetReference) -> Eagle3Config:
    """Its code has one layer, whatever num_hidden_layers says (40 in one published file)."""
    check_architectures(config, *ARCHITECTURES, BASE_ARCHITECTURE)
    check_keys(config, "architectures", "num_hidden_layers", "truncated_vocab_size", *READ, **LAYER, **_PLAIN)
    _check_truncated(config)
    return _build(config, reference_taps(target.num_layers), target.num_layers)


def _check_truncated(config: Config) -> None:
    """Another name of the draft vocabulary's size, found beside it."""
    said = config.get("truncated_vocab_size")
    if said is not None and said != config.get("draft_vocab_size"):
        raise ValueError(f"truncated_vocab_size is {said!r}, but draft_vocab_size {config.get('draft_vocab_size')!r}")


def _write_safeailab(config: Eagle3Config, target: TargetReference) -> dict[str, Any]:
    usual = reference_taps(target.num_layers)
    if config.taps != usual:
        raise ValueError(
            f"SafeAILab's form names no layers and means hidden_states {list(usual)}; this head reads "
            f"{list(config.taps)}: export it as specforge, speculators or vllm"
        )
    _refuse_variants(config, way_out="speculators or vllm")
    return _plain(config)


def _plain(config: Eagle3Config) -> dict[str, Any]:
    return {
        "architectures": [ARCHITECTURE],
        **decoder_to_native(config),
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
    }


# SpecForge

_SPECFORGE_VARIANTS = ("fc_norm", "norm_output")


def _detect_specforge(config: Config) -> bool:
    marks = ("eagle_config", *VARIANTS)
    named = any(config.get(key) is not None for key in marks)
    return _is_eagle3(config) and TAPS_KEY not in config and named and not _detect_modelopt(config)


def _read_specforge(config: Config, target: TargetReference) -> Eagle3Config:
    check_architectures(config, *ARCHITECTURES, BASE_ARCHITECTURE)
    plain = {key: value for key, value in _PLAIN.items() if key not in _SPECFORGE_VARIANTS}
    check_keys(config, "architectures", "eagle_config", *_SPECFORGE_VARIANTS, *READ, **_ONE_LAYER, **plain)
    return _build(config, specforge_taps(config) or reference_taps(target.num_layers), target.num_layers)


def specforge_taps(config: Config, **one_value: Any) -> list[int] | None:
    """Layers are counted from 0 there, and their outputs are meant: hidden_states index i + 1."""
    if config.get("eagle_config") is None:
        return None
    part = part_of(config, "eagle_config")
    check_keys(part, TAPS_KEY, **{"use_aux_hidden_state": True, **one_value})
    layers = layer_ids(part)
    return None if layers is None else [layer + 1 for layer in layers]


def _write_specforge(config: Eagle3Config, target: TargetReference) -> dict[str, Any]:
    _refuse_variants(config, *_SPECFORGE_VARIANTS, way_out="speculators or vllm")
    return {
        **_plain(config),
        **{key: True for key in _SPECFORGE_VARIANTS if getattr(config, key)},
        "eagle_config": {TAPS_KEY: [tap - 1 for tap in config.taps], "use_aux_hidden_state": True},
    }


def _specforge_notes(config: Config, head: Eagle3Config, target: TargetReference) -> list[str]:
    notes = tap_notes(config, head, target)
    if head.norm_output:
        notes.append(
            "norm_output is true, so the normed state is fed back, as servers do it. SpecForge before September 2026 "
            "trained such heads on the raw state: if this one accepts little beyond its first token, set norm_output "
            "to false in its config.json and import it again"
        )
    return notes


# Model-Optimizer

_MODELOPT_MARKS: Mapping[str, Any] = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
"""Keys of its eagle_config that no other form has, and what they must say."""


def _detect_modelopt(config: Config) -> bool:
    part = config.get("eagle_config")
    return (
        _is_eagle3(config)
        and TAPS_KEY not in config
        and isinstance(part, Mapping)
        and not {*part}.isdisjoint(_MODELOPT_MARKS)
    )


def _read_modelopt(config: Config, target: TargetReference) -> Eagle3Config:
    check_architectures(config, *ARCHITECTURES, BASE_ARCHITECTURE)
    check_keys(config, "architectures", "eagle_config", *READ, **_ONE_LAYER, **_PLAIN)
    part = dict(part_of(config, "eagle_config"))
    part.pop("parallel_draft_heads_num_layers", None)  # of heads that are not there
    if not part.get(TAPS_KEY):
        part[TAPS_KEY] = None  # an empty list stands for the default
    taps = specforge_taps({"eagle_config": part}, **_MODELOPT_MARKS)
    return _build(config, taps or reference_taps(target.num_layers), target.num_layers)


def _write_modelopt(config: Eagle3Config, target: TargetReference) -> dict[str, Any]:
    _refuse_variants(config, way_out="speculators or vllm")
    taps = {TAPS_KEY: [tap - 1 for tap in config.taps], "use_aux_hidden_state": True}
    return {**_plain(config), "eagle_config": {**taps, **_MODELOPT_MARKS, "parallel_draft_heads_num_layers": 1}}


def _modelopt_vocabulary(tensors: Tensors, config: Eagle3Config, target: TargetReference) -> DraftVocabulary:
    return vocabulary_from_maps(tensors, size=config.draft_vocab_size, target=target, marks=False)


def _modelopt_from_ours(tensors: dict[str, torch.Tensor], head: DraftHead) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in without_maps(tensors, head).items() if name != "t2d"}


# vLLM and SGLang: our own form


def _detect_vllm(config: Config) -> bool:
    return _is_eagle3(config) and TAPS_KEY in config


def _read_vllm(config: Config, target: TargetReference) -> Eagle3Config:
    check_architectures(config, *ARCHITECTURES, BASE_ARCHITECTURE)
    known = ("architectures", *READ, RESIDUAL_KEY, *VARIANTS, TAPS_KEY, "eagle_config")
    check_keys(config, *known, input_norm=False, **_ONE_LAYER)
    indices, layers_plus_one = layer_ids(config), specforge_taps(config)
    if indices is not None and layers_plus_one is not None and indices != layers_plus_one:
        raise ValueError(
            f"taps are named twice and differently: {TAPS_KEY} {indices} are hidden_states indices, expected those of "
            f"eagle_config + 1, which are {layers_plus_one}"
        )
    return _build(config, indices or layers_plus_one or reference_taps(target.num_layers), target.num_layers)


def _write_vllm(config: Eagle3Config, target: TargetReference) -> dict[str, Any]:
    return config.to_native()


# speculators

OTHER_ALGORITHMS = ("peagle", "dflash", "dspark")
"""speculators' heads that have forms of their own here."""
_SPECULATORS_ARCHITECTURES = ("Eagle3Speculator", "Eagle3DraftModel")


def _detect_speculators(config: Config) -> bool:
    """Unheard-of algorithms of theirs are read as this one, and refused by name."""
    return "speculators_model_type" in config and config["speculators_model_type"] not in OTHER_ALGORITHMS


def _read_speculators(config: Config, target: TargetReference) -> Eagle3Config:
    sizes = speculators_layer(config, "eagle3")
    check_keys(
        config,
        "architectures",
        "speculators_config",
        "transformer_layer_config",
        "draft_vocab_size",
        "target_hidden_size",
        TAPS_KEY,
        RESIDUAL_KEY,
        *VARIANTS,
        speculators_model_type="eagle3",
        input_norm=False,
        embed_requires_grad=False,
        tie_word_embeddings=False,
        model_type="speculator_model",
    )
    check_residual_said(config)
    check_architectures(config, *_SPECULATORS_ARCHITECTURES)
    check_keys(part_of(config, "transformer_layer_config"), "architectures", *READ, **_ONE_LAYER, **_PLAIN)
    sizes |= {key: config[key] for key in (RESIDUAL_KEY, *VARIANTS) if key in config}
    return _build(sizes, layer_ids(config) or reference_taps(target.num_layers), target.num_layers)


def check_residual_said(config: Config) -> None:
    if config.get(RESIDUAL_KEY) is None:
        raise ValueError(
            f"{RESIDUAL_KEY} is missing, and readers of speculators checkpoints disagree on what that means: "
            "expected true or false"
        )


def _write_speculators(config: Eagle3Config, target: TargetReference) -> dict[str, Any]:
    return {
        "architectures": [_SPECULATORS_ARCHITECTURES[0]],
        **speculators_algorithm("eagle3", SPECULATIVE_TOKENS, target),
        "draft_vocab_size": config.draft_vocab_size,
        RESIDUAL_KEY: config.norm_before_residual,
        **{key: True for key in VARIANTS if getattr(config, key)},
        "embed_requires_grad": False,
        TAPS_KEY: list(config.taps),
        "transformer_layer_config": decoder_to_native(config),
    }


def _plain_layer_name(name: str) -> str:
    """`layers.0.*` for our `midlayer.*`."""
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


_MIDLAYER, _LAYERS = (partial(_looks_alike, layer=layer) for layer in ("midlayer", "layers.0"))

EAGLE3_FORMATS: Mapping[str, Format[Eagle3Config]] = {
    "safeailab": Format(
        title="SafeAILab EAGLE-3",
        family="eagle3",
        conventions=(
            "midlayer.*; d2t differences; names no layers and taps the inputs of layers 2, n//2, n-3 (hidden_states of "
            "the same numbers); the residual is the raw state; the embedding is the target's; published files name the "
            "architecture of the target and are known by their draft_vocab_size"
        ),
        detect=_detect_safeailab,
        looks_alike=_MIDLAYER,
        read=_read_safeailab,
        write=_write_safeailab,
        vocabulary=vocabulary,
        to_ours=to_ours,
        notes=tap_notes,
    ),
    "specforge": Format(
        title="SpecForge",
        family="eagle3",
        conventions=(
            "as SafeAILab's, but eagle_config names layers: outputs, counted from 0 (hidden_states index less one), "
            "by default 1, n//2-1, n-4; fc_norm and norm_output may be true; a target_hidden_size of its own is refused"
        ),
        detect=_detect_specforge,
        looks_alike=_MIDLAYER,
        read=_read_specforge,
        write=_write_specforge,
        vocabulary=vocabulary,
        to_ours=to_ours,
        notes=_specforge_notes,
    ),
    "speculators": Format(
        title="speculators (vLLM)",
        family="eagle3",
        conventions=(
            "layers.0.*; d2t differences; the layer's settings are nested; top-level layer ids are hidden_states "
            "indices, by default 2, n//2, n-3; norm_before_residual must be there, and fc_norm, norm_before_fc and "
            "norm_output may be true; may hold a copy of the target's embedding; a full vocabulary has no maps"
        ),
        detect=_detect_speculators,
        looks_alike=_LAYERS,
        read=_read_speculators,
        write=_write_speculators,
        spelling=_plain_layer_name,
        vocabulary=vocabulary,
        to_ours=to_ours,
        from_ours=without_maps,
        may_carry_embedding=True,
        notes=tap_notes,
    ),
    "modelopt": Format(
        title="NVIDIA Model-Optimizer",
        family="eagle3",
        conventions=(
            "layers.0.*; d2t differences and no t2d; eagle_config names layers as SpecForge's and says what is normed; "
            "rope_scaling is often put in at export (yarn); variants and heads without tapped layers are refused; a "
            "full vocabulary has no map"
        ),
        detect=_detect_modelopt,
        looks_alike=_LAYERS,
        read=_read_modelopt,
        write=_write_modelopt,
        spelling=_plain_layer_name,
        vocabulary=_modelopt_vocabulary,
        to_ours=to_ours,
        from_ours=_modelopt_from_ours,
        notes=tap_notes,
    ),
    "vllm": Format(
        title="vLLM and SGLang",
        family="eagle3",
        conventions=(
            "headstart's own files without the card: midlayer.*; d2t differences; taps named as hidden_states indices "
            "(vLLM) and, one less, in eagle_config (SGLang), which must agree; norm_before_residual (which SGLang does "
            "not know), fc_norm, norm_before_fc (vLLM) and norm_output may be true; a full vocabulary has no maps"
        ),
        detect=_detect_vllm,
        looks_alike=_MIDLAYER,
        read=_read_vllm,
        write=_write_vllm,
        vocabulary=vocabulary,
        to_ours=to_ours,
        from_ours=without_maps,
        notes=tap_notes,
    ),
}
