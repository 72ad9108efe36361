"""`benchmarks/soak.py` passes a server that is right, and names what is wrong with one that is not."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from tests.infer.helpers import write_folders
from tests.infer.serve.serving import served, toy_engine


@pytest.fixture(scope="module")
def soak(repository: Path) -> ModuleType:
    """The script as a module; it lies outside the packages."""
    spec = importlib.util.spec_from_file_location("soak", repository / "benchmarks" / "soak.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module  # where dataclasses look for the module of their annotations
    spec.loader.exec_module(module)
    return module


# Servers that are right.


def test_a_right_server_passes(soak: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """A few seconds against a real server over a tiny model: every check is well, and answers were compared."""
    with served(toy_engine(), max_waiting=4) as running:
        words = ["--url", running.url, "--clients", "10", "--minutes", "0.03", "--cases", "4", "--bound", "60"]
        assert soak.main(words) == 0, capsys.readouterr().out
    printed = capsys.readouterr().out
    assert printed.count(" ok") >= 5
    assert "FAILED" not in printed
    assert int(printed.split("compared")[1].split()[0].replace(",", "")) > 0


@pytest.mark.slow
def test_a_minute_of_headstart_serve(
    soak: ModuleType, tmp_path: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole, reduced: `headstart serve` with a tiny model in a process of its own, 16 clients for a minute, its
    memory looked at, and stopped with status 0. (A tiny model's server is small, so a few MB of allocators count for
    much: 10 %.)"""
    folders = write_folders(tmp_path, [("chat", "hello")])
    words = [str(folders.head), "--target", str(folders.target), "--clients", "16", "--minutes", "1", "--cases", "16"]
    assert soak.main([*words, "--serve-args", "--max-requests 4", "--memory-tolerance", "10"]) == 0, (
        capsys.readouterr().out
    )
    assert "MB in the last" in capsys.readouterr().out


# Servers that are not.


class Fake:
    """A server in this process that answers each request with a text made of the request alone. `fault(calls, body)`
    may give a response of its own instead; calls are counted from the first."""

    def __init__(
        self, fault: Callable[[int, dict[str, Any]], httpx.Response | None] = lambda calls, body: None
    ) -> None:
        self.fault = fault
        self.calls = 0
        self.free = 4

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/status":
            return httpx.Response(200, json={"num_free_slots": self.free, "num_running": 0, "num_waiting": 0})
        body = json.loads(request.content)
        self.calls += 1
        wrong = self.fault(self.calls, body)
        if wrong is not None:
            return wrong
        if body.get("temperature", 0) == -1 or "no_such_field" in body or body["max_tokens"] in (0, 10_000_000):
            return httpx.Response(400, json={"error": {"message": "no"}})
        if body.get("stop") == 3 or body.get("n") == 0 or "model" in body:
            return httpx.Response(404, json={"error": {"message": "no"}})
        await asyncio.sleep(0.001)
        return answer_to(body)


def answer_to(body: dict[str, Any], text: str | None = None) -> httpx.Response:
    """An answer of two tokens a sample, whole or as a stream of one delta a token."""
    asked = body.get("prompt") or body["messages"][0]["content"]
    tokens = [f"{len(asked)} ", text or "letters"]
    count = body.get("n", 1)
    is_chat = "messages" in body
    wants = bool(body.get("logprobs"))

    def choice(index: int, part: list[str], kind: str, reason: str | None) -> dict[str, Any]:
        given: dict[str, Any] | None = None
        if wants:
            given = {"content": [{"token": token, "logprob": -0.5} for token in part]}
            given = given if is_chat else {"tokens": part, "token_logprobs": [-0.5] * len(part)}
        said = {kind: {"content": "".join(part)}} if is_chat else {"text": "".join(part)}
        return {"index": index, **said, "logprobs": given, "finish_reason": reason}

    if not body.get("stream"):
        choices = [choice(index, tokens, "message", "stop") for index in range(count)]
        return httpx.Response(200, json={"choices": choices[::-1]})
    deltas = [choice(index, [token], "delta", None) for token in tokens for index in range(count)]
    ends = [choice(index, [], "delta", "stop") for index in range(count)]
    events = [json.dumps({"choices": [one]}) for one in [*deltas, *ends]] + ["[DONE]"]
    return httpx.Response(200, text="".join(f"data: {event}\n\n" for event in events))


def soaked(soak: ModuleType, fake: Fake, *, seconds: float = 0.4, bound: float = 5.0) -> Any:
    """What the soak says of a fake server."""

    async def run() -> Any:
        transport = httpx.MockTransport(fake)  # type: ignore[arg-type]
        async with httpx.AsyncClient(base_url="http://127.0.0.1", transport=transport) as client:
            rng = random.Random(3)
            tally = soak.Tally()
            cases = soak.make_cases(12, rng, schemas=False)
            work = soak.Soak(client=client, cases=cases, rng=rng, bound=bound, tally=tally)
            await work.ask_alone()
            free, _ = await work.free_slots()
            await work.load(8, seconds)
            await work.settle(free)
            await work.ask_again()
            return tally

    return asyncio.run(run())


def test_a_fake_that_is_right(soak: ModuleType) -> None:
    """Streams, samples and log-probabilities of either form are put together to what the whole answer says."""
    tally = soaked(soak, Fake())
    assert not tally.problems, tally.first
    assert min(tally.counts[name] for name in ("compared", "left", "refused", "any answer")) > 0


def is_draw(body: dict[str, Any]) -> bool:
    return bool(body.get("stream")) and body.get("max_tokens") not in (0, 10_000_000)


FAULTS: dict[str, tuple[str, Callable[[int, dict[str, Any]], httpx.Response | None], str]] = {
    "another text": (
        "answers",
        lambda calls, body: answer_to(body, "LETTERS") if is_draw(body) and calls % 9 == 0 else None,
        "text from character",
    ),
    "a text that has changed for good": (
        "answers",
        lambda calls, body: answer_to(body, "words") if calls > 12 and not body.get("stream") else None,
        "expected",
    ),
    "500": (
        "status",
        lambda calls, body: httpx.Response(500, text="internal") if calls % 20 == 19 else None,
        "status 500: internal",
    ),
    "what must be refused is not": (
        "status",
        lambda calls, body: answer_to({**body, "n": 1}) if body.get("temperature") == -1 else None,
        "expected a refusal",
    ),
    "a stream that breaks off": (
        "status",
        lambda calls, body: httpx.Response(200, text="") if is_draw(body) else None,
        "without [DONE]",
    ),
    "an error in a stream": (
        "status",
        lambda calls, body: (
            httpx.Response(200, text='data: {"error": {"message": "oh"}}\n\n') if is_draw(body) else None
        ),
        "error in a stream: oh",
    ),
    "429 without a time": (
        "status",
        lambda calls, body: httpx.Response(429, text="") if calls % 15 == 14 else None,
        "429 without Retry-After",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str, soak: ModuleType) -> None:
    """Each fault is filed under its check, and its first case is told."""
    check, fault, words = FAULTS[name]
    quiet = 12  # the references are taken from a server that is right

    tally = soaked(soak, Fake(lambda calls, body: fault(calls, body) if quiet < calls < 10_000 else None), seconds=0.6)
    assert tally.problems[check] > 0
    assert words in tally.first[check], tally.first
    assert f"{check:<10}FAILED" in soak.report(tally)


def test_another_prompt_in_an_answer(soak: ModuleType) -> None:
    """A server that answers with the prompt before: the marker tells, also where any answer would be right."""
    before: list[str] = ["nothing"]

    def fault(calls: int, body: dict[str, Any]) -> httpx.Response | None:
        asked = str(body.get("prompt") or body["messages"][0]["content"])
        leaked, before[0] = before[0], asked
        return answer_to(body, leaked) if calls > 30 and body.get("seed", 0) is None and is_draw(body) else None

    tally = soaked(soak, Fake(fault), seconds=1.5)
    assert tally.problems["privacy"] > 0
    assert "of another request" in tally.first["privacy"]
    assert not tally.problems["answers"], "those have no reference"


def test_a_request_that_hangs(soak: ModuleType) -> None:
    """Its client goes on after the bound, and the check says so."""
    fake = Fake()
    answer = fake.__call__

    async def hanging(request: httpx.Request) -> httpx.Response:
        if fake.calls > 20 and request.url.path != "/status" and fake.calls < 200 and fake.calls % 10 == 0:
            fake.calls += 1
            await asyncio.sleep(30)
        return await answer(request)

    tally = soaked(soak, hanging, bound=0.3)  # type: ignore[arg-type]
    assert tally.problems["time"] > 0
    assert "had not ended after 0.3 s" in tally.first["time"]


def test_a_slot_that_is_lost(soak: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "SETTLE_SECONDS", 0.3)
    fake = Fake()

    def lose(calls: int, body: dict[str, Any]) -> None:
        fake.free = 3 if calls > 20 else 4

    fake.fault = lose
    tally = soaked(soak, fake)
    assert "3 are free 0.3 s after the last request, 4 were before" in tally.first["slots"]


# Memory, and what is taken for a server.


def test_memory_is_judged_after_warming_up(soak: ModuleType) -> None:
    """Growth in the first third is warming up; 4 % from the middle to the last third is a leak at a tolerance of 3; too
    few looks are no verdict."""
    flat = [(float(n), 100.0 if n < 10 else 200.0) for n in range(31)]
    leak = [(float(n), 200.0 + (8.0 if n >= 20 else 0.0)) for n in range(31)]
    for memory, problems in ((flat, 0), (leak, 1), (flat[:5], 0)):
        tally = soak.Tally()
        tally.memory = memory
        soak.check_memory(tally, 0.03)
        assert tally.problems["memory"] == problems
    assert soak.memory_growth(flat[:5]) is None


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1"])
def test_servers_of_this_machine(soak: ModuleType, url: str) -> None:
    assert soak.check_local(url) == url


@pytest.mark.parametrize("url", ["http://example.com", "http://10.0.0.1:8000", "http://0.0.0.0:8000", "nonsense"])
def test_other_machines_are_left_alone(soak: ModuleType, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A soak is an attack on a server that is somebody else's."""
    assert soak.main(["--url", url]) == 2
    assert "is not on this machine" in capsys.readouterr().err


def test_cases_are_made_anew_from_a_seed(soak: ModuleType) -> None:
    """The same seed gives the same requests; markers are all different; drawn ones have a seed."""
    first, again = (soak.make_cases(60, random.Random(1), schemas=True) for _ in range(2))
    assert first == again
    assert len({case.marker for case in first}) == 60
    for case in first:
        assert case.body["temperature"] == 0 or "seed" in case.body
        assert (case.path == "/v1/chat/completions") == ("messages" in case.body)
    assert {case.name.split()[0] for case in first} == {"plain", "stop", "samples", "logprobs", "penalty", "schema"}
