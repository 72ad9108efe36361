"""A target that was trained along with its head: the base model with a LoRA adapter merged into its weights.

The head's folder holds the adapter in `adapter/`, in peft's own form. It is read and merged here without peft, whenever
the head's target is loaded. **The adapted target is the one that is served**: plain decoding, verification and every
figure are its, and lossless means with respect to it, not to the base model.

A merged weight is W + (alpha / rank) B A in the dtype in which the two were trained, of a W in that dtype, computed in
float64. Another dtype casts it. So all dtypes, devices and machines have the same target, and its fingerprint can be
checked.

Shapes: O outputs and I inputs of a linear layer, r the adapter's rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from heads.checkpoint import HeadCard, present_folder, read_card, read_json, read_tensors, staged_folder
from infer.fingerprint import fingerprint_of

ADAPTER_FOLDER = "adapter"
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
BACKBONE, BASE_FINGERPRINT, DTYPE = "backbone", "base_fingerprint", "dtype"
"""Where a head's card (its `training` part) says that the target was adapted, from which base, and in which dtype."""
ADAPTED = "with the head's adapter"

_PREFIX = "base_model.model."  # of peft's names for tensors
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_FACTORS = ("lora_A.weight", "lora_B.weight")
_SAID = {"peft_type": "LORA", "bias": "none"}
_SILENT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "init_lora_weights",
        "lora_alpha",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "r",
        "revision",
        "target_modules",
        "task_type",
    }
)
"""Settings of peft that do not change what a merged weight is. Any other one that is set does, or may."""


Factors = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""For each adapted layer, by its name in the base model, A [r, I] and B [O, r]."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Adapter:
    """A LoRA adapter. scale: alpha / rank.

    base_name and base_fingerprint: the model that it was trained on, in `dtype`. fingerprint: that of the two together.
    """

    factors: Factors
    scale: float
    base_name: str
    base_fingerprint: str
    fingerprint: str
    dtype: torch.dtype

    @classmethod
    def of_head(cls, folder: str | Path) -> Adapter | None:
        """The adapter in an augmented model's folder; None where its target is as it was."""
        folder = present_folder(Path(folder))
        card = read_card(folder)
        if not is_adapted(card, folder):
            return None
        facts = card.training[BACKBONE]
        if facts.get(DTYPE) not in _DTYPES or BASE_FINGERPRINT not in facts:
            raise ValueError(
                f"the card of {folder} does not say which base its target was adapted from, or in which dtype "
                f"({', '.join(_DTYPES)}): {facts!r:.100}"
            )
        factors, scale = read_adapter(folder / ADAPTER_FOLDER)
        return cls(
            factors=factors,
            scale=scale,
            base_name=card.target.name,
            base_fingerprint=str(facts[BASE_FINGERPRINT]),
            fingerprint=card.target.fingerprint,
            dtype=_DTYPES[facts[DTYPE]],
        )

    def apply(self, model: Any, tokenizer: Any | None, *, name: str, read: Callable[[torch.dtype], nn.Module]) -> None:
        """Make the base model (`name`, a stock one) the adapted target; another model is refused. One into which the
        adapter was merged before, and saved, is left as it is.

        `read` gives the base model in another dtype, where `model` does not hold what its weights were in training.
        """
        given = fingerprint_of(model, tokenizer)
        if given == self.fingerprint:
            return
        if given != self.base_fingerprint:
            raise ValueError(
                f"the head was trained along with {self.base_name} ({self.base_fingerprint}), but {name} has other "
                f"weights or another tokenizer ({given}): give {self.base_name} as it was, or with the adapter merged"
            )
        self.merge_into(model, model if model.dtype in (self.dtype, torch.float32) else read(self.dtype))
        found = fingerprint_of(model, tokenizer)
        if found != self.fingerprint:
            raise ValueError(
                f"the adapter beside the head makes another target ({found}) than the one on the head's card "
                f"({self.fingerprint}): it belongs to another head"
            )

    def merge_into(self, model: nn.Module, base: nn.Module) -> None:
        """Fill the adapted layers of a stock model from those of `base`, which may be the model itself."""
        for name, (down, up) in self.factors.items():
            weight, filled = adapted_layer(base, name).weight.data, adapted_layer(model, name).weight.data
            expected, found = [up.shape[0], down.shape[1]], list(weight.shape)
            if found != expected:
                raise ValueError(f"the adapter of {name} is for a weight of shape {expected}, not {found}")
            merged = merged_weight(weight.to(self.dtype), down, up, self.scale)
            if filled.dtype == torch.float16:  # its rounding, and then the fingerprint's, would not make one rounding
                merged = merged.bfloat16()
            filled.copy_(merged)


def merged_weight(weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scale: float) -> torch.Tensor:
    """weight [O, I] + scale * up [O, r] @ down [r, I], in the weight's dtype.

    In float64, whose own rounding differs between machines far below what the result can show.
    """
    device = weight.device
    update = up.detach().to(device, torch.float64) @ down.detach().to(device, torch.float64)
    return weight.double().add_(update, alpha=scale).float().to(weight.dtype)


def adapted_layer(model: nn.Module, name: str) -> nn.Linear:
    """The linear layer of a stock model that an adapter calls `name`."""
    try:
        layer = model.get_submodule(name)
    except AttributeError:
        raise ValueError(f"the adapter belongs to another kind of model: this one has no layer {name}") from None
    if not isinstance(layer, nn.Linear):
        raise ValueError(f"the adapter changes {name}, which is a {type(layer).__name__}: expected a linear layer")
    return layer


def is_adapted(card: HeadCard, folder: Path) -> bool:
    """Whether the head in `folder` was trained along with its target. The card and the folder must agree."""
    said, there = BACKBONE in card.training, (folder / ADAPTER_FOLDER).is_dir()
    if said and not there:
        raise ValueError(
            f"{folder} was trained along with its target, but has no {ADAPTER_FOLDER}/: "
            "copy the whole folder, or train again"
        )
    if there and not said:
        raise ValueError(f"{folder} holds {ADAPTER_FOLDER}/, of which its card does not speak: is it another head's?")
    return said


def read_adapter(folder: Path) -> tuple[Factors, float]:
    """The factors (A, B) by layer and the scale of an adapter in peft's form; whatever does not fit is refused."""
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / file).is_file():
            raise ValueError(f"{folder} is not an adapter: it has no {file}")
    config = read_json(folder / CONFIG_FILE)
    odd = {key: value for key, value in config.items() if key not in _SILENT and value and _SAID.get(key) != value}
    if odd:
        said = ", ".join(f"{key} = {value!r}" for key, value in odd.items())
        raise ValueError(f"{folder / CONFIG_FILE} says {said}: only plain LoRA adapters are supported")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise ValueError(f"{folder / CONFIG_FILE} says r = {rank!r} and lora_alpha = {alpha!r}: expected two numbers")
    tensors = read_tensors(folder / WEIGHTS_FILE)
    factors = {}
    for layer in sorted({layer_of(name) for name in tensors}):
        pair = [tensors.pop(f"{_PREFIX}{layer}.{factor}", None) for factor in _FACTORS]
        down, up = pair
        if down is None or up is None or down.shape[0] != rank or up.shape[1] != rank:
            shapes = [None if one is None else list(one.shape) for one in pair]
            raise ValueError(
                f"{folder / WEIGHTS_FILE} has factors of shapes {shapes} for {layer}; expected [{rank}, inputs] and "
                f"[outputs, {rank}]"
            )
        if not all(bool(torch.isfinite(one).all()) for one in (down, up)):
            raise ValueError(f"{folder / WEIGHTS_FILE} holds non-finite values for {layer}")
        factors[layer] = (down, up)
    if tensors or not factors:
        raise ValueError(f"{folder / WEIGHTS_FILE} is no LoRA adapter: {sorted(tensors) or 'it holds nothing'}")
    return factors, float(alpha) / rank


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


def write_merged_target(out: str | Path, head: str | Path, base: str | Path) -> Path:
    """The adapted target of `head` as a Hugging Face folder of its own, for programs that do not merge.

    In the dtype in which the two were trained; its fingerprint is the one on the head's card.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from infer.target import refuse_missing

    adapter = Adapter.of_head(head)
    if adapter is None:
        raise ValueError(f"{head} was trained on {read_card(head).target.name} as it is: there is nothing to merge")
    if Path(out).exists():
        raise ValueError(f"{out} exists already: give a new folder")
    refuse_missing(base)

    def read(dtype: torch.dtype) -> Any:
        return AutoModelForCausalLM.from_pretrained(base, dtype=dtype)

    model, tokenizer = read(adapter.dtype), AutoTokenizer.from_pretrained(base)
    adapter.apply(model, tokenizer, name=str(base), read=read)
    with staged_folder(Path(out)) as staging:
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
    return Path(out)
