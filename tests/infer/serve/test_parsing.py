"""Content, reasoning and tool calls of an answer: read right, and the same for every cut of its text."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.serve.parsing import REASONING_PARSERS, TOOL_PARSERS, OutputParser, ParsedAnswer, Piece, opens_reasoning

WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": 3}}\n</tool_call>'
TIME = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'


def parse(
    parts: list[str], *, reasoning: str | None = "think", tools: str | None = "hermes", opened: bool = False
) -> list[Piece]:
    numbers = itertools.count()
    parser = OutputParser(reasoning, tools, opened=opened, new_id=lambda: f"call_{next(numbers)}")
    return [piece for part in parts for piece in parser.push(part)] + parser.close()


def joined(*parts: str, opened: bool = False) -> ParsedAnswer:
    return ParsedAnswer.join(parse(list(parts), opened=opened))


def calls(answer: ParsedAnswer) -> list[tuple[str | None, object]]:
    return [(piece.name, json.loads(piece.text)) for piece in answer.calls]


def test_reasoning_content_and_calls_are_told_apart() -> None:
    answer = joined(f"<think>\nThey want weather.\n</think>\n\nLet me look.\n{WEATHER}\n{TIME}\n")
    assert answer.reasoning == "They want weather."
    assert answer.content == "Let me look."
    assert calls(answer) == [("weather", {"city": "Zürich", "days": 3}), ("time", {})]
    assert [piece.index for piece in answer.calls] == [0, 1]


def test_content_around_calls_keeps_its_order_and_the_blanks_between() -> None:
    answer = joined(f"Before.\n{WEATHER}\nAfter.")
    assert answer.content == "Before.\n\nAfter."
    assert joined(f"\n{TIME}\n{TIME}\n").content == ""


def test_a_prompt_may_have_opened_the_reasoning() -> None:
    assert opens_reasoning("<|im_start|>assistant\n<think>\n")
    assert not opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    answer = joined("So it is.\n</think>\n\nYes.", opened=True)
    assert (answer.reasoning, answer.content) == ("So it is.", "Yes.")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain text \n with blanks at its end \n ",
        "  <thin",
        "a stray </think> is content",
        "in the middle, <think> begins nothing</think>",
        '<tool_call>{"name": "f", "arguments": {"x": 1}',
        '<tool_call>{"name": "f", "arguments": {"x": 1}}',
        '<tool_call>{"name": "f", "arguments": {"x": }}</tool_call> after',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": "unended}}</tool_call>\n',
        "the tag <tool_call> in prose, and \n</tool_call>",
        "<tool_call>" + '{"a":' * 2000 + "1" + "}" * 2000 + "</tool_call>",
        "<tool_call>[]</tool_call><tool_ca",
    ],
)
def test_what_is_no_reasoning_and_no_call_stays_content_to_the_letter(text: str) -> None:
    answer = joined(text)
    assert (answer.content, answer.reasoning, answer.calls) == (text, None, [])


def test_unclosed_reasoning_stays_reasoning_and_loses_nothing() -> None:
    answer = joined("<think>I was cut off </thi")
    assert (answer.reasoning, answer.content) == ("I was cut off </thi", "")


def test_a_broken_call_does_not_hide_a_whole_one_behind_it() -> None:
    answer = joined(f'<tool_call>{{"name": </tool_call>{TIME}')
    assert answer.content == '<tool_call>{"name": </tool_call>'
    assert calls(answer) == [("time", {})]


def test_an_end_tag_within_a_string_ends_no_call() -> None:
    arguments = {"html": 'a </tool_call> "b" <tool_call>'}
    text = f"<tool_call>{json.dumps({'name': 'write', 'arguments': arguments})}</tool_call>"
    assert calls(joined(text)) == [("write", arguments)]


def test_parsers_that_are_off_leave_the_text_alone() -> None:
    text = f"<think>x</think> \n y {WEATHER} "
    assert parse([text], reasoning=None, tools=None) == [Piece("content", text)]
    only_calls = ParsedAnswer.join(parse([text], reasoning=None))
    assert only_calls.content == "<think>x</think> \n y"
    only_reasoning = ParsedAnswer.join(parse([text], tools=None))
    assert only_reasoning.content == f"y {WEATHER} "


def test_text_is_shown_as_soon_as_it_is_certain() -> None:
    """What could not begin a tag is not held back; what could is, until it does not."""
    parser = OutputParser("think", "hermes")
    assert parser.push("Hello") == [Piece("content", "Hello")]
    assert parser.push(" <tool") == []
    assert parser.push("box>") == [Piece("content", " <toolbox>")]
    pieces = parser.push(" the tag <tool_call> is")
    assert [piece.text for piece in pieces] == [" the tag", " <tool_call>", " is"]


def test_ids_of_calls_are_unique_and_look_like_openais() -> None:
    parser = OutputParser(None, "hermes")
    ids = [piece.id for piece in parser.push(TIME * 20)]
    assert len(set(ids)) == 20
    assert all(name is not None and name.startswith("call_") for name in ids)


def test_a_parser_that_is_not_known_is_refused_by_name() -> None:
    assert (REASONING_PARSERS, TOOL_PARSERS) == (("think",), ("hermes",))
    with pytest.raises(ValueError, match=r"no tool parser 'pythonic'.*hermes"):
        OutputParser(None, "pythonic")


FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", WEATHER, TIME, '{"name": "f", "arguments": {"s": "',
    '"}}', "{", "}", '"', "\\", " ", "\n", "word", "é🎉", "<", "</", "tool_call>", "think>",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


@given(text=TEXTS, opened=st.booleans(), seed=st.integers(0, 1 << 30))
@settings(max_examples=400, deadline=None)
def test_every_cut_of_a_text_gives_the_same_answer(text: str, opened: bool, seed: int) -> None:
    """Joined, pieces are those of the whole text: with every tag boundary at every offset (pieces of 1), in blocks of
    any one size, and in random blocks of 1 to 8."""
    whole = joined(text, opened=opened)
    rng = random.Random(seed)
    cuts = [[text[at : at + size] for at in range(0, len(text), size)] for size in (1, 2, 3, 5, 8)]
    blocks, at = [], 0
    while at < len(text):
        size = rng.randint(1, 8)
        blocks.append(text[at : at + size])
        at += size
    for parts in [*cuts, blocks]:
        assert joined(*parts, opened=opened) == whole


@given(text=TEXTS)
@settings(max_examples=400, deadline=None)
def test_no_letter_is_lost(text: str) -> None:
    """Without the calls and tags that were understood, and without blanks, what comes out is what went in."""
    answer = joined(text)
    kept = list((answer.reasoning or "") + answer.content)
    letters = iter(text)
    assert all(letter in letters for letter in kept), "what came out is not in the order of what went in"
    if not answer.calls and answer.reasoning is None and "<think>" not in text:
        assert answer.content == text


def test_both_halves_of_a_text_cut_anywhere() -> None:
    text = f" <think> a\nb </think>\n c {WEATHER}\n{TIME} d <tool_call>no</tool_call> "
    whole = joined(text)
    for cut in range(len(text) + 1):
        assert joined(text[:cut], text[cut:]) == whole
    assert calls(whole) == [("weather", {"city": "Zürich", "days": 3}), ("time", {})]
    assert whole.content == "c \n d <tool_call>no</tool_call>"
