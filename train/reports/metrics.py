"""`metrics.jsonl`: every figure of a run, one JSON object a line.

    {"event": "train" | "evaluation", "step": ..., "curves": {"train/loss": ..., ...}, ...}
    {"event": "about" | "resume" | "end", ...}

`curves` are the points that a tracker gets too, under the same names. Only finite numbers are written: what is not a
number is left out, since JSON has no word for it. A resumed run marks where it took over; nothing is ever removed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
_MAX_PENDING = 10_000


class MetricsFile:
    """Appends records; a full disk is said once, and what could not be written is written as soon as it can be."""

    def __init__(self, folder: Path, notice: Callable[[str], None] = lambda text: None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / METRICS_FILE
        self._notice = notice
        self._pending: list[str] = []
        self._failed = False
        self._repair()

    def write(self, event: str, values: Mapping[str, Any]) -> None:
        self._pending.append(json.dumps(finite({"event": event, **values}), allow_nan=False) + "\n")
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.writelines(self._pending)
        except OSError as error:
            self._undo(size)
            del self._pending[:-_MAX_PENDING]
            if not self._failed:
                self._notice(f"{self.path} cannot be written ({error}); the run goes on, and so do the attempts")
            self._failed = True
        else:
            self._pending.clear()

    def _undo(self, size: int) -> None:
        """Take back what a failed attempt wrote: the next one writes it all again."""
        try:
            if self.path.exists() and self.path.stat().st_size > size:
                os.truncate(self.path, size)
        except OSError:
            pass  # the reader skips half a line

    def _repair(self) -> None:
        """End a line that a killed run left half written."""
        if self.path.exists() and (content := self.path.read_bytes()) and not content.endswith(b"\n"):
            with self.path.open("ab") as stream:
                stream.write(b"\n")


def finite(value: Any) -> Any:
    """`value` as JSON may hold it: entries of a mapping that are no finite number go, elsewhere they become null."""
    if isinstance(value, Mapping):
        return {str(key): finite(each) for key, each in value.items() if not _is_broken(each)}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [finite(each) for each in value]
    return None if _is_broken(value) else value


def _is_broken(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def every_record(folder: Path) -> list[dict[str, Any]]:
    """All whole records of the file, those of superseded attempts included."""
    path = folder / METRICS_FILE
    records: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # half a line of a killed run
        if isinstance(record, dict) and "event" in record:
            records.append(record)
    return records


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """All records; where a resumed run repeats steps, those of the earlier attempt are left out."""
    records: list[dict[str, Any]] = []
    for record in every_record(folder):
        if record["event"] == "resume":
            records = [one for one in records if one.get("step", 0) <= record["step"] and one["event"] != "end"]
        records.append(record)
    return records
