"""A JSON lines file that can be continued after a kill at any moment, and the state that says how it was begun."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heads.checkpoint import staged_file


class GrowingFile:
    """The JSON lines so far and, beside them, `<name>.state.json` with settings and counts.

    The state is there before the first line; after that lines are written and synced before the state, so a
    crash can only leave the state behind the lines: attempts in between are read off the last line's id, and a line
    torn by it is written again.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """`settings` must be those the file was begun with; only how many rows are wanted may differ, and what an older
        file does not say."""
        self.path, self.settings = path, settings
        self.state_path = path.with_name(path.name + ".state.json")
        self.rows = self._read_rows()
        state = self._read_state()
        self.dropped = Counter[str](state.get("dropped", {}))
        last = _attempt_of(self.rows[-1]) + 1 if self.rows else 0
        self.next_attempt = max(last, state.get("next_attempt", 0)) if self.rows else 0
        if not self.rows:
            self.dropped.clear()

    def append(self, rows: Sequence[dict[str, Any]], dropped: Counter[str], next_attempt: int) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.rows:  # lines without settings beside them could not be continued
            self._write_state()
        with self.path.open("ab") as stream:
            for row in rows:
                stream.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
            stream.flush()
            os.fsync(stream.fileno())
        self.rows += rows
        self.dropped += dropped
        self.next_attempt = next_attempt
        self._write_state()

    def _write_state(self) -> None:
        state = {"settings": self.settings, "next_attempt": self.next_attempt, "dropped": dict(self.dropped)}
        with staged_file(self.state_path) as new:
            new.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")

    def _read_rows(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        rows = []
        for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
            try:
                row = json.loads(line)
                _attempt_of(row), row["num_answer_tokens"]
                if "text" not in row:
                    row["messages"][0]["content"]
            except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"{self.path}, line {number} was not written by this command; move the file away or "
                    "name another --out"
                ) from error
            rows.append(row)
        if len(whole) < len(content):  # a line torn by an interruption: its attempt is made again
            with self.path.open("r+b") as stream:
                stream.truncate(len(whole))
        return rows

    def _read_state(self) -> dict[str, Any]:
        if not self.rows:
            return {}
        if not self.state_path.exists():
            raise ValueError(
                f"{self.path} exists without {self.state_path.name}, which records its settings; move it "
                "away or name another --out"
            )
        state: dict[str, Any] = json.loads(self.state_path.read_text(encoding="utf-8"))
        before, now = state["settings"], self.settings
        # A longer run of the same settings has the same beginning.
        changed = sorted(key for key in before if key != "num_conversations" and before[key] != now.get(key))
        if changed:
            details = ", ".join(f"{key} was {before.get(key)!r}, now {now.get(key)!r}" for key in changed)
            raise ValueError(f"{self.path} was begun with other settings ({details}); name another --out")
        return state


def begun_with(path: Path) -> dict[str, Any]:
    """The settings of a file that is to be continued; none where there is nothing to continue."""
    state_path = path.with_name(path.name + ".state.json")
    if not path.exists() or not path.stat().st_size or not state_path.exists():
        return {}
    settings: dict[str, Any] = json.loads(state_path.read_text(encoding="utf-8"))["settings"]
    return settings


def _attempt_of(row: dict[str, Any]) -> int:
    """The number of the attempt that wrote a row: the last part of its id."""
    return int(row["id"].rsplit("-", 1)[1])
