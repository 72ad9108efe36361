"""DFlash: a block drafter whose layers read the target's fused states as keys and values.

Chen et al. 2026, "DFlash: Block diffusion for flash speculative decoding" (arXiv 2602.06036); with `sample_from_anchor`
and the correction by the token before, Cheng et al. 2026, "DSpark" (arXiv 2607.05147).

The target's tapped states of a position, fused and normed, stand in every layer beside what the block itself holds:
each layer projects both to keys and values with the same weights. A row of text asks nothing and has no state of its
own. A block begins with the *anchor*, the token emitted last, and goes on with mask tokens; its places see each other
in both directions. Without `sample_from_anchor` a place guesses its own token, so the anchor guesses none; with it each
place guesses the next.

Layers are Qwen3's (queries and keys are normed). Embeddings and LM head are the target's. Names are those of public
checkpoints.

Shapes: as in `heads.block`; X = H, D head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import nn

from heads.base import TargetWeights, flag, refuse_other_values, required
from heads.block import (
    BlockConfig,
    BlockHead,
    LayerAttend,
    block_of_native,
    block_to_native,
    lent_lm_head,
)
from heads.decoder import PLAIN_LAYERS, decoder_of_native, decoder_to_native
from heads.layers import RANDOM_SHARE, GatedMLP, RMSNorm, Rotary, fill, norm_scale, rotate
from heads.rope import rotary_table
from heads.vocab import DraftVocabulary

ARCHITECTURE = "HeadstartDFlash"


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(BlockConfig):
    """The block's. taps: any number of the target's layers, ascending. sample_from_anchor: see the module."""

    sample_from_anchor: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.taps or any(tap < 1 for tap in self.taps) or list(self.taps) != sorted(set(self.taps)):
            raise ValueError(
                f"a DFlash head reads layer outputs in ascending order (hidden_states indices from 1), got taps "
                f"{list(self.taps)}"
            )

    @property
    def block_size(self) -> int:
        """Places of a block, the anchor's included."""
        return self.num_depths + (0 if self.sample_from_anchor else 1)

    def to_native(self) -> dict[str, Any]:
        """`config.json`."""
        return {
            "architectures": [ARCHITECTURE],
            **decoder_to_native(self),
            **block_to_native(self),
            "model_type": "qwen3",
            "draft_vocab_size": self.draft_vocab_size,
            "tie_word_embeddings": False,
            "sample_from_anchor": self.sample_from_anchor,
            "aux_hidden_state_layer_ids": list(self.taps),
        }

    @classmethod
    def from_native(cls, native: Mapping[str, Any], *, num_target_layers: int | None = None) -> DFlashConfig:
        """From `config.json`; whatever would change the forward is refused rather than ignored."""
        refuse_other_values(native, {"architectures": [ARCHITECTURE], **PLAIN_LAYERS})
        return cls(
            taps=tuple(int(tap) for tap in required(native, "aux_hidden_state_layer_ids")),
            sample_from_anchor=flag(native, "sample_from_anchor"),
            **decoder_of_native(native),
            **block_of_native(native),
        )


class InjectedAttention(nn.Module):
    """Projections around the caller's attention: keys and values of text rows from the target's states, of places from
    their own, queries of places alone."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query_size, key_size = (
            count * config.head_dim for count in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(
        self, inputs: torch.Tensor, rotary: Rotary, layer: int, attend: LayerAttend, places: torch.Tensor
    ) -> torch.Tensor:
        """inputs [N, H] of all rows, those of text from the target -> [M, H] of `places` [M]."""
        key = self.k_norm(self.k_proj(inputs).unflatten(-1, (-1, self.head_dim)))  # [N, Hkv, D]
        value = self.v_proj(inputs).unflatten(-1, (-1, self.head_dim))
        asking = inputs[places]
        query = self.q_norm(self.q_proj(asking).unflatten(-1, (-1, self.head_dim)))  # [M, Hq, D]
        own_rotary = rotary[0][places], rotary[1][places]
        attended = attend(layer, rotate(query, own_rotary), rotate(key, rotary), value, "places")
        return cast(torch.Tensor, self.o_proj(attended.flatten(-2).to(inputs.dtype)))


class InjectedLayer(nn.Module):
    """Qwen3's decoder layer around it."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.self_attn = InjectedAttention(config)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        states: torch.Tensor,
        text: torch.Tensor,
        rotary: Rotary,
        layer: int,
        attend: LayerAttend,
        places: torch.Tensor,
    ) -> torch.Tensor:
        """states [M, H] of the places; `text` [N, H] holds the target's fused states at rows of text, and anything at
        places."""
        inputs = text.index_copy(0, places, self.input_layernorm(states))
        states = states + self.self_attn(inputs, rotary, layer, attend, places)
        return cast(torch.Tensor, states + self.mlp(self.post_attention_layernorm(states)))


class DFlashHead(BlockHead):
    """The network."""

    config: DFlashConfig
    sees_ahead = True

    def __init__(self, config: DFlashConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__(config, vocabulary)
        self.num_places = config.block_size
        self.first_place = 1 if config.sample_from_anchor else 2
        self.fc = nn.Linear(len(config.taps) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(InjectedLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self._rotary = rotary_table(config.head_dim, config.rope_theta, config.rope_scaling)
        self._lm_head: torch.Tensor | None = None

    def bind(self, weights: TargetWeights) -> Self:
        super().bind(weights)
        self._lm_head = lent_lm_head(self)
        return self

    def text_inputs(self, taps: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        width = len(self.config.taps) * self.config.hidden_size
        if taps.shape[-1] != width:
            raise ValueError(
                f"expected {len(self.config.taps)} tapped states of {self.config.hidden_size} = {width}, got "
                f"{taps.shape[-1]}"
            )
        return cast(torch.Tensor, self.hidden_norm(self.fc(taps)))

    def place_inputs(self, following: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        masks = torch.full_like(following, self.config.mask_token_id)[:, None].expand(-1, self.num_places - 1)
        return self.embed(torch.cat([following[:, None], masks], dim=1), dtype)

    def forward(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        attend: LayerAttend,
        *,
        places: torch.Tensor,
        wanted: torch.Tensor | None,
    ) -> torch.Tensor:
        """`wanted` are places; None for all of them."""
        rotary = self._rotary(positions, inputs.dtype)
        states = inputs[places]
        for number, layer in enumerate(self.layers):
            states = layer(states, inputs, rotary, number, attend, places)
        return states if wanted is None else states[torch.searchsorted(places, wanted)]

    def base_outputs(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._lm_head is None:
            raise RuntimeError("the head drafts with its target's LM head: call bind(target.weights) first")
        return self.norm(states), self._lm_head

    def init_from_target(self, *, layer: nn.Module, final_norm: nn.Module, lm_head_weight: torch.Tensor) -> list[str]:
        """The final norm; every layer is the target's last one, where shapes agree, and the states that it reads are
        normed as that layer's; the highest tap goes through the fusion."""
        size = self.config.hidden_size
        filled = fill(self.norm, norm_scale(final_norm))
        source = dict(layer.named_parameters())
        modules = dict(layer.named_modules())
        before_mlp = modules.get("pre_feedforward_layernorm") or modules.get("post_attention_layernorm")
        filled += fill(self.hidden_norm, norm_scale(modules.get("input_layernorm")))
        for own in self.layers:
            for name, module in own.named_modules():
                if isinstance(module, nn.Linear):
                    filled += fill(module, source.get(f"{name}.weight"))
            filled += fill(cast(nn.Module, own.input_layernorm), norm_scale(modules.get("input_layernorm")))
            filled += fill(cast(nn.Module, own.post_attention_layernorm), norm_scale(before_mlp))
        with torch.no_grad():
            self.fc.weight.mul_(RANDOM_SHARE)
            self.fc.weight[:, -size:] += torch.eye(size)
        return self._names_of(filled)
