"""What a run is made of."""

from __future__ import annotations

import pytest
import torch

from heads.vocab import DraftVocabulary
from tests.heads.block_heads import HIDDEN, VOCABULARY, WEIGHTS, make_head
from train.setup import with_vocabulary


@pytest.mark.parametrize("shape", ["peagle of two layers", "dspark"])
def test_a_wide_correction_takes_nothing_of_the_targets_lm_head(shape: str) -> None:
    """With another draft vocabulary a correction by the token before keeps the rows of tokens that it had, and adds
    nothing for new ones, also where its rank is the hidden size. They were the LM head's rows then. Rows are copied, to
    float32, so there is no tolerance."""
    head = make_head(shape, markov_rank=HIDDEN)
    kept = torch.arange(0, VOCABULARY, 2)
    new = with_vocabulary(head, DraftVocabulary(target_ids=kept, vocab_size=VOCABULARY), WEIGHTS.lm_head)
    rows, weights = dict(new.named_parameters())["markov.output.weight"], dict(head.named_parameters())
    before = head.vocabulary.target_ids.tolist()
    for row, token in zip(rows, kept.tolist(), strict=True):
        had = weights["markov.output.weight"][before.index(token)] if token in before else torch.zeros(HIDDEN)
        assert torch.equal(row, had.float())
