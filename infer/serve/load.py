"""Load on an OpenAI-compatible server: chat requests, streamed, and when each of their tokens came.

What the client itself takes of the machine that it shares with the server is measured (`LoadResult.client_share`).

Clocks start when the request is sent, on a connection that stands. A request's first token comes with the first chunk
that holds text or tokens. Between tokens: a chunk of k tokens that comes a gap of g seconds after the chunk before it
counts as k tokens, g / k seconds each. Where the server does not say how many tokens a chunk holds, every chunk behind
the first counts as the request's mean.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from infer.serve.client import Client, ServerError, StreamError, chunk_text, chunk_tokens


@dataclass(frozen=True, kw_only=True)
class Job:
    """One request, ready to be sent: its number, and its JSON."""

    number: int
    body: bytes


@dataclass(frozen=True, kw_only=True)
class TimedAnswer:
    """What came back for request number `job`; times are seconds. `error` is the kind of failure, `message` its text;
    what came before it stands here too.

    started: since the load began. first_token_seconds, seconds: since the request was sent. gaps: (seconds, tokens) of
    every chunk behind the first; tokens is None where the server does not say. num_reused_tokens: of the prompt's, how
    many the server had computed before. acceptance: the server's own account of the request's rounds.
    """

    job: int
    started: float
    seconds: float
    first_token_seconds: float | None = None
    gaps: tuple[tuple[float, int | None], ...] = ()
    num_prompt_tokens: int = 0
    num_reused_tokens: int = 0
    num_tokens: int = 0
    text: str = ""
    token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None
    acceptance: Mapping[str, Any] | None = None
    error: str | None = None
    message: str = ""

    @property
    def token_gaps(self) -> list[float]:
        """Seconds between tokens: one entry for each token that came behind the first chunk."""
        known = [count for _, count in self.gaps if count is not None]
        if len(known) == len(self.gaps):
            return [gap / count for gap, count in self.gaps if count for _ in range(count)]
        mean = max(1.0, (self.num_tokens - 1) / len(self.gaps))
        return [gap / mean for gap, _ in self.gaps for _ in range(round(mean))]


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """Every answer of a load, in the order in which they ended. client_share: of one processor's time, what the client
    took. interrupted: it was stopped before its end."""

    answers: tuple[TimedAnswer, ...]
    seconds: float
    client_share: float
    interrupted: bool = False


def chat_job(number: int, messages: Sequence[Mapping[str, str]], **fields: Any) -> Job:
    """A streamed chat request; `fields` are the other entries of its body."""
    body = {"messages": list(messages), "stream": True, "stream_options": {"include_usage": True}, **fields}
    return Job(number=number, body=json.dumps(body).encode())


async def timed_answer(client: Client, job: Job, *, began: float, timeout: float | None = None) -> TimedAnswer:
    """Send a request and time its answer; failures are told in the answer, never raised."""
    progress = _Progress(job=job.number, began=began)
    try:
        async with asyncio.timeout(timeout), client.connect() as connection:
            progress.sent = time.perf_counter()
            await connection.send("POST", "/v1/chat/completions", job.body)
            async for event in connection.events():
                progress.take(event)
        return progress.answer()
    except TimeoutError:
        return progress.answer(error="timeout", message=f"no whole answer within {timeout} seconds")
    except ServerError as error:
        return progress.answer(error=f"http {error.status}", message=str(error))
    except StreamError as error:
        return progress.answer(error="stream", message=str(error))
    except OSError as error:
        return progress.answer(error="connection", message=str(error) or type(error).__name__)


async def run_load(
    client: Client,
    jobs: Sequence[Job],
    *,
    concurrency: int | None = None,
    rate: float | None = None,
    seed: int = 0,
    timeout: float | None = None,
) -> LoadResult:
    """Send all jobs: `concurrency` at a time (a new one when one ends), or `rate` a second on average, at times drawn
    from `seed` (a Poisson process), whatever has been answered. `timeout`: seconds that each may take.

    When cancelled, it returns what was measured so far.
    """
    assert (concurrency is None) != (rate is None)
    answers: list[TimedAnswer] = []
    began, began_cpu = time.perf_counter(), time.process_time()

    async def send(job: Job) -> None:
        answers.append(await timed_answer(client, job, began=began, timeout=timeout))

    if concurrency is not None:
        waiting = iter(jobs)
        work = [_send_in_turn(waiting, send) for _ in range(min(concurrency, len(jobs)))]
    else:
        assert rate is not None
        work = [_send_at(began + at, job, send) for at, job in zip(arrivals(len(jobs), rate, seed), jobs, strict=True)]
    tasks = [asyncio.ensure_future(each) for each in work]
    interrupted = False
    try:
        await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        interrupted = True
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    seconds = time.perf_counter() - began
    share = (time.process_time() - began_cpu) / seconds
    return LoadResult(answers=tuple(answers), seconds=seconds, client_share=share, interrupted=interrupted)


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Times of `count` arrivals, in seconds from the beginning: the first is at 0."""
    rng = random.Random(seed)
    times = [0.0]
    for _ in range(count - 1):
        times.append(times[-1] + rng.expovariate(rate))
    return times[:count]


async def _send_in_turn(jobs: Iterator[Job], send: Callable[[Job], Awaitable[None]]) -> None:
    for job in jobs:
        await send(job)


async def _send_at(when: float, job: Job, send: Callable[[Job], Awaitable[None]]) -> None:
    await asyncio.sleep(max(0.0, when - time.perf_counter()))
    await send(job)


@dataclass(kw_only=True)
class _Progress:
    """An answer as it comes."""

    job: int
    began: float
    sent: float = field(default_factory=time.perf_counter)
    last: float | None = None
    first: float | None = None
    gaps: list[tuple[float, int | None]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_chunks: int = 0
    usage: Mapping[str, Any] = field(default_factory=dict)
    acceptance: Mapping[str, Any] | None = None
    finish_reason: str | None = None

    def take(self, event: Mapping[str, Any]) -> None:
        now = time.perf_counter()
        self.usage = event.get("usage") or self.usage
        self.acceptance = event.get("acceptance") or self.acceptance
        for choice in event.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            text, tokens = chunk_text(choice), chunk_tokens(choice)
            if text:
                self.texts.append(text)
            if tokens:
                self.token_ids.extend(token["id"] for token in tokens)
            if text or tokens:
                self._arrived(now, None if tokens is None else len(tokens))

    def _arrived(self, now: float, num_tokens: int | None) -> None:
        self.num_chunks += 1
        if self.last is None:
            self.first = now
        else:
            self.gaps.append((now - self.last, num_tokens))
        self.last = now

    def answer(self, *, error: str | None = None, message: str = "") -> TimedAnswer:
        return TimedAnswer(
            job=self.job,
            started=self.sent - self.began,
            seconds=time.perf_counter() - self.sent,
            first_token_seconds=None if self.first is None else self.first - self.sent,
            gaps=tuple(self.gaps),
            num_prompt_tokens=self.usage.get("prompt_tokens") or 0,
            num_reused_tokens=(self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            num_tokens=self.usage.get("completion_tokens", len(self.token_ids) or self.num_chunks),
            text="".join(self.texts),
            token_ids=tuple(self.token_ids) or None,
            finish_reason=self.finish_reason,
            acceptance=self.acceptance,
            error=error,
            message=message,
        )
