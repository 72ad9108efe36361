"""Reading, checking, rendering and splitting of conversations."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from infer.chat import Rendered, render_training
from infer.prompts import load_prompts
from tests.toy_tokenizer import CHATML, toy_tokenizer
from train.cli import data
from train.corpus.contamination import decontaminate
from train.corpus.conversations import (
    Conversation,
    LoadReport,
    TrainingRow,
    check_mask,
    load_conversations,
    split_holdout,
    tokenize_conversations,
)

USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be kind."}
GOOD = {"messages": [USER, ASSISTANT]}


def write(folder: Path, rows: Sequence[Any], name: str = "data.jsonl") -> Path:
    path = folder / name
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def conversation(user: str = "Hi", assistant: str = "Hello", **fields: Any) -> Conversation:
    messages = ({"role": "user", "content": user}, {"role": "assistant", "content": assistant})
    return Conversation(messages=messages, source="here:1", **fields)


def roles(conversation: Conversation) -> list[str]:
    return [message["role"] for message in conversation.messages]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([], "no messages"),
        ({"messages": []}, "no messages"),
        ({"messages": [SYSTEM]}, "system message only"),
        ({"messages": [ASSISTANT]}, "no user message"),
        ({"messages": [USER]}, "no assistant message"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "null content"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "empty content"),
        ({"messages": [USER, {"role": "assistant", "content": 3}]}, "content is not text"),
        ({"messages": [USER, {"role": "assistant"}]}, "message without content"),
        ({"messages": [{"content": "Hi"}, ASSISTANT]}, "message without role"),
        ({"messages": [USER, {"role": "narrator", "content": "x"}]}, "unknown role"),
        ({"messages": [USER, ASSISTANT, SYSTEM]}, "system message after the first turn"),
        ({"messages": [USER, "Hello"]}, "message is not an object"),
        ({"messages": "Hi"}, "messages is not a list"),
        ({"prompt": "Hi"}, "no messages, conversations or text field"),
        ("17", "row is not an object"),
        ('{"messages": [', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ({"messages": [USER, {"role": "assistant", "content": "cut \ud83d"}]}, "text with half a surrogate pair"),
    ],
)
def test_bad_rows_are_dropped_for_a_reason_with_their_line(tmp_path: Path, row: Any, reason: str) -> None:
    """Odd rows once failed with index errors deep in templating."""
    conversations, report = load_conversations(write(tmp_path, [GOOD, row, "", GOOD]))
    assert len(conversations) == 2
    assert dict(report.dropped) == {reason: [2]}
    assert (report.rows_in, report.kept, report.num_dropped) == (3, 2, 1)
    assert f"{reason} (line 2)" in report.summary()


@pytest.mark.parametrize(
    ("messages", "expected", "fix"),
    [
        (
            [ASSISTANT, USER, ASSISTANT],
            ["user", "assistant"],
            "messages before the first user message removed",
        ),
        ([USER, ASSISTANT, USER], ["user", "assistant"], "messages after the last assistant message removed"),
        ([USER, USER, ASSISTANT], ["user", "assistant"], "consecutive user messages joined"),
        ([USER, ASSISTANT, ASSISTANT], ["user", "assistant"], "consecutive assistant messages joined"),
        (
            [{"role": "system", "content": ""}, USER, ASSISTANT],
            ["user", "assistant"],
            "empty system message removed",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, ASSISTANT],
            ["user", "assistant"],
            "text parts joined",
        ),
    ],
)
def test_fixable_rows_are_kept_and_the_fix_is_noted(
    tmp_path: Path, messages: list[Any], expected: list[str], fix: str
) -> None:
    conversations, report = load_conversations(write(tmp_path, [{"messages": messages}]))
    assert roles(conversations[0]) == expected
    assert dict(report.fixed) == {fix: [1]}
    assert not report.dropped


def test_nothing_left_is_an_error_with_the_reasons(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no conversation is left: 2 rows in, 0 kept, 2 dropped; 1 dropped: "):
        load_conversations(write(tmp_path, [[], {"messages": [SYSTEM]}]))
    with pytest.raises(ValueError, match="no conversation is left"):
        load_conversations(write(tmp_path, ["[]"]))
    with pytest.raises(FileNotFoundError, match=r"no conversations file at .*missing\.jsonl"):
        load_conversations(tmp_path / "missing.jsonl")


MIXED_ROWS = [
    {"messages": [USER, ASSISTANT], "meta": None, "tools": [{"arguments": "a"}]},
    {"messages": [USER, ASSISTANT], "meta": "text", "tools": [{"arguments": 3}]},
    {
        "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}],
        "meta": {"a": 1},
    },
    {"messages": None, "conversations": [{"from": "user", "value": "Hi", "weight": 0}, ASSISTANT]},
    {"messages": [{**USER, "tool_calls": None}, {**ASSISTANT, "tool_calls": [{"arguments": {"x": 1}}]}]},
    [USER, ASSISTANT],
]


@pytest.mark.parametrize("form", ["lines", "array", "pretty array", "cut array"])
@pytest.mark.parametrize("reverse", [False, True])
def test_mixed_types_do_not_matter_in_any_order(tmp_path: Path, form: str, reverse: bool) -> None:
    """A columnar schema inferred from the first rows once refused null-then-text columns and mixed argument
    types.
    """
    rows = MIXED_ROWS[::-1] if reverse else MIXED_ROWS
    text = {
        "lines": "\n".join(json.dumps(row) for row in rows),
        "array": json.dumps(rows),
        "pretty array": json.dumps(rows, indent=2),
        "cut array": json.dumps(rows)[:-1] + ', {"messages": [{"ro',
    }[form]
    path = tmp_path / "data.json"
    path.write_text("\ufeff" + text, encoding="utf-8")
    conversations, report = load_conversations(path)
    assert [list(one.messages) for one in conversations] == [[USER, ASSISTANT]] * len(rows)
    assert report.num_dropped == (1 if form == "cut array" else 0)


def test_array_rows_are_reported_by_the_line_they_begin_on(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps([GOOD, {"messages": []}], indent=1))
    first = path.read_text().split("\n").index([" {", '  "messages": []'][0], 2) + 1
    _, report = load_conversations(path)
    assert dict(report.dropped) == {"no messages": [first]}


def test_lines_that_are_not_text_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\xff\xfe\n" + '{"text": "\u2028"}\n'.encode())
    with path.open("a") as stream:
        stream.write(json.dumps({"text": chatml([USER, ASSISTANT])}))
    _, report = load_conversations(path)
    assert dict(report.dropped) == {"not UTF-8": [2], "text is not ChatML": [3]}


def chatml(messages: Sequence[dict[str, str]]) -> str:
    return "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)


def test_chatml_text_equals_the_messages_form(tmp_path: Path) -> None:
    """Pre-formatted rows once lost their loss or were skipped: same ids and mask, or a refusal that shows the
    row.
    """
    messages = [SYSTEM, USER, ASSISTANT, {"role": "user", "content": "a\n\nb"}, ASSISTANT]
    tokenizer = toy_tokenizer()
    (from_text,), _ = load_conversations(write(tmp_path, [{"text": chatml(messages)}]))
    assert list(from_text.messages) == messages
    assert render_training(tokenizer, from_text.messages) == render_training(tokenizer, messages)


@pytest.mark.parametrize(
    "text",
    [
        chatml([USER, ASSISTANT]).replace("\n", "\r\n"),
        "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n",
        chatml([USER]) + "loose words" + chatml([ASSISTANT]),
        chatml([USER, ASSISTANT]) + "<|im_start|>user\nno end",
        "just a document",
    ],
)
def test_other_text_is_refused_with_the_first_row_shown(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="no text row is ChatML") as raised:
        load_conversations(write(tmp_path, [GOOD, {"text": text}]))
    assert repr(text)[:40] in str(raised.value)
    assert "line 2" in str(raised.value)
    # One readable text row shows that the form is right: then the others are dropped rows like any.
    _, report = load_conversations(write(tmp_path, [{"text": chatml([USER, ASSISTANT])}, {"text": text}]))
    assert dict(report.dropped) == {"text is not ChatML": [2]}


def test_requests_need_no_answer(tmp_path: Path) -> None:
    (request,), _ = load_conversations(write(tmp_path, [{"messages": [USER]}]), require_answer=False)
    assert roles(request) == ["user"]


def test_tokenized_rows_keep_loss_and_know_their_source() -> None:
    tokenizer = toy_tokenizer()
    report = LoadReport()
    rows = tokenize_conversations(
        [conversation(domain="chat"), conversation(user="x" * 100), conversation(assistant="y" * 100)],
        tokenizer,
        60,
        report=report,
    )
    assert dict(report.dropped) == {"no assistant token within the length limit": [2]}
    assert (report.rows_in, report.kept) == (3, 2)
    assert isinstance(rows[0], TrainingRow)
    assert rows[0].conversation.domain == "chat"
    assert len(rows[1].token_ids) == len(rows[1].loss_mask) == 60
    assert rows[1].loss_mask[-1]
    with pytest.raises(ValueError, match="none of 1 conversations has an assistant token within 10 tokens"):
        tokenize_conversations([conversation()], tokenizer, 10)


def test_truncated_answers_teach_no_end() -> None:
    tokenizer = toy_tokenizer()
    (whole,) = tokenize_conversations([conversation()], tokenizer, 100)
    (cut,) = tokenize_conversations([conversation(truncated=True)], tokenizer, 100)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert [i for i, m in zip(whole.token_ids, whole.loss_mask, strict=True) if m][-1] == end
    assert [i for i, m in zip(cut.token_ids, cut.loss_mask, strict=True) if m][-1] != end
    assert cut.num_supervised == whole.num_supervised - 1


def test_a_template_that_hides_every_answer_stops_and_is_named() -> None:
    tokenizer = toy_tokenizer(template=CHATML.replace("message['content']", "message['content'] | upper"))
    with pytest.raises(ValueError, match="chat template of toy"):
        tokenize_conversations([conversation()], tokenizer, 100)


@pytest.mark.parametrize("mask", ["none", "all", "user", "user to answer"])
def test_wrong_masks_are_refused(mask: str) -> None:
    """All-zero, all-one, or over the user's words: each was once trained on for hours."""
    tokenizer = toy_tokenizer()
    messages = [{"role": "user", "content": "What is it?"}, ASSISTANT]
    rendered = render_training(tokenizer, messages)
    check_mask(tokenizer, rendered, messages)
    length = len(rendered.token_ids)
    masks = {
        "none": [False] * length,
        "all": [True] * length,
        "user to answer": [index > 12 for index in range(length)],
        "user": [12 <= index < 20 or supervised for index, supervised in enumerate(rendered.loss_mask)],
    }
    with pytest.raises(ValueError, match="the loss mask covers"):
        check_mask(tokenizer, Rendered(token_ids=rendered.token_ids, loss_mask=masks[mask]), messages)


def test_an_answer_may_quote_special_tokens() -> None:
    """A file with one such answer could once not be inspected at all."""
    tokenizer = toy_tokenizer()
    (row,) = tokenize_conversations([conversation(assistant="It ends in <|im_end|>, always.")], tokenizer, 100)
    check_mask(tokenizer, row, row.conversation.messages)


def test_holdout_depends_on_the_conversation_only() -> None:
    """Adding rows or changing their order moves nothing across the split; no prompt is on both sides."""
    conversations = [conversation(user=f"Question {number // 2}", assistant=str(number)) for number in range(400)]
    train, held_out = split_holdout(conversations, 0.1)
    assert len(train) + len(held_out) == 400
    # 200 prompts at 0.1: 20 expected, standard deviation 4.2; the hash is fixed, so this cannot flake.
    assert 8 <= len(held_out) // 2 <= 36
    held_out_keys = {one.prompt_key for one in held_out}
    assert not held_out_keys.intersection(one.prompt_key for one in train)
    some_train, some_held_out = split_holdout(conversations[::-1][:300], 0.1)
    assert {one.messages[0]["content"] for one in some_held_out} <= {one.messages[0]["content"] for one in held_out}
    assert len(some_train) + len(some_held_out) == 300


def test_small_sets_still_hold_something_out() -> None:
    train, held_out = split_holdout([conversation(user="a"), conversation(user="b")], 0.01)
    assert (len(train), len(held_out)) == (1, 1)
    assert split_holdout([conversation()], 0.0)[1] == []
    with pytest.raises(ValueError, match="leaves none to train on"):
        split_holdout([conversation()], 0.5)
    with pytest.raises(ValueError, match=r"must be in \[0, 1\), given 1"):
        split_holdout([conversation()], 1.0)


def test_evaluation_prompts_are_kept_out() -> None:
    """Same words in another case, spacing or punctuation count as the same prompt."""
    leaked = load_prompts()[0].messages[0]["content"].upper().replace(" ", "  ") + "!"
    report = LoadReport(rows_in=2, kept=2)
    kept = decontaminate([conversation(user=leaked), conversation()], report)
    assert [one.messages[0]["content"] for one in kept] == ["Hi"]
    assert dict(report.dropped) == {"evaluation prompt": [1]}
    assert report.kept == 1


def test_data_sets_are_read_row_by_row(tmp_path: Path) -> None:
    """A local Parquet file through `datasets`: the same rules, one row at a time."""
    datasets = pytest.importorskip("datasets")
    path = tmp_path / "data.parquet"
    rows = {"messages": [[USER, ASSISTANT], [SYSTEM]]}
    datasets.Dataset.from_dict(rows).to_parquet(str(path))
    conversations, report = load_conversations(path)
    assert [list(one.messages) for one in conversations] == [[USER, ASSISTANT]]
    assert dict(report.dropped) == {"system message only": [2]}


def inspect(tokenizer: Any, folder: Path, rows: Sequence[Any], *options: str) -> int:
    tokenizer.save_pretrained(folder / "target")
    parser = argparse.ArgumentParser()
    data.add_arguments(parser)
    path = write(folder, rows)
    return data.run(parser.parse_args(["inspect", str(path), "--target", str(folder / "target"), *options]))


def test_inspect_shows_rows_and_reports_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(toy_tokenizer(), tmp_path, [GOOD, [], GOOD], "--json", str(tmp_path / "report.json")) == 0
    figures = json.loads((tmp_path / "report.json").read_text())
    assert figures["rows"] == 2
    assert figures["reading"]["dropped"] == {"no messages": [2]}
    assert figures["supervised_tokens"] == 2 * (len("Hello") + 1)
    printed = capsys.readouterr().out
    assert "6 of 28 tokens supervised" in printed
    assert "3 rows in, 2 kept, 1 dropped" in printed


def test_inspect_refuses_a_target_without_template(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no chat template"):
        inspect(toy_tokenizer(template=None), tmp_path, [GOOD])
    assert inspect(toy_tokenizer(template=None), tmp_path, [GOOD], "--raw") == 0
