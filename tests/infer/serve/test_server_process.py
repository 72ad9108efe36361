"""`headstart serve` as a process: its start, its signals, its end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.infer.helpers import write_folders
from tests.infer.serve.serving import chat, wait_until

READY = re.compile(r"ready: (http://\S+)/v1 serves (\S+);")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folders(tmp_path_factory.mktemp("models"), [("chat", "Hello")]).target


class Process:
    """A server in a process of its own. `lines`: what it has said on stderr."""

    def __init__(self, repository: Path, *arguments: str, key: str | None = None) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HEADSTART_API_KEY": key or ""}
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headstart", "serve", *arguments],
            cwd=repository,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        self.lines.extend(iter(self._process.stderr.readline, ""))

    def wait_for(self, pattern: re.Pattern[str], *, seconds: float = 120.0) -> re.Match[str]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = next(filter(None, map(pattern.search, list(self.lines))), None)
            if found is not None:
                return found
            if self._process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"no line like {pattern.pattern!r}: {self.lines}")

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self, *, seconds: float = 120.0) -> int:
        status = self._process.wait(seconds)
        self._reader.join(10)
        return status

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self.wait()
        assert self._process.stderr is not None
        self._process.stderr.close()


@contextlib.contextmanager
def serving(repository: Path, target: Path, *arguments: str, **options: Any) -> Iterator[tuple[Process, str]]:
    """A process that is ready, and its URL."""
    words = ["ngram", "--target", str(target), "--dtype", "float32", "--chain", "3", "--no-adaptive", *arguments]
    process = Process(repository, *([*words, "--port", "0"] if "--port" not in arguments else words), **options)
    try:
        yield process, process.wait_for(READY).group(1)
    finally:
        process.end()


def post(url: str, body: dict[str, Any], **options: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json={**body, "model": None}, timeout=120.0, **options)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_sigterm_drains_and_ends_with_0(repository: Path, target: Path) -> None:
    """What runs is answered whole, what comes is refused, and then the process ends by itself."""
    body = chat(max_tokens=200, n=8, seed=1, temperature=1)
    with serving(repository, target) as (process, url), ThreadPoolExecutor(1) as pool:
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        running = pool.submit(post, url, body)
        wait_until(lambda: httpx.get(f"{url}/status").json()["num_running"] > 0)
        process.signal(signal.SIGTERM)
        process.wait_for(re.compile("stopping: 8 requests"))
        refused = post(url, chat())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert httpx.get(f"{url}/health").status_code == 503
        answer = running.result()
        assert [choice["finish_reason"] for choice in answer.json()["choices"]] == ["length"] * 8
        assert process.wait() == 0
        assert process.lines[-1] == "stopped\n"


@pytest.mark.slow
def test_what_does_not_end_in_time_is_told_so(repository: Path, target: Path) -> None:
    """With no time to drain, streams end with an error and whole answers with 503; the status is 0 all the same."""
    body = chat(max_tokens=200, n=8)
    with serving(repository, target, "--drain-seconds", "0") as (process, url), ThreadPoolExecutor(2) as pool:
        running = pool.submit(post, url, body)
        stream = pool.submit(post, url, {**body, "stream": True})
        wait_until(lambda: httpx.get(f"{url}/status").json()["num_running"] > 8)
        process.signal(signal.SIGINT)
        assert process.wait() == 0
        assert running.result().status_code == 503
        last = stream.result().text.strip().rpartition("\n\n")[2]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "draining"


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(repository: Path, target: Path) -> None:
    body = chat(max_tokens=200, n=16, stream=True)
    with serving(repository, target) as (process, url), ThreadPoolExecutor(1) as pool:
        running = pool.submit(post, url, body)
        wait_until(lambda: httpx.get(f"{url}/status").json()["num_running"] > 0)
        process.signal(signal.SIGTERM)
        process.wait_for(re.compile("stopping:"))
        process.signal(signal.SIGTERM)
        assert process.wait(seconds=60) in (128 + signal.SIGTERM, 0)  # 0: it was done by then
        with contextlib.suppress(httpx.HTTPError):
            running.result()


@pytest.mark.slow
def test_a_killed_server_comes_back_on_its_port(repository: Path, target: Path) -> None:
    """kill -9 while it answers, and start it again: the same port, the same answer."""
    arguments = ("--port", str(free_port()), "--model-name", "kept")
    body = chat(max_tokens=30, temperature=0.8, seed=5)
    with serving(repository, target, *arguments) as (process, url), ThreadPoolExecutor(1) as pool:
        before = post(url, body).json()["choices"]
        running = pool.submit(post, url, chat(max_tokens=200, n=8, stream=True))
        wait_until(lambda: httpx.get(f"{url}/status").json()["num_running"] > 0)
        process.signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        with contextlib.suppress(httpx.HTTPError):
            running.result()
    with serving(repository, target, *arguments) as (process, url):
        assert process.wait_for(READY).group(2) == "kept"
        assert post(url, body).json()["choices"] == before


@pytest.mark.slow
def test_the_key_of_the_environment_counts(repository: Path, target: Path) -> None:
    with serving(repository, target, "--log-requests", key="secret") as (process, url):
        assert post(url, chat()).status_code == 401
        answer = post(url, chat("MARKED-PROMPT"), headers={"authorization": "Bearer secret"})
        assert answer.status_code == 200
        process.wait_for(re.compile(r"/v1/chat/completions 200 \d+\+12 tokens"))
        assert "MARKED" not in "".join(process.lines)
        assert "secret" not in "".join(process.lines)


def test_a_port_in_use_is_one_line(repository: Path, target: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        process = Process(repository, "--target", str(target), "--port", port)
        try:
            assert process.wait() == 2
        finally:
            process.end()
    (line,) = process.lines
    assert line.startswith(f"headstart: error: port {port} on 127.0.0.1 cannot be taken")


MISTAKES = {
    "two names of HEAD": (["ngram", "--drafter", "ngram"], "give one"),
    "no target": ([], "target"),
    "half a certificate": (["--target", "{target}", "--ssl-keyfile", "{target}/config.json"], "go together"),
    "no length": (["--target", "{target}", "--max-length", "0"], "--max-length must be above 0"),
    "too long": (["--target", "{target}", "--max-length", "100000"], "more than the target's"),
    "no memory": (["--target", "{target}", "--memory", "0.0000001"], "holds no request"),
    "two sizes": (["--target", "{target}", "--memory", "1", "--max-requests", "3"], "give one"),
    "no host": (["--target", "{target}", "--host", "nowhere.invalid"], "no address"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line(name: str, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import headstart

    arguments, words = MISTAKES[name]
    given = [argument.format(target=target) for argument in arguments]
    assert headstart.main(["serve", *given, "--port", "0"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("headstart: error: ")
    assert words in last


def test_connections_are_bounded() -> None:
    """One more than may be open is closed at once, and so is one that says nothing for a time."""
    from types import SimpleNamespace

    from infer.serve.run import bounded

    class Protocol:
        connections: set[Any] = set()  # noqa: RUF012
        cycle: Any = None

        def __init__(self) -> None:
            self.later: list[Any] = []
            self.loop = SimpleNamespace(call_later=lambda _, action, *given: self.later.append((action, given)))

        def connection_made(self, transport: Any) -> None:
            self.connections.add(self)

    closed: list[str] = []

    def connect(name: str) -> Any:
        one = bounded(Protocol, 2)()
        one.connection_made(SimpleNamespace(close=lambda: closed.append(name)))
        return one

    silent, speaking, _ = connect("silent"), connect("speaking"), connect("one too many")
    assert closed == ["one too many"]
    speaking.cycle = object()
    for one in (silent, speaking):
        for action, given in one.later:
            action(*given)
    assert closed == ["one too many", "silent"]


def test_what_a_generation_config_recommends(tmp_path: Path) -> None:
    """Values that differ from transformers' defaults; names that have nothing to do with drawing are left alone."""
    from types import SimpleNamespace

    from transformers import GenerationConfig

    from infer.cli.serve import recommended_sampling

    config = GenerationConfig(temperature=0.6, top_p=0.9, do_sample=True, max_new_tokens=5)
    assert recommended_sampling(SimpleNamespace(generation_config=config)) == {"temperature": 0.6, "top_p": 0.9}
    assert recommended_sampling(SimpleNamespace()) == {}
    assert recommended_sampling(SimpleNamespace(generation_config=GenerationConfig())) == {}


def test_memory_becomes_slots(target: Path) -> None:
    from infer.cli.serve import _slots_in
    from infer.target import TargetModel

    loaded = TargetModel.load(target, dtype="float32")
    one = loaded.new_cache(num_slots=1, num_columns=100).num_bytes
    assert _slots_in(3.5 * one / 1e9, loaded, 100) == 3
