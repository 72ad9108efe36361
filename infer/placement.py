"""Targets that do not fit into one device's memory: spread out by a device map, or with their weights quantised.

device_map     accelerate places the layers on several devices, in CPU memory and on disk, and brings weights and
               states together when a layer runs. Rows and key/value cache stay on the first device, where heads
               work too; attention is computed there.
quantization   int8 or int4 weights: through bitsandbytes on GPUs, through `infer.quantize` on CPUs. It is another
               target than the whole one, with a fingerprint of its own. On CPUs, heads of the whole one draft for it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import torch
from torch import nn

from configs.schema import Quantization

MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
QUANTIZATIONS = get_args(Quantization)
ROUNDED = "headstart_rounded"
"""The attribute of a model that says how `infer.quantize` rounded it."""

DeviceMap = str | Mapping[str, Any]
"""One of `MAPS`, or devices by the names of modules, as transformers takes it."""


def check_placement(quantization: str | None, device_map: DeviceMap | None, device: str) -> None:
    """Refuse what this machine cannot do, or what does not go together."""
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization {quantization!r} is unknown: expected {' or '.join(QUANTIZATIONS)}")
    if isinstance(device_map, str) and device_map not in MAPS:
        raise ValueError(f"device_map {device_map!r} is unknown: expected {', '.join(MAPS)}")
    if device_map is not None and device not in ("auto", "cpu"):
        raise ValueError(f"device {device!r} and a device_map were given: a map places the model, leave the device out")
    if is_rounded_here(quantization, device):
        if device_map is not None:
            raise ValueError(
                f"quantization {quantization!r} and a device_map were given, but no GPU is used: on a CPU weights are "
                "rounded in memory, leave the map out"
            )
        return
    if quantization is not None:
        _check_quantization(quantization)
    if (device_map is not None or quantization is not None) and importlib.util.find_spec("accelerate") is None:
        raise ValueError("device_map and quantization need accelerate: pip install accelerate")


def check_tied(device_map: DeviceMap | None, config: Any) -> None:
    """A map of one's own may not part the embedding from an LM head that is the same weight."""
    if not isinstance(device_map, Mapping) or not getattr(config, "tie_word_embeddings", False):
        return
    ends = [name for name in device_map if name.rpartition(".")[-1] in ("embed_tokens", "wte", "embed_in", "lm_head")]
    if len({str(device_map[name]) for name in ends}) > 1:
        raise ValueError(f"the device map places {' and '.join(ends)} apart, but they are one weight (tied)")


def is_rounded_here(quantization: str | None, device: str) -> bool:
    """Whether weights are rounded by `infer.quantize`: where no GPU is to be used."""
    return quantization is not None and (device == "cpu" or (device == "auto" and not torch.cuda.is_available()))


def _check_quantization(quantization: str) -> None:
    """For GPUs."""
    what = f"an {quantization} target on a GPU goes through bitsandbytes"
    if not torch.cuda.is_available():
        build = "a CPU build of torch is installed" if torch.version.cuda is None else "no GPU is visible"
        raise ValueError(f"{what}, but {build} (torch {torch.__version__}): use device 'cpu', where headstart rounds")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(f"{what}, and is not installed: pip install bitsandbytes")


def loading_arguments(
    quantization: str | None, device_map: DeviceMap | None, device: str, dtype: torch.dtype
) -> dict[str, Any]:
    """What `from_pretrained` is told beside dtype and attention; nothing for a whole target on one device."""
    arguments: dict[str, Any] = {}
    if device_map is not None or quantization is not None:
        arguments["device_map"] = {"": device} if device_map is None else device_map
    if quantization is not None:
        from transformers import BitsAndBytesConfig

        settings: dict[str, Any] = {"load_in_8bit": True}
        if quantization == "int4":
            settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
        arguments["quantization_config"] = BitsAndBytesConfig(**settings)
    return arguments


def quantization_of(model: Any) -> str:
    """How a model's weights are quantised: as it was rounded, or as its config says; empty for a whole one."""
    rounded = getattr(model, ROUNDED, "")
    if rounded:
        return str(rounded)
    config = getattr(model.config, "quantization_config", None)
    if config is None:
        return ""
    values = config if isinstance(config, Mapping) else vars(config)
    for bits in (8, 4):
        if values.get(f"load_in_{bits}bit") or values.get(f"_load_in_{bits}bit"):
            return f"int{bits}"
    return str(values.get("quant_method", "quantised"))


def main_device(model: Any) -> torch.device:
    """Where rows, caches and heads of a model are: the first device of its map, or that of its weights."""
    placed = getattr(model, "hf_device_map", None)
    if not placed:
        device: torch.device = model.get_input_embeddings().weight.device
        return device
    return torch.device(next((device for device in placed.values() if device not in ("cpu", "disk")), "cpu"))


def is_offloaded(model: nn.Module) -> bool:
    """Whether some weights are not in memory but fetched when a layer runs."""
    return any(parameter.is_meta for parameter in model.parameters())


def whole_weight(module: nn.Module, name: str = "weight") -> torch.Tensor:
    """A parameter's values, fetched from where accelerate keeps them if they are offloaded."""
    tensor: torch.Tensor = getattr(module, name)
    if not tensor.is_meta:
        return tensor
    hook = getattr(module, "_hf_hook", None)
    for each in getattr(hook, "hooks", [hook]):
        values = getattr(each, "weights_map", None)
        if values is not None:
            fetched: torch.Tensor = values[name]
            return fetched.to(tensor.dtype)
    raise ValueError(f"{name} of a {type(module).__name__} holds no values: the model was not loaded whole")


def named_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of a model by name, each once: those that are offloaded too, and layers with a live adapter as
    with the adapter merged."""
    tied = _tied_names(model) if is_offloaded(model) else frozenset()
    seen: set[int] = set()
    inside = ""
    for prefix, module in model.named_modules():
        if inside and prefix.startswith(inside):
            continue
        merged = getattr(module, "merged_parameters", None)
        if merged is not None:
            inside = f"{prefix}."
            yield from ((f"{prefix}.{name}", tensor) for name, tensor in merged().items())
            continue
        for name, parameter in module._parameters.items():
            full = f"{prefix}.{name}" if prefix else name
            if parameter is None or id(parameter) in seen or full in tied:
                continue
            seen.add(id(parameter))
            yield full, whole_weight(module, name)


def _tied_names(model: nn.Module) -> frozenset[str]:
    """Names of weights that stand for others. In memory they are one object; offloaded, each has its own place."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return frozenset(tied)
