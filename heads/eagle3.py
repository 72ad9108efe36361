"""EAGLE-3: a one-layer draft head that reads the target's fused hidden states and drafts on its own states.

Li et al. 2025, "EAGLE-3: Scaling up inference acceleration of large language models via training-time test" (arXiv
2503.01840).

Row t of a draft sequence holds the pair (token x_{t+1}, state f_t) and predicts x_{t+2}. A state is the fused
target feature where the target has run, and the head's own previous output beyond.

Layout and names are those of the public EAGLE-3 checkpoints (`midlayer.*`, `d2t` offsets, carried state before the
final norm, residual from the raw state), which vLLM and SGLang load. What later checkpoints norm besides is an option
(`Eagle3Config`); other variants are refused by name.

Shapes: ... any leading dimensions, H hidden, C draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from heads.base import DraftHead, RecurrentHead, TargetSizes, flag, refuse_other_values
from heads.decoder import ONE_LAYER, DecoderConfig, decoder_of_native, decoder_of_target, decoder_to_native
from heads.layers import RANDOM_SHARE, Attend, Attention, Block, GatedMLP, RMSNorm, Rotary, fill, norm_scale
from heads.rope import rotary_table
from heads.vocab import DraftVocabulary

ARCHITECTURE = "LlamaForCausalLMEagle3"
NUM_TAPS = 3
VARIANTS = ("fc_norm", "norm_before_fc", "norm_output")
"""Flags of `config.json` that are false where they are not said."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(DecoderConfig):
    """Sizes of a head, and its variants.

    norm_before_residual: the residual is the normed state, as in most speculators checkpoints; vLLM reads such heads,
    SGLang does not.
    fc_norm: each tapped state is normed before all are fused (one norm a tap). norm_before_fc: all are normed as one
    vector instead.
    norm_output: the state fed back is the normed one, which the LM head reads ("EAGLE-3.1", arXiv 2605.09992).
    """

    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.taps) != NUM_TAPS or any(tap < 1 for tap in self.taps) or list(self.taps) != sorted(set(self.taps)):
            raise ValueError(
                f"an EAGLE-3 head reads {NUM_TAPS} layer outputs in ascending order (hidden_states indices from 1), "
                f"got taps {list(self.taps)}"
            )
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc are both true: a head has one of them, or neither")

    @classmethod
    def for_target(
        cls,
        target_config: Any,
        *,
        draft_vocab_size: int,
        vocab_size: int,
        taps: tuple[int, ...] | None = None,
        **settings: Any,
    ) -> Eagle3Config:
        """A head as wide as the target's layers."""
        sizes = TargetSizes.of(target_config)
        return cls(
            vocab_size=vocab_size,
            draft_vocab_size=draft_vocab_size,
            taps=existing_taps(taps, sizes.num_layers),
            **decoder_of_target(sizes),
            **settings,
        )

    def to_native(self) -> dict[str, Any]:
        """`config.json`. The layer ids are written in both conventions found among servers (see `_native_taps`).

        Flags of variants are written where they are true. All readers take their absence as false; what `norm_output:
        false` says they disagree on (SpecForge once left the norm out altogether).
        """
        return {
            "architectures": [ARCHITECTURE],
            **decoder_to_native(self),
            "target_hidden_size": self.hidden_size,
            "draft_vocab_size": self.draft_vocab_size,
            "tie_word_embeddings": False,
            "norm_before_residual": self.norm_before_residual,
            **{key: True for key in VARIANTS if getattr(self, key)},
            "eagle_aux_hidden_state_layer_ids": list(self.taps),
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in self.taps],
            },
        }

    @classmethod
    def from_native(cls, native: Mapping[str, Any], *, num_target_layers: int | None = None) -> Eagle3Config:
        """From `config.json`; whatever would change the forward is refused rather than ignored."""
        expected = {
            "architectures": [ARCHITECTURE],
            **ONE_LAYER,
            "input_norm": False,
            "target_hidden_size": native.get("hidden_size"),
        }
        refuse_other_values(native, expected)
        flags: dict[str, Any] = {key: flag(native, key) for key in ("norm_before_residual", *VARIANTS)}
        return cls(taps=_native_taps(native, num_target_layers), **decoder_of_native(native), **flags)


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Inputs of decoder layers 2, n//2 and n-3 (the EAGLE-3 choice); spread evenly over shallow targets."""
    taps = (2, num_layers // 2, num_layers - 3)
    if list(taps) == sorted(set(taps)):
        return taps
    if num_layers < NUM_TAPS:
        raise ValueError(f"an EAGLE-3 head reads {NUM_TAPS} layers, the target has only {num_layers}")
    return (1, (num_layers + 1) // 2, num_layers)


def existing_taps(taps: tuple[int, ...] | None, num_layers: int) -> tuple[int, ...]:
    """`taps`, or the default ones; ValueError for layers that the target does not have."""
    taps = taps or default_taps(num_layers)
    if taps[-1] > num_layers:
        raise ValueError(f"tap {taps[-1]} does not exist: the target has {num_layers} layers")
    return taps


def _native_taps(native: Mapping[str, Any], num_target_layers: int | None) -> tuple[int, ...]:
    """The top-level key (vLLM) holds `hidden_states` indices. The one inside `eagle_config` (SpecForge, SGLang) counts
    "output of 0-based layer i", one less.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    indices, layers = native.get(key), (native.get("eagle_config") or {}).get(key)
    if indices is not None and layers is not None and [layer + 1 for layer in layers] != list(indices):
        raise ValueError(
            f"the head's config.json names its taps twice and differently: {key} {indices} are hidden_states indices, "
            f"eagle_config.{key} {layers} are layers counted from 0"
        )
    if indices is not None:
        return tuple(int(index) for index in indices)
    if layers is not None:
        return tuple(int(layer) + 1 for layer in layers)
    if num_target_layers is None:
        raise ValueError(
            "the head's config.json names no eagle_aux_hidden_state_layer_ids, and the defaults depend "
            "on the target's number of layers: load it together with its target"
        )
    return default_taps(num_target_layers)


class MidLayer(nn.Module):
    """The decoder layer. The residual is the raw state (or, as an option, the normed one): the embedding enters through
    attention alone. block: attention and MLP in one, where decoding has made that."""

    block: Block | None = None

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.self_attn = Attention(config, input_size=2 * config.hidden_size)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm_before_residual = config.norm_before_residual

    def forward(
        self,
        embeddings: torch.Tensor,
        states: torch.Tensor,
        rotary: Rotary,
        attend: Attend,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        normed = self.hidden_norm(states)
        inputs = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)  # [..., 2H]
        states = normed if self.norm_before_residual else states
        if self.block is not None and rows is None:
            return self.block(inputs, states, rotary, attend)
        attended = self.self_attn(inputs, rotary, attend, rows)
        states = (states if rows is None else states[rows]) + attended
        return cast(torch.Tensor, states + self.mlp(self.post_attention_layernorm(states)))

    def init_from_target(self, layer: nn.Module) -> list[torch.Tensor]:
        """Read a layer of the target's through the [state] half of the wider input. Returns what was filled."""
        size = self.hidden_norm.weight.numel()
        source = dict(layer.named_parameters())
        modules = dict(layer.named_modules())
        before_mlp = modules.get("pre_feedforward_layernorm") or modules.get("post_attention_layernorm")
        filled: list[torch.Tensor] = []
        for name, module in self.named_modules():
            if name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
                filled += fill(module, source.get(f"{name}.weight"), columns=slice(size, None))
            elif name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
                filled += fill(module, source.get(f"{name}.weight"))
        filled += fill(self.post_attention_layernorm, norm_scale(before_mlp))
        return filled + fill(self.hidden_norm, norm_scale(modules.get("input_layernorm")))


class FusedTaps(DraftHead):
    """A head that fuses the target's states of its three tapped layers into one: `fc`, and what norms come before."""

    config: Eagle3Config

    def make_fusion(self) -> None:
        """The modules."""
        config, width = self.config, NUM_TAPS * self.config.hidden_size
        if config.norm_before_fc:
            self.input_norm = RMSNorm(width, config.rms_norm_eps)
        if config.fc_norm:
            norms = [RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(NUM_TAPS)]
            self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(width, config.hidden_size, bias=False)

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """[..., taps * H] -> [..., H]."""
        width = NUM_TAPS * self.config.hidden_size
        if taps.shape[-1] != width:
            raise ValueError(
                f"expected {NUM_TAPS} tapped states of {self.config.hidden_size} = {width}, got {taps.shape[-1]}"
            )
        if self.config.norm_before_fc:
            taps = self.input_norm(taps)
        if self.config.fc_norm:
            parts = zip(self.fc_norm, taps.chunk(NUM_TAPS, dim=-1), strict=True)
            taps = torch.cat([norm(part) for norm, part in parts], dim=-1)
        return cast(torch.Tensor, self.fc(taps))

    def init_fusion(self) -> None:
        """The highest tap goes through, the others as a part of their random values, so that they are used from the
        first step."""
        size = self.config.hidden_size
        with torch.no_grad():
            self.fc.weight.mul_(RANDOM_SHARE)
            self.fc.weight[:, -size:] += torch.eye(size)


class Eagle3Head(FusedTaps, RecurrentHead):
    """The network."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config, vocabulary: DraftVocabulary) -> None:
        super().__init__(config, vocabulary)
        self.midlayer = MidLayer(config)
        self.make_fusion()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self._rotary = rotary_table(config.head_dim, config.rope_theta, config.rope_scaling)

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
        rotary = self._rotary(positions, states.dtype)
        states = self.midlayer(embeddings, states, rotary, attend, rows)
        return cast(torch.Tensor, self.norm(states) if self.config.norm_output else states)

    def outputs(self, states: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (states if self.config.norm_output else self.norm(states)), self.lm_head.weight

    def init_from_target(self, *, layer: nn.Module, final_norm: nn.Module, lm_head_weight: torch.Tensor) -> list[str]:
        """The draft LM head and norm are the target's. The layer is the target's last one, read through the [state]
        half of its wider input; the [embedding] half and the fusion of the lower taps keep a part of their random
        values, so that they are used from the first step. Tensors whose shapes the target does not have are left as
        they are.
        """
        filled = fill(self.lm_head, lm_head_weight.index_select(0, self.target_ids.to(lm_head_weight.device)))
        filled += fill(self.norm, norm_scale(final_norm))
        filled += self.midlayer.init_from_target(layer)
        self.init_fusion()
        return self._names_of(filled)
