"""The end of a request inside a block, against a plain one-by-one reference; and streamed text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast

from infer.sampling import SamplingParams
from infer.stopping import StopChecker, StopResult, TextStream

EOS = 0
REPLACEMENT = "\ufffd"
BYTE_PIECES = [b"a", b"b", b"ab", b"ba", b"abc", b"c", b" ", b"END", b"E", b"ND", b"", b"\n"]
BYTE_PIECES += [bytes([byte]) for byte in "🎉漢é".encode()]
BYTE_PIECES += ["🎉".encode()[:2], "漢".encode() + b"a", b"\xff"]


class ByteTokenizer:
    """Toy byte-level tokenizer: id 0 is special, id i > 0 stands for the bytes BYTE_PIECES[i - 1]."""

    all_special_ids = (EOS,)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False, **kwargs: Any) -> str:
        if skip_special_tokens:
            token_ids = [token for token in token_ids if token != EOS]
        pieces = [b"<eos>" if token == EOS else BYTE_PIECES[token - 1] for token in token_ids]
        return b"".join(pieces).decode("utf-8", errors="replace")


TOKENIZER = ByteTokenizer()
TOKEN = {piece: index + 1 for index, piece in enumerate(BYTE_PIECES)}
VOCAB_SIZE = len(BYTE_PIECES) + 1


def bytes_to_unicode() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


@pytest.fixture(scope="module")
def byte_level() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer in the manner of GPT-2 whose ids are the bytes; id 256 is special."""
    vocab = {symbol: index for index, symbol in enumerate(bytes_to_unicode())}
    raw = RawTokenizer(BPE(vocab=vocab, merges=[]))
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>")


@pytest.fixture(scope="module")
def byte_fallback() -> PreTrainedTokenizerFast:
    """A sentence-piece tokenizer in the manner of Llama: words that carry their space, and byte tokens."""
    words = ["<unk>", "</s>", "▁Hello", "▁world", "lo", "▁", "!", "é"]
    vocab = {word: index for index, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    raw = RawTokenizer(WordLevel(vocab=vocab, unk_token="<unk>"))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens([AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(smollm2_path)


def split_randomly(token_ids: Sequence[int], generator: random.Random) -> list[list[int]]:
    blocks: list[list[int]] = []
    position = 0
    while position < len(token_ids):
        size = generator.randint(1, 8)
        blocks.append(list(token_ids[position : position + size]))
        position += size
    return blocks


def run(checker: StopChecker, blocks: Sequence[Sequence[int]]) -> tuple[int, StopResult, str]:
    """Total kept, the last result, and all deltas joined."""
    kept, deltas = 0, ""
    result = StopResult(num_kept=0)
    for block in blocks:
        result = checker.push(block)
        kept += result.num_kept
        deltas += checker.take_delta()
        assert checker.text.startswith(deltas)
        if result.finish_reason is not None:
            break
    checker.close()
    return kept, result, deltas + checker.take_delta()


def reference(token_ids: Sequence[int], params: SamplingParams, tokenizer: Any) -> tuple[int, Any, Any, str]:
    """Kept, finish reason, stop reason and text by decoding everything afresh after each token."""
    text = ""
    for count, token in enumerate(token_ids, start=1):
        may_stop = count > params.min_tokens
        before = tokenizer.decode(token_ids[: count - 1], skip_special_tokens=True)
        if may_stop and token == EOS and not params.ignore_eos:
            return count, "stop", None, before
        if may_stop and token in params.stop_token_ids:
            return count, "stop", token, before
        old, text = text, tokenizer.decode(token_ids[:count], skip_special_tokens=True).rstrip(REPLACEMENT)
        text = max(old, text, key=len)
        for end in range(len(old) + 1, len(text) + 1) if may_stop else ():
            found = [stop for stop in params.stop if text[:end].endswith(stop)]
            if found:
                longest = max(found, key=len)
                return count, "stop", longest, text[: end - len(longest)]
        if count == params.max_tokens:
            return count, "length", None, tokenizer.decode(token_ids[:count], skip_special_tokens=True)
    return len(token_ids), None, None, tokenizer.decode(token_ids, skip_special_tokens=True)


params_strategy = st.builds(
    lambda minimum, more, **values: SamplingParams(min_tokens=minimum, max_tokens=minimum + more, **values),
    minimum=st.sampled_from([0, 0, 3, 9]),
    more=st.integers(1, 30),
    stop=st.lists(st.sampled_from(["a", "ab", "bc", "abca", "END", "ND ", "漢", "é\n", "b🎉", "aaa"]), max_size=3).map(
        tuple
    ),
    stop_token_ids=st.lists(st.integers(1, VOCAB_SIZE - 1), max_size=1).map(tuple),
    ignore_eos=st.booleans(),
)


@settings(max_examples=400, deadline=None)
@given(
    token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40),
    params=params_strategy,
    seed=st.integers(0, 99),
)
def test_blocks_equal_one_by_one(token_ids: list[int], params: SamplingParams, seed: int) -> None:
    """However the tokens are cut into blocks, the end, its reason, the text and the joined deltas are the
    same.
    """
    expected_kept, finish_reason, stop_reason, text = reference(token_ids, params, TOKENIZER)
    for blocks in (
        [[token] for token in token_ids],
        split_randomly(token_ids, random.Random(seed)),
        [token_ids],
    ):
        checker = StopChecker(params, eos_ids=[EOS], tokenizer=TOKENIZER)
        kept, result, deltas = run(checker, blocks)
        assert kept == checker.num_tokens == expected_kept
        assert (result.finish_reason, result.stop_reason) == (finish_reason, stop_reason)
        assert (checker.finish_reason, checker.stop_reason) == (finish_reason, stop_reason)
        assert checker.text == deltas == text


def check(block: Sequence[int], *, eos_ids: Sequence[int] = (EOS,), **changes: Any) -> tuple[StopResult, str]:
    checker = StopChecker(SamplingParams(**changes), eos_ids=eos_ids, tokenizer=TOKENIZER)
    return checker.push(block), checker.text


def ids(*pieces: bytes) -> list[int]:
    return [TOKEN[piece] for piece in pieces]


A = TOKEN[b"a"]


def test_a_stop_inside_the_block_beats_a_later_cap() -> None:
    """Past bug of others: the cap was checked first, so a block of 6 with stop at 3 and cap 5 ended by
    length.
    """
    result, _ = check([A, A, EOS, A, A, A], max_tokens=5)
    assert result == StopResult(num_kept=3, finish_reason="stop")


def test_a_cap_beats_a_stop_behind_it() -> None:
    result, text = check([A, A, A, A, A, EOS], max_tokens=5)
    assert result == StopResult(num_kept=5, finish_reason="length")
    assert text == "aaaaa"


def test_at_one_token_the_stop_beats_the_cap() -> None:
    assert check([A, EOS], max_tokens=2)[0] == StopResult(num_kept=2, finish_reason="stop")
    assert check(ids(b"a", b"END"), max_tokens=2, stop=("END",))[0].finish_reason == "stop"


@pytest.mark.parametrize("offset", range(8))
@pytest.mark.parametrize("width", range(1, 9))
def test_end_token_at_every_offset(offset: int, width: int) -> None:
    """Past bug of others: an end token was seen only as the last of its block."""
    tokens = [A] * offset + [EOS] + [A] * 8
    checker = StopChecker(SamplingParams(), eos_ids=[7, EOS], tokenizer=TOKENIZER)
    blocks = [tokens[start : start + width] for start in range(0, len(tokens), width)]
    kept, result, text = run(checker, blocks)
    assert (kept, result.finish_reason, text) == (offset + 1, "stop", "a" * offset)


@pytest.mark.parametrize("offset", range(8))
@pytest.mark.parametrize("pieces", [(b"END",), (b"E", b"ND")])
@pytest.mark.parametrize("first_block", range(9))
def test_stop_string_at_every_offset(offset: int, pieces: tuple[bytes, ...], first_block: int) -> None:
    """Past bug of others: only the tail of a block was searched, so an early stop string was missed."""
    tokens = [A] * offset + ids(*pieces) + [A] * 8
    checker = StopChecker(SamplingParams(stop=("END",)), eos_ids=[], tokenizer=TOKENIZER)
    kept, result, text = run(checker, [tokens[:first_block], tokens[first_block:]])
    assert kept == offset + len(pieces)
    assert (result.finish_reason, result.stop_reason, text) == ("stop", "END", "a" * offset)


def test_of_overlapping_stops_the_first_completed_wins() -> None:
    """Independent of the listing and of the tokens: "bc" is complete before "abca", "abc" contains it and is
    longer.
    """
    for stops in (("abca", "bc"), ("bc", "abca")):
        for tokens in (ids(b"a", b"b", b"c", b"a"), ids(b"abc", b"a"), ids(b"ab", b"c", b"a")):
            result, text = check(tokens, stop=stops)
            assert (result.stop_reason, text) == ("bc", "a")
    for stops in (("bc", "abc"), ("abc", "bc")):
        result, text = check(ids(b"c", b"abc"), stop=stops)
        assert (result.stop_reason, text) == ("abc", "c")


def test_stop_token_ids_are_named_and_leave_no_text() -> None:
    result, text = check(ids(b"ab", b"c", b"a"), stop_token_ids=(TOKEN[b"c"],))
    assert result == StopResult(num_kept=2, finish_reason="stop", stop_reason=TOKEN[b"c"])
    assert text == "ab"


def test_an_end_token_that_the_tokenizer_prints_leaves_no_text() -> None:
    assert check(ids(b"ab", b"c", b"a"), eos_ids=ids(b"c"))[1] == "ab"


def test_without_end_tokens_only_the_cap_ends() -> None:
    assert check([EOS] * 6, eos_ids=(), max_tokens=6)[0] == StopResult(num_kept=6, finish_reason="length")
    assert check([EOS] * 6, ignore_eos=True, max_tokens=7)[0] == StopResult(num_kept=6)
    stopped, _ = check([A, EOS], ignore_eos=True, stop_token_ids=(EOS,))
    assert stopped == StopResult(num_kept=2, finish_reason="stop", stop_reason=EOS)


def test_nothing_stops_within_min_tokens() -> None:
    """Tokens, not rounds, are counted; a stop string completed too early is not found later either."""
    assert check([EOS] * 5, min_tokens=3)[0].num_kept == 4
    tokens = ids(b"END", b"a", b"END")
    result, text = check(tokens, min_tokens=1, stop=("END",))
    assert (result.num_kept, text) == (3, "ENDa")
    assert check(ids(b"E", b"ND"), min_tokens=1, stop=("END",))[0].finish_reason == "stop"


def test_deltas_withhold_what_may_become_a_stop() -> None:
    """Shown text is never taken back: the beginning of a stop string waits until it is decided."""
    checker = StopChecker(SamplingParams(stop=("END",)), eos_ids=[EOS], tokenizer=TOKENIZER)
    shown = []
    for piece in (b"a", b"E", b"a", b"E", b"E", b"ND"):
        checker.push([TOKEN[piece]])
        shown.append(checker.take_delta())
    assert shown == ["a", "", "Ea", "", "E", ""]
    assert checker.text == "aEaE"


def test_a_cancelled_request_shows_what_was_withheld() -> None:
    checker = StopChecker(SamplingParams(stop=("END",)), eos_ids=[EOS], tokenizer=TOKENIZER)
    checker.push([*ids(b"a", b"E"), TOKEN["🎉".encode()[:1]]])
    assert checker.take_delta() == "a"
    checker.close()
    checker.close()
    assert checker.take_delta() == "E" + REPLACEMENT
    with pytest.raises(AssertionError, match="has ended"):
        checker.push([A])


def test_a_cap_inside_a_character_shows_one_replacement_sign() -> None:
    party = [TOKEN[bytes([byte])] for byte in "🎉".encode()]
    for cap in (1, 2, 3):
        checker = StopChecker(SamplingParams(max_tokens=cap + 1), eos_ids=[], tokenizer=TOKENIZER)
        _, result, text = run(checker, [[A, *party]])
        assert (result.finish_reason, text) == ("length", "a" + REPLACEMENT)


def test_stops_without_a_tokenizer() -> None:
    checker = StopChecker(SamplingParams(max_tokens=3), eos_ids=[EOS], tokenizer=None)
    assert checker.push([5, 6, EOS]).finish_reason == "stop"
    assert checker.text == ""
    with pytest.raises(ValueError, match="stop strings \\['END'\\] need a tokenizer"):
        StopChecker(SamplingParams(stop=("END",)), eos_ids=[], tokenizer=None)


def assert_streams_exactly(tokenizer: Any, token_ids: Sequence[int], blocks: Sequence[Sequence[int]]) -> None:
    stream = TextStream(tokenizer)
    deltas = [stream.push(block) for block in blocks]
    expected = tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "".join(deltas) + stream.flush() == expected


def assert_characters_stay_whole(tokenizer: Any, token_ids: list[int], text: str) -> None:
    """Every width of blocks, every cut: no replacement sign unless the text is truncated, nothing lost."""
    for width in range(1, 9):
        stream = TextStream(tokenizer)
        blocks = [token_ids[start : start + width] for start in range(0, len(token_ids), width)]
        deltas = [stream.push(block) for block in blocks]
        assert all(REPLACEMENT not in delta for delta in deltas)
        assert "".join(deltas) == text
        assert stream.flush() == ""
    for cut in range(len(token_ids)):
        assert_streams_exactly(tokenizer, token_ids[:cut], [[token] for token in token_ids[:cut]])


CHARACTERS = "Hi 🎉漢é! 👩‍👩‍👧 naïve"


def test_characters_stay_whole_byte_level(byte_level: PreTrainedTokenizerFast) -> None:
    assert_characters_stay_whole(byte_level, list(CHARACTERS.encode()), CHARACTERS)


def test_characters_stay_whole_smollm2(smollm2: Any) -> None:
    token_ids = smollm2(CHARACTERS, add_special_tokens=False)["input_ids"]
    assert_characters_stay_whole(smollm2, list(token_ids), CHARACTERS)


def test_characters_stay_whole_byte_fallback(byte_fallback: PreTrainedTokenizerFast) -> None:
    """Sentence-piece: spaces of words survive at every cut, also behind a special token; bytes join up."""
    vocab = byte_fallback.get_vocab()
    words = [vocab[word] for word in ("▁Hello", "▁world", "</s>", "▁Hello", "é")]
    token_ids = [*words, *(vocab[f"<0x{byte:02X}>"] for byte in "🎉漢".encode()), vocab["▁world"]]
    for width in range(1, 9):
        stream = TextStream(byte_fallback)
        deltas = [stream.push(token_ids[start : start + width]) for start in range(0, len(token_ids), width)]
        assert "".join(deltas) == "Hello world Helloé🎉漢 world"
        assert all(REPLACEMENT not in delta for delta in deltas)


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_stream_exactly(byte_level: PreTrainedTokenizerFast, seed: int) -> None:
    """Invalid UTF-8 of every kind, special tokens in between: joined deltas equal the full decode."""
    generator = random.Random(seed)
    alphabet = [range(257), range(128, 257), range(0x80, 0xC0), range(0xE0, 0xF5)][seed % 4]
    token_ids = [generator.choice(alphabet) for _ in range(150)]
    assert_streams_exactly(byte_level, token_ids, split_randomly(token_ids, generator))


@pytest.mark.parametrize("seed", range(10))
def test_random_ids_stream_exactly_smollm2(smollm2: Any, seed: int) -> None:
    generator = random.Random(seed)
    broken = [token for token in range(0, len(smollm2), 7) if REPLACEMENT in smollm2.decode([token])]
    alphabet = broken if seed % 2 else range(len(smollm2))
    token_ids = [generator.choice(alphabet) for _ in range(300)]
    assert_streams_exactly(smollm2, token_ids, split_randomly(token_ids, generator))


@pytest.mark.parametrize("seed", range(10))
def test_stop_strings_with_smollm2(smollm2: Any, seed: int) -> None:
    """Real tokens, stop strings across tokens and blocks: every split agrees with the reference."""
    generator = random.Random(seed)
    text = "One two, three 🎉漢é four; five six. " * 4
    token_ids = list(smollm2(text, add_special_tokens=False)["input_ids"])
    start = generator.randrange(len(text) - 8)
    params = SamplingParams(max_tokens=500, stop=(text[start : start + generator.randint(1, 8)], "never"))
    expected = reference(token_ids, params, smollm2)
    for _ in range(5):
        checker = StopChecker(params, eos_ids=[EOS], tokenizer=smollm2)
        kept, result, deltas = run(checker, split_randomly(token_ids, generator))
        assert (kept, result.finish_reason, result.stop_reason, checker.text) == expected
        assert deltas == checker.text


class CountingTokenizer(ByteTokenizer):
    def __init__(self) -> None:
        self.num_decoded = 0

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False, **kwargs: Any) -> str:
        self.num_decoded += len(token_ids)
        return super().decode(token_ids, skip_special_tokens, **kwargs)


@pytest.mark.parametrize("piece", [b"a", b"", b"\xff", bytes(["🎉".encode()[1]]), bytes(["🎉".encode()[0]])])
def test_work_per_token_does_not_grow(piece: bytes) -> None:
    """Even a stream of broken bytes costs a bounded number of decoded tokens for each token."""
    tokenizer = CountingTokenizer()
    stream = TextStream(tokenizer)
    stream.push([TOKEN[piece]] * 2000)
    assert tokenizer.num_decoded < 2000 * 60
