"""Medusa heads: the form of FasterDecoding (which TGI loads), and vLLM's.

Both hold the same network. FasterDecoding's has two layouts under one name, told apart by their tensors: depths with an
LM head each, and depths of residual blocks alone, which use the target's. Its public training code puts one and the
same block into all places of a depth; its files hold that block once a place, so they read like any other. Its
published Vicuna heads say two heads in their configuration and hold five: such files are refused, with a word on what
to mend.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch

from heads.base import DraftHead, TargetSizes, TargetWeights, final_tap
from heads.checkpoint import TargetReference, portable_name
from heads.foreign.common import Config, Format, Tensors, check_copy, check_keys, check_whole_numbers, provenance_of
from heads.medusa import ARCHITECTURE, TOKEN_MAP, MedusaConfig
from heads.vocab import DraftVocabulary

_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(?:weight|bias)")
_LM_HEAD = re.compile(r"(\d+)\.(\d+)\.weight")
_DRAFTED = "draft_vocab_size"
"""Our own key in vLLM's configuration: tokens in the map of a file whose LM heads hold the whole vocabulary."""
_UNNUMBERED = "lm_head"
"""Stands for the number of layers in the names of LM heads, until the head is there to tell it."""


def full_vocabulary(tensors: Tensors, config: Any, target: TargetReference) -> DraftVocabulary:
    """Of forms that do not know reduced ones."""
    return replace(DraftVocabulary.full(target.vocab_size), provenance=provenance_of(target))


def check_full_vocabulary(config: Any, title: str, way_out: str) -> None:
    if config.draft_vocab_size != config.vocab_size:
        raise ValueError(
            f"{title}'s form knows no reduced vocabulary, and this head drafts {config.draft_vocab_size} of "
            f"{config.vocab_size} tokens: {way_out}"
        )


def base_model_note(config: Config, target: TargetReference) -> list[str]:
    """Such a configuration may name its target; another name is worth a look."""
    said = config.get("base_model_name_or_path")
    if not isinstance(said, str) or said.rstrip("/").split("/")[-1].lower() == target.name.split("/")[-1].lower():
        return []
    return [f"the checkpoint says that its target is {portable_name(said)}; it is imported for {target.name}"]


# FasterDecoding


def _detect_reference(config: Config) -> bool:
    return ("medusa_num_heads" in config or "medusa_num_layers" in config) and not _detect_vllm(config)


def _looks_like_reference(tensors: Tensors) -> bool:
    return any(_BLOCK.fullmatch(name) for name in tensors)


def _read_reference(config: Config, target: TargetReference) -> MedusaConfig:
    if config.get("num_hidden_layers") is not None:
        raise ValueError(
            "num_hidden_layers is there: this is a whole model with Medusa heads inside, whose other weights may have "
            "been trained with them (Medusa-2). Expected the heads alone, beside the target they were trained on"
        )
    known = ("medusa_num_heads", "medusa_num_layers", "base_model_name_or_path", "hidden_size", "vocab_size")
    check_keys(config, *known, "version", "decoding_strategy", "model_type")
    check_whole_numbers(config, ("medusa_num_heads", "medusa_num_layers"), ("hidden_size", "vocab_size"))
    vocab_size = config.get("vocab_size") or target.vocab_size
    return MedusaConfig(
        hidden_size=config.get("hidden_size") or target.hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
        taps=(final_tap(target.num_layers),),
        num_heads=config["medusa_num_heads"],
        num_layers=config["medusa_num_layers"],
    )


def _settle_reference(config: MedusaConfig, tensors: Tensors, sizes: TargetSizes | None) -> MedusaConfig:
    """Which of the two layouts it is. More heads or layers than were said are refused."""
    blocks, lm_heads = _numbers(_BLOCK, tensors), _numbers(_LM_HEAD, tensors)
    for name, (head, _) in {**blocks, **lm_heads}.items():
        if head >= config.num_heads:
            raise ValueError(
                f"{name} is of head {head}, counted from 0, but medusa_num_heads is {config.num_heads}: count the "
                "heads in the file, and correct config.json (published heads are known to say 2 where they have 5)"
            )
    for name, (_, layer) in blocks.items():
        if layer >= config.num_layers:
            raise ValueError(
                f"{name} is of layer {layer}, counted from 0, but medusa_num_layers is {config.num_layers}"
            )
    for name, (_, layer) in lm_heads.items():
        if layer != config.num_layers:
            raise ValueError(
                f"{name} is an LM head behind {layer} layers, but medusa_num_layers is {config.num_layers}"
            )
    return replace(config, original_lm_head=not lm_heads)


def _numbers(pattern: re.Pattern[str], tensors: Tensors) -> dict[str, tuple[int, int]]:
    """Head and layer of the names that match."""
    matches = {name: pattern.fullmatch(name) for name in tensors}
    return {name: (int(match[1]), int(match[2])) for name, match in matches.items() if match is not None}


def _spell_reference(name: str) -> str:
    """The number of an LM head's place, which is that of the layers, is put there by `_reference_from_ours`."""
    parts = name.split(".")
    if parts[0] == "blocks":  # blocks.i.layers.j.weight
        return f"{parts[1]}.{parts[3]}.linear.{parts[4]}"
    return f"{parts[1]}.{_UNNUMBERED}.weight" if parts[0] == "lm_heads" else name


def _reference_to_ours(
    tensors: dict[str, torch.Tensor], head: DraftHead, weights: TargetWeights
) -> dict[str, torch.Tensor]:
    """LM heads under the names that `_spell_reference` gives, checked here under those of the file."""
    config = cast(MedusaConfig, head.config)
    if config.original_lm_head:
        return tensors
    shape = [config.draft_vocab_size, config.hidden_size]
    problems, ours = [], dict(tensors)
    for depth in range(config.num_heads):
        name = f"{depth}.{config.num_layers}.weight"
        lm_head = ours.pop(name, None)
        if lm_head is None:
            problems.append(f"missing {name} {shape}")
        elif list(lm_head.shape) != shape:
            problems.append(f"{name} has shape {list(lm_head.shape)}, expected {shape}")
        elif not lm_head.is_floating_point() or not bool(torch.isfinite(lm_head).all()):
            problems.append(f"{name} holds non-finite values, or {lm_head.dtype}")
        else:
            ours[f"{depth}.{_UNNUMBERED}.weight"] = lm_head
    if problems:
        raise ValueError("; ".join(problems))
    return ours


def _reference_from_ours(tensors: dict[str, torch.Tensor], head: DraftHead) -> dict[str, torch.Tensor]:
    config = cast(MedusaConfig, head.config)
    theirs = {}
    for name, tensor in tensors.items():
        if f".{_UNNUMBERED}." not in name:
            theirs[name] = tensor
        elif not config.original_lm_head:
            theirs[name.replace(_UNNUMBERED, str(config.num_layers))] = tensor
    return theirs


def _write_reference(config: MedusaConfig, target: TargetReference) -> dict[str, Any]:
    check_full_vocabulary(config, "FasterDecoding", "export it as vllm-medusa")
    if not config.block_bias:
        raise ValueError("FasterDecoding's blocks have biases, and this head's have none: export it as vllm-medusa")
    written = {
        "base_model_name_or_path": target.name,
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
    }
    return written | ({"version": "2"} if config.original_lm_head else {})


def _reference_notes(config: Config, head: MedusaConfig, target: TargetReference) -> list[str]:
    layout = (
        "its depths are residual blocks alone and use the target's LM head"
        if head.original_lm_head
        else "each of its depths has an LM head of its own"
    )
    notes = [f"of the two Medusa layouts: {layout}"]
    if str(config.get("version")) == "2" and not head.original_lm_head:
        notes.append("config.json says version 2, which usually means the other layout")
    return [*notes, *base_model_note(config, target)]


# vLLM: our own form, but for reduced vocabularies


def _detect_vllm(config: Config) -> bool:
    return ARCHITECTURE in (config.get("architectures") or []) or config.get("model_type") == "medusa"


def _looks_like_vllm(tensors: Tensors) -> bool:
    return any(_bare(name).startswith("blocks.0.layers.") for name in tensors)


def _read_vllm(config: Config, target: TargetReference) -> MedusaConfig:
    sizes = ("hidden_size", "num_heads", "num_hidden_layers", "vocab_size")
    known = (*sizes, "truncated_vocab_size", "medusa_fc_bias", "original_lm_head", "max_paths", "topk", "max_seq_len")
    check_keys(config, *known, _DRAFTED, architectures=[ARCHITECTURE], model_type="medusa", logit_scale=1.0)
    check_whole_numbers(config, sizes, ("truncated_vocab_size", _DRAFTED))
    head = MedusaConfig.from_native(config, num_target_layers=target.num_layers)
    return replace(head, draft_vocab_size=config.get(_DRAFTED) or head.draft_vocab_size)


def _bare(name: str) -> str:
    """vLLM drops this prefix wherever it is."""
    return name.replace("medusa_heads.", "")


def _token_map(tensors: Tensors, config: MedusaConfig) -> torch.Tensor | None:
    """The target's token of each draft token [C], in the file's order; None for a full vocabulary."""
    if config.draft_vocab_size == config.vocab_size:
        return None
    token_map = next((tensor for name, tensor in tensors.items() if _bare(name) == TOKEN_MAP), None)
    if token_map is None:
        raise ValueError(
            f"lacks {TOKEN_MAP}: {config.draft_vocab_size} draft tokens of {config.vocab_size} need their map"
        )
    if token_map.is_floating_point() or token_map.dtype == torch.bool:
        raise ValueError(f"{TOKEN_MAP} has dtype {token_map.dtype}, expected token ids")
    if list(token_map.shape) != [config.draft_vocab_size]:
        raise ValueError(
            f"{TOKEN_MAP} has shape {list(token_map.shape)}, expected [{config.draft_vocab_size}] by config.json"
        )
    return token_map.to(torch.int64)


def _vllm_vocabulary(tensors: Tensors, config: MedusaConfig, target: TargetReference) -> DraftVocabulary:
    """vLLM's map may be in any order; ours ascends, and `_vllm_to_ours` moves the rows of the LM heads alike."""
    token_map = _token_map(tensors, config)
    if token_map is None:
        return full_vocabulary(tensors, config, target)
    try:
        return DraftVocabulary(
            target_ids=token_map.sort().values, vocab_size=config.vocab_size, provenance=provenance_of(target)
        )
    except ValueError as error:
        raise ValueError(f"{TOKEN_MAP}: {error}") from error


def _vllm_to_ours(tensors: dict[str, torch.Tensor], head: DraftHead, weights: TargetWeights) -> dict[str, torch.Tensor]:
    config = cast(MedusaConfig, head.config)
    ours = {_bare(name): tensor for name, tensor in tensors.items()}
    if len(ours) < len(tensors):
        raise ValueError("it holds tensors both with and without the prefix medusa_heads.: expected each once")
    if config.original_lm_head and "lm_head.weight" in ours and "lm_heads.0.weight" not in ours:
        ours["lm_heads.0.weight"] = ours.pop("lm_head.weight")
    token_map = _token_map(tensors, config)
    if token_map is not None:
        order = token_map.argsort()
        for name, tensor in ours.items():
            if name.startswith("lm_heads.") and tensor.ndim == 2 and len(tensor) in (len(order), config.vocab_size):
                # vLLM takes the map's rows of LM heads that have more than it.
                ours[name] = tensor[order] if len(tensor) == len(order) else tensor[token_map[order]]
        ours[TOKEN_MAP] = token_map[order]
    if config.original_lm_head and "lm_heads.0.weight" in ours:
        rows = weights.lm_head[head.target_ids.to(weights.lm_head.device)]
        check_copy(ours["lm_heads.0.weight"], rows, source="lm_heads.0.weight (original_lm_head)")
    return ours


def _vllm_from_ours(tensors: dict[str, torch.Tensor], head: DraftHead) -> dict[str, torch.Tensor]:
    """LM heads of the whole vocabulary in the place of reduced ones, which vLLM (0.32) does not manage to load.

    A token that the head does not draft gets the mean of the rows of those it does, and so the mean of their logits:
    never the largest, which is all that vLLM asks for. The map stays in the file. vLLM passes over it, and reading here
    finds the head as it was.
    """
    token_map = tensors.get(TOKEN_MAP)
    if token_map is None:
        return tensors
    whole = dict(tensors)
    for name, rows in tensors.items():
        if name.startswith("lm_heads."):
            whole[name] = rows.float().mean(dim=0).to(rows.dtype).repeat(head.config.vocab_size, 1)
            whole[name][token_map] = rows
    return whole


def _write_vllm(config: MedusaConfig, target: TargetReference) -> dict[str, Any]:
    if config.draft_vocab_size == config.vocab_size:
        return config.to_native()
    return config.to_native() | {"truncated_vocab_size": config.vocab_size, _DRAFTED: config.draft_vocab_size}


MEDUSA_FORMATS: Mapping[str, Format[MedusaConfig]] = {
    "medusa": Format(
        title="FasterDecoding Medusa",
        family="medusa",
        conventions=(
            "i.j.linear.* are block j of head i, i.L.weight its LM head behind L blocks, or none (the target's LM head "
            "is used, 'version 2'); no reduced vocabulary; the configuration gives medusa_num_heads and "
            "medusa_num_layers, all other sizes are the target's; reads the state after the target's final norm"
        ),
        detect=_detect_reference,
        looks_alike=_looks_like_reference,
        read=_read_reference,
        settle=_settle_reference,
        write=_write_reference,
        vocabulary=full_vocabulary,
        spelling=_spell_reference,
        to_ours=_reference_to_ours,
        from_ours=_reference_from_ours,
        weights_files=("medusa_lm_head.safetensors", "medusa_lm_head.pt"),
        notes=_reference_notes,
    ),
    "vllm-medusa": Format(
        title="vLLM's Medusa",
        family="medusa",
        conventions=(
            "blocks.i.layers.j.*, lm_heads.i.weight (lm_heads.0 alone with original_lm_head); token_map holds target "
            "ids, in any order, if truncated_vocab_size is smaller; medusa_fc_bias is false unless said; reads the "
            "state after the target's final norm. LM heads of a reduced vocabulary are written whole, since vLLM loads "
            "no others"
        ),
        detect=_detect_vllm,
        looks_alike=_looks_like_vllm,
        read=_read_vllm,
        write=_write_vllm,
        vocabulary=_vllm_vocabulary,
        to_ours=_vllm_to_ours,
        from_ours=_vllm_from_ours,
    ),
}
