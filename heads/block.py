"""Heads that draft all depths in one pass: P-EAGLE, DFlash and its kin.

Behind a text's last row, the *root* (the target's state of position t beside the token x[t+1] emitted last), stand
`num_places` *places*: rows that know the root's token at most, and nothing of what is drafted between. One pass of the
head's layers over them gives the states of all depths. Place j, counted from 1, has position t + j; a place sees the
rows of the text up to its root and the other places of its block (`sees_ahead`), and no text row sees a place.

What is drafted at a depth would so not depend on what was drafted before it. `Markov` gives that back for the price of
a small product: a low-rank correction of the logits by the token before (Cheng et al. 2026, "DSpark", arXiv
2607.05147).

Shapes: N rows (of text, places, or both), M places of all blocks, B blocks, P places of a block, D depths, X what the
first layer reads, H hidden, r rank, W = H + r, C draft vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, cast

import torch
from torch import nn
from torch.nn import functional

from heads.base import DraftHead, TargetSizes, flag, required
from heads.block_unroll import Asking, BlockAttention, BlockLayout
from heads.decoder import DecoderConfig, decoder_of_target
from heads.eagle3 import existing_taps
from heads.transfer import sent
from heads.unroll import Batch, UnrolledStep
from heads.vocab import DraftVocabulary

DEFAULT_RANK = 64
"""Of the correction by the token before, in recipes that do not say."""


class LayerAttend(Protocol):
    """Attention of a layer of several: query [Q, Hq, D] of those rows that ask, key and value [N, Hkv, D] of all rows,
    rotated, not scaled -> [Q, Hq, D]. No query (Q = 0): the keys and values are kept, and that is all."""

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asking: Asking
    ) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True)
class BlockConfig(DecoderConfig):
    """num_layers: of the head. num_depths: tokens drafted in a pass. mask_token_id: whose embedding a place reads.

    markov_rank: of the correction by the token before; 0 for none. markov_table: it reads a table of its own [V, r], as
    DSpark's, instead of a projection of the target's embeddings. markov_gate: it is gated by the place's state.
    """

    num_layers: int = 1
    num_depths: int = 4
    mask_token_id: int = 0
    markov_rank: int = 0
    markov_table: bool = False
    markov_gate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_layers < 1 or self.num_depths < 1:
            raise ValueError(
                f"a block head has at least one layer and one depth, got num_layers {self.num_layers} and num_depths "
                f"{self.num_depths}"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is none of the target's {self.vocab_size} tokens")
        if self.markov_rank < 0:
            raise ValueError(f"markov_rank is {self.markov_rank}; it must be at least 0")
        if (self.markov_table or self.markov_gate) and not self.markov_rank:
            raise ValueError("markov_table and markov_gate shape the correction by the token before: give markov_rank")

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
        """A head as wide as the target's layers."""
        sizes = TargetSizes.of(target_config)
        return cls(
            vocab_size=vocab_size,
            draft_vocab_size=draft_vocab_size,
            taps=existing_taps(taps, sizes.num_layers),
            **{"mask_token_id": sizes.eos_token_id or 0, "markov_rank": DEFAULT_RANK, **settings},
            **decoder_of_target(sizes),
        )


def block_to_native(config: BlockConfig) -> dict[str, Any]:
    """The keys of `config.json` that all block heads share, beside `decoder_to_native`'s."""
    return {
        "num_hidden_layers": config.num_layers,
        "num_depths": config.num_depths,
        "mask_token_id": config.mask_token_id,
        "markov_rank": config.markov_rank,
        "markov_table": config.markov_table,
        "markov_gate": config.markov_gate,
    }


def block_of_native(native: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse."""
    return {
        "num_layers": int(required(native, "num_hidden_layers")),
        "num_depths": int(required(native, "num_depths")),
        "mask_token_id": int(required(native, "mask_token_id")),
        "markov_rank": int(native.get("markov_rank", 0)),
        "markov_table": flag(native, "markov_table"),
        "markov_gate": flag(native, "markov_gate"),
    }


class Markov(nn.Module):
    """What the token before says of the next one: r numbers, which a matrix [C, r] turns into an addition to the draft
    logits. It starts at zero. The table has a row for each token of the target."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        size, rank = config.hidden_size, config.markov_rank
        if config.markov_table:
            self.table = nn.Embedding(config.vocab_size, rank)
        else:
            self.project = nn.Linear(size, rank, bias=False)
        if config.markov_gate:
            self.gate = nn.Linear(size + rank, rank)
        self.output = nn.Linear(rank, config.draft_vocab_size, bias=False)
        nn.init.zeros_(self.output.weight)

    def forward(self, head: BlockHead, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """states [..., H], previous [...] -> [..., r]. A gate reads the states as the LM head does."""
        read = self.read(head, previous, states.dtype)
        if hasattr(self, "gate"):
            normed, _ = head.base_outputs(states)
            read = torch.sigmoid(self.gate(torch.cat([normed, read], dim=-1))) * read
        return read

    def read(self, head: BlockHead, previous: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What the tokens before [...] say by themselves: [..., r]."""
        if hasattr(self, "table"):
            return cast(torch.Tensor, self.table(previous)).to(dtype)
        embeddings = head.embed(previous, dtype)
        # Unit mean square, whatever the scale of the target's embeddings.
        scale = torch.rsqrt(embeddings.float().square().mean(-1, keepdim=True) + 1e-6)
        return cast(torch.Tensor, self.project(embeddings * scale.to(dtype)))


class BlockHead(DraftHead):
    """See the module. A family says where its places stand, what rows read, and what its layers do.

    num_places: rows behind the root. first_place: the row, counted from the root as 0, whose state guesses depth 0;
    those behind it guess the further depths. sees_ahead: whether places of a block see those behind them too.
    """

    config: BlockConfig
    num_places: int
    first_place: int
    sees_ahead: bool

    def __init__(self, config: BlockConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__(config, vocabulary)
        if config.markov_rank:
            self.markov = Markov(config)

    @property
    def num_depths(self) -> int:
        return self.config.num_depths

    def has_draft_rows(self, name: str) -> bool:
        return super().has_draft_rows(name) or name == "markov.output.weight"

    def num_places_for(self, depth: int) -> int:
        """Places that a draft of `depth` needs: all of them where they see each other in both directions."""
        if not depth:
            return 0
        return self.num_places if self.sees_ahead else self.first_place + depth - 1

    @abstractmethod
    def text_inputs(self, taps: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """What the first layer reads [N, X] of text rows: their taps [N, taps * H] and the tokens after them [N]."""

    @abstractmethod
    def place_inputs(self, following: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The same [B, P, X] of the places behind roots whose tokens are `following` [B]."""

    @abstractmethod
    def forward(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        attend: LayerAttend,
        *,
        places: torch.Tensor,
        wanted: torch.Tensor | None,
    ) -> torch.Tensor:
        """One pass: inputs [N, X], positions [N] -> states [Q, H] of the `wanted` rows [Q].

        `places` [M] int64: which of the N rows are places; all others are text rows. `wanted` [Q]: ascending rows;
        empty where the text is only read, None for all rows that have a state. Every layer gives `attend` keys and
        values of all N rows, and says which of them ask.
        """

    @abstractmethod
    def base_outputs(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the LM head reads [..., H] for states [..., H] (its norm applied), and its weight [C, H]."""

    def base_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Draft logits [..., C] before the correction."""
        inputs, weight = self.base_outputs(states)
        return self.multiply(inputs, weight.to(inputs.dtype))

    def correction(self, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """What the tokens before [...] add to the draft logits [..., C] of `states` [..., H]."""
        assert self.config.markov_rank
        read = self.markov(self, states, previous)
        return self.multiply(read, self.markov.output.weight.to(read.dtype))

    def joined(self, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """States [..., H] with what `outputs` adds to their logits for the tokens before [...]: [..., W]."""
        if not self.config.markov_rank:
            return states
        return torch.cat([states, self.markov(self, states, previous)], dim=-1)

    def outputs(self, states: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of `joined` states [..., W]."""
        inputs, weight = self.base_outputs(states[..., : self.config.hidden_size])
        if not self.config.markov_rank:
            return inputs, weight
        inputs = torch.cat([inputs, states[..., self.config.hidden_size :].to(inputs.dtype)], dim=-1)
        return inputs, torch.cat([weight, self.markov.output.weight.to(weight.dtype)], dim=-1)

    def unroll(
        self, batch: Batch, plan: Sequence[torch.Tensor], generators: Sequence[torch.Generator] | None = None
    ) -> Iterator[UnrolledStep]:
        """One pass over the text and the places of the roots `plan[0]`. Where places see each other both ways all of a
        root's are there, as in decoding; otherwise those alone that have a label left."""
        device = batch.token_ids.device
        layout = BlockLayout.of(
            plan,
            num_rows=len(batch),
            num_places=self.num_places,
            first_place=self.first_place,
            sees_ahead=self.sees_ahead,
        )
        roots, blocks, steps = (sent(one, device) for one in (layout.roots, layout.blocks, layout.steps))
        text = self.text_inputs(batch.taps, batch.following)
        behind = self.place_inputs(batch.following[roots], text.dtype)  # [B, P, X]
        states = self(
            torch.cat([text, behind[blocks, steps - 1]]),
            torch.cat([batch.positions, batch.positions[roots[blocks]] + steps]),
            BlockAttention(layout, batch.lengths, device=device),
            places=sent(layout.places, device),
            wanted=sent(layout.wanted, device),
        )
        previous = batch.token_ids[sent(layout.previous, device)]
        inputs, weight = self.outputs(self.joined(states, previous), 0)
        for rows in layout.answers:
            yield UnrolledStep(states=inputs[sent(rows, device)], weight=weight)


def lent_lm_head(head: DraftHead) -> torch.Tensor:
    """The target's LM head at the draft vocabulary's tokens [C, H]."""
    lm_head = head.lent.lm_head
    if head.config.draft_vocab_size == head.config.vocab_size:
        return lm_head
    return functional.embedding(head.vocabulary.target_ids.to(lm_head.device), lm_head)
