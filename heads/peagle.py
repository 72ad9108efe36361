"""P-EAGLE: an EAGLE-3 head of one or more layers that drafts all depths in one pass.

Hui et al. 2026, "P-EAGLE: Parallel-drafting EAGLE with scalable training" (arXiv 2602.01469).

A row of text is EAGLE-3's: the token x[t+1] beside the fused state of position t. A place reads the embedding of a
mask token beside one learned state, `mask_hidden`, fused like the target's. All rows are causal, and a place sees the
places before it: so the root's own row guesses depth 0, and place j depth j.

The first layer is EAGLE-3's, which reads embedding and state side by side; further ones are Llama's. Names are those of
public checkpoints (`layers.i.*`, `mask_hidden`). `own_embedding`: the head was trained with embeddings of its own, as
speculators does by default, and brings them.

Shapes: as in `heads.block`; X = 2H.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from heads.base import flag, refuse_other_values, required
from heads.block import BlockConfig, BlockHead, LayerAttend, block_of_native, block_to_native
from heads.block_unroll import Asking
from heads.decoder import PLAIN_LAYERS, decoder_of_native, decoder_to_native
from heads.eagle3 import NUM_TAPS, Eagle3Config, FusedTaps, MidLayer
from heads.layers import Attend, Attention, Block, GatedMLP, RMSNorm, Rotary, fill, norm_scale
from heads.rope import rotary_table
from heads.vocab import DraftVocabulary

ARCHITECTURE = "LlamaForCausalLMPEagle"
FUSION = ("fc_norm", "norm_before_fc")


@dataclass(frozen=True, kw_only=True)
class PEagleConfig(BlockConfig, Eagle3Config):
    """EAGLE-3's and the block's. own_embedding: see the module."""

    own_embedding: bool = False

    def __post_init__(self) -> None:
        BlockConfig.__post_init__(self)
        Eagle3Config.__post_init__(self)
        if self.norm_output:
            raise ValueError("norm_output says what is fed back to the head, and a P-EAGLE head feeds nothing back")

    def to_native(self) -> dict[str, Any]:
        """`config.json`."""
        return {
            "architectures": [ARCHITECTURE],
            **decoder_to_native(self),
            **block_to_native(self),
            "draft_vocab_size": self.draft_vocab_size,
            "tie_word_embeddings": False,
            "norm_before_residual": self.norm_before_residual,
            **{key: True for key in FUSION if getattr(self, key)},
            "own_embedding": self.own_embedding,
            "eagle_aux_hidden_state_layer_ids": list(self.taps),
        }

    @classmethod
    def from_native(cls, native: Mapping[str, Any], *, num_target_layers: int | None = None) -> PEagleConfig:
        """From `config.json`; whatever would change the forward is refused rather than ignored."""
        refuse_other_values(native, {"architectures": [ARCHITECTURE], **PLAIN_LAYERS, "norm_output": False})
        flags: dict[str, Any] = {key: flag(native, key) for key in ("norm_before_residual", "own_embedding", *FUSION)}
        taps = tuple(int(tap) for tap in required(native, "eagle_aux_hidden_state_layer_ids"))
        return cls(taps=taps, **decoder_of_native(native), **block_of_native(native), **flags)


class PlainLayer(nn.Module):
    """Llama's decoder layer. block: as in `MidLayer`."""

    block: Block | None = None

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config, input_size=config.hidden_size)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, states: torch.Tensor, rotary: Rotary, attend: Attend, rows: torch.Tensor | None) -> torch.Tensor:
        inputs = self.input_layernorm(states)
        if self.block is not None and rows is None:
            return self.block(inputs, states, rotary, attend)
        attended = self.self_attn(inputs, rotary, attend, rows)
        states = (states if rows is None else states[rows]) + attended
        return cast(torch.Tensor, states + self.mlp(self.post_attention_layernorm(states)))


class PEagleHead(FusedTaps, BlockHead):
    """The network."""

    config: PEagleConfig
    first_place = 0
    sees_ahead = False

    def __init__(self, config: PEagleConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__(config, vocabulary)
        self.num_places = config.num_depths - 1
        first: list[nn.Module] = [MidLayer(config)]
        self.layers = nn.ModuleList([*first, *(PlainLayer(config) for _ in range(config.num_layers - 1))])
        self.make_fusion()
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, NUM_TAPS * config.hidden_size))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self._rotary = rotary_table(config.head_dim, config.rope_theta, config.rope_scaling)

    def embed(self, token_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not self.config.own_embedding:
            return super().embed(token_ids, dtype)
        return functional.embedding(token_ids, self.embed_tokens.weight).to(dtype)

    def text_inputs(self, taps: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        states = self.fuse(taps)
        return torch.cat([self.embed(following, states.dtype), states], dim=-1)

    def place_inputs(self, following: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        mask = torch.full((1,), self.config.mask_token_id, device=following.device)
        state = self.fuse(self.mask_hidden.view(1, -1).to(dtype))
        place = torch.cat([self.embed(mask, state.dtype), state], dim=-1)
        return place[:, None].expand(len(following), self.num_places, -1)

    def forward(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        attend: LayerAttend,
        *,
        places: torch.Tensor,
        wanted: torch.Tensor | None,
    ) -> torch.Tensor:
        embeddings, states = inputs.chunk(2, dim=-1)
        rotary = self._rotary(positions, inputs.dtype)
        for number, layer in enumerate(self.layers):
            rows = wanted if number == len(self.layers) - 1 else None
            own = _of_layer(attend, number, "all" if rows is None else "wanted")
            if isinstance(layer, MidLayer):
                states = layer(embeddings, states, rotary, own, rows)
            else:
                states = layer(states, rotary, own, rows)
        return states

    def base_outputs(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.norm(states), self.lm_head.weight

    def init_from_target(self, *, layer: nn.Module, final_norm: nn.Module, lm_head_weight: torch.Tensor) -> list[str]:
        """As EAGLE-3's: the first layer is the target's last one. Further layers start as they are, with an MLP and an
        attention that add nothing."""
        filled = fill(self.lm_head, lm_head_weight.index_select(0, self.target_ids.to(lm_head_weight.device)))
        filled += fill(self.norm, norm_scale(final_norm))
        first = self.layers[0]
        assert isinstance(first, MidLayer)
        filled += first.init_from_target(layer)
        for further in list(self.layers)[1:]:
            assert isinstance(further, PlainLayer)
            nn.init.zeros_(further.self_attn.o_proj.weight)
            nn.init.zeros_(further.mlp.down_proj.weight)
        self.init_fusion()
        return self._names_of(filled)


def _of_layer(attend: LayerAttend, layer: int, asking: Asking) -> Attend:
    if asking == "all" and hasattr(attend, "of_layer"):  # decoding's, which fused layers know
        return cast(Attend, attend.of_layer(layer))

    def own(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend(layer, query, key, value, asking)

    return own
