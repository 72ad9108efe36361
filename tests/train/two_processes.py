"""Functions run in several gloo processes at once, as under torchrun on a CPU.

The processes are started once and asked many times, since starting costs seconds:

    with Processes(2) as processes:
        first, second = processes.run(function, argument)   # a module-level function; its results, by rank
"""

from __future__ import annotations

import importlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PATIENCE_SECONDS = 240.0
"""How long an answer may take on busy cores; processes that wait for each other forever fail a test instead."""


class Processes:
    """`size` processes with the environment that torchrun sets."""

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._children: list[subprocess.Popen[bytes]] = []
        self._ends: list[Connection] = []

    def __enter__(self) -> Self:
        port = str(free_port())
        for rank in range(self.size):
            (ours_in, theirs_out), (theirs_in, ours_out) = os.pipe(), os.pipe()
            self._children.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.train.two_processes", str(theirs_in), str(theirs_out)],
                    cwd=REPOSITORY,
                    env=environment(rank, self.size, port),
                    pass_fds=(theirs_in, theirs_out),
                    stdout=self._output,
                    stderr=subprocess.STDOUT,
                )
            )
            os.close(theirs_in)
            os.close(theirs_out)
            self._ends.append(Connection(ours_in, writable=False))
            self._ends.append(Connection(ours_out, readable=False))
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.kill()
            child.wait()
        for end in self._ends:
            end.close()
        self._output.close()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `function` returns in each process."""
        for sending in self._ends[1::2]:
            _send(sending, (function.__module__, function.__qualname__, arguments))
        results = [self._answer(receiving) for receiving in self._ends[::2]]
        failures = [result for is_good, result in results if not is_good]
        if failures:
            raise AssertionError("in a process:\n" + "\n".join(failures))
        return [result for _, result in results]

    def output(self) -> str:
        """What all processes printed so far."""
        self._output.seek(0)
        return self._output.read().decode(errors="replace")

    def _answer(self, receiving: Connection) -> tuple[bool, Any]:
        try:
            if receiving.poll(PATIENCE_SECONDS):
                answer: tuple[bool, Any] = _receive(receiving)
                return answer
        except EOFError:
            pass
        return False, f"no answer; the processes printed:\n{self.output()[-4000:]}"


def _send(end: Connection, value: Any) -> None:
    """By value: torch would otherwise lend tensors from process to process."""
    end.send_bytes(pickle.dumps(value))


def _receive(end: Connection) -> Any:
    return pickle.loads(end.recv_bytes())


def environment(rank: int, size: int, port: str) -> dict[str, str]:
    given = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }
    return {**os.environ, **given}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(receiving: Connection, sending: Connection) -> None:
    from train.world import World

    World.from_environment().start()
    while True:
        try:
            module, name, arguments = _receive(receiving)
        except EOFError:
            os._exit(0)
        try:
            _send(sending, (True, getattr(importlib.import_module(module), name)(*arguments)))
        except BaseException:
            _send(sending, (False, traceback.format_exc()))


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1]), writable=False), Connection(int(sys.argv[2]), readable=False))
