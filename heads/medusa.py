"""Medusa: a small network a depth, each guessing its token from the target's last state alone.

Cai et al. 2024, "Medusa: Simple LLM inference acceleration framework with multiple decoding heads" (arXiv 2401.10774),
trained on a frozen target (Medusa-1). Depth i is `num_layers` residual blocks x + SiLU(Wx + b) and an LM head over the
draft vocabulary. What was drafted before is not read, so all depths could be drafted at once.

Layout and names are vLLM's (`blocks.i.layers.j`, `lm_heads.i`, and `token_map`, the target's token of each draft token,
where the vocabulary is reduced). It loads a folder with a full vocabulary as it is; its loader of reduced ones does not
work (0.32), and `headstart export` writes them in a way that it loads. Each depth has blocks of its own: the first
public code put one and the same block into all places of a depth (`[ResBlock()] * n`). Two layouts share the name:
heads with an LM head each, and heads of residual blocks alone that use the target's LM head (`original_lm_head`). Both
are read and trained here.

Shapes: ... any leading dimensions, F drafted nodes, H hidden, C draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import nn
from torch.nn import functional

from heads.base import (
    HeadConfig,
    PathHead,
    TargetSizes,
    TargetWeights,
    final_tap,
    flag,
    refuse_other_values,
    required,
)
from heads.layers import fill
from heads.vocab import DraftVocabulary, VocabularyProvenance

ARCHITECTURE = "MedusaModel"
TOKEN_MAP = "token_map"


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadConfig):
    """num_heads: depths. num_layers: residual blocks of each. block_bias: whether the blocks have biases.

    original_lm_head: all depths use the target's LM head, and only their blocks are trained.
    """

    num_heads: int = 4
    num_layers: int = 1
    block_bias: bool = True
    original_lm_head: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads < 1 or self.num_layers < 1:
            raise ValueError(
                f"a Medusa head has at least one depth of at least one block, "
                f"got num_heads {self.num_heads} and num_layers {self.num_layers}"
            )
        if len(self.taps) != 1:
            raise ValueError(
                f"a Medusa head reads one state, that after the target's final norm; got {list(self.taps)}"
            )

    @classmethod
    def for_target(
        cls,
        target_config: Any,
        *,
        draft_vocab_size: int,
        vocab_size: int,
        taps: tuple[int, ...] | None = None,
        **settings: Any,
    ) -> MedusaConfig:
        """`settings`: num_heads, num_layers."""
        sizes = TargetSizes.of(target_config)
        usual = (final_tap(sizes.num_layers),)
        if taps is not None and tuple(taps) != usual:
            raise ValueError(
                f"a Medusa head reads the state after the target's final norm, taps {list(usual)}; got {list(taps)}: "
                "leave taps out"
            )
        return cls(
            hidden_size=sizes.hidden_size,
            vocab_size=vocab_size,
            draft_vocab_size=draft_vocab_size,
            taps=usual,
            **settings,
        )

    def to_native(self) -> dict[str, Any]:
        """`config.json` as vLLM reads it. No key may be added whose name holds `num` and `heads` or `num` and `layers`:
        vLLM takes each of them for one of the two below."""
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "medusa",
            "hidden_size": self.hidden_size,
            "num_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "medusa_fc_bias": self.block_bias,
            "original_lm_head": self.original_lm_head,
            "vocab_size": self.vocab_size,
            "truncated_vocab_size": self.draft_vocab_size,
        }

    @classmethod
    def from_native(cls, native: Mapping[str, Any], *, num_target_layers: int | None = None) -> MedusaConfig:
        """From `config.json`; whatever would change the forward is refused rather than ignored."""
        refuse_other_values(native, {"architectures": [ARCHITECTURE], "model_type": "medusa", "logit_scale": 1.0})
        if num_target_layers is None:
            raise ValueError(
                "a Medusa head reads the state after its target's final norm, whose number depends on the target's "
                "layers: load it together with its target"
            )
        vocab_size = int(required(native, "vocab_size"))
        return cls(
            hidden_size=int(required(native, "hidden_size")),
            vocab_size=vocab_size,
            draft_vocab_size=int(native.get("truncated_vocab_size") or vocab_size),
            taps=(final_tap(num_target_layers),),
            num_heads=int(required(native, "num_heads")),
            num_layers=int(required(native, "num_hidden_layers")),
            block_bias=flag(native, "medusa_fc_bias"),
            original_lm_head=flag(native, "original_lm_head"),
        )


class ResidualBlocks(nn.Module):
    """x + SiLU(Wx + b), once a layer, [..., H] -> [..., H]. W and b start at zero, where a block changes nothing."""

    def __init__(self, hidden_size: int, num_layers: int, *, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden_size, hidden_size, bias=bias) for _ in range(num_layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            states = states + functional.silu(layer(states))
        return states


class LentLMHead(nn.Module):
    """The target's LM head at the draft vocabulary's tokens [C, H]: not trained, but saved, since vLLM wants it in the
    file. Not a number until it is lent or loaded."""

    weight: torch.Tensor

    def __init__(self, hidden_size: int, draft_vocab_size: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.full((draft_vocab_size, hidden_size), torch.nan))


class MedusaHead(PathHead):
    """The networks of all depths. With `original_lm_head` there is one LM head, `lm_heads.0`, for all."""

    config: MedusaConfig
    token_map: torch.Tensor

    def __init__(self, config: MedusaConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__(config, vocabulary)
        self.blocks = nn.ModuleList(
            ResidualBlocks(config.hidden_size, config.num_layers, bias=config.block_bias)
            for _ in range(config.num_heads)
        )
        if config.original_lm_head:
            self.lm_heads = nn.ModuleList([LentLMHead(config.hidden_size, config.draft_vocab_size)])
        else:
            self.lm_heads = nn.ModuleList(
                nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) for _ in range(config.num_heads)
            )

    @classmethod
    def vocabulary_buffers(cls, vocabulary: DraftVocabulary) -> dict[str, torch.Tensor]:
        """vLLM's map holds target ids; a full vocabulary has none."""
        return {TOKEN_MAP: vocabulary.target_ids.clone()} if len(vocabulary) < vocabulary.vocab_size else {}

    @classmethod
    def read_vocabulary(
        cls, tensors: Mapping[str, torch.Tensor], config: HeadConfig, provenance: VocabularyProvenance
    ) -> DraftVocabulary:
        size, vocab_size = config.draft_vocab_size, config.vocab_size
        if size == vocab_size:
            return DraftVocabulary(target_ids=torch.arange(size), vocab_size=vocab_size, provenance=provenance)
        token_map = tensors.get(TOKEN_MAP)
        if token_map is None:
            raise ValueError(f"the weights lack {TOKEN_MAP}: {size} draft tokens of {vocab_size} need their map")
        if list(token_map.shape) != [size]:
            raise ValueError(f"{TOKEN_MAP} has shape {list(token_map.shape)}, expected [{size}]")
        try:
            return DraftVocabulary(target_ids=token_map, vocab_size=vocab_size, provenance=provenance)
        except ValueError as error:
            raise ValueError(f"{TOKEN_MAP}: {error}") from error

    @property
    def num_depths(self) -> int:
        return self.config.num_heads

    def bind(self, weights: TargetWeights) -> Self:
        super().bind(weights)
        head = self.lm_heads[0]
        if isinstance(head, LentLMHead):
            head.weight.copy_(self.lent.lm_head[self.target_ids.to(self.lent.lm_head.device)])
        return self

    def draft(self, roots: torch.Tensor, path_tokens: torch.Tensor, depth: int) -> torch.Tensor:
        if roots.shape[-1] != self.config.hidden_size:
            raise ValueError(f"expected one tapped state of {self.config.hidden_size}, got {roots.shape[-1]}")
        return cast(torch.Tensor, self.blocks[depth](roots))

    def outputs(self, states: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        head = self.lm_heads[0 if self.config.original_lm_head else depth]
        return states, cast(torch.Tensor, head.weight)

    def init_from_target(self, *, layer: nn.Module, final_norm: nn.Module, lm_head_weight: torch.Tensor) -> list[str]:
        """The paper's start: every depth is the target's own LM head, since its blocks change nothing yet."""
        rows = lm_head_weight.index_select(0, self.target_ids.to(lm_head_weight.device))
        filled = []
        for head in self.lm_heads:
            if isinstance(head, nn.Linear):
                filled += fill(head, rows)
        return self._names_of(filled)
