"""Where a request ends: the exact end of text inside a block of accepted tokens.

A round of speculative decoding emits several tokens at once. `StopChecker.push` takes them as a block and
gives the answer that one-by-one decoding would give: how many tokens are kept, and why the request ended.
`TextStream` turns token ids into text whose pieces are append-only and never split a character.

The text leaves out the stop string or stop token that ended it; the token ids keep the tokens up to and
including the one that completed the stop. Knows nothing about models or sampling laws.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from infer.sampling import SamplingParams

FinishReason = Literal["stop", "length"]

_REPLACEMENT = "\ufffd"
_MAX_UNFINISHED_TOKENS = 8
"""No character spans this many tokens: past it, replacement signs are bytes that will never become one."""


class Tokenizer(Protocol):
    """What is needed of a tokenizer; those of transformers fit."""

    @property
    def all_special_ids(self) -> Sequence[int]: ...

    def decode(self, token_ids: list[int], skip_special_tokens: bool = ..., **kwargs: Any) -> Any: ...


class TextStream:
    """Incremental detokenizer: the pieces joined equal the decoding of all tokens at once.

    A character whose bytes are spread over tokens is held back until it is complete (or until `flush`). Only
    a short window of tokens is decoded at each step, so the work per token does not grow with the text.

    Limit: tokenizers with byte fallback turn a whole run of byte tokens into replacement signs when its last
    character is broken off. What is out already is not taken back, so there the full characters of the run
    stay readable.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._skipped_ids = _special_ids(tokenizer)
        self._window: list[int] = []
        self._context_size = 0  # leading tokens of the window whose text is out already
        self._num_emitted = 0  # characters of the window's text that are out already

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that is final once `token_ids` have been added."""
        # One at a time, so that the pieces do not depend on how the tokens were cut into blocks.
        return "".join([self._push(token) for token in token_ids])

    def flush(self) -> str:
        """What is still held back at the end of the text: replacement signs for a truncated character."""
        text = self._decode(self._window)
        return self._emit(text, len(text))

    def _push(self, token: int) -> str:
        # Skipped tokens never enter the window: alone they would make an empty context, which sentence-piece
        # tokenizers take for the start of a text, and so drop the next word's space.
        if token in self._skipped_ids:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        num_final = len(text.rstrip(_REPLACEMENT))
        delta = self._emit(text, num_final)
        if num_final == len(text):
            self._move_on()
        elif len(self._window) - self._context_size > _MAX_UNFINISHED_TOKENS:
            delta += self._emit(text, len(text) - 1)
            self._split(text)
        return delta

    def _emit(self, text: str, num_final: int) -> str:
        delta = text[self._num_emitted : num_final]
        self._num_emitted = max(self._num_emitted, num_final)
        return delta

    def _move_on(self) -> None:
        """All text is out: drop the old context; the newer tokens are the context of those to come."""
        del self._window[: self._context_size]
        self._context_size = len(self._window)
        self._num_emitted = len(self._decode(self._window))

    def _split(self, text: str) -> None:
        """Cut a window full of broken bytes where both sides decode alone to what they decode to together."""
        for num_left in range(len(self._window) - 1, 0, -1):
            left, right = self._decode(self._window[:num_left]), self._decode(self._window[num_left:])
            if left + right == text and len(left) <= self._num_emitted:
                del self._window[:num_left]
                self._context_size = 0
                self._num_emitted -= len(left)
                return

    def _decode(self, token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        # Cleaning up spaces would rewrite text that is out already.
        text = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


@dataclass(frozen=True, kw_only=True)
class StopResult:
    """What became of a block: how many of its tokens are kept and, if the request ended, why.

    `stop_reason` is the stop string or the id from `stop_token_ids`; None for the model's own end token and
    `length`.
    """

    num_kept: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class StopChecker:
    """Follows one request and ends it exactly where one-by-one decoding would.

    At one token an end token or stop id comes before a stop string, and both before the length limit. Of
    several stop strings the one completed by the earliest character wins, and of those the longest, so the
    text does not depend on how it was cut into tokens. Nothing but the limit ends a request within its first
    `min_tokens` tokens.

    Without a tokenizer there is no text, and stop strings are refused.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        eos_ids: Iterable[int],
        tokenizer: Tokenizer | None,
    ) -> None:
        if params.stop and tokenizer is None:
            raise ValueError(f"stop strings {list(params.stop)} need a tokenizer, got none")
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.num_tokens = 0
        self._params = params
        self._eos_ids = frozenset() if params.ignore_eos else frozenset(eos_ids)
        self._stop_ids = frozenset(params.stop_token_ids)
        self._stream = None if tokenizer is None else TextStream(tokenizer)
        self._text = _GrowingText()
        self._num_streamed = 0
        self._closed = False

    @property
    def text(self) -> str:
        """The text so far, without the stop that ended it; while running it may end in part of a stop."""
        return self._text.value

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def push(self, token_ids: Sequence[int]) -> StopResult:
        """Add a block of newly emitted tokens. Tokens past the end are not counted and leave no text."""
        assert not self._closed, "tokens pushed to a request that has ended"
        num_kept = self._keep(token_ids)
        if self.finished:
            self.close()
        return StopResult(num_kept=num_kept, finish_reason=self.finish_reason, stop_reason=self.stop_reason)

    def take_delta(self) -> str:
        """New text that can be shown for good: withholds an ending that could still become a stop string."""
        num_safe = len(self._text)
        if not self._closed:
            num_safe -= self._num_withheld()
        delta = self._text.tail(self._num_streamed)[: max(0, num_safe - self._num_streamed)]
        self._num_streamed += len(delta)
        return delta

    def close(self) -> None:
        """End the request, also from outside (cancelled): lets out all text that was held back."""
        # After a stop string, whatever is held back lies behind the end.
        if not self._closed and self._stream is not None and not isinstance(self.stop_reason, str):
            self._text.append(self._stream.flush())
        self._closed = True

    def _keep(self, token_ids: Sequence[int]) -> int:
        """Take tokens until the request ends; returns how many."""
        for num_kept, token in enumerate(token_ids, start=1):
            self.num_tokens += 1
            if self._ends_at_id(token) or self._ends_in_text(self._read(token)):
                return num_kept
            if self.num_tokens >= self._params.max_tokens:
                self.finish_reason = "length"
                return num_kept
        return len(token_ids)

    def _may_stop(self) -> bool:
        return self.num_tokens > self._params.min_tokens

    def _ends_at_id(self, token: int) -> bool:
        if not self._may_stop() or not (token in self._eos_ids or token in self._stop_ids):
            return False
        self.finish_reason = "stop"
        self.stop_reason = None if token in self._eos_ids else token
        return True

    def _ends_in_text(self, num_new: int) -> bool:
        """Look for a stop string completed by one of the last `num_new` characters, and cut the text before
        it.
        """
        if not num_new or not self._params.stop or not self._may_stop():
            return False
        num_old = len(self._text) - num_new
        offset = max(0, num_old - max(map(len, self._params.stop)) + 1)
        tail = self._text.tail(offset)
        matches: list[tuple[int, int, str]] = []
        for stop in self._params.stop:
            start = tail.find(stop, max(0, num_old - offset - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        if not matches:
            return False
        _, start, self.stop_reason = min(matches)
        self.finish_reason = "stop"
        self._text.cut(offset + start)
        return True

    def _read(self, token: int) -> int:
        """Decode a token into the text; returns the number of new characters."""
        return 0 if self._stream is None else self._text.append(self._stream.push([token]))

    def _num_withheld(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        if not self._params.stop:
            return 0
        longest = max(map(len, self._params.stop)) - 1
        tail = self._text.tail(max(0, len(self._text) - longest))
        for start in range(len(tail)):
            if any(stop.startswith(tail[start:]) for stop in self._params.stop):
                return len(tail) - start
        return 0


class _GrowingText:
    """A string that grows at the end without copying what is there; only its tail is looked at."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def value(self) -> str:
        return self.tail(0)

    def append(self, piece: str) -> int:
        if piece:
            self._pieces.append(piece)
            self._length += len(piece)
        return len(piece)

    def tail(self, start: int) -> str:
        """The text from character `start` on."""
        index, position = len(self._pieces), self._length
        while index and position > start:
            index -= 1
            position -= len(self._pieces[index])
        return "".join(self._pieces[index:])[max(0, start - position) :]

    def cut(self, length: int) -> None:
        self._pieces = [self.value[:length]]
        self._length = length


def _special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """The ids that `decode(skip_special_tokens=True)` leaves out: the named ones and all added as special."""
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {token for token, entry in added.items() if entry.special}
