"""Hydra: a network a depth, as in Medusa, that also reads the tokens drafted so far.

Ankner et al. 2024, "Hydra: Sequentially-dependent draft heads for Medusa decoding" (arXiv 2402.05109).

Depth i reads the root's state beside the embeddings of the i + 1 tokens that lead to the node. Its first block brings
the width down to H with a linear layer of its own in the place of the residual, Rx + SiLU(Wx + b); further blocks are
Medusa's. The LM head has a bias. Hydra++ puts a decoder layer over the text in front (`prefix_layer`): Llama's layer
and norm on the target's states, whose output is the root's state. Its cross-attention and EAGLE-like variants are
refused by name.

Names are those of the public code (`hydra_mlp`, `res_connection`, `hydra_lm_head`, and `prefix_embeding_layer`, spelled
so), with the `d2t` and `t2d` of reduced vocabularies added. Blocks of one depth are apart: the public code puts one and
the same block into all places after the first (`[ResBlock()] * n`).

Shapes: ... any leading dimensions, F drafted nodes, H hidden, C draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from heads.base import (
    HeadConfig,
    PathHead,
    TargetSizes,
    final_tap,
    refuse_other_values,
    required,
)
from heads.layers import (
    Attend,
    Attention,
    GatedMLP,
    RMSNorm,
    Rotary,
    RotaryTable,
    check_attention_sizes,
    fill,
    norm_scale,
)
from heads.rope import read_rope
from heads.vocab import DraftVocabulary

ARCHITECTURE = "HydraModel"
PLAIN, PREFIX = "mlp", "prefix-mlp"
"""Hydra's names for what is supported of its architectures (`hydra_head_arch`)."""
ROPE_THETA = 10000.0
"""The base of the prefix layer's rotary embeddings. The public code has this one for every target, and so have heads
that are made here."""
LAYER_SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
"""A prefix layer's sizes, which are those of the target's layers."""
BIAS_COLUMNS = 8
"""Columns that carry the LM head's bias in training. One would do; fast matrix products want widths of eight."""


@dataclass(frozen=True, kw_only=True)
class HydraConfig(HeadConfig):
    """num_heads: depths. num_layers: blocks of each. prefix_layer: whether a decoder layer over the text makes the
    roots' states; the sizes below are its own. Without it, or where nothing says them yet, they are 0.

    hidden_state_offset: 0 for the state after the target's final norm, k for the output of its k-th layer from the end,
    the last one being the 0th; `taps` says the same.
    """

    num_heads: int = 4
    num_layers: int = 1
    hidden_state_offset: int = 0
    prefix_layer: bool = False
    intermediate_size: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    rms_norm_eps: float = 0.0
    rope_theta: float = ROPE_THETA

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads < 1 or self.num_layers < 1:
            raise ValueError(
                f"a Hydra head has at least one depth of at least one layer, "
                f"got num_heads {self.num_heads} and num_layers {self.num_layers}"
            )
        if len(self.taps) != 1:
            raise ValueError(f"a Hydra head reads one state, got taps {list(self.taps)}")
        check_attention_sizes(self)

    @classmethod
    def for_target(
        cls,
        target_config: Any,
        *,
        draft_vocab_size: int,
        vocab_size: int,
        taps: tuple[int, ...] | None = None,
        **settings: Any,
    ) -> HydraConfig:
        """`settings`: num_heads, num_layers, prefix_layer."""
        sizes = TargetSizes.of(target_config)
        taps = taps or (final_tap(sizes.num_layers),)
        layer = {name: getattr(sizes, name) for name in LAYER_SIZES} if settings.get("prefix_layer") else {}
        return cls(
            hidden_size=sizes.hidden_size,
            vocab_size=vocab_size,
            draft_vocab_size=draft_vocab_size,
            taps=tuple(taps),
            hidden_state_offset=offset_of_tap(taps[0], sizes.num_layers),
            **layer,
            **settings,
        )

    def to_native(self) -> dict[str, Any]:
        """`config.json`: Hydra's own keys, and the sizes that it takes from the target's."""
        native: dict[str, Any] = {
            "architectures": [ARCHITECTURE],
            "hydra_num_heads": self.num_heads,
            "hydra_num_layers": self.num_layers,
            "hydra_head_arch": PREFIX if self.prefix_layer else PLAIN,
            "grounded_heads": True,
            "hidden_state_offset": self.hidden_state_offset,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
        }
        if self.prefix_layer:
            native |= {name: getattr(self, name) for name in LAYER_SIZES}
            native |= {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
            native |= {"rope_theta": self.rope_theta, "rope_scaling": None}
        return native

    @classmethod
    def from_native(cls, native: Mapping[str, Any], *, num_target_layers: int | None = None) -> HydraConfig:
        """From `config.json`; whatever would change the forward is refused rather than ignored."""
        expected = {"architectures": [ARCHITECTURE], "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
        refuse_other_values(native, expected)
        if num_target_layers is None:
            raise ValueError(
                "hidden_state_offset counts from the target's last layer, so which state a Hydra head reads depends "
                "on the target's number of layers: load it together with its target"
            )
        offset = int(native.get("hidden_state_offset") or 0)
        prefix_layer = is_prefix_arch(native)
        layer: dict[str, Any] = {}
        if prefix_layer:
            layer = {key: required(native, key) for key in LAYER_SIZES}
            layer["rope_theta"], scaling = read_rope(native)
            if scaling is not None:
                raise ValueError(f"the head's config.json says rope_scaling = {scaling!r}; only null is supported")
        return cls(
            hidden_size=int(required(native, "hidden_size")),
            vocab_size=int(required(native, "vocab_size")),
            draft_vocab_size=int(native.get("draft_vocab_size") or required(native, "vocab_size")),
            taps=(tap_of_offset(offset, num_target_layers),),
            num_heads=int(required(native, "hydra_num_heads")),
            num_layers=int(required(native, "hydra_num_layers")),
            hidden_state_offset=offset,
            prefix_layer=prefix_layer,
            **layer,
        )


def is_prefix_arch(native: Mapping[str, Any]) -> bool:
    """Whether a configuration has the prefix layer; ValueError for what is not Hydra's MLP heads on drafted tokens."""
    arch, grounded = native.get("hydra_head_arch", PLAIN), native.get("grounded_heads")
    if arch not in (PLAIN, PREFIX):
        raise ValueError(f"hydra_head_arch = {arch!r}; only {PLAIN!r} and {PREFIX!r} are supported")
    if grounded is not True:
        raise ValueError(
            f"grounded_heads = {grounded!r}; only true is supported: heads that do not read the drafted tokens are "
            "Medusa's in all but name"
        )
    return bool(arch == PREFIX)


def tap_of_offset(offset: int, num_target_layers: int) -> int:
    """The `hidden_states` index that Hydra's `hidden_state_offset` means."""
    if not 0 <= offset < num_target_layers:
        raise ValueError(f"hidden_state_offset is {offset}, expected 0 to {num_target_layers - 1}: the target's layers")
    return final_tap(num_target_layers) if offset == 0 else num_target_layers - offset


def offset_of_tap(tap: int, num_target_layers: int) -> int:
    """The inverse of `tap_of_offset`."""
    if tap == final_tap(num_target_layers):
        return 0
    if not 1 <= tap < num_target_layers:
        raise ValueError(
            f"a Hydra head reads the state after the target's final norm (tap {final_tap(num_target_layers)}) or the "
            f"output of a layer before the last (1 to {num_target_layers - 1}), got tap {tap}"
        )
    return num_target_layers - tap


class HydraBlock(nn.Module):
    """[..., (1 + num_tokens) * H] -> [..., H]: Rx + SiLU(Wx + b), where R is the identity if there are no tokens. W and
    b start at zero."""

    def __init__(self, hidden_size: int, num_tokens: int = 0) -> None:
        super().__init__()
        width = (1 + num_tokens) * hidden_size
        self.linear = nn.Linear(width, hidden_size)
        self.res_connection = nn.Linear(width, hidden_size) if num_tokens else nn.Identity()
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.res_connection(inputs) + functional.silu(self.linear(inputs)))


class DecoderLayer(nn.Module):
    """Llama's: attention and MLP, each behind a norm and beside the residual."""

    def __init__(self, config: HydraConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config, input_size=config.hidden_size)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, states: torch.Tensor, rotary: Rotary, attend: Attend, rows: torch.Tensor | None) -> torch.Tensor:
        attended = self.self_attn(self.input_layernorm(states), rotary, attend, rows)
        states = (states if rows is None else states[rows]) + attended
        return cast(torch.Tensor, states + self.mlp(self.post_attention_layernorm(states)))


class PrefixLayer(nn.Module):
    """The decoder layer and the norm behind it, named as in a one-layer Llama."""

    def __init__(self, config: HydraConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList([DecoderLayer(config)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, states: torch.Tensor, rotary: Rotary, attend: Attend, rows: torch.Tensor | None) -> torch.Tensor:
        return cast(torch.Tensor, self.norm(self.layers[0](states, rotary, attend, rows)))


class HydraHead(PathHead):
    """The networks of all depths, and the prefix layer if the config has one."""

    config: HydraConfig
    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, config: HydraConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__(config, vocabulary)
        size = config.hidden_size
        self.has_prefix_layer = config.prefix_layer
        if config.prefix_layer:
            if missing := [name for name in LAYER_SIZES if not getattr(config, name)]:
                raise ValueError(f"a Hydra head's prefix layer needs its {', '.join(missing)}")
            self.prefix_embeding_layer = PrefixLayer(config)
            self._rotary = RotaryTable(config.head_dim, config.rope_theta)
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(HydraBlock(size, depth + 1), *(HydraBlock(size) for _ in range(config.num_layers - 1)))
            for depth in range(config.num_heads)
        )
        self.hydra_lm_head = nn.ModuleList(nn.Linear(size, config.draft_vocab_size) for _ in range(config.num_heads))

    @property
    def num_depths(self) -> int:
        return self.config.num_heads

    def roots(
        self,
        taps: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        *,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The prefix layer reads the target's states alone: the token after a position enters with the path."""
        if taps.shape[-1] != self.config.hidden_size:
            raise ValueError(f"expected one tapped state of {self.config.hidden_size}, got {taps.shape[-1]}")
        if not self.config.prefix_layer:
            return super().roots(taps, token_ids, positions, attend, rows=rows)
        return cast(torch.Tensor, self.prefix_embeding_layer(taps, self._rotary(positions, taps.dtype), attend, rows))

    def draft(self, roots: torch.Tensor, path_tokens: torch.Tensor, depth: int) -> torch.Tensor:
        embeddings = self.embed(path_tokens, roots.dtype).flatten(-2)  # [F, (depth + 1) * H]
        return cast(torch.Tensor, self.hydra_mlp[depth](torch.cat([roots, embeddings], dim=-1)))

    def logits(self, states: torch.Tensor, depth: int = 0) -> torch.Tensor:
        """Draft logits [..., C], without the copy of the weights that `outputs` makes."""
        head = self.hydra_lm_head[depth]
        weight, bias = cast(torch.Tensor, head.weight), cast(torch.Tensor, head.bias)
        if weight.dtype is states.dtype:
            return cast(torch.Tensor, head(states))
        return functional.linear(states, weight.to(states.dtype), bias.to(states.dtype))

    def outputs(self, states: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The bias as further columns: [states, 1, 0...] and [weight, bias, 0...]."""
        head = self.hydra_lm_head[depth]
        weight, bias = cast(torch.Tensor, head.weight), cast(torch.Tensor, head.bias)
        one = functional.pad(torch.ones_like(states[..., :1]), (0, BIAS_COLUMNS - 1))
        column = functional.pad(bias[:, None], (0, BIAS_COLUMNS - 1))
        return torch.cat([states, one], dim=-1), torch.cat([weight, column], dim=-1)

    def init_from_target(self, *, layer: nn.Module, final_norm: nn.Module, lm_head_weight: torch.Tensor) -> list[str]:
        """As in Medusa, every depth starts as the target's own LM head on the root's state: first blocks hand that
        state on, further ones change nothing.

        The prefix layer starts with the target's last layer's weights where shapes allow, but adds nothing yet: its
        output projections are zero, and its norm undoes itself as well as one factor can (exactly, the target's final
        norm, where the state read is from before that).
        """
        size = self.config.hidden_size
        rows = lm_head_weight.index_select(0, self.target_ids.to(lm_head_weight.device))
        filled = []
        for mlp, head in zip(self.hydra_mlp, self.hydra_lm_head, strict=True):
            passage = cast(nn.Linear, cast(HydraBlock, cast(nn.Sequential, mlp)[0]).res_connection)
            eye = torch.eye(size, device=passage.weight.device, dtype=passage.weight.dtype)
            padded = functional.pad(eye, (0, passage.weight.shape[1] - size))
            filled += fill(passage, padded) + fill(head, rows)
            with torch.no_grad():
                passage.bias.zero_()
                cast(torch.Tensor, head.bias).zero_()
            filled += [passage.bias, cast(torch.Tensor, head.bias)]
        if self.config.prefix_layer:
            filled += self._init_prefix_layer(layer, norm_scale(final_norm))
        return self._names_of(filled)

    def _init_prefix_layer(self, layer: nn.Module, final_scale: torch.Tensor | None) -> list[torch.Tensor]:
        source, modules = dict(layer.named_parameters()), dict(layer.named_modules())
        filled: list[torch.Tensor] = []
        for name, module in self.prefix_embeding_layer.layers[0].named_modules():
            if name in ("self_attn.o_proj", "mlp.down_proj"):
                filled += fill(module, torch.zeros_like(cast(torch.Tensor, module.weight)))
            elif name.endswith("_proj"):
                filled += fill(module, source.get(f"{name}.weight"))
            elif name.endswith("layernorm"):
                filled += fill(module, norm_scale(modules.get(name)))
        if final_scale is None:
            return filled
        if self.config.hidden_state_offset == 0:
            final_scale = torch.full_like(final_scale, float(final_scale.float().square().mean().sqrt()))
        return filled + fill(self.prefix_embeding_layer.norm, final_scale)
