"""Hydra heads, and Hydra++ heads with the prefix layer: the forms of the public code.

The configuration gives counts and the kind of network; all sizes are the target's. In the file of a Hydra++ head, each
layer's number is odd (dropout sits between them), and the prefix layer, made as a whole Llama, holds an embedding that
it never reads. One block is in all places of a depth after the first, once a place, so the file reads like any other.
The prefix layer turns by the base 10,000 whatever its target has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from heads.base import DraftHead, TargetSizes, TargetWeights
from heads.checkpoint import TargetReference
from heads.foreign.common import Config, Format, Tensors, check_keys, check_positive, check_whole_numbers
from heads.foreign.medusa import base_model_note, check_full_vocabulary, full_vocabulary
from heads.hydra import LAYER_SIZES, PLAIN, PREFIX, ROPE_THETA, HydraConfig, is_prefix_arch, tap_of_offset

_LAYER = "prefix_embeding_layer.layers.0."
_UNREAD_EMBEDDING = "prefix_embeding_layer.embed_tokens.weight"
_FREQUENCIES = f"{_LAYER}self_attn.rotary_emb.inv_freq"


def _detects(arch: str) -> Callable[[Config], bool]:
    def detect(config: Config) -> bool:
        return "hydra_num_heads" in config and (config.get("hydra_head_arch") == PREFIX) == (arch == PREFIX)

    return detect


def _looks_plain(tensors: Tensors) -> bool:
    return any(name.startswith("hydra_mlp.") for name in tensors) and not _looks_prefixed(tensors)


def _looks_prefixed(tensors: Tensors) -> bool:
    return any(name.startswith(_LAYER) for name in tensors)


def _reads(arch: str) -> Callable[[Config, TargetReference], HydraConfig]:
    def read(config: Config, target: TargetReference) -> HydraConfig:
        counts = ("hydra_num_heads", "hydra_num_layers")
        sizes = ("hidden_size", "vocab_size", *(name for name in LAYER_SIZES if name != "rms_norm_eps"))
        check_keys(
            config,
            *counts,
            *sizes,
            "rms_norm_eps",
            "hidden_state_offset",
            "base_model_name_or_path",
            hydra_head_arch=arch,
            grounded_heads=True,
        )
        is_prefix_arch(config)
        check_whole_numbers(config, counts, sizes)
        check_positive(config, "rms_norm_eps")
        offset = config.get("hidden_state_offset") or 0
        if isinstance(offset, bool) or not isinstance(offset, int):
            raise ValueError(f"hidden_state_offset is {offset!r:.80}, expected a whole number")
        vocab_size = config.get("vocab_size") or target.vocab_size
        layer = {name: config.get(name) or 0 for name in LAYER_SIZES} if arch == PREFIX else {}
        return HydraConfig(
            hidden_size=config.get("hidden_size") or target.hidden_size,
            vocab_size=vocab_size,
            draft_vocab_size=vocab_size,
            taps=(tap_of_offset(offset, target.num_layers),),
            num_heads=config["hydra_num_heads"],
            num_layers=config["hydra_num_layers"],
            hidden_state_offset=offset,
            prefix_layer=arch == PREFIX,
            **layer,
        )

    return read


def _settle_prefix(config: HydraConfig, tensors: Tensors, sizes: TargetSizes | None) -> HydraConfig:
    """The layer's sizes that the configuration leaves to the target, as Hydra's code does with all of them."""
    if sizes is not None and sizes.rope_scaling is not None:
        raise ValueError(
            f"the target's rotary embeddings are scaled ({json.dumps(sizes.rope_scaling):.80}), and Hydra's code "
            "scales those of the prefix layer alike: only unscaled ones are supported"
        )
    missing = [name for name in LAYER_SIZES if not getattr(config, name)]
    if missing and sizes is None:
        raise ValueError(f"config.json does not say the prefix layer's {', '.join(missing)}, nor is the target at hand")
    return replace(config, **{name: getattr(sizes, name) for name in missing})


def _writes(arch: str) -> Callable[[HydraConfig, TargetReference], dict[str, Any]]:
    def write(config: HydraConfig, target: TargetReference) -> dict[str, Any]:
        if config.prefix_layer != (arch == PREFIX):
            has, form = ("has a", "hydra-prefix") if config.prefix_layer else ("has no", "hydra")
            raise ValueError(f"this Hydra head {has} prefix layer: export it as {form}")
        check_full_vocabulary(config, "Hydra", "there is no other form for it")
        written: dict[str, Any] = {
            "base_model_name_or_path": target.name,
            "grounded_heads": True,
            "hidden_state_offset": config.hidden_state_offset,
            "hydra_head_arch": arch,
            "hydra_num_heads": config.num_heads,
            "hydra_num_layers": config.num_layers,
        }
        return written | (_layer_sizes(config) if config.prefix_layer else {})

    return write


def _layer_sizes(config: HydraConfig) -> dict[str, Any]:
    """Written beside Hydra's own keys, so that the file can be read without its target. Hydra's code ignores them."""
    if config.rope_theta != ROPE_THETA:
        raise ValueError(
            f"Hydra's code turns by the base {ROPE_THETA:g} alone, this head's prefix layer by {config.rope_theta:g}"
        )
    if config.num_attention_heads * config.head_dim != config.hidden_size:
        raise ValueError(
            f"Hydra's attention is as wide as its states ({config.hidden_size}), and this head's is "
            f"{config.num_attention_heads} x {config.head_dim}"
        )
    return {name: getattr(config, name) for name in LAYER_SIZES}


def _spell_prefixed(name: str) -> str:
    """Dropout takes every even place."""
    parts = name.split(".")
    if parts[0] == "hydra_mlp":
        parts[2] = str(2 * int(parts[2]) + 1)
    if parts[0] == "hydra_lm_head":
        parts.insert(2, "1")
    return ".".join(parts)


def _to_ours(tensors: dict[str, torch.Tensor], head: DraftHead, weights: TargetWeights) -> dict[str, torch.Tensor]:
    maps = [name for name in ("d2t", "t2d") if name in tensors]
    if maps:
        raise ValueError(f"unknown {', '.join(maps)}: Hydra's form knows no reduced vocabulary")
    return tensors


def _prefixed_to_ours(
    tensors: dict[str, torch.Tensor], head: DraftHead, weights: TargetWeights
) -> dict[str, torch.Tensor]:
    ours = _to_ours(dict(tensors), head, weights)
    config = head.config
    unread = ours.pop(_UNREAD_EMBEDDING, None)
    if unread is not None and list(unread.shape) != [config.vocab_size, config.hidden_size]:
        expected = [config.vocab_size, config.hidden_size]
        raise ValueError(f"{_UNREAD_EMBEDDING} has shape {list(unread.shape)}, expected {expected}")
    frequencies = ours.pop(_FREQUENCIES, None)
    if frequencies is not None:
        _check_frequencies(frequencies, config)
    return ours


def _check_frequencies(given: torch.Tensor, config: Any) -> None:
    """They tell what no other tensor does: the head dimension and the base. bfloat16 has three digits."""
    half = config.head_dim // 2
    if list(given.shape) != [half]:
        raise ValueError(
            f"{_FREQUENCIES} has shape {list(given.shape)}, expected [{half}], half of the head dimension: "
            "num_attention_heads is another"
        )
    expected = ROPE_THETA ** (-torch.arange(half) / half)
    if not torch.allclose(given.float(), expected, rtol=0.01, atol=0):
        raise ValueError(f"{_FREQUENCIES} are not those of the base {ROPE_THETA:g}, which the form always has")


def _from_ours(tensors: dict[str, torch.Tensor], head: DraftHead) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}


def _notes(config: Config, head: HydraConfig, target: TargetReference) -> list[str]:
    return base_model_note(config, target)


_FILES = ("hydra_lm_head.safetensors", "hydra_lm_head.pt")

HYDRA_FORMATS: Mapping[str, Format[HydraConfig]] = {
    "hydra": Format(
        title="Hydra",
        family="hydra",
        conventions=(
            "hydra_mlp.i.j.*, hydra_mlp.i.0.res_connection.*, hydra_lm_head.i.*, all with biases; no reduced "
            "vocabulary; grounded_heads must be true; hidden_state_offset 0 is the state after the target's final "
            "norm, k the output of the k-th layer before the last; all sizes are the target's"
        ),
        detect=_detects(PLAIN),
        looks_alike=_looks_plain,
        read=_reads(PLAIN),
        write=_writes(PLAIN),
        vocabulary=full_vocabulary,
        to_ours=_to_ours,
        from_ours=_from_ours,
        weights_files=_FILES,
        notes=_notes,
    ),
    "hydra-prefix": Format(
        title="Hydra++",
        family="hydra",
        conventions=(
            "as Hydra's, but layer j is hydra_mlp.i.(2j+1), the LM head hydra_lm_head.i.1, and prefix_embeding_layer "
            "is a Llama of one layer, whose embedding is never read and whose rotary embeddings have the base 10,000"
        ),
        detect=_detects(PREFIX),
        looks_alike=_looks_prefixed,
        read=_reads(PREFIX),
        settle=_settle_prefix,
        write=_writes(PREFIX),
        vocabulary=full_vocabulary,
        spelling=_spell_prefixed,
        to_ours=_prefixed_to_ours,
        from_ours=_from_ours,
        weights_files=_FILES,
        notes=_notes,
    ),
}
