"""Early exit: the target's own first layers draft, and a small adapter makes the last layers' state of theirs.

The first N layers of the target run over the draft with the target's own cache, so a draft step costs a share of the
target's forward, and the text is never read twice: Draft & Verify (Zhang et al. 2023, arXiv 2309.08168) and LayerSkip
(Elhoushi et al. 2024, arXiv 2404.16710), which trains the target itself to be read early. Here the target stays as it
is, and what is trained is an adapter behind layer N, as in Kangaroo (Liu et al. 2024, arXiv 2404.18911), though a
smaller one, without attention: a residual gated MLP that starts as the identity, and the target's final norm. The LM
head is the target's and is not saved. The form on disk is headstart's own: no other project loads it.

The layers read true tokens at every depth, so all depths are alike: at step s, row t reads the state of position
t + 1 + s and guesses x[t + 2 + s].

Shapes: ... any leading dimensions, H hidden, C draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import nn

from heads.base import DraftHead, HeadConfig, TargetWeights, refuse_other_values, required
from heads.layers import GatedMLP, RMSNorm, fill, norm_scale
from heads.unroll import Batch, UnrolledStep
from heads.vocab import DraftVocabulary

ARCHITECTURE = "HeadstartEarlyExit"
NORMS = ("rms", "layer")


@dataclass(frozen=True, kw_only=True)
class EarlyExitConfig(HeadConfig):
    """intermediate_size: of the adapter's MLP. norm, norm_eps: the kind of the target's final norm, which is the
    head's."""

    intermediate_size: int
    norm: str = "rms"
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.taps) != 1 or self.taps[0] < 1:
            raise ValueError(f"an early-exit head reads the output of one layer, counted from 1; got {list(self.taps)}")
        if self.intermediate_size < 1:
            raise ValueError(f"intermediate_size must be at least 1, got {self.intermediate_size}")
        if self.norm not in NORMS:
            raise ValueError(f"norm is {self.norm!r}: expected {' or '.join(map(repr, NORMS))}")

    @property
    def exit_layer(self) -> int:
        """The target's layer, counted from 1, behind which drafts are made."""
        return self.taps[0]

    @classmethod
    def for_target(
        cls,
        target_config: Any,
        *,
        draft_vocab_size: int,
        vocab_size: int,
        taps: tuple[int, ...] | None = None,
        exit_layer: int | None = None,
        **settings: Any,
    ) -> EarlyExitConfig:
        """`exit_layer`: by default a third of the target's layers, rounded up."""
        assert not settings, f"no such settings: {sorted(settings)}"
        text = target_config.get_text_config() if hasattr(target_config, "get_text_config") else target_config
        num_layers = int(text.num_hidden_layers)
        if exit_layer is None:
            exit_layer = -(-num_layers // 3) if taps is None else taps[0]
        if taps is not None and tuple(taps) != (exit_layer,):
            raise ValueError(
                f"an early-exit head reads the layer that it exits from, {exit_layer}; got taps {list(taps)}: "
                "leave taps out"
            )
        if not 1 <= exit_layer < num_layers:
            raise ValueError(
                f"exit_layer is {exit_layer}: the target has {num_layers} layers, so an early exit is after one of "
                f"1 to {num_layers - 1}"
            )
        norm, norm_eps = _final_norm(text)
        return cls(
            hidden_size=int(text.hidden_size),
            intermediate_size=int(text.hidden_size),
            vocab_size=vocab_size,
            draft_vocab_size=draft_vocab_size,
            taps=(exit_layer,),
            norm=norm,
            norm_eps=norm_eps,
        )

    def to_native(self) -> dict[str, Any]:
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "headstart_early_exit",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "exit_layer": self.exit_layer,
            "hidden_act": "silu",
            "norm": self.norm,
            "norm_eps": self.norm_eps,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
        }

    @classmethod
    def from_native(cls, native: Mapping[str, Any], *, num_target_layers: int | None = None) -> EarlyExitConfig:
        refuse_other_values(
            native, {"architectures": [ARCHITECTURE], "model_type": "headstart_early_exit", "hidden_act": "silu"}
        )
        exit_layer = int(required(native, "exit_layer"))
        if num_target_layers is not None and exit_layer >= num_target_layers:
            raise ValueError(
                f"the head's config.json says exit_layer = {exit_layer}, but its target has {num_target_layers} layers"
            )
        return cls(
            hidden_size=int(required(native, "hidden_size")),
            intermediate_size=int(required(native, "intermediate_size")),
            vocab_size=int(required(native, "vocab_size")),
            draft_vocab_size=int(required(native, "draft_vocab_size")),
            taps=(exit_layer,),
            norm=str(required(native, "norm")),
            norm_eps=float(required(native, "norm_eps")),
        )


class EarlyExitHead(DraftHead):
    """The adapter and the norm. Drafted with by `infer.drafters.model`."""

    config: EarlyExitConfig

    def __init__(self, config: EarlyExitConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__(config, vocabulary)
        size, eps = config.hidden_size, config.norm_eps
        self.adapter_norm = RMSNorm(size, eps)
        self.adapter = GatedMLP(size, config.intermediate_size)
        nn.init.zeros_(self.adapter.down_proj.weight)
        self.norm: nn.Module = RMSNorm(size, eps) if config.norm == "rms" else nn.LayerNorm(size, eps=eps)
        self._lm_head: torch.Tensor | None = None

    def bind(self, weights: TargetWeights) -> Self:
        super().bind(weights)
        is_reduced = self.config.draft_vocab_size < self.config.vocab_size
        lm_head = self.lent.lm_head
        self._lm_head = lm_head[self.vocabulary.target_ids.to(lm_head.device)] if is_reduced else lm_head
        return self

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Layer N's states [..., H] -> what the LM head reads [..., H]."""
        if states.shape[-1] != self.config.hidden_size:
            raise ValueError(f"expected one tapped state of {self.config.hidden_size}, got {states.shape[-1]}")
        states = states + self.adapter(self.adapter_norm(states))
        return cast(torch.Tensor, self.norm(states))

    def outputs(self, states: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """From layer N's states, at every depth alike."""
        if self._lm_head is None:
            raise RuntimeError("the head has no LM head yet: call bind(target.weights) first")
        return self(states.to(self.dtype)), self._lm_head

    def init_from_target(self, *, layer: nn.Module, final_norm: nn.Module, lm_head_weight: torch.Tensor) -> list[str]:
        """The target's final norm. The adapter changes nothing yet, so the head starts as the bare first layers."""
        if isinstance(self.norm, RMSNorm):
            filled = fill(self.norm, norm_scale(final_norm))
        else:
            filled = fill(self.norm, getattr(final_norm, "weight", None))
            bias = getattr(final_norm, "bias", None)
            if isinstance(bias, torch.Tensor):
                with torch.no_grad():
                    filled.append(cast(torch.Tensor, self.norm.bias).copy_(bias))
        return self._names_of(filled)

    def unroll(
        self, batch: Batch, plan: Sequence[torch.Tensor], generators: Sequence[torch.Generator] | None = None
    ) -> Iterator[UnrolledStep]:
        for step, rows in enumerate(plan):
            inputs, weight = self.outputs(batch.taps[rows + 1 + step], step)
            yield UnrolledStep(states=inputs, weight=weight)


def _final_norm(config: Any) -> tuple[str, float]:
    """The kind and epsilon of a target's final norm, as its configuration names them."""
    for name in ("rms_norm_eps", "norm_eps"):
        if getattr(config, name, None) is not None:
            return "rms", float(getattr(config, name))
    for name in ("layer_norm_eps", "layer_norm_epsilon"):
        if getattr(config, name, None) is not None:
            return "layer", float(getattr(config, name))
    return "rms", 1e-6
