"""Served conversations, recorded to be trained on. Nothing is recorded unless somebody asks for it by name.

What people ask and are answered is *stored as it is*, in a file that only its owner may read: tell them, and redact
what must not be kept. The file is JSON lines that `headstart train` reads (`messages`, or `text` where there was no
chat template). It grows by whole lines up to a size, several threads and processes may write to it, and what it holds
already is not written again. A full disk or any other fault of writing ends the recording, never the answer.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from heads.checkpoint import lock_file

MAX_BYTES = 1_000_000_000


class Harvest:
    """An append-only file of conversations."""

    def __init__(
        self, path: str | Path, *, max_bytes: int = MAX_BYTES, redact: Callable[[str], str] | None = None
    ) -> None:
        """`redact` is given every text before it is stored, and says what is stored instead."""
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1, given {max_bytes}")
        self.path, self.max_bytes, self._redact = Path(path), max_bytes, redact
        self.num_written = self.num_repeated = self.num_beyond_limit = 0
        self.fault: str | None = None
        """Why recording has ended."""
        self._lock = threading.Lock()
        self._seen = self._read_keys()

    def add(
        self,
        messages: Sequence[Mapping[str, str]],
        answer: str,
        sampling: Mapping[str, Any] | None = None,
        *,
        truncated: bool = False,
        raw: bool = False,
    ) -> bool:
        """Record one answer to `messages`; whether it was written.

        `sampling`: how it was drawn. `truncated`: it ended at a limit, so its end must not be taught. `raw`: the
        messages are one text that the answer goes on with.
        """
        try:
            row = self._row(messages, answer.rstrip("\ufffd") if truncated else answer, truncated=truncated, raw=raw)
        except Exception as error:  # of a redaction, which is the caller's: what it fails on must not be stored
            self.fault = f"the redaction failed ({type(error).__name__}); nothing more is recorded"
        if self.fault is not None or row is None:
            return False
        drawn = {"sampling": dict(sampling)} if sampling else {}
        line = (json.dumps(row | drawn, ensure_ascii=False) + "\n").encode()
        with self._lock:
            return self._add_line(_key(row), line)

    def _add_line(self, key: str, line: bytes) -> bool:
        if key in self._seen:
            self.num_repeated += 1
            return False
        try:
            written = self._append(line)
        except OSError as error:
            self.fault = f"{self.path} cannot be written ({error.strerror or error}); nothing more is recorded"
            return False
        if not written:
            self.num_beyond_limit += 1
            return False
        self._seen.add(key)
        self.num_written += 1
        return True

    def summary(self) -> str:
        """What was recorded, in one line."""
        parts = [f"recorded {self.num_written} conversations in {self.path}"]
        if self.num_repeated:
            parts.append(f"{self.num_repeated} it held already")
        if self.num_beyond_limit:
            parts.append(f"{self.num_beyond_limit} left out beyond its limit of {self.max_bytes:,} bytes")
        return "; ".join([*parts, *([self.fault] if self.fault else [])])

    def _row(
        self, messages: Sequence[Mapping[str, str]], answer: str, *, truncated: bool, raw: bool
    ) -> dict[str, Any] | None:
        """What would be written; None for what cannot be trained on."""
        if not answer.strip() or not messages:
            return None
        if raw:
            return {"text": self._clean("".join(one["content"] for one in messages) + answer), "truncated": truncated}
        kept = [{"role": one["role"], "content": self._clean(one["content"])} for one in messages]
        return {"messages": [*kept, {"role": "assistant", "content": self._clean(answer)}], "truncated": truncated}

    def _clean(self, text: str) -> str:
        return text if self._redact is None else self._redact(text)

    def _append(self, line: bytes) -> bool:
        """One whole line, or nothing: False beyond the limit, OSError if the disk refuses."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            lock_file(descriptor)
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line  # a writer that was killed left half a line, which costs that line alone
            if size + len(line) > self.max_bytes:
                return False
            try:
                written = os.write(descriptor, line)
                if written < len(line):
                    raise OSError(f"{written} of {len(line)} bytes were taken")
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)
        return True

    def _read_keys(self) -> set[str]:
        """What the file holds; a line that is not ours counts for nothing."""
        keys: set[str] = set()
        if not self.path.exists():
            return keys
        with self.path.open("rb") as stream:
            for line in stream:
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                if isinstance(row, dict):
                    keys.add(_key(row))
        return keys


def _key(row: Mapping[str, Any]) -> str:
    """Equal for equal conversations, however they were drawn."""
    content = json.dumps([row.get("messages"), row.get("text")], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()
