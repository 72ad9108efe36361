"""What tests of block heads share: small heads with every weight off its start, text with random target states, and the
pass of one root as decoding makes it: a text and the places behind it, by a plain dense attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from heads.base import TargetWeights
from heads.block import BlockHead
from heads.block_unroll import Asking
from heads.registry import FAMILIES
from heads.unroll import Batch
from heads.vocab import DraftVocabulary

HIDDEN, VOCABULARY, DRAFT_VOCABULARY = 24, 60, 40
LENGTHS, PROMPTS = (9, 4, 21), (2, 1, 5)
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": VOCABULARY,
    "draft_vocab_size": DRAFT_VOCABULARY,
    "taps": (1, 2, 3),
    "mask_token_id": 7,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "peagle": ("peagle", {}),
    "peagle of one depth": ("peagle", {"num_depths": 1, "markov_rank": 3}),
    "peagle of two layers": ("peagle", {"num_layers": 2, "markov_rank": 5, "norm_before_residual": True}),
    "peagle by itself": ("peagle", {"own_embedding": True, "markov_rank": 3, "markov_table": True, "fc_norm": True}),
    "dflash": ("dflash", {"markov_rank": 4}),
    "dflash of two layers": ("dflash", {"num_layers": 2, "num_depths": 3}),
    "dspark": ("dflash", {"sample_from_anchor": True, "markov_rank": 4, "markov_table": True, "markov_gate": True}),
    "dspark of one place": ("dflash", {"sample_from_anchor": True, "num_depths": 1, "taps": (2, 5)}),
}
WEIGHTS = TargetWeights(
    embedding=torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(11)).double(),
    lm_head=torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(12)).double(),
)


def make_head(shape: str, **changes: Any) -> BlockHead:
    """In float64, so that orders of summation hardly differ. The draft vocabulary leaves out every third token."""
    family, settings = SHAPES[shape]
    kept = [token for token in range(VOCABULARY) if token % 3]
    vocabulary = DraftVocabulary(target_ids=torch.tensor(kept), vocab_size=VOCABULARY)
    made = FAMILIES[family].head(FAMILIES[family].config(**{**SIZES, **settings, **changes}), vocabulary)
    assert isinstance(made, BlockHead)
    chance = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_((1.0 if "norm" in name else 0.0) + 0.3 * torch.randn(parameter.shape, generator=chance))
    return made.double().bind(WEIGHTS)


def make_batch(head: BlockHead, lengths: Sequence[int] = LENGTHS, prompts: Sequence[int] = PROMPTS) -> Batch:
    chance, total = torch.Generator().manual_seed(3), sum(lengths)
    masks = [torch.arange(length) >= prompt for length, prompt in zip(lengths, prompts, strict=True)]
    width = len(head.config.taps) * HIDDEN
    return Batch(
        token_ids=torch.randint(VOCABULARY, (total,), generator=chance),
        loss_mask=torch.cat(masks),
        lengths=tuple(lengths),
        taps=torch.randn(total, width, generator=chance, dtype=torch.float64),
        last=torch.randn(total, HIDDEN, generator=chance, dtype=torch.float64),
    )


class DenseAttention:
    """A `LayerAttend` by a mask [N, N] of who sees whom."""

    def __init__(self, sees: torch.Tensor, asking: dict[Asking, torch.Tensor]) -> None:
        self.sees, self.asking = sees, asking

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asking: Asking
    ) -> torch.Tensor:
        shared = query.shape[1] // key.shape[1]
        keys, values = (one.repeat_interleave(shared, dim=1) for one in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, keys) / math.sqrt(query.shape[-1])
        scores = scores.masked_fill(~self.sees[self.asking[asking]], -math.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


def drafted_states(head: BlockHead, taps: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """[D, H] of all depths behind a text: its taps [T, X] and the tokens after each of its rows [T]."""
    length, num_places = len(taps), head.num_places
    rows = torch.arange(length + num_places)
    places, wanted = rows[length:], rows[length - 1 + head.first_place :][: head.config.num_depths]
    sees = rows[:, None] >= rows
    if head.sees_ahead:
        sees[length:] = True
    text = head.text_inputs(taps, token_ids)
    behind = head.place_inputs(token_ids[-1:], text.dtype)[0]
    attend = DenseAttention(sees, {"all": rows, "places": places, "wanted": wanted})
    states: torch.Tensor = head(torch.cat([text, behind]), rows, attend, places=places, wanted=wanted)
    return states


def drafted_logits(head: BlockHead, batch: Batch, row: int, depth: int) -> torch.Tensor:
    """[C] behind one root, as decoding has them: the base of all depths, and the correction by the true token before
    `depth`, counted from 0."""
    ends = torch.tensor(batch.lengths).cumsum(0)
    start = int(torch.cat([torch.zeros(1, dtype=torch.int64), ends])[torch.searchsorted(ends, row, right=True)])
    states = drafted_states(head, batch.taps[start : row + 1], batch.token_ids[start + 1 : row + 2])[depth]
    logits = head.base_logits(states)
    if head.config.markov_rank:
        logits = logits + head.correction(states, batch.token_ids[row + 1 + depth])
    return logits
