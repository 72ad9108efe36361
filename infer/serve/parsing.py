"""What a served answer is made of: content, reasoning and tool calls, told apart in its text as it grows.

The parser sees text and no tokens, so it cannot matter how many of them come in a block: joined, its pieces are the
same for every cut of the text. An answer is read as

    [blanks <think> reasoning </think>] content and calls, <tool_call>{"name": ..., "arguments": {...}}</tool_call>

Blanks beside a tag that was understood are dropped; all other text comes out as it is, in its order. A tag that is not
what it seems (a call that is no JSON object with a name, or is never closed; a `</think>` without its beginning) is
content, tag included. Reasoning that is never closed stays reasoning: it was shown before its end could be missed.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from infer.chat import is_unicode

REASONING_PARSERS = ("think",)
TOOL_PARSERS = ("hermes",)

_THINK, _END_THINK = "<think>", "</think>"
_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


@dataclass(frozen=True)
class Piece:
    """New text of one kind. A tool call comes whole, in one piece: `text` is the JSON of its arguments, `index` counts
    the calls of the answer, from 0."""

    kind: Literal["content", "reasoning", "tool"]
    text: str
    index: int = 0
    name: str | None = None
    id: str | None = None


Reader = Callable[[list[Piece], bool], bool]


@dataclass(kw_only=True)
class ParsedAnswer:
    """All pieces of an answer, joined. `reasoning` is None where there was none."""

    content: str = ""
    reasoning: str | None = None
    calls: list[Piece] = field(default_factory=list)

    @classmethod
    def join(cls, pieces: Iterable[Piece]) -> ParsedAnswer:
        answer = cls()
        for piece in pieces:
            if piece.kind == "content":
                answer.content += piece.text
            elif piece.kind == "reasoning":
                answer.reasoning = (answer.reasoning or "") + piece.text
            else:
                answer.calls.append(piece)
        return answer


def opens_reasoning(prompt: str) -> bool:
    """Whether a rendered prompt ends within reasoning, as templates of reasoning models leave it."""
    return prompt.rstrip().endswith(_THINK)


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class OutputParser:
    """Splits one answer's text, given in any pieces.

    reasoning, tools: one of `REASONING_PARSERS` and `TOOL_PARSERS`, or None to leave such text in the content.
    opened: the prompt has begun the reasoning already (`opens_reasoning`).
    """

    def __init__(
        self,
        reasoning: str | None = None,
        tools: str | None = None,
        *,
        opened: bool = False,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        _check("reasoning", reasoning, REASONING_PARSERS)
        _check("tool", tools, TOOL_PARSERS)
        self._finds_calls = tools is not None
        self._new_id = new_id
        self._held = ""  # text whose meaning is still open
        self._gap = ""  # blanks that are content if more content follows
        self._skips_blanks = False
        self._has_content = False
        self._searched = 0  # characters of a held call that are known not to end it
        self._read: Reader = self._read_content
        self.num_calls = 0
        if reasoning is not None and opened:
            self._begin(self._read_reasoning)
        elif reasoning is not None:
            self._read = self._read_start

    def push(self, text: str) -> list[Piece]:
        """Add text; returns the pieces that are certain now."""
        self._held += text
        return self._advance(is_end=False)

    def close(self) -> list[Piece]:
        """The answer is complete: everything still held back."""
        pieces = self._advance(is_end=True)
        if not self.num_calls and self._gap:
            pieces.append(Piece("content", self._gap))
        self._gap = ""
        return pieces

    def _advance(self, *, is_end: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while self._read(pieces, is_end):
            pass
        return pieces

    # Each reader takes what is certain off `_held`, and says whether another has to go on with the rest.

    def _read_start(self, pieces: list[Piece], is_end: bool) -> bool:
        text = self._held.lstrip()
        if text.startswith(_THINK):
            self._held = text.removeprefix(_THINK)
            self._begin(self._read_reasoning)
        elif _THINK.startswith(text) and not is_end:
            return False
        else:
            self._read = self._read_content
        return True

    def _read_reasoning(self, pieces: list[Piece], is_end: bool) -> bool:
        if not self._skip_blanks():
            return False
        end = self._held.find(_END_THINK)
        if end < 0:
            num_certain = len(self._held) if is_end else _num_certain(self._held, _END_THINK)
            _add(pieces, "reasoning", self._take(num_certain))
            return False
        _add(pieces, "reasoning", self._take(end).rstrip())
        self._take(len(_END_THINK))
        self._begin(self._read_content)
        return True

    def _read_content(self, pieces: list[Piece], is_end: bool) -> bool:
        if not self._skip_blanks():
            return False
        if not self._finds_calls:
            _add(pieces, "content", self._take(len(self._held)))
            return False
        start = self._held.find(_CALL)
        if start < 0:
            num_certain = len(self._held) if is_end else len(self._held) - _num_begun(self._held, _CALL)
            self._add_content(pieces, self._take(num_certain))
            return False
        self._add_content(pieces, self._take(start))
        self._searched = 0
        self._read = self._read_call
        return True

    def _read_call(self, pieces: list[Piece], is_end: bool) -> bool:
        """A call is taken up to the first end tag that leaves a whole call before it. One that lies in a string of the
        call's JSON does not end it."""
        begun = self._held[len(_CALL) :].lstrip()
        if begun and not begun.startswith("{"):
            return self._give_up(pieces)
        while (end := self._held.find(_END_CALL, self._searched)) >= 0:
            body = self._held[len(_CALL) : end]
            call = _parse_call(body)
            if call is not None:
                self._held = self._held[end + len(_END_CALL) :]
                return self._add_call(pieces, *call)
            if '"' not in _JSON_STRING.sub("", body):
                return self._give_up(pieces)
            self._searched = end + 1
        self._searched = max(self._searched, len(self._held) - len(_END_CALL) + 1)
        return self._give_up(pieces) if is_end else False

    def _add_call(self, pieces: list[Piece], name: str, arguments: str) -> bool:
        pieces.append(Piece("tool", arguments, index=self.num_calls, name=name, id=self._new_id()))
        self.num_calls += 1
        if not self._has_content:
            self._gap = ""
        self._read = self._read_content
        return True

    def _give_up(self, pieces: list[Piece]) -> bool:
        """The tag is content; what follows it is read anew."""
        self._add_content(pieces, self._take(len(_CALL)))
        self._read = self._read_content
        return True

    def _add_content(self, pieces: list[Piece], text: str) -> None:
        text = self._gap + text
        shown = text.rstrip()
        self._gap = text[len(shown) :]
        self._has_content = self._has_content or bool(shown)
        _add(pieces, "content", shown)

    def _begin(self, reader: Reader) -> None:
        self._read = reader
        self._skips_blanks = True

    def _skip_blanks(self) -> bool:
        """Drop blanks behind a tag; whether there is anything else."""
        if self._skips_blanks:
            self._held = self._held.lstrip()
            self._skips_blanks = not self._held
        return bool(self._held)

    def _take(self, num_characters: int) -> str:
        text, self._held = self._held[:num_characters], self._held[num_characters:]
        return text


def _check(what: str, name: str | None, known: tuple[str, ...]) -> None:
    if name is not None and name not in known:
        raise ValueError(f"there is no {what} parser {name!r}: expected one of {', '.join(known)}, or none")


def _add(pieces: list[Piece], kind: Literal["content", "reasoning"], text: str) -> None:
    if text:
        pieces.append(Piece(kind, text))


def _num_begun(text: str, tag: str) -> int:
    """Length of the longest end of `text` that may be the beginning of `tag`."""
    longest = min(len(text), len(tag) - 1)
    return next((length for length in range(longest, 0, -1) if tag.startswith(text[-length:])), 0)


def _num_certain(text: str, tag: str) -> int:
    """Characters of `text` that stay whether `tag` follows or not: all but its beginning, and blanks before it."""
    return len(text[: len(text) - _num_begun(text, tag)].rstrip())


def _parse_call(body: str) -> tuple[str, str] | None:
    """Name and arguments (JSON) of a call; None if it is none. Left out, the arguments are empty."""
    try:
        call = json.loads(body, parse_constant=_refuse)
        name, arguments = call["name"], call.get("arguments", {})
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return (name, text) if is_unicode(name + text) else None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
