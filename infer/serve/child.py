"""`headstart serve` as a process of this one's: started, awaited, stopped."""

from __future__ import annotations

import collections
import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import infer

_HEADSTART = Path(infer.__file__).resolve().parents[1] / "headstart.py"
_NUM_KEPT_LINES = 30


@dataclass(kw_only=True)
class ServerProcess:
    """A server that is ready, at the root `url`. lines: the last that it has said. status: its exit status, once it has
    ended."""

    url: str
    pid: int
    lines: collections.deque[str]
    status: int | None = None


@contextlib.contextmanager
def started_server(
    options: Sequence[str],
    *,
    notice: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
    ending_seconds: float = 20.0,
) -> Iterator[ServerProcess]:
    """A server that is ready, with these options of `headstart serve`. It is told to stop when the block ends, and
    killed if it still runs `ending_seconds` later; Ctrl-C does not reach it. `notice` is called with what it says until
    it is ready. ValueError if it does not start."""
    process = subprocess.Popen(
        [sys.executable, str(_HEADSTART), "serve", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        env=None if environment is None else dict(environment),
    )
    log = _ServerLog(process, notice)
    server = ServerProcess(url="", pid=process.pid, lines=log.lines)
    try:
        server.url = log.wait_until_ready()
        yield server
    finally:
        process.terminate()
        try:
            server.status = process.wait(ending_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            server.status = process.wait()
        log.join()


class _ServerLog:
    """Reads what a server says, so that it never waits for a reader; its lines are passed on until it is ready."""

    def __init__(self, process: subprocess.Popen[str], notice: Callable[[str], None]) -> None:
        self._process = process
        self._notice = notice
        self.lines: collections.deque[str] = collections.deque(maxlen=_NUM_KEPT_LINES)
        self._url = ""
        self._settled = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait_until_ready(self) -> str:
        self._settled.wait()
        if not self._url:
            self._process.wait()
            said = next((line for line in reversed(self.lines) if line.strip()), "it said nothing")
            raise ValueError(f"the server did not start: {said.removeprefix('headstart: error: ')}")
        return self._url

    def join(self) -> None:
        self._thread.join()

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in map(str.rstrip, lines):
                self.lines.append(line)
                if line.startswith("ready: "):
                    self._url = line.split()[1].removesuffix("/v1")
                    self._settled.set()
                elif not self._settled.is_set() and not line.startswith("headstart: error"):
                    self._notice(line)
        self._settled.set()
