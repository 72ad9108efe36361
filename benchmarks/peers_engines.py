"""What `peers.py` compares: engines that answer one prompt at a time, in this process or in one of their own.

All of them take token ids and give token ids, the time of the answer (prefill included) and the number of rounds after
the prefill, where they tell. A process is started at once and waited for later (`wait`), so that several load side by
side; while another engine is asked it has nothing to do, and `idle_seconds` says whether that is so.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from headstart import __version__
from infer.bench import run_engine, run_stock
from infer.engine import Engine
from infer.machine import dtype_name
from infer.sampling import SamplingParams
from infer.target import TargetModel

LOAD_SECONDS = 1800.0
"""Time in which a process must have loaded its model: compiling it is part of that the first time."""
ANSWER_SECONDS = 600.0


class PeerError(ValueError):
    """An engine that does not load, or does not answer: it leaves the comparison, and the others go on."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What an engine answered. num_rounds: forwards of the target after the one that read the prompt; None where the
    engine does not tell."""

    token_ids: tuple[int, ...]
    seconds: float
    num_rounds: int | None

    @property
    def tokens_per_second(self) -> float:
        return len(self.token_ids) / self.seconds


class Peer(Protocol):
    """An engine in the comparison. `weights`: the precision that its weights are held in."""

    @property
    def weights(self) -> str: ...

    @property
    def versions(self) -> Mapping[str, str]: ...

    def wait(self) -> None:
        """Return when it is ready; PeerError where it will not be."""

    def answer(self, prompt: Sequence[int], params: SamplingParams) -> Answer: ...

    def idle_seconds(self) -> float:
        """Processor time that its own process has taken so far."""

    def close(self) -> None: ...


class _InProcess:
    """What engines in this process share: they are loaded when they are made, and have no process of their own."""

    def __init__(self, target: TargetModel, *packages: str) -> None:
        self.target = target
        self.weights = target.quantization or dtype_name(target.dtype)
        self.versions: Mapping[str, str] = {name: version(name) for name in packages}

    def wait(self) -> None:
        pass

    def idle_seconds(self) -> float:
        return 0.0

    def close(self) -> None:
        pass


class EnginePeer(_InProcess):
    """Our engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.target, "torch")
        self.versions = {"headstart": __version__, **self.versions}
        self.engine = engine

    def answer(self, prompt: Sequence[int], params: SamplingParams) -> Answer:
        run = run_engine(self.engine, prompt, params)
        return Answer(token_ids=run.token_ids, seconds=run.seconds, num_rounds=len(run.round_lengths))


class StockPeer(_InProcess):
    """transformers' `generate` on the same weights: alone, with its prompt lookup, or with an assistant.

    counts: whether each forward of the target is one of verification, so that rounds can be counted (an assistant made
    of the target's own layers calls the target as well).
    """

    def __init__(self, target: TargetModel, *, counts: bool = True, **how: Any) -> None:
        super().__init__(target, "transformers", "torch")
        self.how = how
        self.counts = counts

    def answer(self, prompt: Sequence[int], params: SamplingParams) -> Answer:
        with _forwards_of(self.target.model) as calls:
            run = run_stock(self.target, prompt, params, **self.how)
        return Answer(token_ids=run.token_ids, seconds=run.seconds, num_rounds=len(calls) - 1 if self.counts else None)


@contextlib.contextmanager
def _forwards_of(model: Any) -> Iterator[list[None]]:
    """A list that grows by one for each forward of `model`."""
    calls: list[None] = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(None))
    try:
        yield calls
    finally:
        handle.remove()


class Process:
    """A child process in a session of its own, what it prints, and its end."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], **pipes: Any) -> None:
        self.log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed by `close`)
        options = {"stdout": self.log, **pipes}
        self.child = subprocess.Popen(
            command, env=dict(variables), stderr=self.log, start_new_session=True, text=True, **options
        )

    def log_text(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def seconds(self) -> float:
        """Processor time of its whole session so far, as /proc tells; 0 where there is none."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it may have ended meanwhile
                fields = stat.read_text().rpartition(")")[2].split()  # a name may hold spaces; state is the first
                if int(fields[3]) == self.child.pid:
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def close(self, *, patience: float = 10.0) -> None:
        """End it and what it has started: by the end of its input, then by a signal."""
        if self.child.stdin is not None:
            with contextlib.suppress(OSError):
                self.child.stdin.close()
        else:
            self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(patience)
        self._signal(signal.SIGKILL)  # whatever of its session is left
        self.child.wait()
        for stream in (self.child.stdout, self.log):
            if stream is not None:
                stream.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.child.pid, number)


class RunnerPeer:
    """An engine behind a runner that speaks JSON lines (`peers_vllm.py`)."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        job: Mapping[str, Any],
        *,
        variables: Mapping[str, str],
        weights: str,
        reason: Callable[[str], str] = str,
    ) -> None:
        """`reason` makes a line of the log of a process that died."""
        self.name = name
        self.weights = weights
        self.versions: Mapping[str, str] = {}
        self._reason = reason
        self.process = Process(command, variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._send(job)

    def wait(self) -> None:
        self.versions = self._receive(LOAD_SECONDS, "load")["ready"]

    def answer(self, prompt: Sequence[int], params: SamplingParams) -> Answer:
        self._send(
            {
                "prompt": list(prompt),
                "temperature": params.temperature,
                "max_tokens": params.max_tokens,
                "seed": params.seed,
            }
        )
        reply = self._receive(ANSWER_SECONDS, "answer")
        return Answer(token_ids=tuple(reply["token_ids"]), seconds=reply["seconds"], num_rounds=reply.get("num_rounds"))

    def idle_seconds(self) -> float:
        return self.process.seconds()

    def close(self) -> None:
        self.process.close()

    def _send(self, value: Mapping[str, Any]) -> None:
        assert self.process.child.stdin is not None
        try:
            self.process.child.stdin.write(json.dumps(value) + "\n")
            self.process.child.stdin.flush()
        except OSError:  # it is gone; what it said last is told when its reply is missed
            pass

    def _receive(self, seconds: float, what: str) -> dict[str, Any]:
        stdout = self.process.child.stdout
        assert stdout is not None
        ready, _, _ = select.select([stdout], [], [], seconds)
        if not ready:
            raise PeerError(f"{self.name} did not {what} within {seconds:.0f} s")
        line = stdout.readline()
        if not line:
            raise PeerError(f"{self.name} does not {what}: {self._reason(self.process.log_text())}")
        try:
            reply = json.loads(line)
        except json.JSONDecodeError:
            reply = None
        if not isinstance(reply, dict):
            raise PeerError(f"{self.name} replied {line!r:.200}; expected one JSON object a line")
        return reply


def wait_until(
    check: Callable[[], bool], process: Process, *, seconds: float, what: str, reason: Callable[[str], str] = str
) -> None:
    """Ask `check()` again and again until it says yes; PeerError where the process ends first, or the time."""
    end = time.monotonic() + seconds
    while not check():
        if process.child.poll() is not None:
            raise PeerError(f"{what} ended with status {process.child.returncode}: {reason(process.log_text())}")
        if time.monotonic() > end:
            raise PeerError(f"{what} did not load within {seconds:.0f} s")
        time.sleep(0.1)
