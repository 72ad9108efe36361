"""Does a server stay right under load? Many clients at once, all kinds of requests, and connections that break.

    python benchmarks/soak.py runs/demo/best --minutes 10
    python benchmarks/soak.py runs/demo/best --clients 16 --minutes 1 --serve-args "--max-requests 8"
    python benchmarks/soak.py --url http://127.0.0.1:8000 --pid 4711 --minutes 30

Starts `headstart serve` with the given head (in float32, where answers are equal to the bit), or takes a server that
runs on this machine. A fixed set of requests is made at random: chats and completions, greedy and seeded, with stop
strings, several samples, log-probabilities, JSON schemas. Each is asked alone first: that is its reference. Then the
clients ask them in random order, streamed or not, with drafts, without or bounded, and leave some of them in the
middle; between them come requests that must be refused. At the end all are asked alone once more. Checked are

    answers     every answer that was read to its end is its reference's: text, finish reason, tokens, log-probabilities
    privacy     each prompt holds a marker of its own, and no answer holds another request's
    status      no 5xx, and what must be refused is refused (429, a full waiting line, is waited for)
    time        every request ends within --bound seconds
    slots       as many are free at the end as at the start
    memory      resident memory of the last third of the time, against the middle third: --memory-tolerance at most

One table at the end; exit status 1 if a check failed, 2 if it could not be run. Requests stop at the end of --minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import json
import random
import shlex
import string
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import httpx

# Run as a file, python looks for our packages beside it; they are one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from infer.serve.child import started_server

SETTLE_SECONDS = 20.0
STOP_SECONDS = 60.0
LOGPROB_TOLERANCE = 2e-3
"""Log-probabilities of one token alone and in a batch differ by rounding, in float32 by less than this."""
LEAVES, REFUSED, UNSEEDED = 0.15, 0.05, 0.1
"""Shares of requests that are left in the middle, that must be refused, and whose answer is any."""
_WORDS = (
    "river",
    "light",
    "seven",
    "garden",
    "music",
    "stone",
    "winter",
    "paper",
    "engine",
    "apple",
    "cloud",
    "silver",
)
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_MISTAKES: Sequence[Mapping[str, Any]] = (
    {"temperature": -1},
    {"max_tokens": 0},
    {"max_tokens": 10_000_000},
    {"no_such_field": 1},
    {"stop": 3},
    {"n": 0},
    {"model": "no such model"},
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A request that has one right answer. `body` lacks how it is asked: streamed, with what drafts."""

    name: str
    path: str
    body: Mapping[str, Any]
    marker: str


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One choice of an answer. tokens, logprobs: where they were asked for."""

    text: str
    finish_reason: str | None
    tokens: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()

    def differs_from(self, other: Sample) -> str | None:
        """How, in a few words; None where it does not."""
        if self.text != other.text:
            place = next(
                (i for i, pair in enumerate(zip(self.text, other.text, strict=False)) if pair[0] != pair[1]),
                min(len(self.text), len(other.text)),
            )
            return f"text from character {place} on: {self.text[place:][:30]!r}, expected {other.text[place:][:30]!r}"
        if self.finish_reason != other.finish_reason:
            return f"finish reason {self.finish_reason}, expected {other.finish_reason}"
        if self.tokens != other.tokens:
            return f"{len(self.tokens)} tokens with log-probabilities, expected {len(other.tokens)}, or other ones"
        worst = max((abs(a - b) for a, b in zip(self.logprobs, other.logprobs, strict=True)), default=0.0)
        return f"log-probabilities by {worst:.4f}" if worst > LOGPROB_TOLERANCE else None


Answer = tuple[Sample, ...]


@dataclass(kw_only=True)
class Tally:
    """What has happened, and what was wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)  # (seconds since the start, MB)

    def problem(self, check: str, text: str) -> None:
        self.problems[check] += 1
        self.first.setdefault(check, text)

    def check(self, case: Case, answer: Answer, reference: Answer, markers: Sequence[str], how: str) -> None:
        """Hold a whole answer against its reference, and look for other requests' markers in it."""
        self.counts["compared"] += 1
        if len(answer) != len(reference):
            self.problem("answers", f"{case.name}, {how}: {len(answer)} samples, expected {len(reference)}")
            return
        for got, expected in zip(answer, reference, strict=True):
            difference = got.differs_from(expected)
            if difference is not None:
                self.problem("answers", f"{case.name}, {how}: {difference}")
        self.check_markers(case, answer, markers, how)

    def check_markers(self, case: Case, answer: Answer, markers: Sequence[str], how: str) -> None:
        for marker in markers:
            if marker != case.marker and any(marker in sample.text for sample in answer):
                self.problem("privacy", f"{case.name}, {how}: holds the marker {marker} of another request")


# Requests.


def make_cases(count: int, rng: random.Random, *, schemas: bool, longest: int = 80) -> list[Case]:
    """`longest`: characters that a prompt may have beyond a short question."""
    return [_make_case(index, rng, schemas=schemas, longest=longest) for index in range(count)]


def _make_case(index: int, rng: random.Random, *, schemas: bool, longest: int) -> Case:
    marker = "".join(rng.choices(string.ascii_uppercase, k=10))
    text = f"My word is {marker}. Tell me about {' and '.join(rng.sample(_WORDS, 2))}" + "." * rng.randint(1, 3)
    if rng.random() < 0.3:
        text += " " + " ".join(rng.choices(_WORDS, k=200))[: rng.randint(1, longest)]
    kinds = ["plain", "plain", "stop", "samples", "logprobs", "penalty"]
    kind = rng.choice([*kinds, "schema"] if schemas else kinds)
    is_chat = rng.random() < 0.7
    body: dict[str, Any] = {"max_tokens": rng.randint(1, 40), "temperature": 0}
    if rng.random() < 0.6:
        body |= {"temperature": rng.choice([0.5, 0.8, 1.0]), "seed": rng.randrange(1 << 31)}
        if rng.random() < 0.3:
            body["top_p"] = 0.9
    if kind == "stop":
        body["stop"] = rng.sample(["e", ".", "\n", "the", " a"], 2)
    elif kind == "samples":
        body["n"] = rng.randint(2, 3)
    elif kind == "logprobs":
        body |= {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
    elif kind == "penalty":
        body |= {"repetition_penalty": 1.2, "presence_penalty": 0.5}
    elif kind == "schema":
        is_chat = True
        body |= {"max_tokens": 60, "response_format": {"type": "json_schema", "json_schema": {"schema": _SCHEMA}}}
    if is_chat:
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = text
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    return Case(name=f"{kind} {index}", path=path, body=body, marker=marker)


def drafting(rng: random.Random) -> dict[str, Any]:
    """What a request says of drafts, which must change no token."""
    return rng.choice([{}, {}, {"draft": True}, {"draft": False}, {"draft": {"max_nodes": 3, "max_depth": 2}}])


# Answers.


def read_body(case: Case, body: Mapping[str, Any]) -> Answer:
    choices = sorted(body["choices"], key=lambda choice: choice["index"])
    return tuple(_sample(case, [choice]) for choice in choices)


def read_chunks(case: Case, chunks: Sequence[Mapping[str, Any]]) -> Answer:
    """A stream's chunks as the one body that they amount to."""
    parts: dict[int, list[Mapping[str, Any]]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            parts.setdefault(choice["index"], []).append(choice)
    return tuple(_sample(case, parts[index]) for index in sorted(parts))


def _sample(case: Case, parts: Sequence[Mapping[str, Any]]) -> Sample:
    """One choice, of which `parts` are all that came: the whole, or its deltas."""
    texts, reasons, tokens, logprobs = [], [], [], []
    for part in parts:
        message = part.get("message") or part.get("delta") or {}
        texts.append(part["text"] if "text" in part else message.get("content") or "")
        reasons.append(part.get("finish_reason"))
        given = part.get("logprobs") or {}
        if "content" in given:
            tokens += [entry["token"] for entry in given["content"] or ()]
            logprobs += [entry["logprob"] for entry in given["content"] or ()]
        else:
            tokens += given.get("tokens") or ()
            logprobs += given.get("token_logprobs") or ()
    return Sample(
        text="".join(texts),
        finish_reason=next((reason for reason in reversed(reasons) if reason is not None), None),
        tokens=tuple(tokens),
        logprobs=tuple(0.0 if value is None else value for value in logprobs),
    )


async def events(response: httpx.Response) -> AsyncGenerator[dict[str, Any], None]:
    """The JSON events of a stream, up to its end mark; a stream that breaks off raises."""
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise ServerError(f"error in a stream: {event['error'].get('message')}")
            yield event
    raise ServerError("a stream ended without [DONE]")


class ServerError(Exception):
    """An answer that no client should get."""


# The clients.


@dataclass(kw_only=True)
class Soak:
    """A server under load. `references`: by the cases' names."""

    client: httpx.AsyncClient
    cases: Sequence[Case]
    rng: random.Random
    bound: float
    tally: Tally
    references: dict[str, Answer] = field(default_factory=dict)

    @property
    def markers(self) -> list[str]:
        return [case.marker for case in self.cases]

    async def ask_alone(self) -> None:
        """Every case by itself: its reference. A server that cannot answer even so is not soaked."""
        for case in self.cases:
            answer = await self._alone(case)
            self.references[case.name] = answer
            self.tally.check_markers(case, answer, self.markers, "alone")

    async def ask_again(self) -> None:
        """Every case by itself once more: it must be the same."""
        for case in self.cases:
            with self._watched():
                answer = await self._alone(case)
                self.tally.check(case, answer, self.references[case.name], self.markers, "alone, afterwards")

    async def _alone(self, case: Case) -> Answer:
        async with asyncio.timeout(self.bound):
            response = await self.client.post(case.path, json=case.body)
        if response.status_code != 200:
            raise ServerError(f"{case.name} was answered with {response.status_code}: {response.text[:300]}")
        return read_body(case, response.json())

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """What goes wrong within is a problem, and not the end."""
        try:
            yield
        except TimeoutError:
            self.tally.problem("time", f"a request had not ended after {self.bound:g} s")
        except ServerError as error:
            self.tally.problem("status", str(error))
        except httpx.HTTPError as error:
            self.tally.problem("status", f"the connection failed: {type(error).__name__} {error}")

    async def load(self, num_clients: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        seeds = [self.rng.randrange(1 << 30) for _ in range(num_clients)]
        async with asyncio.TaskGroup() as group:
            for seed in seeds:
                group.create_task(self._client(random.Random(seed), deadline))

    async def _client(self, rng: random.Random, deadline: float) -> None:
        while time.monotonic() < deadline:
            start = time.monotonic()
            with self._watched():
                async with asyncio.timeout(self.bound):
                    await self._one(rng)
            self.tally.seconds.append(time.monotonic() - start)

    async def _one(self, rng: random.Random) -> None:
        """One request of a random kind."""
        case = rng.choice(self.cases)
        self.tally.counts["requests"] += 1
        draw = rng.random()
        if draw < REFUSED:
            await self._mistake(case, rng)
            return
        body = {**case.body, **drafting(rng), "tag": rng.choice(["", "a", "b", "c"]) or None}
        has_reference = True
        if rng.random() < UNSEEDED and "response_format" not in body:
            body, has_reference = {**body, "temperature": 1.0, "seed": None}, False
        leaves = draw < REFUSED + LEAVES
        if rng.random() < 0.5:
            await self._streamed(case, body, rng, leaves=leaves, compare=has_reference)
        else:
            await self._whole(case, body, rng, leaves=leaves, compare=has_reference)

    async def _mistake(self, case: Case, rng: random.Random) -> None:
        mistake = rng.choice(_MISTAKES)
        response = await self.client.post(case.path, json={**case.body, **mistake})
        self.tally.counts["refused"] += 1
        if not 400 <= response.status_code < 500:
            self.tally.problem("status", f"{mistake} was answered with {response.status_code}, expected a refusal")

    async def _whole(
        self, case: Case, body: Mapping[str, Any], rng: random.Random, *, leaves: bool, compare: bool
    ) -> None:
        asked = asyncio.ensure_future(self.client.post(case.path, json=body))
        if leaves:
            await asyncio.wait([asked], timeout=rng.uniform(0, 0.5))
            if not asked.done():
                asked.cancel()
                with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError):
                    await asked
                self.tally.counts["left"] += 1
                return
        response = await asked
        if not await self._is_answer(response, rng):
            return
        self._compare(case, read_body(case, response.json()), compare, "whole")

    async def _streamed(
        self, case: Case, body: Mapping[str, Any], rng: random.Random, *, leaves: bool, compare: bool
    ) -> None:
        most = rng.randint(0, 4) if leaves else None
        chunks: list[Mapping[str, Any]] = []
        async with self.client.stream("POST", case.path, json={**body, "stream": True}) as response:
            if not await self._is_answer(response, rng):
                return
            stream = events(response)
            async with contextlib.aclosing(stream):
                async for chunk in stream:
                    if most is not None and len(chunks) >= most:
                        self.tally.counts["left"] += 1
                        return
                    chunks.append(chunk)
        self._compare(case, read_chunks(case, chunks), compare, "streamed")

    async def _is_answer(self, response: httpx.Response, rng: random.Random) -> bool:
        """Whether there is an answer; a full line is waited for, anything else is a problem."""
        if response.status_code == 200:
            return True
        await response.aread()
        if response.status_code == 429:
            self.tally.counts["told to wait"] += 1
            if "retry-after" not in response.headers:
                self.tally.problem("status", "429 without Retry-After")
            await asyncio.sleep(rng.uniform(0.1, 1.0))
            return False
        raise ServerError(f"status {response.status_code}: {response.text[:200]}")

    def _compare(self, case: Case, answer: Answer, compare: bool, how: str) -> None:
        if compare:
            self.tally.check(case, answer, self.references[case.name], self.markers, how)
        else:
            self.tally.counts["any answer"] += 1
            self.tally.check_markers(case, answer, self.markers, how)

    async def free_slots(self) -> tuple[int, int]:
        """(free slots, requests that run or wait)."""
        status = (await self.client.get("/status")).json()
        return int(status["num_free_slots"]), int(status["num_running"] + status["num_waiting"])

    async def settle(self, free_before: int) -> None:
        """Wait for the slots to come back."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            free, num_left = await self.free_slots()
            if free == free_before and not num_left:
                return
            if time.monotonic() > deadline:
                self.tally.problem(
                    "slots",
                    f"{free} are free {SETTLE_SECONDS:g} s after the last request, {free_before} were before; "
                    f"{num_left} requests are said to run or wait",
                )
                return
            await asyncio.sleep(0.1)


async def watch_memory(pid: int, tally: Tally) -> None:
    """Note the resident memory of a process until cancelled."""
    start = time.monotonic()
    while True:
        tally.memory.append((time.monotonic() - start, resident_megabytes(pid)))
        await asyncio.sleep(0.5)


def resident_megabytes(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"/proc/{pid}/status says nothing of its memory")


def memory_growth(memory: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """MB in the middle third of the time and in the last (medians): the first third is for warming up. None where it
    was looked at too few times."""
    if len(memory) < 12:
        return None
    end = memory[-1][0]
    middle = [megabytes for when, megabytes in memory if end / 3 <= when < 2 * end / 3]
    last = [megabytes for when, megabytes in memory if when >= 2 * end / 3]
    return (median(middle), median(last)) if middle and last else None


def check_memory(tally: Tally, tolerance: float) -> None:
    growth = memory_growth(tally.memory)
    if growth is not None and growth[1] > growth[0] * (1 + tolerance):
        tally.problem("memory", f"{growth[0]:.0f} MB in the middle third, {growth[1]:.0f} MB in the last")


# The server.


def serve_options(args: argparse.Namespace) -> list[str]:
    """Of `headstart serve`, on a free port."""
    options = [str(args.head), "--host", "127.0.0.1", "--port", "0", "--dtype", "float32"]
    if args.target is not None:
        options += ["--target", str(args.target)]
    return options + shlex.split(args.serve_args)


def check_local(url: str) -> str:
    """A soak is an attack on a server that is somebody else's."""
    host = urlsplit(url).hostname or ""
    with contextlib.suppress(ValueError):
        if host == "localhost" or ipaddress.ip_address(host).is_loopback:
            return url
    raise ValueError(f"--url {url} is not on this machine: run the soak where the server is (http://127.0.0.1:PORT)")


# The whole.


async def soak(args: argparse.Namespace, url: str, pid: int | None) -> Tally:
    tally = Tally()
    rng = random.Random(args.seed)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=args.clients)
    headers = {"authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=args.bound, headers=headers) as client:
        longest = min(1000, await max_length(client) // 3)  # a tokenizer of bytes has one a character
        cases = make_cases(args.cases, rng, schemas=await takes_schemas(client), longest=longest)
        work = Soak(client=client, cases=cases, rng=rng, bound=args.bound, tally=tally)
        note(f"asking {len(cases)} requests alone")
        await work.ask_alone()
        free_before, _ = await work.free_slots()
        watcher = None if pid is None else asyncio.ensure_future(watch_memory(pid, tally))
        note(f"{args.clients} clients for {args.minutes:g} minutes")
        try:
            await work.load(args.clients, 60 * args.minutes)
        finally:
            if watcher is not None:
                watcher.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watcher  # what went wrong in it is told
        await work.settle(free_before)
        note("asking them alone once more")
        await work.ask_again()
        await work.settle(free_before)
    check_memory(tally, args.memory_tolerance / 100)
    return tally


async def max_length(client: httpx.AsyncClient) -> int:
    """Most tokens of a request, prompt and answer."""
    (first, *_) = (await client.get("/v1/models")).json()["data"]
    return int(first["max_model_len"])


async def takes_schemas(client: httpx.AsyncClient) -> bool:
    """Whether the server can constrain answers (it needs the package llguidance)."""
    form = {"type": "json_schema", "json_schema": {"schema": _SCHEMA}}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "response_format": form}
    response = await client.post("/v1/chat/completions", json=body)
    if response.status_code != 200:
        note(f"no JSON schemas: {response.text[:200]}")
    return response.status_code == 200


CHECKS = ("answers", "privacy", "status", "time", "slots", "memory")


def report(tally: Tally) -> str:
    """The table."""
    lines = [f"{name:<14}{count:>9,}" for name, count in tally.counts.most_common()]
    if tally.seconds:
        ordered = sorted(tally.seconds)
        shown = (ordered[len(ordered) // 2], ordered[int(0.99 * (len(ordered) - 1))], ordered[-1])
        lines.append("seconds of a request: median {:.2f}, 99 % below {:.2f}, longest {:.2f}".format(*shown))
    growth = memory_growth(tally.memory)
    if growth is not None:
        lines.append(f"memory: {growth[0]:.0f} MB in the middle third, {growth[1]:.0f} MB in the last")
    lines.append("")
    for check in CHECKS:
        count = tally.problems[check]
        verdict = f"FAILED {count:,} times, first: {tally.first[check]}" if count else "ok"
        if check == "memory" and not count and growth is None:
            verdict = "not looked at (no process, or too short)"
        lines.append(f"{check:<10}{verdict}")
    return "\n".join(lines)


def note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("head", nargs="?", metavar="HEAD", help="what `headstart serve` is given")
    parser.add_argument("--target", metavar="MODEL", help="the same")
    parser.add_argument("--serve-args", default="", metavar="TEXT", help="more of its options, as one text")
    parser.add_argument("--url", metavar="URL", help="a server that runs on this machine, instead of one of its own")
    parser.add_argument("--pid", type=int, metavar="N", help="with --url: its process, to look at its memory")
    parser.add_argument("--api-key", metavar="KEY", help="with --url: a key that it takes")
    parser.add_argument("--clients", type=int, default=64, metavar="N", help="(default: 64)")
    parser.add_argument("--minutes", type=float, default=10.0, metavar="M", help="of load (default: 10)")
    parser.add_argument("--cases", type=int, default=48, metavar="N", help="different requests (default: 48)")
    parser.add_argument("--bound", type=float, default=300.0, metavar="S", help="of a request (default: 300 s)")
    parser.add_argument("--memory-tolerance", type=float, default=3.0, metavar="PERCENT", help="(default: 3)")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    args = parser.parse_args(argv)
    if (args.head is None) == (args.url is None):
        parser.error("give HEAD, and a server is started, or --url of one that runs")
    if args.clients < 1 or args.cases < 1 or not args.minutes > 0:
        parser.error("--clients, --cases and --minutes must be above 0")
    try:
        tally = run(args)
    except (ValueError, OSError, httpx.HTTPError, ServerError) as error:  # a time-out is an OSError
        note(f"error: {error or 'the server does not answer'}")
        return 2
    print(report(tally))
    return 1 if tally.problems else 0


def run(args: argparse.Namespace) -> Tally:
    if args.url is not None:
        return asyncio.run(soak(args, check_local(args.url), args.pid))
    with started_server(serve_options(args), notice=note, ending_seconds=STOP_SECONDS) as server:
        try:
            tally = asyncio.run(soak(args, server.url, server.pid))
        except BaseException:
            note("\n".join(["the server's last lines:", *server.lines]))
            raise
    if server.status != 0:
        tally.problem("status", f"the server ended with status {server.status} after SIGTERM, expected 0")
    return tally


if __name__ == "__main__":
    sys.exit(main())
