"""What a draft head is: a network on a target's hidden states that guesses the tokens after the next one.

Row t of a text holds the target's states of position t (`taps`) and the token x[t+1]. At depth d, counted from 0 as a
*step*, a head guesses x[t+2+step]. Three things are asked of every head: that it drafts (`outputs`, and what its shape
adds), that it can be trained (`unroll`), and that it can be written down (`config`, `state_dict`).

Three shapes cover the families here, and decoding knows one way to draft with each (`infer.drafters.head`):

    RecurrentHead   a decoder layer that goes on from its own states (EAGLE)
    PathHead        one network a depth, each reading the root's state and the drafted path (Medusa, Hydra)
    BlockHead       one pass for all depths, over places behind the text (P-EAGLE, DFlash; `heads.block`)

Shapes: ... any leading dimensions, R packed rows, Q rows of a step, F drafted nodes, H hidden, C draft vocabulary,
V target vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional

from heads.layers import Attend
from heads.rope import target_rope
from heads.transfer import sent
from heads.unroll import Batch, UnrolledAttention, UnrolledStep
from heads.vocab import DraftVocabulary, VocabularyProvenance


@dataclass(frozen=True, kw_only=True, eq=False)
class TargetWeights:
    """What a target lends its head, which never saves it: the token embedding and the LM head, each [V, H]."""

    embedding: torch.Tensor
    lm_head: torch.Tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> TargetWeights:
        """A copy of a head borrows the same weights."""
        return self


@dataclass(frozen=True, kw_only=True)
class TargetSizes:
    """What a head's default sizes follow: those of the target's layers."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_id: int | None

    @classmethod
    def of(cls, target_config: Any) -> TargetSizes:
        """From a transformers configuration."""
        text = target_config.get_text_config() if hasattr(target_config, "get_text_config") else target_config
        num_heads = int(text.num_attention_heads)
        hidden_size = int(text.hidden_size)
        eos = text.eos_token_id
        rope_theta, rope_scaling = target_rope(text.to_dict())
        return cls(
            num_layers=int(text.num_hidden_layers),
            hidden_size=hidden_size,
            intermediate_size=int(getattr(text, "intermediate_size", None) or 4 * hidden_size),
            num_attention_heads=num_heads,
            num_key_value_heads=int(getattr(text, "num_key_value_heads", None) or num_heads),
            head_dim=int(getattr(text, "head_dim", None) or hidden_size // num_heads),
            rms_norm_eps=float(getattr(text, "rms_norm_eps", 1e-6)),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=int(getattr(text, "max_position_embeddings", 2048)),
            bos_token_id=text.bos_token_id,
            eos_token_id=eos[0] if isinstance(eos, list) else eos,
        )


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Sizes of a head. hidden_size, vocab_size: the target's (rows of its LM head).

    taps: Hugging Face `hidden_states` indices of what is read (0 = embeddings, i = output of layer i); one more than
    the target has layers stands for the state after its final norm (`final_tap`).
    """

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} must lie between 1 and the target's {self.vocab_size}"
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
    ) -> Self:
        """The family's usual head for a target. `settings`: those of the recipe's `head` section that apply to the
        family and were given."""
        raise NotImplementedError

    def to_native(self) -> dict[str, Any]:
        """`config.json`, with the family's `architectures`."""
        raise NotImplementedError

    @classmethod
    def from_native(cls, native: Mapping[str, Any], *, num_target_layers: int | None = None) -> Self:
        """From `config.json`; whatever would change the forward is refused rather than ignored."""
        raise NotImplementedError


class DraftHead(nn.Module, ABC):
    """See the module. A head holds nothing of its target: `bind` lends it what it reads.

    multiply: the product of inputs with an LM head's weight, where decoding has a faster one than torch's.
    """

    config: HeadConfig
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = staticmethod(functional.linear)

    def __init__(self, config: HeadConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__()
        if (len(vocabulary), vocabulary.vocab_size) != (config.draft_vocab_size, config.vocab_size):
            raise ValueError(
                f"the vocabulary maps {len(vocabulary)} of {vocabulary.vocab_size} tokens, "
                f"the config says {config.draft_vocab_size} of {config.vocab_size}"
            )
        self.config = config
        self.vocabulary = vocabulary
        for name, tensor in self.vocabulary_buffers(vocabulary).items():
            self.register_buffer(name, tensor)
        self._target_ids = vocabulary.target_ids
        self._lent: TargetWeights | None = None

    @classmethod
    def vocabulary_buffers(cls, vocabulary: DraftVocabulary) -> dict[str, torch.Tensor]:
        """The vocabulary map as it is saved with the weights."""
        return {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}

    @classmethod
    def read_vocabulary(
        cls, tensors: Mapping[str, torch.Tensor], config: HeadConfig, provenance: VocabularyProvenance
    ) -> DraftVocabulary:
        """The inverse of `vocabulary_buffers`; ValueError for a map that is missing or none."""
        missing = [name for name in ("d2t", "t2d") if name not in tensors]
        if missing:
            raise ValueError(f"the weights lack {', '.join(missing)}: the head's draft vocabulary has no map")
        return DraftVocabulary.from_maps(
            tensors["d2t"], tensors["t2d"], vocab_size=config.vocab_size, provenance=provenance
        )

    @property
    def num_depths(self) -> int | None:
        """The deepest draft that the head can make (None: no bound)."""
        return None

    @property
    def target_ids(self) -> torch.Tensor:
        """[C] int64: the target token of each draft token."""
        return self._target_ids.to(self.device)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def bind(self, weights: TargetWeights) -> Self:
        """Lend the head what it reads of its target."""
        expected = [self.config.vocab_size, self.config.hidden_size]
        for name, weight in (("embeddings", weights.embedding), ("LM head", weights.lm_head)):
            if list(weight.shape) != expected:
                raise ValueError(
                    f"the head was made for a target with {name} of shape {expected} (vocabulary, hidden), "
                    f"this target's are {list(weight.shape)}"
                )
        self._lent = TargetWeights(embedding=weights.embedding.detach(), lm_head=weights.lm_head.detach())
        return self

    def twin(self) -> Self:
        """A copy apart from whatever trains this one: equal weights in tensors of its own, nothing else of it."""
        made = type(self)(self.config, self.vocabulary)
        made.load_state_dict(self.state_dict())
        made.to(self.device)
        return made if self._lent is None else made.bind(self._lent)

    @property
    def lent(self) -> TargetWeights:
        if self._lent is None:
            raise RuntimeError("the head has nothing of its target yet: call bind(target.weights) first")
        return self._lent

    def embed(self, token_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The target's embeddings [..., H] of token_ids [...]."""
        return functional.embedding(token_ids, self.lent.embedding).to(dtype)

    @abstractmethod
    def outputs(self, states: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What the head's LM head reads [..., W] for the states of nodes whose children are at `depth` (from 0), and
        that LM head's weight [C, W]."""

    def logits(self, states: torch.Tensor, depth: int = 0) -> torch.Tensor:
        """Draft logits [..., C]."""
        inputs, weight = self.outputs(states, depth)
        return self.multiply(inputs, weight.to(inputs.dtype))

    def has_draft_rows(self, name: str) -> bool:
        """Whether the parameter called `name` has a row for each token of the draft vocabulary."""
        return "lm_head" in name

    def init_from_target(self, *, layer: nn.Module, final_norm: nn.Module, lm_head_weight: torch.Tensor) -> list[str]:
        """Start from what the target already knows (its last layer, final norm and LM head); returns the names of the
        tensors that were filled."""
        return []

    @abstractmethod
    def unroll(
        self, batch: Batch, plan: Sequence[torch.Tensor], generators: Sequence[torch.Generator] | None = None
    ) -> Iterator[UnrolledStep]:
        """What the head answers at the planned rows [Q] of each step, over the text's true tokens. A plan in CPU memory
        spares waiting for the device. `generators`: one for each sequence of the batch, for what is random in training.
        """

    def _names_of(self, tensors: Sequence[torch.Tensor]) -> list[str]:
        return [name for name, parameter in self.named_parameters() if any(parameter is one for one in tensors)]


class RecurrentHead(DraftHead):
    """Drafts on its own states. A state is the fused target feature where the target has run, and the head's own output
    beyond; `forward` reads it beside the token after its position, and gives the next.

    Its config has the sizes of its one attention layer: num_key_value_heads and head_dim.
    """

    @abstractmethod
    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """Target states of the tapped layers, side by side [..., taps * H] -> first states [..., H]."""

    @abstractmethod
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

        The token is the one *after* the state's position. The new states are both what `outputs` reads and
        what the next step takes as its states. Only differences of positions matter.

        `rows` (indices into the first dimension) asks for the new states of some rows only: the others just
        give their keys and values, as a prompt does. `attend` then gets the queries of `rows` alone.
        """

    def training_taps(self, batch: Batch, generators: Sequence[torch.Generator] | None) -> torch.Tensor:
        """The batch's taps as training sees them: a place for noise, each sequence's from its own generator."""
        return batch.taps

    def auxiliary_loss(self, states: torch.Tensor, batch: Batch, rows: torch.Tensor, step: int) -> torch.Tensor | None:
        """A loss beside the distillation [Q] of `rows`, whose new states are `states` [Q, H]."""
        return None

    def unroll(
        self, batch: Batch, plan: Sequence[torch.Tensor], generators: Sequence[torch.Generator] | None = None
    ) -> Iterator[UnrolledStep]:
        positions = batch.positions
        host_plan = [rows.cpu() for rows in plan]
        plan = [sent(rows, batch.token_ids.device) for rows in plan]
        attention = UnrolledAttention(batch.lengths, plan[0], host_plan[0])
        states = self.fuse(self.training_taps(batch, generators))
        for step, rows in enumerate(plan):
            if step == 0:
                states = self(batch.following, states, positions, attention, rows=rows)
            else:
                kept = torch.searchsorted(plan[step - 1], rows)
                attention.keep(kept, host_plan[step])
                states = self(batch.token_ids[rows + 1 + step], states[kept], positions[rows] + step, attention)
            inputs, weight = self.outputs(states, step)
            yield UnrolledStep(states=inputs, weight=weight, auxiliary=self.auxiliary_loss(states, batch, rows, step))


class PathHead(DraftHead):
    """One network a depth: each reads the root's state and the tokens drafted below it. No state of its own is carried.

    `has_prefix_layer` says whether a layer of the head's own runs over the text to make the roots' states; its config
    then has that layer's num_key_value_heads and head_dim.
    """

    has_prefix_layer = False

    def roots(
        self,
        taps: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        *,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """States [..., H] from taps [..., taps * H] of text rows, each beside the token after its position. `rows` as
        in `RecurrentHead.forward`."""
        return taps if rows is None else taps[rows]

    @abstractmethod
    def draft(self, roots: torch.Tensor, path_tokens: torch.Tensor, depth: int) -> torch.Tensor:
        """States [F, W] for the nodes' children at `depth` (from 0), from the roots' states [F, H] and the tokens on
        the way to each node, the root's own first [F, depth + 1]."""

    def unroll(
        self, batch: Batch, plan: Sequence[torch.Tensor], generators: Sequence[torch.Generator] | None = None
    ) -> Iterator[UnrolledStep]:
        host_rows = plan[0].cpu()
        plan = [sent(rows, batch.token_ids.device) for rows in plan]
        attention = UnrolledAttention(batch.lengths, plan[0], host_rows)
        roots = self.roots(batch.taps, batch.following, batch.positions, attention, rows=plan[0])
        for step, rows in enumerate(plan):
            path = torch.stack([batch.token_ids[rows + 1 + i] for i in range(step + 1)], dim=-1)
            states = self.draft(roots[torch.searchsorted(plan[0], rows)], path, step)
            inputs, weight = self.outputs(states, step)
            yield UnrolledStep(states=inputs, weight=weight)


def final_tap(num_target_layers: int) -> int:
    """The tap of the state that feeds the target's LM head, after its final norm."""
    return num_target_layers + 1


def required(native: Mapping[str, Any], key: str) -> Any:
    """An entry of a `config.json`; ValueError without it."""
    if native.get(key) is None:
        raise ValueError(f"the head's config.json has no {key!r}")
    return native[key]


def flag(native: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    """A true-or-false entry of a `config.json`."""
    value = native.get(key)
    if not isinstance(value, bool | None):
        raise ValueError(f"the head's config.json says {key} = {value!r}; expected true or false")
    return default if value is None else value


def refuse_other_values(native: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuse flags of related formats that change the computation. A key without a value says nothing."""
    for key, value in expected.items():
        given = native.get(key)
        if given is not None and given != value:
            raise ValueError(f"the head's config.json says {key} = {given!r}; only {value!r} is supported")
