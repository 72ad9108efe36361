"""Conversations from files and data sets: read row by row, checked by stated rules, counted, and rendered for
training.

Rows are parsed with plain `json`, never through a columnar schema, so columns of mixed types cannot break a
file and unused ones are ignored. Every row is kept, kept after a named fix, or dropped for a named reason
with its line number.

Fixes: consecutive messages of one role are joined; assistant messages before the first user message, messages
after the last assistant message, and empty system messages are removed; text parts are joined. Drops:
everything in `LoadReport.dropped`.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infer.chat import Rendered, is_unicode, render_training, special_ids
from infer.prompts import load_prompts, normalise_text, prompt_hashes, text_hash

ROLES = {
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""Role names seen in public data, and what they mean here."""

CUT = "cut at the length limit"
"""What a `LoadReport` of rendering calls rows that lost their end."""

_CHATML_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n?", re.DOTALL)
_FILE_SUFFIXES = (".jsonl", ".json", ".ndjson", ".txt")


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages that begin (after an optional system message) with the user's; `source` is "file:line"."""

    messages: tuple[dict[str, str], ...]
    source: str
    domain: str | None = None
    truncated: bool = False
    """The last answer was cut by a length limit: its end must not be taught."""

    @property
    def prompt_key(self) -> str:
        """Hash of what the users say: equal for conversations that differ in their answers only."""
        users = [normalise_text(message["content"]) for message in self.messages if message["role"] == "user"]
        return hashlib.sha256("\n".join(users).encode()).hexdigest()


@dataclass(kw_only=True)
class LoadReport:
    """What became of every row; line numbers count from 1."""

    rows_in: int = 0
    kept: int = 0
    fixed: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    dropped: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    @property
    def num_dropped(self) -> int:
        return sum(len(lines) for lines in self.dropped.values())

    def summary(self) -> str:
        lines = [f"{self.rows_in} rows in, {self.kept} kept, {self.num_dropped} dropped"]
        for verb, rules in (("fixed", self.fixed), ("dropped", self.dropped)):
            lines += [f"  {len(where):6d} {verb}: {rule} ({_few(where)})" for rule, where in sorted(rules.items())]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return {
            "rows_in": self.rows_in,
            "kept": self.kept,
            "fixed": dict(self.fixed),
            "dropped": dict(self.dropped),
        }


@dataclass(frozen=True, kw_only=True)
class TrainingRow(Rendered):
    """A rendered conversation that still knows where it came from."""

    conversation: Conversation


class RowFault(ValueError):
    """Why one row is dropped."""


def load_conversations(
    source: str | Path, *, limit: int | None = None, require_answer: bool = True
) -> tuple[list[Conversation], LoadReport]:
    """Conversations of a JSON (lines or array) file, or of a `datasets` name, optionally `name:split`.

    `require_answer=False` also keeps conversations without an assistant message (requests to be answered).
    """
    report = LoadReport()
    conversations: list[Conversation] = []
    unreadable_text: tuple[int, str] | None = None
    num_texts = 0
    for number, row in _rows(source):
        if limit is not None and len(conversations) >= limit:
            break
        report.rows_in += 1
        try:
            if isinstance(row, RowFault):
                raise row
            raw_messages, is_text = _raw_messages(row)
            num_texts += is_text
            messages, fixes = _checked_messages(raw_messages, require_answer=require_answer)
        except _TextFault as fault:
            unreadable_text = unreadable_text or (number, fault.text)
            report.dropped[str(fault)].append(number)
            continue
        except RowFault as fault:
            report.dropped[str(fault)].append(number)
            continue
        for fix in fixes:
            report.fixed[fix].append(number)
        conversations.append(_conversation(row, messages, f"{source}:{number}"))
    report.kept = len(conversations)
    if unreadable_text is not None and not num_texts:
        number, text = unreadable_text
        raise ValueError(
            f"{source}: no text row is ChatML (<|im_start|>role, newline, text, <|im_end|>, with \\n "
            f"newlines); use a `messages` field instead. The first such row, line {number}, begins "
            f"{text[:300]!r}"
        )
    if not conversations:
        raise ValueError(
            f"{source}: no conversation is left: {'; '.join(map(str.strip, report.summary().splitlines()))}"
        )
    return conversations, report


def tokenize_conversations(
    conversations: Sequence[Conversation],
    tokenizer: Any,
    max_length: int,
    *,
    raw: bool = False,
    report: LoadReport | None = None,
) -> list[Rendered]:
    """Rendered rows (each a `TrainingRow`) of at most `max_length` tokens.

    Longer rows are cut at the end. A row is dropped when the cut leaves no supervised token or the template cannot
    render it; if none is left, the first template error (or the length limit) is raised. Both are noted in
    `report` by the conversation's place, counted from 1.
    """
    if max_length < 2:
        raise ValueError(f"max_length must be at least 2 tokens, given {max_length}")
    report = report if report is not None else LoadReport()
    rows: list[Rendered] = []
    first_error: ValueError | None = None
    for number, conversation in enumerate(conversations, start=1):
        report.rows_in += 1
        try:
            rendered = render_training(
                tokenizer, conversation.messages, end_of_last=not conversation.truncated, raw=raw
            )
        except ValueError as error:
            first_error = first_error or error
            report.dropped["refused by the chat template or its mask"].append(number)
            continue
        row = TrainingRow(
            token_ids=rendered.token_ids[:max_length],
            loss_mask=rendered.loss_mask[:max_length],
            conversation=conversation,
        )
        if not row.num_supervised:
            report.dropped["no assistant token within the length limit"].append(number)
            continue
        if len(rendered.token_ids) > max_length:
            report.fixed[CUT].append(number)
        rows.append(row)
    report.kept += len(rows)
    if not rows:
        raise first_error or ValueError(
            f"none of {len(conversations)} conversations has an assistant token within {max_length} tokens; "
            "raise the length limit"
        )
    return rows


def check_mask(tokenizer: Any, rendered: Rendered, messages: Sequence[Mapping[str, str]]) -> None:
    """Refuse a mask that covers nothing, everything, or text that no assistant wrote."""
    supervised, total = rendered.num_supervised, len(rendered.token_ids)
    if supervised in (0, total):
        raise ValueError(f"the loss mask covers {supervised} of {total} tokens; a chat needs some and not all")
    special = special_ids(tokenizer)
    markers = [str(tokenizer.convert_ids_to_tokens(token_id)) for token_id in sorted(special)]
    answers = [_letters(message["content"], markers) for message in messages if message["role"] == "assistant"]
    for run in masked_runs(rendered):
        text = tokenizer.decode([token_id for token_id in run if token_id not in special])
        if not any(_letters(text, markers) in answer for answer in answers):
            raise ValueError(f"the loss mask covers text that no assistant message holds: {text[:200]!r}")


def masked_runs(rendered: Rendered) -> Iterator[list[int]]:
    """Token ids of each unbroken stretch of supervised tokens."""
    run: list[int] = []
    for token_id, supervised in zip(rendered.token_ids, rendered.loss_mask, strict=True):
        if supervised:
            run.append(token_id)
        elif run:
            yield run
            run = []
    if run:
        yield run


def split_holdout(
    conversations: Sequence[Conversation], fraction: float
) -> tuple[list[Conversation], list[Conversation]]:
    """Training and held-out conversations, chosen by a hash of what the users say.

    So the same conversation is always on the same side, whatever else is in the file, and two answers to one
    prompt never end up on both sides. At least one prompt is held out when `fraction` is above 0.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"the held-out fraction must be in [0, 1), given {fraction}")
    if fraction == 0 or not conversations:
        return list(conversations), []
    keys = [conversation.prompt_key for conversation in conversations]
    threshold = max(int(fraction * 16**16), int(min(keys)[:16], 16) + 1)
    held_out = [int(key[:16], 16) < threshold for key in keys]
    train = [conversation for conversation, held in zip(conversations, held_out, strict=True) if not held]
    if not train:
        raise ValueError(
            f"holding out {fraction} of {len(conversations)} conversations leaves none to train on; add data"
        )
    return train, [conversation for conversation, held in zip(conversations, held_out, strict=True) if held]


def decontaminate(conversations: Sequence[Conversation], report: LoadReport | None = None) -> list[Conversation]:
    """Conversations in which no user says what an evaluation prompt of the default set says."""
    hashes = prompt_hashes(load_prompts())
    kept = []
    for number, conversation in enumerate(conversations, start=1):
        users = (message["content"] for message in conversation.messages if message["role"] == "user")
        if any(text_hash(text) in hashes for text in users):
            if report is not None:
                report.dropped["evaluation prompt"].append(number)
                report.kept -= 1
        else:
            kept.append(conversation)
    return kept


def check_source(source: str | Path) -> None:
    """Refuse a path to no file, before anything is loaded. Other names may be data sets of the Hub."""
    path = Path(source)
    if not path.is_file() and (path.suffix in _FILE_SUFFIXES or path.is_absolute()):
        raise FileNotFoundError(f"no conversations file at {path}")


def _rows(source: str | Path) -> Iterator[tuple[int, Any]]:
    """(line number, parsed row or RowFault) of a file, or (row number, row) of a data set."""
    path = Path(source)
    check_source(path)
    if path.is_file() and path.suffix in (".parquet", ".arrow", ".csv"):
        yield from _dataset_rows(path.suffix[1:], data_files=str(path))
    elif path.is_file():
        yield from _file_rows(path)
    else:
        name, _, split = str(source).partition(":")
        yield from _dataset_rows(name, split=split or "train")


def _dataset_rows(name: str, *, split: str = "train", data_files: str | None = None) -> Iterator[tuple[int, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{data_files or name!r} is not a JSON file, and the `datasets` package is not installed; "
            "install it or give a .jsonl file"
        ) from error
    rows = datasets.load_dataset(name, split=split, data_files=data_files, streaming=True)
    yield from enumerate((dict(row) for row in rows), start=1)


def _file_rows(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as stream:
        first = stream.readline().removeprefix(b"\xef\xbb\xbf").strip()
        rest_is_blank = not stream.read(4096).strip()
    if first.startswith(b"[") and (rest_is_blank or not _is_json(first)):
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is one JSON array that is not UTF-8: {error}") from error
        yield from _array_rows(text)
    else:
        yield from _line_rows(path)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _line_rows(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as stream:  # bytes: only \n ends a line, whatever the text holds
        for number, line in enumerate(stream, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield number, json.loads(text)
            except UnicodeDecodeError:
                yield number, RowFault("not UTF-8")
            except (ValueError, RecursionError):  # the latter: nested too deeply
                yield number, RowFault("not JSON")


def _array_rows(text: str) -> Iterator[tuple[int, Any]]:
    """Elements of one JSON array, with the lines they begin on; a file cut short loses its last element."""
    decoder = json.JSONDecoder()
    position, line, counted = text.index("[") + 1, 1, 0
    while True:
        while position < len(text) and text[position] in " \t\r\n,":
            position += 1
        line, counted = line + text.count("\n", counted, position), position
        if position >= len(text) or text[position] == "]":
            return
        try:
            row, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            yield line, RowFault("not JSON (the array ends here)")
            return
        yield line, row


class _TextFault(RowFault):
    def __init__(self, text: str) -> None:
        super().__init__("text is not ChatML")
        self.text = text


def _raw_messages(row: Any) -> tuple[list[Any], bool]:
    """The row's list of messages, and whether it was parsed out of a `text` field."""
    if isinstance(row, list):
        return row, False
    if not isinstance(row, dict):
        raise RowFault("row is not an object")
    for key in ("messages", "conversations", "conversation"):
        if row.get(key) is not None:
            if not isinstance(row[key], list):
                raise RowFault(f"{key} is not a list")
            return row[key], False
    if isinstance(row.get("text"), str):
        return _parse_chatml(row["text"]), True
    raise RowFault("no messages, conversations or text field")


def _parse_chatml(text: str) -> list[dict[str, str]]:
    messages, position = [], 0
    for turn in _CHATML_TURN.finditer(text):
        if text[position : turn.start()].strip():
            raise _TextFault(text)
        messages.append({"role": turn[1], "content": turn[2]})
        position = turn.end()
    if not messages or text[position:].strip():
        raise _TextFault(text)
    return messages


def _conversation(row: Any, messages: Sequence[dict[str, str]], source: str) -> Conversation:
    fields = row if isinstance(row, dict) else {}
    domain = fields.get("domain")
    return Conversation(
        messages=tuple(messages),
        source=source,
        domain=domain if isinstance(domain, str) else None,
        truncated=fields.get("truncated") is True,
    )


def _checked_messages(raw_messages: list[Any], *, require_answer: bool) -> tuple[list[dict[str, str]], list[str]]:
    """Messages after the fixes, and the fixes' names; RowFault where no rule helps."""
    fixes: list[str] = []
    if not raw_messages:
        raise RowFault("no messages")
    messages = [_parse_message(message, fixes) for message in raw_messages]
    messages = _without_empty_system(messages, fixes)
    messages = _joined(messages, fixes)
    system = [message for message in messages[:1] if message["role"] == "system"]
    turns = messages[len(system) :]
    if not turns:
        raise RowFault("system message only")
    if any(message["role"] == "system" for message in turns):
        raise RowFault("system message after the first turn")
    if any(not message["content"].strip() for message in turns):
        raise RowFault("empty content")
    return system + _trimmed(turns, fixes, require_answer=require_answer), list(dict.fromkeys(fixes))


def _parse_message(message: Any, fixes: list[str]) -> dict[str, str]:
    if not isinstance(message, dict):
        raise RowFault("message is not an object")
    role = message.get("role", message.get("from"))
    if role is None:
        raise RowFault("message without role")
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise RowFault("unknown role")
    if "content" not in message and "value" not in message:
        raise RowFault("message without content")
    content = message["content"] if "content" in message else message["value"]
    if content is None:
        raise RowFault("null content")
    if isinstance(content, list):
        content = _joined_parts(content)
        fixes.append("text parts joined")
    if not isinstance(content, str):
        raise RowFault("content is not text")
    if not is_unicode(content):
        raise RowFault("text with half a surrogate pair")
    return {"role": ROLES[role.lower()], "content": content}


def _joined_parts(parts: list[Any]) -> str:
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise RowFault("content is not text")
        texts.append(text)
    return "".join(texts)


def _without_empty_system(messages: list[dict[str, str]], fixes: list[str]) -> list[dict[str, str]]:
    kept = [message for message in messages if message["role"] != "system" or message["content"].strip()]
    if len(kept) < len(messages):
        fixes.append("empty system message removed")
    return kept


def _joined(messages: list[dict[str, str]], fixes: list[str]) -> list[dict[str, str]]:
    joined: list[dict[str, str]] = []
    for message in messages:
        if joined and joined[-1]["role"] == message["role"] and message["role"] != "tool":
            joined[-1]["content"] += "\n\n" + message["content"]
            fixes.append(f"consecutive {message['role']} messages joined")
        else:
            joined.append(dict(message))
    return joined


def _trimmed(turns: list[dict[str, str]], fixes: list[str], *, require_answer: bool) -> list[dict[str, str]]:
    roles = [message["role"] for message in turns]
    if "user" not in roles:
        raise RowFault("no user message")
    first = roles.index("user")
    if first:
        fixes.append("messages before the first user message removed")
    turns, roles = turns[first:], roles[first:]
    if not require_answer:
        return turns
    if "assistant" not in roles:
        raise RowFault("no assistant message")
    last = len(roles) - 1 - roles[::-1].index("assistant")
    if last + 1 < len(roles):
        fixes.append("messages after the last assistant message removed")
    return turns[: last + 1]


def _letters(text: str, markers: Sequence[str]) -> str:
    """Text without what tokenizers may change when they decode: blanks, case, compatibility forms, cut characters; and
    without the special tokens' names in `markers`, which an answer may quote.
    """
    for marker in markers:
        text = text.replace(marker, "")
    return "".join(unicodedata.normalize("NFKC", text).casefold().replace("\ufffd", "").split())


def _few(numbers: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(str(number) for number in numbers[:most])
    return f"line {shown}" if len(numbers) == 1 else f"lines {shown}" + (", ..." if len(numbers) > most else "")
