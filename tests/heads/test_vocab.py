"""The draft vocabulary: what it keeps, its maps, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AddedToken

from heads.vocab import BYTE_SYMBOLS, NO_DRAFT_TOKEN, DraftVocabulary, VocabularyProvenance, always_kept_ids
from tests.toy_tokenizer import CHATML, toy_tokenizer


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


def with_reserved_tokens(count: int, template: str | None = CHATML) -> Any:
    """As Llama-3 and Gemma have them: special, numbered, and never seen in any text."""
    tokenizer = toy_tokenizer(template=template)
    tokenizer.add_tokens([AddedToken(f"<|reserved_{number}|>", special=True) for number in range(count)])
    tokenizer.add_tokens(["<table>"])
    return tokenizer


def names(tokenizer: Any, ids: set[int]) -> set[str]:
    return set(tokenizer.convert_ids_to_tokens(sorted(ids)))


def test_reserved_tokens_are_not_kept() -> None:
    """Thousands of them once left no room for a draft vocabulary of 4,096; nor need HTML tags be kept."""
    tokenizer = with_reserved_tokens(5000)
    kept = names(tokenizer, always_kept_ids(tokenizer))
    assert kept == {"<s>", "</s>", "<|im_start|>", "<|im_end|>"} | BYTE_SYMBOLS


def test_reserved_tokens_that_are_used_are_kept() -> None:
    """A marker that the texts use, whatever its frequency; an ordinary added token waits for its frequency."""
    tokenizer = with_reserved_tokens(20)
    used = tokenizer.convert_tokens_to_ids(["<|reserved_7|>", "<table>"])
    kept = names(tokenizer, always_kept_ids(tokenizer, used_ids=used))
    assert "<|reserved_7|>" in kept
    assert not kept & {"<|reserved_8|>", "<table>"}
    named = tokenizer.convert_tokens_to_ids(["<|reserved_8|>"])
    assert "<|reserved_8|>" in names(tokenizer, always_kept_ids(tokenizer, named))


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}<|reserved_3|>{{ m['content'] }}{% endfor %}",
        "{% for m in messages %}{{ '<|reserved_' + ('3' if m['role'] == 'user' else '4') + '|>' }}{% endfor %}",
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ '<|reserved_' ~ 3 ~ '|>' }}{% endfor %}",
    ],
    ids=["written out", "put together", "no system message"],
)
def test_markers_of_the_template_are_kept(template: str) -> None:
    """Also those that no text of the template holds as a whole, and where it refuses some chats."""
    tokenizer = with_reserved_tokens(20, template)
    kept = names(tokenizer, always_kept_ids(tokenizer))
    assert "<|reserved_3|>" in kept
    assert "<|reserved_9|>" not in kept


def test_without_a_template_the_named_tokens_are_kept() -> None:
    tokenizer = with_reserved_tokens(20, None)
    assert names(tokenizer, always_kept_ids(tokenizer)) == {"<s>", "</s>"} | BYTE_SYMBOLS


@pytest.mark.slow
def test_real_tokenizer_keeps_all_bytes(smollm2_path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    kept = always_kept_ids(tokenizer)
    vocabulary = DraftVocabulary.from_counts({}, size=4096, vocab_size=49152, keep_ids=kept)
    assert {0, 1, 2} <= kept
    assert len(kept) < 400
    assert "<jupyter_code>" not in names(tokenizer, kept)
    # All bytes that the tokenizer has (a rare few have no token of their own in any text).
    assert names(tokenizer, kept) >= BYTE_SYMBOLS & set(tokenizer.get_vocab())
    french = tokenizer("Où êtes-vous né, Zoë ?").input_ids
    pieces = [token for token in french if token in kept or bool(vocabulary.t2d[token])]
    assert pieces


@pytest.mark.slow
def test_real_tokenizer_with_thousands_of_reserved_tokens(repository) -> None:
    """Gemma-3 has more than 6,000 added tokens, one of them beyond its LM head, and falls back to bytes."""
    from transformers import AutoTokenizer

    folder = repository / "models" / "gemma3-270m"
    if not folder.is_dir():
        pytest.skip(f"no model in {folder}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer.get_added_vocab()) > 6000
    kept = always_kept_ids(tokenizer)
    vocabulary = DraftVocabulary.from_counts({}, size=4096, vocab_size=262144, keep_ids=kept)
    assert {"<eos>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256))} <= names(tokenizer, kept)
    assert len(kept) < 600
    rare = tokenizer("\U00013000", add_special_tokens=False).input_ids
    assert len(rare) >= 4
    assert vocabulary.coverage(rare[1:]) == 1.0  # the first is the word mark


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
