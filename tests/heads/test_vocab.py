"""The draft vocabulary: what it keeps, its maps, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from heads.vocab import BYTE_SYMBOLS, NO_DRAFT_TOKEN, DraftVocabulary, VocabularyProvenance, always_kept_ids
from tests.toy_tokenizer import toy_tokenizer


def test_most_frequent_tokens_and_kept_ones_in_ascending_order() -> None:
    vocabulary = DraftVocabulary.from_counts({7: 5, 3: 9, 8: 1, 2: 0}, size=4, vocab_size=10, keep_ids=[9])
    assert vocabulary.target_ids.tolist() == [3, 7, 8, 9]
    assert vocabulary.d2t.tolist() == [3, 6, 6, 6]
    assert vocabulary.t2d.nonzero().flatten().tolist() == [3, 7, 8, 9]
    assert vocabulary.draft_ids.tolist() == [NO_DRAFT_TOKEN] * 3 + [0] + [NO_DRAFT_TOKEN] * 3 + [1, 2, 3]


def test_small_corpus_is_filled_up_with_the_lowest_ids() -> None:
    vocabulary = DraftVocabulary.from_counts({7: 1}, size=4, vocab_size=10)
    assert vocabulary.target_ids.tolist() == [0, 1, 2, 7]


def test_ties_do_not_depend_on_the_order_of_counting() -> None:
    counts = dict.fromkeys([5, 9, 2, 7], 3)
    backwards = dict(reversed(counts.items()))
    one, other = (DraftVocabulary.from_counts(c, size=2, vocab_size=10) for c in (counts, backwards))
    assert one.target_ids.tolist() == other.target_ids.tolist() == [2, 5]


def test_special_chat_and_byte_tokens_are_always_kept() -> None:
    """By frequency alone an English corpus once lost 90 byte tokens, and accented text could not be drafted."""
    tokenizer = toy_tokenizer(merges=("h i",))
    kept = always_kept_ids(tokenizer)
    names = tokenizer.convert_ids_to_tokens(sorted(kept))
    assert {"<s>", "</s>", "<|im_start|>", "<|im_end|>"} < set(names)
    assert set(names) > BYTE_SYMBOLS
    assert "hi" not in names
    vocabulary = DraftVocabulary.from_counts({260: 99}, size=len(kept) + 1, vocab_size=300, keep_ids=kept)
    accented = tokenizer("é", add_special_tokens=False).input_ids
    assert vocabulary.coverage(accented) == 1.0


def test_byte_symbols_are_those_of_byte_level_bpe() -> None:
    from tokenizers import pre_tokenizers

    assert set(pre_tokenizers.ByteLevel.alphabet()) == BYTE_SYMBOLS


@pytest.mark.slow
def test_real_tokenizer_keeps_all_bytes(smollm2_path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    kept = always_kept_ids(tokenizer)
    vocabulary = DraftVocabulary.from_counts({}, size=4096, vocab_size=49152, keep_ids=kept)
    assert {0, 1, 2} <= kept
    assert len(kept) < 400
    french = tokenizer("Où êtes-vous né, Zoë ?").input_ids
    pieces = [token for token in french if token in kept or bool(vocabulary.t2d[token])]
    assert pieces


def test_too_many_kept_tokens_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"5 tokens are always kept .* size 4: choose a larger size"):
        DraftVocabulary.from_counts({}, size=4, vocab_size=10, keep_ids=range(5))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 3, 3], "lists target id 3 twice"),
        ([1, 5, 3], "target id 3 out of order, after 5"),
        ([1, 3, 12], r"maps to target ids 1..12, but the target's vocabulary is 0..9"),
        ([-1, 3], r"maps to target ids -1..3"),
        ([], "non-empty"),
    ],
)
def test_maps_that_are_no_bijection_are_refused(ids: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftVocabulary(target_ids=torch.tensor(ids, dtype=torch.int64), vocab_size=10)


def test_map_survives_the_disk_form() -> None:
    vocabulary = DraftVocabulary.from_counts({4: 2, 9: 1, 5: 5}, size=3, vocab_size=10)
    again = DraftVocabulary.from_maps(vocabulary.d2t, vocabulary.t2d, vocab_size=10)
    assert again.target_ids.tolist() == vocabulary.target_ids.tolist()


def test_absolute_ids_import_to_the_same_map() -> None:
    vocabulary = DraftVocabulary.from_counts({4: 2, 9: 1, 5: 5}, size=3, vocab_size=10)
    again = DraftVocabulary.from_maps(vocabulary.target_ids, vocab_size=10, absolute=True)
    assert again.d2t.tolist() == vocabulary.d2t.tolist()


def test_zero_map_is_refused_unless_it_is_the_identity() -> None:
    """A buffer that was never filled once meant "the first N tokens", silently; marks that say so are believed."""
    first = torch.arange(10) < 4
    assert len(DraftVocabulary.from_maps(torch.zeros(4, dtype=torch.int64), first, vocab_size=10)) == 4
    with pytest.raises(ValueError, match="all zeros"):
        DraftVocabulary.from_maps(torch.zeros(4, dtype=torch.int64), torch.zeros(10).bool(), vocab_size=10)
    with pytest.raises(ValueError, match="all zeros"):
        DraftVocabulary.from_maps(torch.zeros(4, dtype=torch.int64), vocab_size=10)
    assert len(DraftVocabulary.from_maps(torch.zeros(10, dtype=torch.int64), vocab_size=10)) == 10


def test_disagreeing_marks_are_named() -> None:
    vocabulary = DraftVocabulary.from_counts({4: 2, 9: 1}, size=2, vocab_size=10)
    marks = vocabulary.t2d.clone()
    marks[3] = True
    with pytest.raises(ValueError, match=r"disagree on 1 target tokens, first \[3\]"):
        DraftVocabulary.from_maps(vocabulary.d2t, marks, vocab_size=10)
    with pytest.raises(ValueError, match=r"each of the target's 10 tokens, got shape \[9\]"):
        DraftVocabulary.from_maps(vocabulary.d2t, marks[:9], vocab_size=10)


def test_provenance_conflict_is_said_in_words() -> None:
    mine = VocabularyProvenance(target_fingerprint="a", tokenizer_hash="t")
    assert mine.conflict(VocabularyProvenance(target_fingerprint="a")) is None
    assert mine.conflict(VocabularyProvenance(tokenizer_hash="u")) == "tokenizer hash is t, expected u"
