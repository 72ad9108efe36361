"""EAGLE and EAGLE-2: a decoder layer that continues the target's last states and drafts with the target's LM head.

Li et al. 2024, "EAGLE: Speculative sampling requires rethinking feature uncertainty" (arXiv 2401.15077) and "EAGLE-2:
Faster inference of language models with dynamic draft trees" (arXiv 2406.16858; the same network, other trees). HASS
(Zhang et al. 2024, "Learning harmonized representations for speculative sampling", arXiv 2408.15766) is this network
too, unrolled on its own states in training, with a loss that favours the target's likeliest tokens.

Row t of a draft sequence holds the pair (token x_{t+1}, state f_t) and predicts x_{t+2}. A state is the target's after
its final norm where the target has run, and the head's own previous output beyond: the head learns to give the target's
next state, and so needs no norm and no LM head of its own. `fc` brings [embedding; state] down to one state; the layer
is Llama's without its input norm.

Layout and names are those of the public checkpoints (`fc`, `layers.0.*`), which vLLM and SGLang load where the draft
vocabulary is full. The LM head's rows of a reduced one are gathered from the target's; its map goes with the head.

Shapes: ... any leading dimensions, R packed rows, Q rows of a step, H hidden, C draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch
from torch import nn
from torch.nn import functional

from heads.base import HeadConfig, RecurrentHead, TargetSizes, TargetWeights, final_tap, flag, refuse_other_values
from heads.decoder import ONE_LAYER, DecoderConfig, decoder_of_native, decoder_of_target, decoder_to_native
from heads.layers import Attend, Attention, Block, GatedMLP, RMSNorm, Rotary
from heads.rope import rotary_table
from heads.unroll import Batch
from heads.vocab import DraftVocabulary, VocabularyProvenance

ARCHITECTURE = "EagleLlamaForCausalLM"


@dataclass(frozen=True, kw_only=True)
class Eagle1Config(DecoderConfig):
    """Sizes of a head, and how it is trained.

    bias: `fc` has one. Public heads are of both kinds; vLLM reads those without.
    feature_loss: weight of the regression on the target's states against the distillation loss. feature_noise:
    half-width of the uniform noise on the target's states in training. They are of no matter to what the head computes,
    and two heads that differ in them alone are alike.
    """

    bias: bool = False
    feature_loss: float = field(default=10.0, compare=False)
    feature_noise: float = field(default=0.1, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.taps) != 1:
            raise ValueError(f"an EAGLE head reads one state, the target's after its final norm; got {list(self.taps)}")

    @classmethod
    def for_target(
        cls,
        target_config: Any,
        *,
        draft_vocab_size: int,
        vocab_size: int,
        taps: tuple[int, ...] | None = None,
        **settings: Any,
    ) -> Eagle1Config:
        """A head as wide as the target's layers. `settings`: feature_loss, feature_noise."""
        sizes = TargetSizes.of(target_config)
        last = (final_tap(sizes.num_layers),)
        if taps is not None and tuple(taps) != last:
            raise ValueError(
                f"an EAGLE head reads the target's state after its final norm (tap {last[0]}), got taps {list(taps)}: "
                "leave them out"
            )
        return cls(
            vocab_size=vocab_size, draft_vocab_size=draft_vocab_size, taps=last, **decoder_of_target(sizes), **settings
        )

    def to_native(self) -> dict[str, Any]:
        """`config.json`, as vLLM reads it where the draft vocabulary is full and `fc` has no bias."""
        return {
            "architectures": [ARCHITECTURE],
            **decoder_to_native(self),
            "draft_vocab_size": self.draft_vocab_size,
            "tie_word_embeddings": False,
            "bias": self.bias,
            "feature_loss": self.feature_loss,
            "feature_noise": self.feature_noise,
        }

    @classmethod
    def from_native(cls, native: Mapping[str, Any], *, num_target_layers: int | None = None) -> Eagle1Config:
        """From `config.json`; whatever would change the forward is refused rather than ignored."""
        refuse_other_values(native, {"architectures": [ARCHITECTURE], **ONE_LAYER})
        if num_target_layers is None:
            raise ValueError(
                "an EAGLE head reads the state after its target's last layer, whose number its config.json does not "
                "say: load it together with its target"
            )
        return cls(
            taps=(final_tap(num_target_layers),),
            bias=flag(native, "bias", default=True),  # what the public code takes a missing key for
            feature_loss=float(native.get("feature_loss", cls.feature_loss)),
            feature_noise=float(native.get("feature_noise", cls.feature_noise)),
            **decoder_of_native(native),
        )


class DecoderLayer(nn.Module):
    """Llama's without the norm before attention: its input comes from `fc`. block: as in `heads.eagle3.MidLayer`."""

    block: Block | None = None

    def __init__(self, config: Eagle1Config) -> None:
        super().__init__()
        self.self_attn = Attention(config, input_size=config.hidden_size)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, inputs: torch.Tensor, rotary: Rotary, attend: Attend, rows: torch.Tensor | None) -> torch.Tensor:
        if self.block is not None and rows is None:
            return self.block(inputs, inputs, rotary, attend)
        attended = self.self_attn(inputs, rotary, attend, rows)
        states = (inputs if rows is None else inputs[rows]) + attended
        return cast(torch.Tensor, states + self.mlp(self.post_attention_layernorm(states)))


class Eagle1Head(RecurrentHead):
    """The network.

    It takes nothing over from its target at the start. The target's last layer reads normed states of another scale: a
    head that began as that layer, as it is or in the coordinates of the final-normed state, was worse at every depth.
    """

    config: Eagle1Config

    def __init__(self, config: Eagle1Config, vocabulary: DraftVocabulary) -> None:
        super().__init__(config, vocabulary)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)
        self.layers = nn.ModuleList([DecoderLayer(config)])
        self._rotary = rotary_table(config.head_dim, config.rope_theta, config.rope_scaling)
        self._lm_head: torch.Tensor | None = None

    @classmethod
    def vocabulary_buffers(cls, vocabulary: DraftVocabulary) -> dict[str, torch.Tensor]:
        """None of a full vocabulary: so the files are those of the public code."""
        return {} if len(vocabulary) == vocabulary.vocab_size else super().vocabulary_buffers(vocabulary)

    @classmethod
    def read_vocabulary(
        cls, tensors: Mapping[str, torch.Tensor], config: HeadConfig, provenance: VocabularyProvenance
    ) -> DraftVocabulary:
        if config.draft_vocab_size == config.vocab_size:
            ids = torch.arange(config.vocab_size)
            return DraftVocabulary(target_ids=ids, vocab_size=config.vocab_size, provenance=provenance)
        return super().read_vocabulary(tensors, config, provenance)

    def bind(self, weights: TargetWeights) -> Self:
        super().bind(weights)
        lm_head = self.lent.lm_head
        full = self.config.draft_vocab_size == self.config.vocab_size
        self._lm_head = lm_head if full else lm_head.index_select(0, self.vocabulary.target_ids.to(lm_head.device))
        return self

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        if taps.shape[-1] != self.config.hidden_size:
            raise ValueError(f"expected one tapped state of {self.config.hidden_size}, got {taps.shape[-1]}")
        return taps

    def forward(
        self,
        token_ids: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        *,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        embeddings = self.embed(token_ids, states.dtype)
        inputs = self.fc(torch.cat([embeddings, states], dim=-1))
        rotary = self._rotary(positions, states.dtype)
        return cast(torch.Tensor, self.layers[0](inputs, rotary, attend, rows))

    def outputs(self, states: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._lm_head is None:
            raise RuntimeError("the head drafts with its target's LM head: call bind(target.weights) first")
        return states, self._lm_head

    def training_taps(self, batch: Batch, generators: Sequence[torch.Generator] | None) -> torch.Tensor:
        """The target's states with uniform noise, as if a draft step had made them."""
        if generators is None or self.config.feature_noise == 0:
            return batch.taps
        width = batch.taps.shape[-1]
        chances = zip(batch.lengths, generators, strict=True)
        noise = torch.cat([torch.rand(length, width, generator=generator) for length, generator in chances])
        return batch.taps + noise.mul_(2).sub_(1).mul_(self.config.feature_noise).to(batch.taps)

    def auxiliary_loss(self, states: torch.Tensor, batch: Batch, rows: torch.Tensor, step: int) -> torch.Tensor | None:
        """[Q]: Smooth L1 distance to the target's states that predict the same tokens, averaged over the features."""
        if self.config.feature_loss == 0:
            return None
        wanted = batch.last[rows + 1 + step].float()
        distances = functional.smooth_l1_loss(states.float(), wanted, reduction="none").mean(dim=-1)  # [Q]
        return self.config.feature_loss * distances
