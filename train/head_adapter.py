"""A LoRA adapter on a trained head: for a few MB the head follows its target to a fine-tuned version of it.

The weights of the head that it begins as stay as they are. Every linear layer's weight becomes a function of that and
of two small factors, whoever reads it: a layer's own forward, and those who take the LM head's weight from `outputs`.
So the network, its unrolling and its losses know nothing of adapters, and families need nothing for it. What is
evaluated and saved is the merged head, an ordinary one (`heads.lora` says what lies beside it).

Shapes: O outputs and I inputs of a linear layer, r the adapter's rank.
"""

from __future__ import annotations

import copy
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn.utils import parametrize

from configs.schema import RunConfig
from heads.base import DraftHead
from heads.checkpoint import read_card
from heads.lora import (
    Factors,
    HeadBase,
    adaptable_layers,
    copy_factors,
    linear_layer,
    merged_weight,
    read_head_adapter,
    write_head_adapter,
)
from train.world import World


class LowRankUpdate(nn.Module):
    """weight [O, I] -> weight + scale * B A. B begins at zero, where nothing is changed; A as peft's."""

    def __init__(self, weight: torch.Tensor, rank: int, scale: float) -> None:
        super().__init__()
        num_outputs, num_inputs = weight.shape
        self.scale = scale
        self.lora_A = nn.Parameter(weight.new_empty((rank, num_inputs), dtype=torch.float32))
        self.lora_B = nn.Parameter(weight.new_zeros((num_outputs, rank), dtype=torch.float32))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        with torch.autocast(weight.device.type, enabled=False):  # a rounded sum would lose most of a small update
            update = torch.addmm(weight.float(), self.lora_B.float(), self.lora_A.float(), alpha=self.scale)
        return update.to(weight.dtype)


class HeadAdapter:
    """The adapter of a head in training.

    head: the network, bound to its target and on its device; it is changed in place: its own weights are frozen, and
    `parameters` is what is trained. base: what it began as. factors: of a run that goes on.
    """

    def __init__(
        self,
        head: DraftHead,
        base: HeadBase,
        *,
        rank: int,
        alpha: int | None = None,
        seed: int = 0,
        factors: Factors | None = None,
    ) -> None:
        self.head, self.base = head, base
        self.rank, self.alpha = rank, rank if alpha is None else alpha
        self._merged = copy.deepcopy(head).bind(head.lent).requires_grad_(False).eval()
        # What is merged into is the base's weights as they were, whatever a gradient engine makes of the network's.
        self._base_weights = {name: layer.weight.data for name, layer in adaptable_layers(head)}
        head.requires_grad_(False)
        self._updates: dict[str, LowRankUpdate] = {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for name, weight in self._base_weights.items():
                layer = linear_layer(head, name)
                self._updates[name] = LowRankUpdate(weight, rank, self.alpha / rank)
                parametrize.register_parametrization(layer, "weight", self._updates[name])
        if factors is not None:
            copy_factors(self._factors(), factors, wanted=f"head.lora_rank={self.rank} describes")

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What is trained: the factors of all layers, in float32, always in the same order."""
        return [parameter for update in self._updates.values() for parameter in update.parameters()]

    def merged(self) -> DraftHead:
        """The head as it is now, an ordinary one with weights of its own. One object, renewed at each call."""
        for name, (down, up) in self._factors().items():
            merged = merged_weight(self._base_weights[name], down, up, self.alpha / self.rank)
            with torch.no_grad():  # not through .data, which hides the change from weights that were packed
                linear_layer(self._merged, name).weight.copy_(merged)
        return self._merged

    def facts(self) -> dict[str, Any]:
        """What the card says of it."""
        return {
            "base": asdict(self.base),
            "rank": self.rank,
            "alpha": self.alpha,
            "num_layers": len(self._updates),
            "num_parameters": sum(parameter.numel() for parameter in self.parameters),
        }

    def describe(self) -> str:
        """The plan in words."""
        trained = sum(parameter.numel() for parameter in self.parameters)
        frozen = sum(parameter.numel() for parameter in self._merged.parameters())
        return (
            f"a LoRA adapter of rank {self.rank} on {len(self._updates)} layers of the head {self.base.name} of "
            f"{self.base.target}: {trained / 1e6:.2f}M parameters are trained, the head's own {frozen / 1e6:.1f}M stay"
        )

    def write(self, folder: Path) -> None:
        """Add the adapter to the folder of the merged head, whose card is there already."""
        write_head_adapter(folder, self._config(), self._factors())

    def _factors(self) -> Factors:
        """(A, B) by layer."""
        return {name: (update.lora_A.detach(), update.lora_B.detach()) for name, update in self._updates.items()}

    def _config(self) -> dict[str, Any]:
        """peft's own config."""
        return {
            "peft_type": "LORA",
            "task_type": None,
            "base_model_name_or_path": self.base.name,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "inference_mode": True,
            "target_modules": sorted(self._updates),
        }


def adapt_head(
    config: RunConfig, head: DraftHead, world: World | None = None, *, resumed: Path | None = None
) -> HeadAdapter | None:
    """The adapter that the recipe trains on `head`, the one in `head.init_from`; None where the head itself is trained.

    resumed: the checkpoint's folder, whose adapter goes on; one for another base or of another shape is refused. Of
    several processes the main one alone reads folders.
    """
    settings, world = config.head, world or World()
    if settings.lora_rank is None:
        return None
    begun = world.broadcast(_start(cast(str, settings.init_from), head, resumed) if world.is_main else None)
    assert begun is not None
    base, factors = begun
    return HeadAdapter(
        head, base, rank=settings.lora_rank, alpha=settings.lora_alpha, seed=config.train.seed, factors=factors
    )


def _start(folder: str, head: DraftHead, resumed: Path | None) -> tuple[HeadBase, Factors | None]:
    if resumed is None:
        return HeadBase.of(folder, head, read_card(folder)), None
    factors, _, base = read_head_adapter(resumed)
    base.check(folder, head)
    return base, factors
