"""Evaluation prompts in training data: equal, nearly equal, or inside longer texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import headstart
from infer.prompts import load_prompts, normalise_text, user_texts
from tests.toy_tokenizer import toy_tokenizer
from train.corpus.contamination import EQUAL, NEARLY, ORDER, OVERLAPS, Contamination, decontaminate, prompt_texts
from train.corpus.conversations import Conversation, LoadReport, load_conversations

LONG = "A farmer has 17 sheep, and all but nine of them run away one morning; how many sheep are left to sell?"
SHORT = "Name the capital of France."


def chat(user: str, answer: str = "Hello", *, line: int = 1) -> Conversation:
    messages = ({"role": "user", "content": user}, {"role": "assistant", "content": answer})
    return Conversation(messages=messages, source=f"data.jsonl:{line}")


@pytest.mark.parametrize(
    ("user", "answer", "reason"),
    [
        ("name THE capital  of france!", "Paris", EQUAL),
        (LONG.upper(), "9", EQUAL),
        (LONG.replace("sell", "keep"), "9", NEARLY),
        ("Think step by step. " * 5 + LONG + " " + "Answer with a number. " * 5, "9", OVERLAPS),
        ("Quote it back to me.", f"You said: {LONG.lower()}", OVERLAPS),
        ("Please name the capital of France now, and then of Italy and Spain", "Paris", None),
        ("A farmer has 17 sheep, and they are all white.", "So?", None),
        ("Name the capital of Italy.", "Rome", None),
    ],
)
def test_what_counts_as_an_evaluation_prompt(user: str, answer: str, reason: str | None) -> None:
    """Short prompts by (nearly) equal turns alone: five usual words in a longer text are no leak."""
    assert Contamination([LONG, SHORT]).reason(chat(user, answer)) == reason


def test_pieces_need_that_many_words_in_a_row() -> None:
    words = [f"word{number}" for number in range(2 * ORDER)]
    contamination = Contamination([" ".join(words)])
    for length, found in ((ORDER - 1, None), (ORDER, OVERLAPS)):
        text = " ".join(["other"] * 20 + words[3 : 3 + length] + ["more"] * 20)
        assert contamination.reason(chat("Hi", text)) == found
    broken = [*words[: ORDER - 1], "gap", *words[ORDER:]]
    assert contamination.reason(chat("Hi", " ".join(["other"] * 20 + broken[: ORDER + 5]))) is None


def test_raw_texts_are_looked_through_too() -> None:
    content = f"Exercises. {LONG} " + " ".join(f"word{number}" for number in range(50))
    text = Conversation(messages=({"role": "text", "content": content},), source="x:1")
    assert Contamination([LONG]).reason(text) == OVERLAPS


def test_every_shipped_prompt_is_found_wherever_it_stands() -> None:
    """As a turn of its own every one, and inside a longer text every one of enough words."""
    contamination = Contamination.of()
    for text in user_texts(load_prompts()):
        assert contamination.reason(chat(text)) == EQUAL
        inside = chat("Hi", f"Here is what they asked me: {text} And then they left without another word.")
        assert (contamination.reason(inside) is None) == (len(normalise_text(text).split()) < ORDER)


def test_rows_are_listed_by_their_lines(tmp_path: Path) -> None:
    """Lines of the file, not places in the list, which earlier drops have shortened."""
    rows: list[Any] = [{"messages": []}, *({"messages": chat(text).messages} for text in ("Hi", SHORT, LONG, "Bye"))]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": SHORT}]}) + "\n" + json.dumps(LONG) + "\n")
    conversations, report = load_conversations(path)
    kept = decontaminate(conversations, report, files=[prompts])
    assert [one.messages[0]["content"] for one in kept] == ["Hi", "Bye"]
    assert dict(report.dropped) == {"no messages": [1], EQUAL: [3, 4]}
    assert report.rows_in == report.kept + report.num_dropped
    assert len(decontaminate(conversations, LoadReport())) == 4


@pytest.mark.parametrize(
    ("row", "texts"),
    [
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, ["a"]),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, ["a"]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}]}, ["ab"]),
        ({"prompt": "def f():", "task_id": "HumanEval/0"}, ["def f():"]),
        ({"question": "q", "answer": "42"}, ["q"]),
        ({"turns": ["first", "second"], "category": "writing"}, ["first", "second"]),
        ({"text": "a document"}, ["a document"]),
        ("just text", ["just text"]),
    ],
)
def test_prompts_files_of_the_usual_forms(tmp_path: Path, row: Any, texts: list[str]) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert prompt_texts(path) == texts


@pytest.mark.parametrize("line", ["{", "[]", '{"id": 3}', '{"prompt": " "}', "3"])
def test_a_prompt_that_cannot_be_read_is_an_error(tmp_path: Path, line: str) -> None:
    """Skipped in silence, it would be trained on."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n{"prompt": "too"}\n' + line + "\n")
    with pytest.raises(ValueError, match="line 3: no prompt found"):
        Contamination.of([path])


def test_equal_sets_have_equal_names() -> None:
    assert Contamination(["a b", "c"]).identity == Contamination(["c", "A b!"]).identity
    assert Contamination(["a b"]).identity != Contamination(["a c"]).identity


def test_inspect_counts_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toy_tokenizer().save_pretrained(tmp_path / "target")
    path = tmp_path / "data.jsonl"
    leaked = load_prompts()[0].messages[0]["content"]
    path.write_text("".join(json.dumps({"messages": chat(text).messages}) + "\n" for text in ("Hi", leaked)))
    assert headstart.main(["data", "inspect", str(path), "--target", str(tmp_path / "target"), "--decontaminate"]) == 0
    assert "1 dropped: evaluation prompt (line 2)" in capsys.readouterr().out
