"""Conversations from files and data sets: read row by row, checked by stated rules, counted, and rendered for
training.

Unused columns are ignored. Every row is kept, kept after a named fix, or dropped for a named reason with its line
number.

Fixes: consecutive messages of one role are joined; assistant messages before the first user message, messages
after the last assistant message, and empty system messages are removed; text parts are joined. Drops:
everything in `LoadReport.dropped`.

Raw texts (`raw=True`, for base models) are another matter: a row's `text` is plain text, all of it is trained on, and
what does not fit into one row fills further ones.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infer.chat import Rendered, encode_text, is_unicode, render_text, render_training, special_ids
from infer.prompts import normalise_text
from train.corpus.reading import RowFault, read_rows

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
SPLIT = "cut into several rows of the length limit"
"""What it calls raw texts that became more than one row."""

TEXT = "text"
"""The role of a raw text, which is nobody's turn."""
RAW_PROMPT_TOKENS = 256

__all__ = [
    "CUT",
    "SPLIT",
    "TEXT",
    "Conversation",
    "LoadReport",
    "TrainingRow",
    "check_mask",
    "conversation_rows",
    "holdout_threshold",
    "is_held_out",
    "label_counts",
    "load_conversations",
    "masked_runs",
    "parse_row",
    "raw_prompt",
    "scan_conversations",
    "split_holdout",
    "tokenize_conversations",
]

_MESSAGE_FIELDS = ("messages", "conversations", "conversation")
_CHATML_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n?", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages that begin (after an optional system message) with the user's, or one raw text; `source` is
    "file:line"."""

    messages: tuple[dict[str, str], ...]
    source: str
    domain: str | None = None
    truncated: bool = False
    """The last answer was cut by a length limit: its end must not be taught."""

    @property
    def prompt_key(self) -> str:
        """Hash of what the users say: equal for conversations that differ in their answers only."""
        users = [normalise_text(message["content"]) for message in self.messages if message["role"] in ("user", TEXT)]
        return hashlib.sha256("\n".join(users).encode()).hexdigest()

    @property
    def line(self) -> int | None:
        """Where it stands in its file, if its source says so."""
        number = self.source.rpartition(":")[2]
        return int(number) if number.isdecimal() else None


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


def load_conversations(
    source: str | Path, *, limit: int | None = None, require_answer: bool = True, raw: bool = False
) -> tuple[list[Conversation], LoadReport]:
    """Conversations of a JSON (lines or array) file, or of a `datasets` name, optionally `name:split`.

    `require_answer=False` also keeps conversations without an assistant message (requests to be answered). `raw`: a
    row's `text` is plain text rather than a chat in ChatML.
    """
    report = LoadReport()
    found = scan_conversations(source, report, require_answer=require_answer, raw=raw)
    conversations = list(itertools.islice(found, limit))
    if not conversations:
        raise ValueError(
            f"{source}: no conversation is left: {'; '.join(map(str.strip, report.summary().splitlines()))}"
        )
    return conversations, report


def scan_conversations(
    source: str | Path, report: LoadReport, *, require_answer: bool = True, raw: bool = False
) -> Iterator[Conversation]:
    """The same one by one; `report` grows as they come.

    Raises at the end if there were `text` rows and none was readable: then it is the file's form that is wrong.
    """
    unreadable_text: tuple[int, str] | None = None
    num_texts = 0
    for number, row in read_rows(source):
        report.rows_in += 1
        try:
            conversation, fixes = parse_row(row, f"{source}:{number}", require_answer=require_answer, raw=raw)
        except RowFault as fault:
            if isinstance(fault, _TextFault):
                unreadable_text = unreadable_text or (number, fault.text)
            report.dropped[str(fault)].append(number)
            continue
        for fix in fixes:
            report.fixed[fix].append(number)
        num_texts += _is_text(row)
        report.kept += 1
        yield conversation
    if unreadable_text is not None and not num_texts:
        number, text = unreadable_text
        raise ValueError(
            f"{source}: no text row is ChatML (<|im_start|>role, newline, text, <|im_end|>, with \\n "
            "newlines); use a `messages` field instead, or raw text if it is plain text for a base model. The first "
            f"such row, line {number}, begins {text[:300]!r}"
        )


def parse_row(
    row: Any, source: str, *, require_answer: bool = True, raw: bool = False
) -> tuple[Conversation, list[str]]:
    """The conversation in a row of a file, and the names of the fixes it needed; RowFault if it is none."""
    if isinstance(row, RowFault):
        raise row
    if _is_text(row) and raw:
        messages, fixes = [_raw_message(row["text"])], list[str]()
    else:
        messages, fixes = _checked_messages(_messages_of(row), require_answer=require_answer)
    fields = row if isinstance(row, dict) else {}
    domain = fields.get("domain")
    conversation = Conversation(
        messages=tuple(messages),
        source=source,
        domain=domain if isinstance(domain, str) else None,
        truncated=fields.get("truncated") is True,
    )
    return conversation, fixes


def tokenize_conversations(
    conversations: Sequence[Conversation],
    tokenizer: Any,
    max_length: int,
    *,
    raw: bool = False,
    report: LoadReport | None = None,
) -> list[Rendered]:
    """Rendered rows (each a `TrainingRow`) of at most `max_length` tokens.

    Longer chats are cut at the end, longer raw texts into several rows. A conversation is dropped when the cut leaves
    no supervised token or the template cannot render it; if none is left, the first template error (or the length
    limit) is raised. Both are noted in `report` by the conversation's place, counted from 1.
    """
    report = report if report is not None else LoadReport()
    rows: list[Rendered] = []
    first_error: ValueError | None = None
    for number, conversation in enumerate(conversations, start=1):
        report.rows_in += 1
        try:
            found, lost_end = _rendered_rows(conversation, tokenizer, max_length, raw=raw)
        except ValueError as error:
            first_error = first_error or error
            report.dropped["refused by the chat template or its mask"].append(number)
            continue
        if not found:
            reason = "no token to train on" if raw else "no assistant token within the length limit"
            report.dropped[reason].append(number)
            continue
        if lost_end:
            report.fixed[CUT].append(number)
        if len(found) > 1:
            report.fixed[SPLIT].append(number)
        report.kept += 1
        rows.extend(found)
    if not rows:
        raise first_error or ValueError(
            f"none of {len(conversations)} conversations has "
            f"{'a token to train on' if raw else 'an assistant token'} within {max_length} tokens; raise the length "
            "limit"
        )
    return rows


def conversation_rows(
    conversation: Conversation, tokenizer: Any, max_length: int, *, raw: bool = False
) -> list[TrainingRow]:
    """The rows of one conversation: one or none of a chat, as many of a raw text as it fills."""
    return _rendered_rows(conversation, tokenizer, max_length, raw=raw)[0]


def _rendered_rows(
    conversation: Conversation, tokenizer: Any, max_length: int, *, raw: bool
) -> tuple[list[TrainingRow], bool]:
    """(rows, whether a chat lost its end)."""
    if max_length < 2:
        raise ValueError(f"max_length must be at least 2 tokens, given {max_length}")
    if raw:
        pieces = _raw_pieces(conversation, tokenizer, max_length)
        masks = ([False] + [True] * (len(piece) - 1) for piece in pieces)
        rows = [
            TrainingRow(token_ids=piece, loss_mask=mask, conversation=conversation)
            for piece, mask in zip(pieces, masks, strict=True)
        ]
        return rows, False
    rendered = render_training(tokenizer, conversation.messages, end_of_last=not conversation.truncated)
    row = TrainingRow(
        token_ids=rendered.token_ids[:max_length],
        loss_mask=rendered.loss_mask[:max_length],
        conversation=conversation,
    )
    return ([row] if row.num_supervised else []), len(rendered.token_ids) > max_length


def _raw_pieces(conversation: Conversation, tokenizer: Any, max_length: int) -> list[list[int]]:
    """Token ids in pieces of at most `max_length`, of each of which all but the first are trained on.

    That first token is the beginning-of-sequence token, without which some targets are lost, or where there is none
    the last token of the piece before: so every token but a text's first is trained on exactly once.
    """
    text = render_text(tokenizer, conversation.messages, add_generation_prompt=False, raw=True)
    if conversation.truncated:  # the end of a cut answer must not be taught
        text = text.removesuffix(getattr(tokenizer, "eos_token", None) or "")
    token_ids = encode_text(tokenizer, text)
    begins = token_ids[:1] == [getattr(tokenizer, "bos_token_id", None)]
    step = max_length - 1
    starts = range(0, len(token_ids) - 1, step)
    if not begins:
        return [token_ids[start : start + max_length] for start in starts]
    return [token_ids[:1] + token_ids[start + 1 : start + max_length] for start in starts]


def raw_prompt(row: Rendered, max_tokens: int = RAW_PROMPT_TOKENS) -> list[int]:
    """What a base model is given of a held-out raw text, to write the rest: its first half, within the limit."""
    return row.token_ids[: max(1, min(max_tokens, len(row.token_ids) // 2))]


def check_mask(tokenizer: Any, rendered: Rendered, messages: Sequence[Mapping[str, str]], *, raw: bool = False) -> None:
    """Refuse a mask that covers nothing, everything, or text that no assistant wrote; of a raw text, one that does not
    cover all but the first token."""
    supervised, total = rendered.num_supervised, len(rendered.token_ids)
    if raw:
        if rendered.loss_mask != [False] + [True] * (total - 1):
            raise ValueError(f"the loss mask covers {supervised} of {total} tokens; a raw text needs all but the first")
        return
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


def label_counts(rows: Iterable[Rendered]) -> Counter[int]:
    """Tokens under the loss, by id."""
    counts: Counter[int] = Counter()
    for row in rows:
        for run in masked_runs(row):
            counts.update(run)
    return counts


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
    threshold = holdout_threshold(keys, fraction)
    held_out = [is_held_out(key, threshold) for key in keys]
    train = [conversation for conversation, held in zip(conversations, held_out, strict=True) if not held]
    if not train:
        raise ValueError(
            f"holding out {fraction} of {len(conversations)} conversations ({len(set(keys))} different prompts) leaves "
            "none to train on, since answers to one prompt stay together: add data"
        )
    return train, [conversation for conversation, held in zip(conversations, held_out, strict=True) if held]


def holdout_threshold(keys: Sequence[str], fraction: float) -> int:
    """What `is_held_out` compares prompt keys with: the fraction of all keys, and at least one of `keys`."""
    return max(int(fraction * 16**16), int(min(keys)[:16], 16) + 1)


def is_held_out(key: str, threshold: int) -> bool:
    """Whether the conversations of this prompt key are kept out of training."""
    return int(key[:16], 16) < threshold


class _TextFault(RowFault):
    def __init__(self, text: str) -> None:
        super().__init__("text is not ChatML")
        self.text = text


def _messages_of(row: Any) -> list[Any]:
    """The row's messages, not looked at yet."""
    if isinstance(row, list):
        return row
    if not isinstance(row, dict):
        raise RowFault("row is not an object")
    for key in _MESSAGE_FIELDS:
        if row.get(key) is not None:
            if not isinstance(row[key], list):
                raise RowFault(f"{key} is not a list")
            return list(row[key])
    if _is_text(row):
        return _parse_chatml(row["text"])
    raise RowFault("no messages, conversations or text field")


def _is_text(row: Any) -> bool:
    """Whether the row is a text rather than messages."""
    return (
        isinstance(row, dict)
        and all(row.get(key) is None for key in _MESSAGE_FIELDS)
        and isinstance(row.get("text"), str)
    )


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


def _raw_message(text: str) -> dict[str, str]:
    if not text.strip():
        raise RowFault("empty text")
    if not is_unicode(text):
        raise RowFault("text with half a surrogate pair")
    return {"role": TEXT, "content": text}


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
