"""Tokens as clients are shown them: one at a time, as text and as bytes, and where each lies in a text."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from infer.stopping import TextStream

_REPLACEMENT = "\ufffd"
_NUM_SPELLINGS = 1 << 16


class Spelling:
    """Tokens one at a time, as text and as bytes (a token may be part of a character)."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._letters = _byte_letters() if _is_byte_level(tokenizer) else {}
        self.text = lru_cache(_NUM_SPELLINGS)(self._text)
        self.bytes = lru_cache(_NUM_SPELLINGS)(self._bytes)

    def stream(self) -> TextStream | None:
        return None if self.tokenizer is None else TextStream(self.tokenizer)

    def _text(self, token: int) -> str:
        if self.tokenizer is None:
            return str(token)
        text = self.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _bytes(self, token: int) -> tuple[int, ...]:
        text = self.text(token)
        if _REPLACEMENT not in text or self.tokenizer is None:
            return tuple(text.encode())
        piece = self.tokenizer.convert_ids_to_tokens(token) or ""
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return (int(piece[3:5], 16),)
        if self._letters and all(letter in self._letters for letter in piece):
            return tuple(self._letters[letter] for letter in piece)
        return tuple(text.encode())

    def key(self, token: int) -> str:
        """A name for a table: the text, or the bytes of what is no text (as OpenAI writes them)."""
        text = self.text(token)
        if _REPLACEMENT not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes(token))


class Offsets:
    """Where each token begins in the text, in characters: for a token within a character, where that one begins."""

    def __init__(self, spelling: Spelling, *, start: int) -> None:
        self._spelling = spelling
        self._stream = spelling.stream()
        self._length = start

    def push(self, token: int) -> int:
        before = self._length
        if self._stream is None:
            return before
        new, own = self._stream.push([token]), self._spelling.text(token)
        self._length += len(new)
        # Broken characters before it may come out with a token.
        return self._length - len(own) if new.endswith(own) else before


def _is_byte_level(tokenizer: Any) -> bool:
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    return type(decoder).__name__ == "ByteLevel"


def _byte_letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for: printable Latin-1 is itself, the others are
    counted from U+0100 on."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(itself)]
    return {**{chr(byte): byte for byte in itself}, **{chr(0x100 + place): byte for place, byte in enumerate(others)}}
