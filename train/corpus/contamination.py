"""Keeping evaluation prompts out of what is trained on: equal prompts, near-equal ones, and texts that hold a long
piece of one.

A prompt of `ORDER` words or more leaves its word n-grams in a set, and any text that holds one of them is out: that is
how prompts leak inside longer documents, or with another first sentence. Shorter prompts are too ordinary for that, so
only a user's turn that says the same, word for word or nearly so, is out.

Words are compared as letters and digits in lower case, whatever stands between them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from infer.prompts import load_prompts, normalise_text, text_hash, user_texts
from train.corpus.conversations import TEXT, Conversation, LoadReport
from train.corpus.filters import NearDuplicates
from train.corpus.reading import RowFault, read_rows

ORDER = 13
NEAR = 0.8
"""Share of word 3-grams in common from which a user's turn counts as an evaluation prompt."""
EQUAL, NEARLY, OVERLAPS = "evaluation prompt", "nearly an evaluation prompt", "holds a piece of an evaluation prompt"

_TEXT_FIELDS = ("text", "prompt", "question", "instruction", "input", "query")
_LIST_FIELDS = ("messages", "conversations", "conversation", "turns")
_USERS = ("user", "human", "prompter")


class Contamination:
    """Tells what of given texts a conversation holds. A look-up costs about the text's length."""

    def __init__(self, texts: Iterable[str]) -> None:
        texts = list(texts)
        self._hashes = frozenset(text_hash(text) for text in texts)
        self._near = NearDuplicates(texts, threshold=NEAR)
        self._pieces = frozenset(piece for text in texts for piece in _pieces(_words(text)))
        self._begin = frozenset(piece[0] for piece in self._pieces)
        self.identity = hashlib.sha256("\n".join(sorted(self._hashes)).encode()).hexdigest()[:16]
        """Equal for equal sets of texts."""

    @classmethod
    def of(cls, files: Sequence[str | Path] = ()) -> Contamination:
        """The shipped evaluation prompts, and those of `files`."""
        return cls([*user_texts(load_prompts()), *(text for file in files for text in prompt_texts(file))])

    def reason(self, conversation: Conversation) -> str | None:
        """Why the conversation must not be trained on; None if it may."""
        for message in conversation.messages:
            text = message["content"]
            if message["role"] in ("user", TEXT):
                if text_hash(text) in self._hashes:
                    return EQUAL
                if text in self._near:
                    return NEARLY
            if message["role"] != "system" and self._holds_piece(text):
                return OVERLAPS
        return None

    def without(self, conversations: Sequence[Conversation], report: LoadReport) -> list[Conversation]:
        """Those that may be trained on. `report` gets the others by the line of their file, or by their place if they
        have none."""
        kept = []
        for number, conversation in enumerate(conversations, start=1):
            reason = self.reason(conversation)
            if reason is None:
                kept.append(conversation)
            else:
                report.dropped[reason].append(conversation.line or number)
                report.kept -= 1
        return kept

    def _holds_piece(self, text: str) -> bool:
        words = _words(text)
        return any(
            words[start] in self._begin and tuple(words[start : start + ORDER]) in self._pieces
            for start in range(len(words) - ORDER + 1)
        )


def decontaminate(
    conversations: Sequence[Conversation], report: LoadReport | None = None, *, files: Sequence[str | Path] = ()
) -> list[Conversation]:
    """Conversations that hold nothing of the shipped evaluation prompts, nor of the prompts in `files`.

    `report` gets the others by the line of their file, or by their place if they have none.
    """
    contamination = Contamination.of(files)
    kept = []
    for number, conversation in enumerate(conversations, start=1):
        reason = contamination.reason(conversation)
        if reason is None:
            kept.append(conversation)
        elif report is not None:
            report.dropped[reason].append(conversation.line or number)
            report.kept -= 1
    return kept


def prompt_texts(source: str | Path) -> list[str]:
    """What the users say in a file of prompts or a data set: chats, or one text a row under a usual name.

    A row from which no text can be taken is an error: prompts that are skipped would be trained on.
    """
    texts: list[str] = []
    for number, row in read_rows(source):
        found = [] if isinstance(row, RowFault) else [text for text in _row_texts(row) if text.strip()]
        if not found:
            raise ValueError(
                f"{source}, line {number}: no prompt found"
                + (f" ({row})" if isinstance(row, RowFault) else "")
                + f"; expected a text, or an object with messages or one of {', '.join(_TEXT_FIELDS)}"
            )
        texts.extend(found)
    if not texts:
        raise ValueError(f"{source} holds no prompts; write one JSON object a line")
    return texts


def _row_texts(row: Any) -> Iterator[str]:
    if isinstance(row, str):
        yield row
    elif isinstance(row, list):
        for entry in row:
            yield from _turn_texts(entry)
    elif isinstance(row, dict):
        for field in _LIST_FIELDS:
            if isinstance(row.get(field), list):
                yield from _row_texts(row[field])
        yield from (row[field] for field in _TEXT_FIELDS if isinstance(row.get(field), str))


def _turn_texts(entry: Any) -> Iterator[str]:
    """The text of a list's entry: a plain one (`turns`), or a message of the user's."""
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict) and str(entry.get("role", entry.get("from"))).lower() in _USERS:
        content = entry.get("content", entry.get("value"))
        parts = content if isinstance(content, list) else [content]
        texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
        yield "".join(text for text in texts if isinstance(text, str))


def _words(text: str) -> list[str]:
    return normalise_text(text).split()


def _pieces(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    yield from (tuple(words[start : start + ORDER]) for start in range(len(words) - ORDER + 1))
