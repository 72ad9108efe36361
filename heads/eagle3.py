"""EAGLE-3: a one-layer draft head that reads the target's fused hidden states and drafts on its own states.

One forward serves training and decoding; only the attention differs, so the caller supplies it (`Attend`).
Row t of a draft sequence holds the pair (token x_{t+1}, state f_t) and predicts x_{t+2}. A state is the fused
target feature where the target has run, and the head's own previous output beyond.

Layout and names are those of the public EAGLE-3 checkpoints (`midlayer.*`, `d2t` offsets, carried state before the
final norm, residual from the raw state), which vLLM and SGLang load. The normed state as the residual is an option
(`norm_before_residual`); other variants are refused by name.

Shapes: ... any leading dimensions, H hidden, D head dimension, Hq query heads, Hkv key-value heads, C draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from heads.vocab import DraftVocabulary

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(query [..., Hq, D], key [..., Hkv, D], value [..., Hkv, D]), rotated, not scaled -> [..., Hq, D]."""

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, each [..., 1, D]."""

ARCHITECTURE = "LlamaForCausalLMEagle3"
NUM_TAPS = 3
RANDOM_SHARE = 0.3
"""What is left of random values in tensors that are filled from the target in part (see `init_from_target`)."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """Sizes of a head. `taps` are Hugging Face `hidden_states` indices (0 = embeddings, i = output of layer i).

    `norm_before_residual`: the residual is the normed state, as in most speculators checkpoints; vLLM reads such heads,
    SGLang does not.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    norm_before_residual: bool = False

    def __post_init__(self) -> None:
        if len(self.taps) != NUM_TAPS or any(tap < 1 for tap in self.taps) or list(self.taps) != sorted(set(self.taps)):
            raise ValueError(
                f"an EAGLE-3 head reads {NUM_TAPS} layer outputs in ascending order (hidden_states indices from 1), "
                f"got taps {list(self.taps)}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} query heads cannot share {self.num_key_value_heads} key-value heads evenly"
            )
        if self.head_dim % 2:
            raise ValueError(f"rotary embeddings need an even head dimension, got {self.head_dim}")
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} must lie between 1 and the target's {self.vocab_size}"
            )

    @classmethod
    def for_target(
        cls, target_config: Any, *, draft_vocab_size: int, vocab_size: int, taps: tuple[int, ...] | None = None
    ) -> Eagle3Config:
        """A head as wide as the target's layers. `vocab_size` is the number of rows of the target's LM head."""
        text = target_config.get_text_config() if hasattr(target_config, "get_text_config") else target_config
        num_layers = int(text.num_hidden_layers)
        taps = taps or default_taps(num_layers)
        if taps[-1] > num_layers:
            raise ValueError(f"tap {taps[-1]} does not exist: the target has {num_layers} layers")
        num_heads = int(text.num_attention_heads)
        hidden_size = int(text.hidden_size)
        eos = text.eos_token_id
        return cls(
            hidden_size=hidden_size,
            intermediate_size=int(getattr(text, "intermediate_size", None) or 4 * hidden_size),
            num_attention_heads=num_heads,
            num_key_value_heads=int(getattr(text, "num_key_value_heads", None) or num_heads),
            head_dim=int(getattr(text, "head_dim", None) or hidden_size // num_heads),
            vocab_size=vocab_size,
            draft_vocab_size=draft_vocab_size,
            taps=taps,
            rms_norm_eps=float(getattr(text, "rms_norm_eps", 1e-6)),
            rope_theta=_plain_rope_theta(text.to_dict()) or 10000.0,
            max_position_embeddings=int(getattr(text, "max_position_embeddings", 2048)),
            bos_token_id=text.bos_token_id,
            eos_token_id=eos[0] if isinstance(eos, list) else eos,
        )

    def to_native(self) -> dict[str, Any]:
        """`config.json`. The layer ids are written in both conventions found among servers (see `_native_taps`)."""
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "target_hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "max_position_embeddings": self.max_position_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "tie_word_embeddings": False,
            "norm_before_residual": self.norm_before_residual,
            "eagle_aux_hidden_state_layer_ids": list(self.taps),
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in self.taps],
            },
        }

    @classmethod
    def from_native(cls, native: Mapping[str, Any], *, num_target_layers: int | None = None) -> Eagle3Config:
        """From `config.json`; whatever would change the forward is refused rather than ignored."""
        _refuse_variants(native)
        hidden_size = int(_required(native, "hidden_size"))
        num_heads = int(_required(native, "num_attention_heads"))
        return cls(
            hidden_size=hidden_size,
            intermediate_size=int(_required(native, "intermediate_size")),
            num_attention_heads=num_heads,
            num_key_value_heads=int(native.get("num_key_value_heads") or num_heads),
            head_dim=int(native.get("head_dim") or hidden_size // num_heads),
            vocab_size=int(_required(native, "vocab_size")),
            draft_vocab_size=int(native.get("draft_vocab_size") or _required(native, "vocab_size")),
            taps=_native_taps(native, num_target_layers),
            rms_norm_eps=float(native.get("rms_norm_eps", 1e-6)),
            rope_theta=_plain_rope_theta(native) or 10000.0,
            max_position_embeddings=int(native.get("max_position_embeddings", 2048)),
            bos_token_id=native.get("bos_token_id"),
            eos_token_id=native.get("eos_token_id"),
            norm_before_residual=_flag(native, "norm_before_residual"),
        )


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Inputs of decoder layers 2, n//2 and n-3 (the EAGLE-3 choice); spread evenly over shallow targets."""
    taps = (2, num_layers // 2, num_layers - 3)
    if list(taps) == sorted(set(taps)):
        return taps
    if num_layers < NUM_TAPS:
        raise ValueError(f"an EAGLE-3 head reads {NUM_TAPS} layers, the target has only {num_layers}")
    return (1, (num_layers + 1) // 2, num_layers)


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


def _required(native: Mapping[str, Any], key: str) -> Any:
    if native.get(key) is None:
        raise ValueError(f"the head's config.json has no {key!r}")
    return native[key]


def _flag(native: Mapping[str, Any], key: str) -> bool:
    value = native.get(key)
    if not isinstance(value, bool | None):
        raise ValueError(f"the head's config.json says {key} = {value!r}; expected true or false")
    return bool(value)


def _refuse_variants(native: Mapping[str, Any]) -> None:
    """Flags of related formats that change the computation."""
    expected: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "norm_before_fc": False,
        "norm_output": False,
        "fc_norm": False,
        "input_norm": False,
        "target_hidden_size": native.get("hidden_size"),
    }
    for key, value in expected.items():
        given = native.get(key)
        if given is not None and given != value:
            raise ValueError(f"the head's config.json says {key} = {given!r}; only {value!r} is supported")


def _plain_rope_theta(config: Mapping[str, Any]) -> float | None:
    """The base of unscaled rotary embeddings; other kinds are refused, since draft and target would disagree."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rotary embeddings of type {kind!r} are not supported in draft heads, only 'default'")
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    return None if theta is None else float(theta)


class RMSNorm(nn.Module):
    """Llama's: the mean square in float32, the weight applied in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        wide = states.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(states.dtype) * normed.to(states.dtype)


class Attention(nn.Module):
    """Projections around the caller's attention; the input is [embedding; state], twice as wide as usual."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)

    def forward(self, inputs: torch.Tensor, rotary: Rotary, attend: Attend, rows: torch.Tensor | None) -> torch.Tensor:
        key = self.k_proj(inputs).unflatten(-1, (-1, self.head_dim))  # [..., Hkv, D]
        value = self.v_proj(inputs).unflatten(-1, (-1, self.head_dim))  # [..., Hkv, D]
        key = rotate(key, rotary)
        if rows is not None:
            inputs, rotary = inputs[rows], (rotary[0][rows], rotary[1][rows])
        query = self.q_proj(inputs).unflatten(-1, (-1, self.head_dim))  # [..., Hq, D]
        attended = attend(rotate(query, rotary), key, value)
        return cast(torch.Tensor, self.o_proj(attended.flatten(-2).to(inputs.dtype)))


class GatedMLP(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        gated = functional.silu(self.gate_proj(states)) * self.up_proj(states)
        return cast(torch.Tensor, self.down_proj(gated))


class MidLayer(nn.Module):
    """The decoder layer. The residual is the raw state (or, as an option, the normed one): the embedding enters through
    attention alone."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = GatedMLP(config)
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
        attended = self.self_attn(inputs, rotary, attend, rows)
        states = normed if self.norm_before_residual else states
        states = (states if rows is None else states[rows]) + attended
        return cast(torch.Tensor, states + self.mlp(self.post_attention_layernorm(states)))


class Eagle3Head(nn.Module):
    """The network. It holds no token embedding of its own: `bind` lends it the target's, which is never saved."""

    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, config: Eagle3Config, vocabulary: DraftVocabulary) -> None:
        super().__init__()
        if (len(vocabulary), vocabulary.vocab_size) != (config.draft_vocab_size, config.vocab_size):
            raise ValueError(
                f"the vocabulary maps {len(vocabulary)} of {vocabulary.vocab_size} tokens, "
                f"the config says {config.draft_vocab_size} of {config.vocab_size}"
            )
        self.config = config
        self.vocabulary = vocabulary
        self.midlayer = MidLayer(config)
        self.fc = nn.Linear(NUM_TAPS * config.hidden_size, config.hidden_size, bias=False)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", vocabulary.d2t)
        self.register_buffer("t2d", vocabulary.t2d)
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        # Not a buffer: `to(bfloat16)` would round it, and angles at position 1,000 would be off by a radian.
        self._inverse_frequencies = (config.rope_theta**-exponents).float()
        self._embedding: torch.Tensor | None = None

    def bind(self, embedding_weight: torch.Tensor) -> Eagle3Head:
        """Lend the head the target's token embedding [V, H]."""
        expected = [self.config.vocab_size, self.config.hidden_size]
        if list(embedding_weight.shape) != expected:
            raise ValueError(
                f"the head was made for a target with embeddings of shape {expected} (vocabulary, hidden), "
                f"this target's are {list(embedding_weight.shape)}"
            )
        self._embedding = embedding_weight.detach()
        return self

    @property
    def target_ids(self) -> torch.Tensor:
        """[C] int64: the target token of each draft token."""
        return self.d2t + torch.arange(self.d2t.numel(), device=self.d2t.device)

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """Target states of the tapped layers, side by side [..., 3H] -> first states [..., H]."""
        width = NUM_TAPS * self.config.hidden_size
        if taps.shape[-1] != width:
            raise ValueError(
                f"expected {NUM_TAPS} tapped states of {self.config.hidden_size} = {width}, got {taps.shape[-1]}"
            )
        return cast(torch.Tensor, self.fc(taps))

    def forward(
        self,
        token_ids: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        *,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One draft step: token_ids [...], states [..., H], positions [...] -> new states [..., H].

        The token is the one *after* the state's position. The new states are both what `logits` reads and
        what the next step takes as its states. Only differences of positions matter.

        `rows` (indices into the first dimension) asks for the new states of some rows only: the others just
        give their keys and values, as a prompt does. `attend` then gets the queries of `rows` alone.
        """
        if self._embedding is None:
            raise RuntimeError("the head has no token embedding yet: call bind(target.embedding_weight) first")
        embeddings = functional.embedding(token_ids, self._embedding).to(states.dtype)
        rotary = self._rotary(positions, states.dtype)
        return cast(torch.Tensor, self.midlayer(embeddings, states, rotary, attend, rows))

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Draft logits [..., C] for the token after the one the states were computed from."""
        return cast(torch.Tensor, self.lm_head(self.norm(states)))

    def _rotary(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotary:
        angles = positions.float()[..., None] * self._inverse_frequencies.to(positions.device)  # [..., D/2]
        angles = torch.cat([angles, angles], dim=-1)[..., None, :]  # [..., 1, D]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(vectors: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Llama's rotary embedding (halves, not pairs): vectors [..., heads, D]."""
    cos, sin = (table.to(vectors.dtype) for table in rotary)
    first, second = vectors.chunk(2, dim=-1)
    return vectors * cos + torch.cat([-second, first], dim=-1) * sin


def init_from_target(
    head: Eagle3Head, *, layer: nn.Module, final_norm: nn.Module, lm_head_weight: torch.Tensor
) -> list[str]:
    """Start from what the target already knows; returns the names of the tensors that were filled.

    The draft LM head and norm are the target's. The layer is the target's last one, read through the [state] half of
    its wider input; the [embedding] half and the fusion of the lower taps keep a part of their random values, so that
    they are used from the first step. Tensors whose shapes the target does not have are left as they are.
    """
    size = head.config.hidden_size
    filled = _copy(head.lm_head, lm_head_weight.index_select(0, head.target_ids.to(lm_head_weight.device)))
    filled += _copy(head.norm, getattr(final_norm, "weight", None))
    source = dict(layer.named_parameters())
    for name, module in head.midlayer.named_modules():
        if name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            filled += _copy(module, source.get(f"{name}.weight"), columns=slice(size, None))
        elif name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm"):
            filled += _copy(module, source.get(f"{name}.weight"))
    filled += _copy(head.midlayer.hidden_norm, source.get("input_layernorm.weight"))
    with torch.no_grad():
        head.fc.weight.mul_(RANDOM_SHARE)
        head.fc.weight[:, -size:] += torch.eye(size)
    return [name for name, parameter in head.named_parameters() if any(parameter is one for one in filled)]


def _copy(module: nn.Module, weight: torch.Tensor | None, columns: slice = slice(None)) -> list[torch.Tensor]:
    """Fill a module's weight (or some of its columns, scaling down the others) where the shapes agree."""
    own = cast(torch.Tensor, module.weight)
    if weight is None or own[..., columns].shape != weight.shape:
        return []
    with torch.no_grad():
        if own.ndim > 1 and own.shape != weight.shape:
            own.mul_(RANDOM_SHARE)
        own[..., columns] = weight.to(own)
    return [own]
