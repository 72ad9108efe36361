"""Raw texts for base models: read as they are, all trained on but the first token, cut into rows, none thrown away."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import headstart
from infer.chat import Rendered, encode_text
from tests.toy_tokenizer import toy_tokenizer
from train.corpus.conversations import (
    SPLIT,
    Conversation,
    LoadReport,
    check_mask,
    conversation_rows,
    load_conversations,
    raw_prompt,
    split_holdout,
    tokenize_conversations,
)

CHATML = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"


def raw_text(content: str, **fields: Any) -> Conversation:
    return Conversation(messages=({"role": "text", "content": content},), source="here:1", **fields)


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_plain_texts_are_rows_only_when_asked_for(tmp_path: Path) -> None:
    """They were refused even by `--raw`: a text had to be ChatML."""
    path = write(tmp_path / "texts.jsonl", {"text": "a document"}, {"text": "another", "domain": "books"})
    with pytest.raises(ValueError, match="or raw text if it is plain text for a base model"):
        load_conversations(path)
    conversations, report = load_conversations(path, raw=True)
    assert [one.messages for one in conversations] == [
        ({"role": "text", "content": "a document"},),
        ({"role": "text", "content": "another"},),
    ]
    assert conversations[1].domain == "books"
    assert (report.rows_in, report.kept) == (2, 2)


def test_bad_raw_rows_are_dropped_with_their_line(tmp_path: Path) -> None:
    rows = [{"text": "fine"}, {"text": " \n"}, {"text": None}, {"text": 3}, {"text": "cut \ud83d"}, {"title": "x"}, []]
    conversations, report = load_conversations(write(tmp_path / "texts.jsonl", *rows), raw=True)
    assert len(conversations) == 1
    assert dict(report.dropped) == {
        "empty text": [2],
        "no messages, conversations or text field": [3, 4, 6],
        "text with half a surrogate pair": [5],
        "no messages": [7],
    }


def test_chatml_is_plain_text_in_raw_mode(tmp_path: Path) -> None:
    """What `raw` says holds for every row alike, whatever it looks like."""
    (one,), _ = load_conversations(write(tmp_path / "texts.jsonl", {"text": CHATML}), raw=True)
    assert one.messages == ({"role": "text", "content": CHATML},)


def test_chats_are_plain_text_too(tmp_path: Path) -> None:
    """Their contents one after another, all trained on, with the end token behind whole answers alone."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    path = write(tmp_path / "chats.jsonl", {"messages": messages}, {"messages": messages, "truncated": True})
    conversations, _ = load_conversations(path, raw=True)
    tokenizer = toy_tokenizer(template=None)
    whole, cut = tokenize_conversations(conversations, tokenizer, 100, raw=True)
    assert tokenizer.decode(whole.token_ids) == "Hi\n\nHello</s>"
    assert tokenizer.decode(cut.token_ids) == "Hi\n\nHello"


@pytest.mark.parametrize(("adds_bos", "adds_eos"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("length", [2, 9, 10, 11, 19, 20, 95])
def test_every_token_but_the_first_is_trained_on_once(adds_bos: bool, adds_eos: bool, length: int) -> None:
    """A long text fills several rows, each with a token before it to begin from: BOS, as at the text's own beginning,
    or the last token of the row before. Ids are the tokenizer's own; BOS is never doubled, EOS never added."""
    tokenizer = toy_tokenizer(adds_bos=adds_bos, adds_eos=adds_eos)
    text = "".join(chr(97 + number % 26) for number in range(length))
    rows = conversation_rows(raw_text(text), tokenizer, 10, raw=True)
    expected = encode_text(tokenizer, text)
    labels = [token for row in rows for token, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask]
    assert labels == expected[1:]
    for row in rows:
        check_mask(tokenizer, row, row.conversation.messages, raw=True)
        assert 2 <= len(row.token_ids) <= 10
        assert row.token_ids.count(0) == adds_bos
    if adds_bos:
        assert all(row.token_ids[0] == 0 for row in rows)
    (alone,) = conversation_rows(raw_text(text), tokenizer, 1000, raw=True)
    assert alone.token_ids == expected


def test_a_bos_written_in_the_text_is_not_doubled() -> None:
    tokenizer = toy_tokenizer(adds_bos=True)
    (plain,) = conversation_rows(raw_text("abc"), tokenizer, 100, raw=True)
    (written,) = conversation_rows(raw_text("<s>abc"), tokenizer, 100, raw=True)
    assert plain.token_ids == written.token_ids


def test_what_became_of_texts_is_counted() -> None:
    report = LoadReport()
    texts = [raw_text("a" * 5), raw_text("b" * 35), raw_text("c")]
    rows = tokenize_conversations(texts, toy_tokenizer(), 10, raw=True, report=report)
    assert (report.rows_in, report.kept) == (3, 2)
    assert dict(report.fixed) == {SPLIT: [2]}
    assert dict(report.dropped) == {"no token to train on": [3]}
    assert len(rows) == 1 + 4
    with pytest.raises(ValueError, match="none of 1 conversations has a token to train on"):
        tokenize_conversations(texts[2:], toy_tokenizer(), 10, raw=True)


def test_texts_are_split_by_what_they_say() -> None:
    """All of them once had one key (no user message), and would have been on one side together."""
    texts = [raw_text(f"text number {number}") for number in range(200)]
    train, held_out = split_holdout(texts, 0.1)
    assert len(train) + len(held_out) == 200
    assert 5 <= len(held_out) <= 40
    assert len({one.prompt_key for one in texts}) == 200


def test_raw_prompts_are_the_beginning_of_a_row() -> None:
    (row,) = conversation_rows(raw_text("a" * 100), toy_tokenizer(), 200, raw=True)
    assert raw_prompt(row) == row.token_ids[:50]
    assert raw_prompt(row, 7) == row.token_ids[:7]
    (short,) = conversation_rows(raw_text("ab"), toy_tokenizer(), 200, raw=True)
    assert raw_prompt(short) == short.token_ids[:1]


def test_raw_masks_are_checked() -> None:
    row = Rendered(token_ids=[5, 6, 7], loss_mask=[False, True, True])
    check_mask(toy_tokenizer(), row, (), raw=True)
    with pytest.raises(ValueError, match="covers 3 of 3 tokens; a raw text needs all but the first"):
        check_mask(toy_tokenizer(), Rendered(token_ids=[5, 6, 7], loss_mask=[True] * 3), (), raw=True)


def test_inspect_raw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two files, no template, one long text; and the hash line says that no template was used."""
    toy_tokenizer(template=None).save_pretrained(tmp_path / "target")
    first = write(tmp_path / "a.jsonl", {"text": "x" * 45}, {"text": ""})
    second = write(tmp_path / "b.jsonl", {"text": "short"})
    report = tmp_path / "report.json"
    options = ("--target", str(tmp_path / "target"), "--raw", "--max-length", "20", "--json", str(report))
    assert headstart.main(["data", "inspect", str(first), str(second), *options]) == 0
    figures = json.loads(report.read_text())
    assert (figures["rows"], figures["supervised_tokens"], figures["longest"]) == (4, 44 + 4, 20)
    assert figures["template_hash"] == "raw text, no chat template"
    assert figures["reading"][str(first)]["dropped"] == {"empty text": [2]}
    assert "1 fixed: cut into several rows of the length limit (line 1)" in capsys.readouterr().out
