"""LoRA adapters in peft's own form, and heads that were adapted by one.

A linear layer's weight W becomes W + scale * B A, where scale is alpha / rank, or alpha / sqrt(rank) where the adapter
says so (rsLoRA); patterns of peft may give single layers another rank or alpha. What is read here is merged without
peft. Other kinds of adapters are refused by name.

A head that was adapted (`head.lora_rank`) is saved merged, as any other head, so that every command takes it. Beside it
lies `head_adapter/`: a few MB from which anyone who has the head that it began as, the *base*, makes the same head
again. It holds peft's two files and the adapted head's card, which names the base and has a fingerprint of its weights:

    headstart import runs/NAME/best/head_adapter --base BASE --out HEAD

Shapes: O outputs and I inputs of a linear layer, r the adapter's rank.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from heads.base import DraftHead, TargetWeights
from heads.checkpoint import (
    CARD_FILE,
    HeadCard,
    load_head,
    portable_name,
    present_folder,
    read_card,
    read_json,
    read_tensors,
    save_head,
)
from heads.registry import family_of_head

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
HEAD_ADAPTER_FOLDER = "head_adapter"
LORA = "lora"
"""Where a head's card (its `training` part) says that the head was adapted, and from which base."""

_PREFIX = "base_model.model."  # of peft's names for tensors
_FACTORS = ("lora_A.weight", "lora_B.weight")
_SAID = {"peft_type": "LORA", "bias": "none"}
_SILENT = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "target_modules",
        "task_type",
        "use_rslora",
    }
)
"""Settings of peft that are read here, or do not change what a merged weight is. Any other one that is set does, or
may."""
_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base's own weights as they are; others (pissa, olora, loftq) do not."""

Factors = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""For each adapted layer, by its name in the base model, A [r, I] and B [O, r]."""
Scales = Mapping[str, float]
"""What each layer's product of factors is multiplied by."""


# peft's form


def read_adapter(folder: Path) -> tuple[Factors, Scales]:
    """The factors (A, B) and the scale by layer of an adapter in peft's form; whatever does not fit is refused."""
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / file).is_file():
            raise ValueError(f"{folder} is not an adapter: it has no {file}")
    config = read_json(folder / CONFIG_FILE)
    _refuse_other_kinds(config, folder)
    tensors = read_tensors(folder / WEIGHTS_FILE)
    factors, scales = {}, {}
    for layer in sorted({layer_of(name) for name in tensors}):
        rank, scales[layer] = _rank_and_scale(config, layer)
        pair = [tensors.pop(tensor_name(layer, factor.removesuffix(".weight")), None) for factor in _FACTORS]
        down, up = pair
        fits = all(one is not None and one.ndim == 2 for one in pair)
        if not fits or down is None or up is None or down.shape[0] != rank or up.shape[1] != rank:
            shapes = [None if one is None else list(one.shape) for one in pair]
            raise ValueError(
                f"{folder / WEIGHTS_FILE} has factors of shapes {shapes} for {layer}; expected [{rank}, inputs] and "
                f"[outputs, {rank}]"
            )
        if not all(bool(torch.isfinite(one).all()) for one in (down, up)):
            raise ValueError(f"{folder / WEIGHTS_FILE} holds non-finite values for {layer}")
        factors[layer] = (down, up)
    if not factors:
        raise ValueError(f"{folder / WEIGHTS_FILE} is no LoRA adapter: it holds nothing")
    return factors, scales


def _refuse_other_kinds(config: Mapping[str, Any], folder: Path) -> None:
    odd = {key: value for key, value in config.items() if key not in _SILENT and value and _SAID.get(key) != value}
    if config.get("init_lora_weights") not in _STARTS:
        odd["init_lora_weights"] = config["init_lora_weights"]
    if odd:
        said = ", ".join(f"{key} = {value!r}" for key, value in odd.items())
        raise ValueError(
            f"{folder / CONFIG_FILE} says {said}: only plain LoRA adapters are supported; merge others with peft "
            "(merge_and_unload, save_pretrained) and give the merged model"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise ValueError(f"{folder / CONFIG_FILE} says r = {rank!r} and lora_alpha = {alpha!r}: expected two numbers")


def _rank_and_scale(config: Mapping[str, Any], layer: str) -> tuple[int, float]:
    """Of one layer: by a pattern that its name matches, as peft matches them, else as of all."""
    rank = _by_pattern(config.get("rank_pattern") or {}, layer, config["r"])
    alpha = _by_pattern(config.get("alpha_pattern") or {}, layer, config["lora_alpha"])
    return int(rank), float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _by_pattern(patterns: Mapping[str, Any], layer: str, default: Any) -> Any:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", layer)), default)


def layer_of(name: str) -> str:
    """The layer that a tensor of an adapter file belongs to."""
    for factor in _FACTORS:
        if name.startswith(_PREFIX) and name.endswith(f".{factor}"):
            return name[len(_PREFIX) : -len(factor) - 1]
    raise ValueError(f"the adapter holds {name}, which is no factor of a LoRA adapter")


def tensor_name(layer: str, factor: str) -> str:
    """peft's name for the factor (lora_A or lora_B) of a layer."""
    return f"{_PREFIX}{layer}.{factor}.weight"


def write_adapter(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write peft's form: its config, and its tensors by their names there."""
    folder.mkdir()
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS_FILE)
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


def merged_weight(weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scale: float) -> torch.Tensor:
    """weight [O, I] + scale * up [O, r] @ down [r, I], in the weight's dtype.

    In float64, whose own rounding differs between machines far below what the result can show.
    """
    device = weight.device
    update = up.detach().to(device, torch.float64) @ down.detach().to(device, torch.float64)
    return weight.detach().double().add_(update, alpha=scale).float().to(weight.dtype)


def linear_layer(model: nn.Module, name: str) -> nn.Linear:
    """The linear layer of a model or head that an adapter calls `name`."""
    try:
        layer = model.get_submodule(name)
    except AttributeError:
        raise ValueError(f"the adapter belongs to another kind of model: this one has no layer {name}") from None
    if not isinstance(layer, nn.Linear):
        raise ValueError(f"the adapter changes {name}, which is a {type(layer).__name__}: expected a linear layer")
    return layer


def refuse_other_shape(name: str, weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> None:
    """Refuse factors that are for a weight of another shape."""
    expected, found = [up.shape[0], down.shape[1]], list(weight.shape)
    if found != expected:
        raise ValueError(f"the adapter of {name} is for a weight of shape {expected}, not {found}")


def copy_factors(own: Factors, saved: Factors, *, wanted: str) -> None:
    """Give the factors that are trained the values of saved ones. `wanted`: what says which adapter they must be."""
    problems = sorted(own.keys() ^ saved.keys()) or [
        layer for layer, pair in own.items() if [one.shape for one in pair] != [one.shape for one in saved[layer]]
    ]
    if problems:
        raise ValueError(
            f"the saved adapter is not the one that {wanted}: they differ at {len(problems)} of {len(own)} layers, "
            f"such as {problems[0]}"
        )
    for layer, pair in own.items():
        for mine, given in zip(pair, saved[layer], strict=True):
            mine.copy_(given)


# Adapted heads


@dataclass(frozen=True, kw_only=True)
class HeadBase:
    """The head that an adapted one began as. target, target_fingerprint: the model that it was trained for."""

    name: str
    fingerprint: str
    target: str
    target_fingerprint: str

    @classmethod
    def of(cls, folder: str | Path, head: DraftHead, card: HeadCard) -> HeadBase:
        """head, card: what `folder` holds."""
        run = card.training.get("run")
        return cls(
            name=portable_name(str(run or Path(folder))),
            fingerprint=head_fingerprint(head),
            target=card.target.name,
            target_fingerprint=card.target.fingerprint,
        )

    def check(self, folder: str | Path, head: DraftHead) -> None:
        """Refuse another head than this one."""
        found = head_fingerprint(head)
        if found != self.fingerprint:
            raise ValueError(
                f"the adapter was trained on the head {self.name} of {self.target} ({self.fingerprint}), but {folder} "
                f"has other weights or another draft vocabulary ({found}): give that head as it was"
            )


def head_fingerprint(head: DraftHead) -> str:
    """A hash of a head's family, of all its weights and of its vocabulary map. What its target lends is left out."""
    digest = hashlib.sha256(family_of_head(head).encode())
    weights = [*head.named_parameters(), ("vocabulary", head.vocabulary.target_ids)]
    for name, tensor in weights:
        values = tensor.detach().cpu()
        values = values.float() if values.is_floating_point() else values.long()
        digest.update(json.dumps([name, list(values.shape)]).encode())
        digest.update(values.contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


def adaptable_layers(head: DraftHead) -> Iterator[tuple[str, nn.Linear]]:
    """Every linear layer of a head: all of its weights but those of norms, biases, tables of tokens and learned
    states."""
    for name, module in head.named_modules():
        if isinstance(module, nn.Linear):
            yield name, module


def write_head_adapter(folder: Path, config: Mapping[str, Any], factors: Factors) -> None:
    """Add `head_adapter/` to an adapted head's folder, whose card is there already."""
    tensors: dict[str, torch.Tensor] = {}
    for layer, (down, up) in factors.items():
        tensors |= {tensor_name(layer, "lora_A"): down, tensor_name(layer, "lora_B"): up}
    write_adapter(folder / HEAD_ADAPTER_FOLDER, config, tensors)
    shutil.copyfile(folder / CARD_FILE, folder / HEAD_ADAPTER_FOLDER / CARD_FILE)


def read_head_adapter(folder: str | Path) -> tuple[Factors, Scales, HeadBase]:
    """The adapter in `head_adapter/`, or in an adapted head's folder that holds one."""
    folder = present_folder(Path(folder))
    if (folder / HEAD_ADAPTER_FOLDER).is_dir():
        folder = folder / HEAD_ADAPTER_FOLDER
    if not (folder / CARD_FILE).is_file():
        raise ValueError(
            f"{folder} is not the adapter of a head: it has no {CARD_FILE}. Give the {HEAD_ADAPTER_FOLDER}/ of a head "
            "that was trained with head.lora_rank"
        )
    facts = read_card(folder).training.get(LORA) or {}
    try:
        base = HeadBase(**facts["base"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"the card of {folder} does not say which head its adapter is for: {facts!r:.100}") from error
    factors, scales = read_adapter(folder)
    return factors, scales, base


def merge_head(head: DraftHead, factors: Factors, scales: Scales) -> DraftHead:
    """A copy of `head` with the adapter merged into its weights."""
    merged = copy.deepcopy(head)
    for name, (down, up) in factors.items():
        weight = linear_layer(merged, name).weight
        refuse_other_shape(name, weight, down, up)
        with torch.no_grad():
            weight.copy_(merged_weight(weight, down, up, scales[name]))
    return merged


def apply_head_adapter(adapter: str | Path, base: str | Path, weights: TargetWeights | None) -> DraftHead:
    """The adapted head: the one in `base` with `adapter` merged in, bit for bit as training saved it.

    weights: the adapted head's target's, which heads that keep rows of them need.
    """
    factors, scales, expected = read_head_adapter(adapter)
    head, _ = load_head(base)
    expected.check(base, head)
    head = merge_head(head, factors, scales)
    lent = [name for name, buffer in head.named_buffers() if buffer.is_floating_point()]
    if lent and weights is None:
        raise ValueError(f"the head keeps a copy of its target's {', '.join(lent)}: give the target with --target")
    return head if weights is None else head.bind(weights)


def import_head_adapter(
    adapter: str | Path, base: str | Path, out: str | Path, *, weights: TargetWeights | None = None
) -> HeadCard:
    """Write the adapted head's folder, the adapter within it; returns its card."""
    head = apply_head_adapter(adapter, base, weights)
    factors, _, _ = read_head_adapter(adapter)
    source = present_folder(Path(adapter))
    source = source / HEAD_ADAPTER_FOLDER if (source / HEAD_ADAPTER_FOLDER).is_dir() else source
    card, config = read_card(source), read_json(source / CONFIG_FILE)
    save_head(out, head, card, add_files=lambda folder: write_head_adapter(folder, config, factors))
    return card
