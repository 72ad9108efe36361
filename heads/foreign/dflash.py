"""DFlash and DSpark heads: the forms of z-lab, speculators and DeepSpec.

All hold one network (`fc`, `hidden_norm`, `layers.i.*` with Qwen3's norms of queries and keys, `norm`) and draft with
the target's embedding and LM head, of which a file may have copies. They differ in where the configuration says what,
in how they number the target's layers, and in whether the block's first place guesses a token (`sample_from_anchor`).

DSpark's correction by the token before, `markov_head`, is a table with a row for each token. A head that projects the
target's embeddings instead is written as that table. DSpark's `confidence_head` guesses how far a draft will be
accepted, and does not touch it: it is left out. Sliding windows are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from heads.base import DraftHead, HeadConfig, TargetWeights
from heads.checkpoint import TargetReference
from heads.decoder import decoder_to_native
from heads.dflash import ARCHITECTURE, DFlashConfig, DFlashHead
from heads.foreign.common import (
    DRAFT_LM_HEAD,
    EMBEDDING,
    LM_HEAD,
    Config,
    Format,
    Tensors,
    check_architectures,
    check_full_attention,
    check_keys,
    check_positive,
    check_token_id,
    check_whole_numbers,
    full_vocabulary,
    part_of,
    speculators_algorithm,
    speculators_layer,
    verifier_note,
    vocabulary_from_maps,
)
from heads.vocab import DraftVocabulary

_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "num_hidden_layers")
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings", "draft_vocab_size")
_READ = (
    *_SIZES,
    *_OPTIONAL_SIZES,
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "bos_token_id",
    "eos_token_id",
    "layer_types",
    "target_hidden_size",
    "sliding_window",  # of layers that have one
    "tie_word_embeddings",  # the embedding and the LM head are the target's own, tied or not
)
_ONE_VALUE: Mapping[str, Any] = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "use_sliding_window": False,
    "is_causal": False,
    "is_neox_style": True,
}
_SPELLINGS = {
    "markov.table.": "markov_head.markov_w1.",
    "markov.output.": "markov_head.markov_w2.",
    "markov.gate.": "markov_head.gate_proj.",
}
_MARKOV_TYPES = {"vanilla": False, "gated": True}
"""DSpark's corrections that a head here can have, and whether they have a gate."""
_ROWS = 4096
"""Rows of a table that are computed at a time."""


def _build(config: Config, taps: Sequence[int], target: TargetReference, **of_block: Any) -> DFlashConfig:
    """A head's sizes from keys that all forms call alike."""
    check_whole_numbers(config, _SIZES, _OPTIONAL_SIZES)
    check_positive(config, "rms_norm_eps")
    check_full_attention(config)
    said = config.get("target_hidden_size")
    if said is not None and said != config["hidden_size"]:
        raise ValueError(f"target_hidden_size is {said}, only that of the head ({config['hidden_size']}) is supported")
    if max(taps) > target.num_layers:
        raise ValueError(f"taps are hidden_states {list(taps)}, but the target has {target.num_layers} layers")
    eos = config.get("eos_token_id")
    native = {key: config[key] for key in _READ if key in config and key != "tie_word_embeddings"}
    native |= {"architectures": [ARCHITECTURE], "aux_hidden_state_layer_ids": list(taps), **of_block}
    native["eos_token_id"] = eos[0] if isinstance(eos, list) and eos else eos
    return DFlashConfig.from_native(native)


def _depths(block_size: int, *, from_anchor: bool) -> int:
    """Tokens of a block: its first place guesses one or not."""
    if block_size < (1 if from_anchor else 2):
        raise ValueError(f"block_size is {block_size}: no place of such a block guesses a token")
    return block_size if from_anchor else block_size - 1


def _layer_ids(config: Config, key: str) -> list[int]:
    ids = config.get(key)
    whole = isinstance(ids, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in ids)
    if not whole or not ids:
        raise ValueError(f"{key} is {ids!r:.80}, expected whole numbers")
    return list(ids)


def _taps_of_outputs(layers: Sequence[int], target: TargetReference) -> list[int]:
    """Layers are counted from 0, and their outputs are meant: hidden_states index i + 1."""
    if max(layers) + 1 >= target.num_layers:
        raise ValueError(
            f"target_layer_ids {list(layers)} name the last of the target's {target.num_layers} layers or more: of the "
            "last one some readers take the state before the final norm, and some behind it. Expected lower layers"
        )
    return [layer + 1 for layer in layers]


def _layers_of_taps(config: DFlashConfig, target: TargetReference, way_out: str) -> list[int]:
    """The inverse."""
    if config.taps[-1] >= target.num_layers:
        raise ValueError(
            f"this head reads the output of the target's last layer (hidden_states {config.taps[-1]}), which readers "
            f"of this form take in two ways: export it as {way_out}"
        )
    return [tap - 1 for tap in config.taps]


def _check_target_layers(config: Config, target: TargetReference) -> None:
    said = config.get("num_target_layers")
    if said is not None and said != target.num_layers:
        raise ValueError(f"num_target_layers is {said!r:.80}, but {target.name} has {target.num_layers} layers")


def _vocabulary(tensors: Tensors, config: DFlashConfig, target: TargetReference) -> DraftVocabulary:
    return vocabulary_from_maps(tensors, size=config.draft_vocab_size, target=target)


def _full_vocabulary(tensors: Tensors, config: DFlashConfig, target: TargetReference) -> DraftVocabulary:
    return full_vocabulary(target)


def _to_ours(tensors: dict[str, torch.Tensor], head: DraftHead, weights: TargetWeights) -> dict[str, torch.Tensor]:
    """The maps have been read."""
    return {name: tensor for name, tensor in tensors.items() if name not in head.vocabulary_buffers(head.vocabulary)}


def _without_full_maps(tensors: dict[str, torch.Tensor], head: DraftHead) -> dict[str, torch.Tensor]:
    """No form has a map of a full vocabulary."""
    if len(head.vocabulary) < head.vocabulary.vocab_size:
        return tensors
    return {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}


def _refuse(config: DFlashConfig, form: str, *, correction: bool, reduced: bool, anchor: bool, way_out: str) -> None:
    """What a form cannot say of a head (`correction`, `reduced`, `anchor`: it cannot)."""
    has = []
    if correction and config.markov_rank:
        has.append(f"a correction by the token before (markov_rank {config.markov_rank})")
    if reduced and config.draft_vocab_size != config.vocab_size:
        has.append(f"a reduced vocabulary ({config.draft_vocab_size} of {config.vocab_size} tokens)")
    if anchor and config.sample_from_anchor:
        has.append("a first place that guesses a token (sample_from_anchor)")
    if has:
        raise ValueError(f"{form}'s form has no {' and no '.join(has)}, and this head has: {way_out}")


def _layer(config: DFlashConfig) -> dict[str, Any]:
    return decoder_to_native(config) | {
        "model_type": "qwen3",
        "num_hidden_layers": config.num_layers,
        "layer_types": ["full_attention"] * config.num_layers,
        "use_sliding_window": False,
        "sliding_window": None,
    }


# z-lab


def _detect_zlab(config: Config) -> bool:
    return "DFlashDraftModel" in (config.get("architectures") or []) and "speculators_model_type" not in config


def usual_layers(num_target_layers: int, num_layers: int) -> list[int]:
    """What z-lab's form taps where it names none: as many layers as the head has, evenly from 1 to n-3, from 0."""
    if num_layers == 1:
        return [num_target_layers // 2]
    last = num_target_layers - 3
    return [round(1 + number * (last - 1) / (num_layers - 1)) for number in range(num_layers)]


def _read_zlab(config: Config, target: TargetReference) -> DFlashConfig:
    check_architectures(config, "DFlashDraftModel")
    known = ("architectures", "block_size", "dflash_config", "num_target_layers", *_READ)
    check_keys(config, *known, **_ONE_VALUE)
    part = part_of(config, "dflash_config")
    of_part = ("mask_token_id", "target_layer_ids", "block_size")
    check_keys(part, *of_part, causal=False, use_swa=False, attention_sink_bias=False, use_aux_hidden_state=True)
    check_token_id(part, "mask_token_id")
    _check_target_layers(config, target)
    said = [one["block_size"] for one in (config, part) if one.get("block_size") is not None]
    if len({*map(str, said)}) > 1:
        raise ValueError(f"block_size is {said[0]!r}, but {said[1]!r} in dflash_config")
    check_whole_numbers({"block_size": said[0] if said else None}, ("block_size",))
    check_whole_numbers(config, ("num_hidden_layers",))
    named = part.get("target_layer_ids") is not None
    layers = (
        _layer_ids(part, "target_layer_ids") if named else usual_layers(target.num_layers, config["num_hidden_layers"])
    )
    return _build(
        config,
        _taps_of_outputs(layers, target),
        target,
        mask_token_id=part["mask_token_id"],
        num_depths=_depths(said[0], from_anchor=False),
    )


def _write_zlab(config: DFlashConfig, target: TargetReference) -> dict[str, Any]:
    way_out = "speculators-dspark" if config.markov_rank else "speculators-dflash"
    _refuse(config, "z-lab", correction=True, reduced=True, anchor=True, way_out=f"export it as {way_out}")
    return {
        "architectures": ["DFlashDraftModel"],
        **_layer(config),
        "block_size": config.block_size,
        "num_target_layers": target.num_layers,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": _layers_of_taps(config, target, "speculators-dflash"),
        },
    }


# DSpark's corrections


def _read_markov(config: Config) -> dict[str, Any]:
    rank = config.get("markov_rank")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise ValueError(f"markov_rank is {rank!r:.80}, expected a whole number from 0")
    if rank == 0:
        return {"markov_rank": 0}
    kind = config.get("markov_head_type")
    if kind not in _MARKOV_TYPES:
        why = ": rnn carries a state from each token to the next, which is not computed here" if kind == "rnn" else ""
        raise ValueError(f"markov_head_type is {kind!r:.80}, expected {' or '.join(_MARKOV_TYPES)}{why}")
    return {"markov_rank": rank, "markov_table": True, "markov_gate": _MARKOV_TYPES[kind]}


def _write_markov(config: DFlashConfig) -> dict[str, Any]:
    written: dict[str, Any] = {"markov_rank": config.markov_rank}
    if config.markov_rank:
        written["markov_head_type"] = "gated" if config.markov_gate else "vanilla"
    return written | {"enable_confidence_head": False, "confidence_head_with_markov": False}


def with_table(
    head: DraftHead, tensors: dict[str, torch.Tensor], weights: TargetWeights | None
) -> tuple[HeadConfig, dict[str, torch.Tensor]]:
    """A head whose correction projects the target's embeddings, with a table of what it makes of each token instead."""
    config = cast(DFlashConfig, head.config)
    if not config.markov_rank or config.markov_table:
        return config, tensors
    assert weights is not None, "the form has written_copies"
    projection = tensors["markov.project.weight"]
    on_cpu = TargetWeights(embedding=weights.embedding.cpu(), lm_head=weights.lm_head.cpu())
    bound = cast(DFlashHead, head.bind(on_cpu))
    with torch.no_grad():
        rows = torch.arange(config.vocab_size).split(_ROWS)
        table = torch.cat([bound.markov.read(bound, one, torch.float32) for one in rows])
    restated = {name: tensor for name, tensor in tensors.items() if name != "markov.project.weight"}
    restated["markov.table.weight"] = table.to(projection.dtype)
    return replace(config, markov_table=True), restated


def _spelling(name: str) -> str:
    for ours, theirs in _SPELLINGS.items():
        if name.startswith(ours):
            return name.replace(ours, theirs, 1)
    return name


# speculators

_OF_SPARK = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
_SPECULATORS_ARCHITECTURES: Mapping[str, tuple[str, str]] = {
    "dflash": ("DFlashDraftModel", "DFlashSpeculator"),
    "dspark": ("DSparkDraftModel", "DSparkSpeculator"),
}


def _detect_speculators(config: Config, algorithm: str) -> bool:
    return config.get("speculators_model_type") == algorithm


def _read_speculators(config: Config, target: TargetReference, algorithm: str) -> DFlashConfig:
    sizes = speculators_layer(config, algorithm)
    check_keys(
        config,
        "architectures",
        "speculators_config",
        "transformer_layer_config",
        "draft_vocab_size",
        "target_hidden_size",
        "block_size",
        "mask_token_id",
        "aux_hidden_state_layer_ids",
        "sample_from_anchor",
        "sliding_window_non_causal",  # of layers that have a window
        "max_anchors",  # of training
        *(_OF_SPARK if algorithm == "dspark" else ()),
        speculators_model_type=algorithm,
        tie_word_embeddings=False,
        model_type="speculator_model",
    )
    check_architectures(config, *_SPECULATORS_ARCHITECTURES[algorithm])
    check_keys(part_of(config, "transformer_layer_config"), "architectures", *_READ, **_ONE_VALUE)
    check_whole_numbers(config, ("block_size",))
    check_token_id(config, "mask_token_id")
    from_anchor = config.get("sample_from_anchor")
    if from_anchor is None and algorithm == "dspark":
        raise ValueError(
            "sample_from_anchor is missing, and readers of DSpark heads disagree on what that means: expected true or "
            "false"
        )
    if not isinstance(from_anchor, bool | None):
        raise ValueError(f"sample_from_anchor is {from_anchor!r:.80}, expected true or false")
    return _build(
        sizes,
        _layer_ids(config, "aux_hidden_state_layer_ids"),
        target,
        mask_token_id=config["mask_token_id"],
        num_depths=_depths(config["block_size"], from_anchor=bool(from_anchor)),
        sample_from_anchor=bool(from_anchor),
        **(_read_markov(config) if algorithm == "dspark" else {}),
    )


def _write_speculators(config: DFlashConfig, target: TargetReference, algorithm: str) -> dict[str, Any]:
    if algorithm == "dflash":
        way_out = "export it as speculators-dspark, or train one with head.markov_rank=0"
        _refuse(config, "DFlash", correction=True, reduced=False, anchor=False, way_out=way_out)
    elif not config.markov_rank:
        raise ValueError(
            "a DSpark head has a correction by the token before, and this one has not: export it as dflash or "
            "speculators-dflash"
        )
    return {
        "architectures": [_SPECULATORS_ARCHITECTURES[algorithm][0]],
        **speculators_algorithm(algorithm, config.num_depths, target),
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": list(config.taps),
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": False,
        **(_write_markov(config) if algorithm == "dspark" else {}),
        "transformer_layer_config": _layer(config),
    }


# DeepSpec


def _detect_deepspec(config: Config) -> bool:
    return "Qwen3DSparkModel" in (config.get("architectures") or []) and "speculators_model_type" not in config


def _read_deepspec(config: Config, target: TargetReference) -> DFlashConfig:
    check_architectures(config, "Qwen3DSparkModel")
    check_keys(
        config,
        "architectures",
        "block_size",
        "mask_token_id",
        "target_layer_ids",
        "num_target_layers",
        "num_anchors",  # of training
        *_OF_SPARK,
        *_READ,
        **_ONE_VALUE,
    )
    check_whole_numbers(config, ("block_size",))
    check_token_id(config, "mask_token_id")
    _check_target_layers(config, target)
    return _build(
        config,
        _taps_of_outputs(_layer_ids(config, "target_layer_ids"), target),
        target,
        mask_token_id=config["mask_token_id"],
        num_depths=_depths(config["block_size"], from_anchor=True),
        sample_from_anchor=True,
        **_read_markov(config),
    )


def _write_deepspec(config: DFlashConfig, target: TargetReference) -> dict[str, Any]:
    way_out = "speculators-dspark" if config.markov_rank else "speculators-dflash"
    _refuse(config, "DeepSpec", correction=False, reduced=True, anchor=False, way_out=f"export it as {way_out}")
    if not config.sample_from_anchor:
        raise ValueError(
            "the first place of a DeepSpec block guesses a token, and this head's does not (sample_from_anchor is "
            f"false): export it as {way_out}"
        )
    return {
        "architectures": ["Qwen3DSparkModel"],
        **_layer(config),
        "tie_word_embeddings": False,
        "block_size": config.block_size,
        "num_target_layers": target.num_layers,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": _layers_of_taps(config, target, way_out),
        "num_anchors": 512,
        **_write_markov(config),
    }


def _looks_alike(tensors: Tensors, *, markov: bool | None) -> bool:
    """markov: whether the tensors of a correction must be there (None: they may)."""
    known = "hidden_norm.weight" in tensors and "layers.0.self_attn.q_norm.weight" in tensors
    return known and markov in (None, "markov_head.markov_w1.weight" in tensors)


def _speculators_notes(config: Config, head: DFlashConfig, target: TargetReference) -> list[str]:
    return verifier_note(config, target)


_COPIES = {EMBEDDING: "embedding", LM_HEAD: DRAFT_LM_HEAD}
_form = partial(
    Format[DFlashConfig],
    family="dflash",
    to_ours=_to_ours,
    from_ours=_without_full_maps,
    copies=_COPIES,
    refused_files=("mask_embedding.pt",),
)
_speculators_form = partial(
    _form,
    vocabulary=_vocabulary,
    written_copies=_COPIES,
    notes=_speculators_notes,
    restate=with_table,
    spelling=_spelling,
)
_UNREAD = ("verifier_lm_head.", "verifier_norm.")
_CONFIDENCE = "confidence_head."

DFLASH_FORMATS: Mapping[str, Format[DFlashConfig]] = {
    "dflash": _form(
        title="z-lab's DFlash",
        conventions=(
            "fc, hidden_norm, layers.i.* and norm; the embedding and the LM head are the target's, whole; "
            "dflash_config names layers: outputs, counted from 0 (hidden_states index less one), by default evenly "
            "from 1 to n-3; the first of block_size places guesses nothing. vLLM and SGLang read it"
        ),
        detect=_detect_zlab,
        looks_alike=partial(_looks_alike, markov=False),
        read=_read_zlab,
        write=_write_zlab,
        vocabulary=_full_vocabulary,
    ),
    "speculators-dflash": _speculators_form(
        title="speculators' DFlash",
        conventions=(
            "fc, hidden_norm, layers.i.* and norm, with copies of the target's embedding and of its LM head's rows; "
            "d2t differences; the layers' settings are nested; aux_hidden_state_layer_ids are hidden_states indices; "
            "the first of block_size places guesses nothing unless sample_from_anchor is true; a full vocabulary has "
            "no maps"
        ),
        detect=partial(_detect_speculators, algorithm="dflash"),
        looks_alike=partial(_looks_alike, markov=False),
        read=partial(_read_speculators, algorithm="dflash"),
        write=partial(_write_speculators, algorithm="dflash"),
        unread=_UNREAD,
    ),
    "speculators-dspark": _speculators_form(
        title="speculators' DSpark",
        conventions=(
            "fc, hidden_norm, layers.i.* and norm as speculators' DFlash, and the correction by the token before: the "
            "table markov_head.markov_w1, the matrix markov_w2 and, where markov_head_type is gated, gate_proj on "
            "[normed state; row of the table]; the confidence head is left out. vLLM reads vanilla ones"
        ),
        detect=partial(_detect_speculators, algorithm="dspark"),
        looks_alike=partial(_looks_alike, markov=True),
        read=partial(_read_speculators, algorithm="dspark"),
        write=partial(_write_speculators, algorithm="dspark"),
        unread=(*_UNREAD, _CONFIDENCE),
    ),
    "deepspec": _form(
        title="DeepSpec's DSpark and DFlash",
        conventions=(
            "fc, hidden_norm, layers.i.* and norm, with copies of the target's embedding and LM head; the correction "
            "as speculators' DSpark, or none (markov_rank 0); target_layer_ids are outputs, counted from 0 "
            "(hidden_states index less one); every place of a block guesses a token; no reduced vocabulary"
        ),
        detect=_detect_deepspec,
        looks_alike=partial(_looks_alike, markov=None),
        read=_read_deepspec,
        write=_write_deepspec,
        vocabulary=_full_vocabulary,
        restate=with_table,
        spelling=_spelling,
        written_copies=_COPIES,
        unread=(_CONFIDENCE,),
    ),
}
