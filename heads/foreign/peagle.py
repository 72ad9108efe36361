"""P-EAGLE heads: the forms of speculators, and of vLLM's parallel drafting (Amazon's published heads).

Both hold an EAGLE-3 head of several layers (`layers.i.*`) and `mask_hidden`, the state that stands at places of tokens
not drafted yet. Where an embedding is in the file it was trained with the head or is a copy of the target's: a copy is
dropped. Neither form knows a correction by the token before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from heads.base import DraftHead, TargetSizes, TargetWeights
from heads.checkpoint import TargetReference
from heads.decoder import decoder_to_native
from heads.eagle3 import ARCHITECTURE as EAGLE3_ARCHITECTURE
from heads.eagle3 import NUM_TAPS
from heads.foreign.common import (
    EMBEDDING,
    Config,
    Format,
    Tensors,
    check_architectures,
    check_full_attention,
    check_keys,
    check_positive,
    check_token_id,
    check_whole_numbers,
    part_of,
    speculators_algorithm,
    speculators_layer,
)
from heads.foreign.eagle3 import (
    ARCHITECTURES,
    BASE_ARCHITECTURE,
    LAYER,
    OPTIONAL_SIZES,
    READ,
    RESIDUAL_KEY,
    SIZES,
    TAPS_KEY,
    check_residual_said,
    drafts_in_parallel,
    layer_ids,
    reference_taps,
    specforge_taps,
    tap_notes,
    to_ours,
    vocabulary,
    without_maps,
)
from heads.peagle import ARCHITECTURE, FUSION, PEagleConfig

NUM_DEPTHS = 8
"""Where a file does not say how many tokens it was trained to draft: the paper's number. Places are causal, so one more
or less changes nothing of those before it."""
MASK_KEYS = ("ptd_token_id", "pard_token", "mask_token_id")
"""What vLLM's files call the token that stands at places."""

_MANY_LAYERS: Mapping[str, Any] = {key: value for key, value in LAYER.items() if key != "layer_types"}
_OF_LAYERS = ("num_hidden_layers", "layer_types", "sliding_window")
_VARIANTS = (RESIDUAL_KEY, *FUSION)
_VLLM_ARCHITECTURES = (*ARCHITECTURES, "PeagleLlamaForCausalLM", "PEagleDraftModel")
_SPECULATORS_ARCHITECTURES = ("PEagleDraftModel", "PEagleSpeculator")


def _build(config: Config, taps: Sequence[int], target: TargetReference, *, mask: int, depths: int) -> PEagleConfig:
    """A head's sizes from keys that both forms call alike."""
    check_whole_numbers(config, (*SIZES, "num_hidden_layers"), OPTIONAL_SIZES)
    check_positive(config, "rms_norm_eps")
    check_full_attention(config)
    said = config.get("target_hidden_size")
    if said is not None and said != config["hidden_size"]:
        raise ValueError(f"target_hidden_size is {said}, only that of the head ({config['hidden_size']}) is supported")
    if max(taps) > target.num_layers:
        raise ValueError(f"taps are hidden_states {list(taps)}, but the target has {target.num_layers} layers")
    eos = config.get("eos_token_id")
    native = {key: config[key] for key in (*READ, *_VARIANTS, "num_hidden_layers") if key in config}
    native |= {"architectures": [ARCHITECTURE], TAPS_KEY: list(taps), "mask_token_id": mask, "num_depths": depths}
    native["eos_token_id"] = eos[0] if isinstance(eos, list) and eos else eos
    return PEagleConfig.from_native(native)


def _settle(config: PEagleConfig, tensors: Tensors, sizes: TargetSizes | None) -> PEagleConfig:
    """Copies of the target's embedding have been dropped."""
    return replace(config, own_embedding=EMBEDDING in tensors)


def _to_ours(tensors: dict[str, torch.Tensor], head: DraftHead, weights: TargetWeights) -> dict[str, torch.Tensor]:
    """`mask_hidden` is a vector, in any number of dimensions. vLLM takes EAGLE-3's name of the first layer too."""
    ours = {}
    for name, tensor in to_ours(tensors, head, weights).items():
        plain = name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name
        if plain in ours:
            raise ValueError(f"it holds {plain} under the name of midlayer too: expected each tensor once")
        ours[plain] = tensor
    mask, width = ours.get("mask_hidden"), NUM_TAPS * head.config.hidden_size
    if mask is not None and mask.numel() == width == mask.shape[-1]:
        ours["mask_hidden"] = mask.reshape(1, 1, width)
    return ours


def _refuse_correction(config: PEagleConfig) -> None:
    if config.markov_rank:
        raise ValueError(
            f"this form has no correction by the token before, which this head has (markov_rank {config.markov_rank}): "
            "train one with head.markov_rank=0"
        )


def _looks_alike(tensors: Tensors) -> bool:
    return "mask_hidden" in tensors


def _layer(config: PEagleConfig) -> dict[str, Any]:
    return decoder_to_native(config) | {"num_hidden_layers": config.num_layers}


# speculators


def _detect_speculators(config: Config) -> bool:
    return config.get("speculators_model_type") == "peagle"


def _read_speculators(config: Config, target: TargetReference) -> PEagleConfig:
    sizes = speculators_layer(config, "peagle")
    check_keys(
        config,
        "architectures",
        "speculators_config",
        "transformer_layer_config",
        "draft_vocab_size",
        "target_hidden_size",
        "mask_token_id",
        "embed_requires_grad",  # whether the embedding was trained is seen by the tensors
        TAPS_KEY,
        *_VARIANTS,
        speculators_model_type="peagle",
        norm_output=False,
        input_norm=False,
        tie_word_embeddings=False,
        model_type="speculator_model",
    )
    check_architectures(config, *_SPECULATORS_ARCHITECTURES)
    check_token_id(config, "mask_token_id")
    check_residual_said(config)
    plain = dict.fromkeys((*_VARIANTS, "norm_output", "input_norm"), False)
    layer = part_of(config, "transformer_layer_config")
    check_keys(layer, "architectures", *_OF_LAYERS, *READ, **_MANY_LAYERS, **plain)
    sizes |= {key: config[key] for key in _VARIANTS if key in config}
    taps = layer_ids(config) or reference_taps(target.num_layers)
    depths = proposed_tokens(config) or NUM_DEPTHS
    return _build(sizes, taps, target, mask=config["mask_token_id"], depths=depths)


def proposed_tokens(config: Config) -> int | None:
    """How many tokens a speculators checkpoint proposes, where it says so."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods")
    if not methods:
        return None
    if not isinstance(methods, list) or not all(isinstance(one, Mapping) for one in methods):
        raise ValueError(f"proposal_methods are {methods!r:.80}, expected a list of mappings")
    check_whole_numbers(methods[0], (), ("speculative_tokens",))
    tokens: int | None = methods[0].get("speculative_tokens")
    return tokens


def _write_speculators(config: PEagleConfig, target: TargetReference) -> dict[str, Any]:
    _refuse_correction(config)
    return {
        "architectures": [_SPECULATORS_ARCHITECTURES[0]],
        **speculators_algorithm("peagle", config.num_depths, target),
        "draft_vocab_size": config.draft_vocab_size,
        **{key: getattr(config, key) for key in _VARIANTS},
        "norm_output": False,
        "embed_requires_grad": config.own_embedding,
        "mask_token_id": config.mask_token_id,
        TAPS_KEY: list(config.taps),
        "transformer_layer_config": _layer(config),
    }


# vLLM


def _detect_vllm(config: Config) -> bool:
    architectures = config.get("architectures") or []
    known = any(one in _VLLM_ARCHITECTURES for one in architectures)
    known |= BASE_ARCHITECTURE in architectures and config.get("draft_vocab_size") is not None
    return known and "speculators_model_type" not in config and drafts_in_parallel(config)


def _read_vllm(config: Config, target: TargetReference) -> PEagleConfig:
    check_architectures(config, *_VLLM_ARCHITECTURES, BASE_ARCHITECTURE)
    known = ("architectures", *READ, *_OF_LAYERS, *_VARIANTS, *MASK_KEYS, TAPS_KEY, "eagle_config", "num_depths")
    check_keys(config, *known, parallel_drafting=True, norm_output=False, input_norm=False, **_MANY_LAYERS)
    check_whole_numbers(config, (), ("num_depths",))
    masks = {key: config[key] for key in MASK_KEYS if config.get(key) is not None}
    if not masks:
        raise ValueError(f"it names no token for the places of a draft: expected {' or '.join(MASK_KEYS)}")
    check_token_id(config, *masks)
    if len({*masks.values()}) > 1:
        raise ValueError(f"the token of the places is named twice and differently: {masks}")
    indices, layers_plus_one = layer_ids(config), specforge_taps(config)
    if indices is not None and layers_plus_one is not None and indices != layers_plus_one:
        raise ValueError(
            f"taps are named twice and differently: {TAPS_KEY} {indices} are hidden_states indices, expected those of "
            f"eagle_config + 1, which are {layers_plus_one}"
        )
    taps = indices or layers_plus_one or reference_taps(target.num_layers)
    depths = config.get("num_depths") or NUM_DEPTHS
    return _build(config, taps, target, mask=next(iter(masks.values())), depths=depths)


def _write_vllm(config: PEagleConfig, target: TargetReference) -> dict[str, Any]:
    _refuse_correction(config)
    return {
        "architectures": [EAGLE3_ARCHITECTURE],
        **_layer(config),
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        RESIDUAL_KEY: config.norm_before_residual,
        **{key: True for key in FUSION if getattr(config, key)},
        TAPS_KEY: list(config.taps),
        "parallel_drafting": True,
        "ptd_token_id": config.mask_token_id,
        "num_depths": config.num_depths,
    }


def _notes(config: Config, head: PEagleConfig, target: TargetReference, *, said: bool) -> list[str]:
    notes = tap_notes(config, head, target)
    if not said:
        notes.append(
            f"the file does not say how many tokens it drafts: {NUM_DEPTHS} were taken. Any number is possible (set it "
            "in config.json before the import); those beyond what it was trained for are hardly ever right"
        )
    return notes


def _speculators_notes(config: Config, head: PEagleConfig, target: TargetReference) -> list[str]:
    notes = _notes(config, head, target, said=proposed_tokens(config) is not None)
    if config.get("embed_requires_grad") and not head.own_embedding:
        notes.append("embed_requires_grad is true, but the embedding is the target's or not in the file")
    return notes


def _vllm_notes(config: Config, head: PEagleConfig, target: TargetReference) -> list[str]:
    return _notes(config, head, target, said=config.get("num_depths") is not None)


_form = partial(
    Format[PEagleConfig],
    family="peagle",
    looks_alike=_looks_alike,
    settle=_settle,
    vocabulary=vocabulary,
    to_ours=_to_ours,
    from_ours=without_maps,
    copies={},
    own_or_copies={EMBEDDING: "embedding"},
    unread=("verifier_lm_head.", "verifier_norm."),
)

PEAGLE_FORMATS: Mapping[str, Format[PEagleConfig]] = {
    "speculators-peagle": _form(
        title="speculators' P-EAGLE",
        conventions=(
            "layers.i.* and mask_hidden; d2t differences; the layers' settings are nested; layer ids are hidden_states "
            "indices, by default 2, n//2, n-3; the tokens of a draft are the speculative_tokens of its proposal; the "
            "embedding is its own or the target's; norm_before_residual must be there, fc_norm and norm_before_fc may "
            "be true; a full vocabulary has no maps"
        ),
        detect=_detect_speculators,
        read=_read_speculators,
        write=_write_speculators,
        may_carry_embedding=True,
        notes=_speculators_notes,
    ),
    "vllm-peagle": _form(
        title="vLLM's parallel drafting",
        conventions=(
            "layers.i.* (the first may be called midlayer.*) and mask_hidden; EAGLE-3's architecture and settings, "
            "told from it by ptd_token_id, pard_token or parallel_drafting; top-level layer ids are hidden_states "
            f"indices; num_depths says how many tokens it drafts ({NUM_DEPTHS} where it is missing)"
        ),
        detect=_detect_vllm,
        read=_read_vllm,
        write=_write_vllm,
        may_carry_embedding=True,
        notes=_vllm_notes,
    ),
}
