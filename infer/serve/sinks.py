"""Where records of acceptance go: sinks, and the one thread that writes to them."""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

_log = logging.getLogger(__name__)

_QUEUE_SIZE = 256
_TICK_SECONDS = 2.0
_CLOSE_SECONDS = 60.0
"""Longest that a server waits at its end for a sink that has lost its service."""
Record = Mapping[str, Any]


class Sink(Protocol):
    """Somewhere records go, in a thread of their own. What it raises ends it, after one warning."""

    def open(self) -> None: ...

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class Writer:
    """The thread in which sinks are written to. Where they cannot keep up, records are dropped and counted."""

    def __init__(self, sinks: Sequence[Sink], *, tick: Callable[[], None]) -> None:
        self._sinks = list(sinks)
        self._tick = tick
        self._queue: queue.Queue[Record | None] = queue.Queue(_QUEUE_SIZE)
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="headstart-acceptance", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._num_dropped += 1

    def close(self) -> None:
        try:
            self._queue.put(None, timeout=_CLOSE_SECONDS)
            self._thread.join(_CLOSE_SECONDS)
        except queue.Full:
            pass
        if self._thread.is_alive():
            _log.warning("the acceptance log was not written within %g s: it is left as it is", _CLOSE_SECONDS)
        if self._num_dropped:
            _log.warning("%d records of acceptance were dropped, since they could not be written", self._num_dropped)

    def _run(self) -> None:
        self._each("open", lambda sink: sink.open())
        while True:
            try:
                record = self._queue.get(timeout=_TICK_SECONDS)
            except queue.Empty:
                self._tick()
                continue
            if record is None:
                break
            self._each("write to", lambda sink, record=record: sink.write(record))  # type: ignore[misc]
        self._each("close", lambda sink: sink.close())

    def _each(self, what: str, action: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                action(sink)
            except Exception as error:  # a full disk or a third party's fault must not reach the engine
                self._sinks.remove(sink)
                _log.warning("cannot %s %s (%s): acceptance is not kept there", what, sink, error)


class JsonLines:
    """A file of JSON lines that grows; its first line of each start says what the figures mean."""

    def __init__(self, path: Path, head: Record) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._head = head
        self._file = path.open("a", encoding="utf-8")

    def open(self) -> None:
        self.write({"event": "start", "time": datetime.now(UTC).isoformat(timespec="seconds"), **self._head})

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __str__(self) -> str:
        return str(self.path)
