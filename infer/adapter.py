"""LoRA adapters of a target: merged into its weights when it is loaded, or live beside a base that others share.

One kind comes with a head that was trained along with its target: the head's folder holds it in `adapter/`. Another is
anyone's, in peft's form (`target.adapter`, `--adapter`). Both are read without peft. **The adapted target is the one
that is served**: plain decoding, verification and every figure are its, and lossless means with respect to it, not to
the base model.

A merged weight is W + scale * B A in the dtype in which the two were trained (float32 for anyone's adapter), of a W in
that dtype, computed in float64. Another dtype casts it. So all dtypes, devices and machines have the same target, and
its fingerprint can be checked.

Live (`TargetModel.with_adapter`), a layer computes W x + scale * B (A x): several adapted targets then share one W, and
each costs its factors alone. It is the same target by name and fingerprint, to rounding in what it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from heads.checkpoint import HeadCard, portable_name, present_folder, read_card, read_json, staged_folder
from heads.lora import (
    CONFIG_FILE,
    Factors,
    Scales,
    linear_layer,
    merged_weight,
    read_adapter,
    refuse_other_shape,
)
from infer.fingerprint import fingerprint_of

ADAPTER_FOLDER = "adapter"
BACKBONE, BASE_FINGERPRINT, DTYPE = "backbone", "base_fingerprint", "dtype"
"""Where a head's card (its `training` part) says that the target was adapted, from which base, and in which dtype."""
ADAPTED = "with the head's adapter"

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, eq=False)
class Adapter:
    """A LoRA adapter.

    name: how it is called on the cards of heads; empty for a head's own. base_name and base_fingerprint: the model that
    it was trained on, in `dtype`. fingerprint: that of the two together. Both fingerprints are empty where nothing says
    them.
    """

    factors: Factors
    scales: Scales
    base_name: str
    base_fingerprint: str
    fingerprint: str
    dtype: torch.dtype
    name: str = ""

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
        factors, scales = read_adapter(folder / ADAPTER_FOLDER)
        return cls(
            factors=factors,
            scales=scales,
            base_name=card.target.name,
            base_fingerprint=str(facts[BASE_FINGERPRINT]),
            fingerprint=card.target.fingerprint,
            dtype=_DTYPES[facts[DTYPE]],
        )

    @classmethod
    def of_folder(cls, folder: str | Path) -> Adapter:
        """Anyone's adapter in peft's form. What its base was, only the names and shapes of its layers say."""
        path = Path(folder)
        if not path.is_dir():
            raise ValueError(f"there is no adapter folder {str(folder)!r}: give one that holds {CONFIG_FILE}")
        factors, scales = read_adapter(path)
        base = str(read_json(path / CONFIG_FILE).get("base_model_name_or_path") or "")
        return cls(
            factors=factors,
            scales=scales,
            base_name=portable_name(base) if base else "",
            base_fingerprint="",
            fingerprint="",
            dtype=torch.float32,
            name=portable_name(str(path.resolve())),
        )

    def apply(
        self,
        model: Any,
        tokenizer: Any | None,
        *,
        name: str,
        read: Callable[[torch.dtype], nn.Module],
        stored: torch.dtype | None = None,
    ) -> None:
        """Make the base model (`name`, a stock one) the adapted target; another model is refused. One into which a
        head's adapter was merged before, and saved, is left as it is.

        `read` gives the base model in another dtype, where `model` does not hold what its weights were in training.
        stored: the dtype in which the base's files hold it, where that is known.
        """
        if not self.fingerprint:
            is_whole = model.dtype in (self.dtype, stored)
            self.merge_into(model, model if is_whole else read(self.dtype))
            return
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
            refuse_other_shape(name, weight, down, up)
            merged = merged_weight(weight.to(self.dtype), down, up, self.scales[name])
            filled.copy_(_rounded(merged, filled.dtype))

    def live(self, model: nn.Module) -> dict[nn.Module, nn.Module]:
        """What takes the place of the adapted layers of a stock model, each beside the layer itself."""
        new: dict[nn.Module, nn.Module] = {}
        for name, (down, up) in self.factors.items():
            layer = adapted_layer(model, name)
            refuse_other_shape(name, layer.weight, down, up)
            new[layer] = AdaptedLinear(layer, down, up, self.scales[name], dtype=self.dtype)
        return new


class AdaptedLinear(nn.Module):
    """A linear layer with a live adapter: what the layer says, plus scale * B (A x). The layer may be shared."""

    def __init__(
        self, layer: nn.Linear, down: torch.Tensor, up: torch.Tensor, scale: float, *, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.layer = layer
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.down = nn.Parameter(down.to(layer.weight), requires_grad=False)
        self.up = nn.Parameter((scale * up.double()).to(layer.weight), requires_grad=False)
        self._exact = (down, up, scale, dtype)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        own = cast(torch.Tensor, self.layer(hidden))  # first: siblings that share a product know it by its input
        return own + functional.linear(functional.linear(hidden, self.down), self.up)

    @property
    def weight(self) -> torch.Tensor:
        """What the layer's weight would be with the adapter merged [O, I]."""
        down, up, scale, dtype = self._exact
        return _rounded(merged_weight(self.layer.weight.to(dtype), down, up, scale), self.layer.weight.dtype)

    @property
    def bias(self) -> torch.Tensor | None:
        return self.layer.bias

    def merged_parameters(self) -> dict[str, torch.Tensor]:
        """Parameters by their names in the layer that this one stands for, the adapter merged."""
        return {name: self.weight if name == "weight" else one for name, one in self.layer.named_parameters()}


def _rounded(merged: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A merged weight in the dtype that a model is loaded in. float16 goes by bfloat16: its own rounding, and then the
    fingerprint's, would not make one rounding."""
    return merged.bfloat16().to(dtype) if dtype == torch.float16 else merged.to(dtype)


def adapted_layer(model: nn.Module, name: str) -> nn.Linear:
    """The linear layer of a stock model that an adapter calls `name`. Its weight is not one that others have too."""
    layer = linear_layer(model, name)
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    if embedding is not None and getattr(embedding, "weight", None) is layer.weight:
        raise ValueError(
            f"the adapter changes {name}, whose weight is the embedding's too (tied), so merging it would change both: "
            "it is not supported"
        )
    if layer.weight.is_meta or type(layer) is not nn.Linear:
        raise ValueError(
            f"the adapter changes {name}, whose weight is quantised or not in memory: load the model whole, without "
            "quantization and device_map, or merge the adapter into its folder first (peft: merge_and_unload, "
            "save_pretrained)"
        )
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
