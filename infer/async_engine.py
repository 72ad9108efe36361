"""An engine for many callers at once: a thread of its own runs its rounds, and requests join and leave between them.

Callers live in asyncio; whatever touches the engine happens in its thread. What they send (new requests, cancellations)
waits in a mailbox that the thread empties between two rounds, and what a round gives goes back in one call into the
callers' event loop.

    submit -> prepared in a worker thread (template, tokens, grammar) -> mailbox -> Engine.enqueue
    Engine.step -> one Update for each request that emitted -> Ticket, from which its caller reads
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, Protocol

from infer.engine import Engine
from infer.intake import Prompt
from infer.learning import Learner
from infer.request import Completion, DraftBounds, Request, RequestRound, TokenLogprobs
from infer.sampling import SamplingParams
from infer.scheduling import Sharing
from infer.threads import release_workers
from infer.tree import DraftTree

_log = logging.getLogger(__name__)

_NUM_PREPARERS = 2
"""Threads that render, encode and compile: more than one, so that a slow grammar does not hold up everyone."""
_MOST_FAULTS = 8
"""So many steps in a row that raised, and the engine is taken to be broken."""


class QueueFull(Exception):
    """The waiting line is full. retry_after: seconds after which there may be room."""

    def __init__(self, num_waiting: int, retry_after: int) -> None:
        super().__init__(f"{num_waiting} requests wait already: try again in {retry_after} s")
        self.retry_after = retry_after


class Draining(Exception):
    """The engine is closing, and takes no new requests."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """What one round added to one sample of a call.

    num_accepted: how many of `token_ids`, from the front, had been drafted; those behind are the target's own. text:
    what can be shown for good, without part of a character or of a stop string. tree, path: the tree that was verified
    and its accepted nodes, where trees were asked for. completion: with the last update.
    """

    sample: int
    token_ids: tuple[int, ...] = ()
    num_accepted: int = 0
    num_nodes: int = 0
    depth: int = 0
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    tree: DraftTree | None = None
    path: tuple[int, ...] = ()
    completion: Completion | None = None


@dataclass(frozen=True, kw_only=True)
class Step:
    """One `Engine.step`. num_prompt_tokens: rows of prompts that it computed. rounds: one for each request that
    emitted."""

    seconds: float
    num_running: int
    num_waiting: int
    num_prompt_tokens: int
    rounds: tuple[RequestRound, ...]


class Listener(Protocol):
    """Told of everything, in the engine's thread: must be quick. What it raises is logged."""

    def stepped(self, step: Step) -> None: ...

    def finished(self, request: Request) -> None:
        """A request has left: answered, cancelled or failed."""


@dataclass(frozen=True, kw_only=True)
class EngineStatus:
    """num_cached_tokens: tokens whose rows the slots hold, those of requests that have left included. is_drafting: off
    for good once the drafter was given up. is_alive: the engine's thread runs and has not given up."""

    num_running: int
    num_waiting: int
    num_slots: int
    num_free_slots: int
    num_cached_tokens: int
    is_draining: bool
    is_alive: bool
    is_drafting: bool


@dataclass(eq=False, kw_only=True)
class _Sample:
    """One request of a ticket, as the engine's thread knows it. num_seen: tokens that its caller has been sent."""

    request: Request
    ticket: Ticket
    num_seen: int = 0


class Ticket:
    """One call's `n` samples: an asynchronous iterator of their updates, in the order in which rounds end."""

    def __init__(
        self, engine: AsyncEngine, requests: Sequence[Request], *, trees: bool, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.num_prompt_tokens = len(requests[0].prompt_ids)
        self.seed = requests[0].seed
        self.num_samples = len(requests)
        self._trees = trees
        self._samples = [_Sample(request=request, ticket=self) for request in requests]
        self._loop = loop
        self._engine = engine
        self._updates: deque[Update] = deque()
        self._arrived = asyncio.Event()
        self._num_open = len(requests)
        self._completions: dict[int, Completion] = {}

    @property
    def num_reused_tokens(self) -> int:
        """Prompt tokens that were not computed again, of all samples; known after the first update."""
        return sum(sample.request.num_reused for sample in self._samples)

    @property
    def num_pending(self) -> int:
        """Updates that nobody has read yet."""
        return len(self._updates)

    def cancel(self) -> None:
        """Free the slots before the next round. Does nothing to samples that have ended."""
        self._engine._cancel(self)

    async def completions(self) -> list[Completion]:
        """Wait for all samples; their order is that of `Completion.sample`. Updates not read by then are dropped."""
        async for _ in self:
            pass
        return [self._completions[sample] for sample in sorted(self._completions)]

    def __aiter__(self) -> AsyncIterator[Update]:
        return self

    async def __anext__(self) -> Update:
        while not self._updates:
            if not self._num_open:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        update = self._updates.popleft()
        if update.completion is not None:
            self._num_open -= 1
        return update

    def _put(self, update: Update) -> None:
        """In the event loop: an update has come."""
        if update.completion is not None:
            self._completions[update.sample] = update.completion
        self._updates.append(update)
        self._arrived.set()


@dataclass
class _Mail:
    """What the engine's thread has been sent and has not read."""

    arrived: list[Ticket] = field(default_factory=list)
    cancelled: list[Ticket] = field(default_factory=list)


class AsyncEngine:
    """See the module.

    max_waiting: requests that wait for a slot, beyond which callers are told to come back (`QueueFull`). An engine
    whose sharing nobody has settled is shared as servers do; faults are isolated in any case. Its slots are allocated
    when the thread starts, if it has a `max_length`. learner: goes on training the head between the rounds
    (`train.online`).

        async with AsyncEngine(load_engine("runs/best", max_length=2048)) as engine:
            async for update in engine.stream("Hello", SamplingParams()):
                print(update.text, end="")
    """

    def __init__(self, engine: Engine, *, max_waiting: int = 256, learner: Learner | None = None) -> None:
        if max_waiting < 1:
            raise ValueError(f"max_waiting must be at least 1, got {max_waiting}")
        self.engine = engine
        self.max_waiting = max_waiting
        settled = engine.sharing != Sharing()
        engine.share(replace(engine.sharing, isolate_faults=True) if settled else Sharing.among_callers())
        self._mail = _Mail()
        self._lock = threading.Condition()
        self._listeners: list[Listener] = []
        self._live: dict[Request, _Sample] = {}  # of the engine's thread
        self._learner = learner
        self._learns = False  # whether there is something left to learn while nobody waits
        self._thread: threading.Thread | None = None
        self._preparers = ThreadPoolExecutor(_NUM_PREPARERS, thread_name_prefix="headstart-prepare")
        self._is_draining = False
        self._is_stopping = False
        self._is_broken = False
        self._num_open = 0  # requests between `submit` and their end
        self._seconds_per_request = 1.0  # of late, for `QueueFull`

    def start(self) -> None:
        """Allocate the slots and start the thread; does nothing when called again."""
        if self._thread is None:
            if self.engine.max_length is not None:
                self.engine.reserve()
            release_workers()  # from here on the engine's thread computes
            self._thread = threading.Thread(target=self._run, name="headstart-engine", daemon=True)
            self._thread.start()

    async def close(self, *, drain_seconds: float | None = 0.0) -> None:
        """Refuse new requests at once, let those at hand go on for so long (None: to their end), cancel the rest and
        stop the thread."""
        self._is_draining = True
        deadline = math.inf if drain_seconds is None else time.perf_counter() + drain_seconds
        while self._num_open and self._thread is not None and time.perf_counter() < deadline:
            await asyncio.sleep(0.02)
        with self._lock:
            self._is_stopping = True
            self._lock.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        self._preparers.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> AsyncEngine:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(drain_seconds=0.0 if error is not None else None)

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        draft: DraftBounds | None = None,
        owner: str = "",
        trees: bool = False,
        tag: str = "",
    ) -> Ticket:
        """Queue a prompt; the ticket gives what its `n` samples say. owner: whose it is, for fair shares of the slots.
        tag: a domain, for statistics.

        Raises ValueError for what cannot be served, QueueFull, and Draining.
        """
        if self._thread is None:
            raise ValueError("the engine has not been started: use `async with AsyncEngine(...)`, or call start()")
        self._check_open(params.n)
        self._count(params.n)
        try:
            loop = asyncio.get_running_loop()
            prepare = partial(self._prepare, prompt, params, draft=draft, owner=owner, tag=tag)
            requests = await loop.run_in_executor(self._preparers, prepare)
            ticket = Ticket(self, requests, trees=trees, loop=loop)
            with self._lock:
                if self._is_stopping:
                    raise Draining("the engine has stopped")
                self._mail.arrived.append(ticket)
                self._lock.notify()
        except BaseException:
            self._count(-params.n)
            raise
        return ticket

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        draft: DraftBounds | None = None,
        owner: str = "",
        tag: str = "",
    ) -> list[Completion]:
        """The `n` answers to a prompt. They are cancelled if the caller is."""
        ticket = await self.submit(prompt, params, draft=draft, owner=owner, tag=tag)
        try:
            return await ticket.completions()
        finally:
            ticket.cancel()

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        draft: DraftBounds | None = None,
        owner: str = "",
        trees: bool = False,
        tag: str = "",
    ) -> AsyncIterator[Update]:
        """The updates of a prompt's samples. They are cancelled when the reader goes away."""
        ticket = await self.submit(prompt, params, draft=draft, owner=owner, trees=trees, tag=tag)
        try:
            async for update in ticket:
                yield update
        finally:
            ticket.cancel()

    def _cancel(self, ticket: Ticket) -> None:
        if any(sample.request.finish_reason is None for sample in ticket._samples):
            with self._lock:
                self._mail.cancelled.append(ticket)
                self._lock.notify()

    def status(self) -> EngineStatus:
        engine = self.engine
        return EngineStatus(
            num_running=engine.num_running,
            num_waiting=self._num_waiting,
            num_slots=engine.num_slots,
            num_free_slots=engine.num_free_slots,
            num_cached_tokens=engine.num_cached_tokens,
            is_draining=self._is_draining,
            is_alive=self._thread is not None and self._thread.is_alive() and not self._is_broken,
            is_drafting=engine.is_drafting,
        )

    def add_listener(self, listener: Listener) -> None:
        self._listeners.append(listener)

    @property
    def _num_waiting(self) -> int:
        """Requests that have no slot, those being prepared included."""
        return max(0, self._num_open - self.engine.num_running)

    def _check_open(self, num_samples: int) -> None:
        if self._is_draining or self._is_broken:
            raise Draining("the engine is closing" if self._is_draining else "the engine has given up after faults")
        num_waiting = max(0, self._num_open + num_samples - self.engine.max_requests)
        if num_waiting > self.max_waiting:
            seconds = self._seconds_per_request * (1 + num_waiting / self.engine.max_requests)
            raise QueueFull(self._num_waiting, max(1, math.ceil(seconds)))

    def _count(self, change: int) -> None:
        with self._lock:
            self._num_open += change

    def _prepare(self, prompt: Prompt, params: SamplingParams, **options: Any) -> list[Request]:
        """`Engine.prepare`, in a worker thread; a panic of a library in Rust is no Exception, and comes out as one."""
        try:
            return self.engine.prepare(prompt, params, **options)
        except Exception:
            raise
        except BaseException as error:
            raise RuntimeError(f"a request could not be prepared: {type(error).__name__}") from error

    # What follows runs in the engine's thread.

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException:
            _log.exception("the engine's thread failed: it takes no more requests")
            self._is_broken = True
        self._end_all(is_fault=self._is_broken)
        self._turn_away()

    def _serve(self) -> None:
        """Rounds, until it is time to stop."""
        num_faults = 0
        while (mail := self._next_mail()) is not None:
            try:
                self._read(mail)
                self._learn(self._step())
                num_faults = 0
            except BaseException:
                num_faults += 1
                _log.exception("a step of the engine failed: all that run are ended")
                self._is_broken = num_faults == _MOST_FAULTS
                self._end_all(is_fault=True)
                if self._is_broken:
                    raise

    def _next_mail(self) -> _Mail | None:
        """What has come; waits for it where there is nothing else to do. None: it is time to stop."""
        with self._lock:
            while not (self._live or self._mail.arrived or self._mail.cancelled or self._is_stopping or self._learns):
                self._lock.wait()
            if self._is_stopping:
                return None
            mail, self._mail = self._mail, _Mail()
            return mail

    def _read(self, mail: _Mail) -> None:
        for ticket in mail.arrived:
            self._live.update({sample.request: sample for sample in ticket._samples})
            try:
                self.engine.enqueue([sample.request for sample in ticket._samples])
            except Exception as error:
                _log.exception("a request could not be queued")
                for sample in ticket._samples:
                    sample.request.end("error", error=str(error), is_fault=True)
                self._send([(sample, None) for sample in ticket._samples])
        for ticket in mail.cancelled:
            samples = [sample for sample in ticket._samples if sample.request in self._live]
            self.engine.abort([sample.request for sample in samples])
            self._send([(sample, None) for sample in samples])

    def _learn(self, seconds: float) -> None:
        """Let the head learn for a moment, between two steps, of which the one before took `seconds`."""
        if self._learner is None:
            return
        if self._live:
            self._learner.after_step(seconds)
        else:
            self._learns = self._learner.when_idle()

    def _step(self) -> float:
        """One round for all that run; returns the seconds that it took."""
        if not self._live:
            return 0.0
        start = time.perf_counter()
        self.engine.step()
        step = Step(
            seconds=time.perf_counter() - start,
            num_running=self.engine.num_running,
            num_waiting=self.engine.num_waiting,
            num_prompt_tokens=self.engine.num_prompt_rows,
            rounds=tuple(self.engine.rounds),
        )
        self._tell(lambda listener: listener.stepped(step))
        emitted = {one.request for one in step.rounds}
        ended = [request for request in self._live if request.finish_reason is not None and request not in emitted]
        news: list[tuple[_Sample, RequestRound | None]] = [(self._live[one.request], one) for one in step.rounds]
        self._send([*news, *((self._live[request], None) for request in ended)])
        return step.seconds

    def _send(self, news: Sequence[tuple[_Sample, RequestRound | None]]) -> None:
        """Tell callers what has become of their samples, in one call into each event loop."""
        updates: dict[asyncio.AbstractEventLoop, list[tuple[Ticket, Update]]] = {}
        for sample, done in news:
            update = _update(sample, done)
            updates.setdefault(sample.ticket._loop, []).append((sample.ticket, update))
            if update.completion is not None:
                self._forget(sample.request)
        for loop, each in updates.items():
            try:
                loop.call_soon_threadsafe(_deliver, each)
            except RuntimeError:  # the loop is closed, and nobody waits any more
                with self._lock:
                    self._mail.cancelled.extend({ticket for ticket, _ in each})

    def _forget(self, request: Request) -> None:
        del self._live[request]
        self._count(-1)
        if request.finish_reason in ("stop", "length"):
            self._seconds_per_request += 0.1 * (request.seconds - self._seconds_per_request)
        self._tell(lambda listener: listener.finished(request))

    def _end_all(self, *, is_fault: bool) -> None:
        samples = list(self._live.values())
        try:
            self.engine.abort()
        except BaseException:
            _log.exception("the engine could not let go of its requests")
        for sample in samples:
            if is_fault and sample.request.finish_reason in (None, "abort"):
                sample.request.end("error", error="internal error: a step of the engine failed", is_fault=True)
            elif sample.request.finish_reason is None:
                sample.request.end("abort")
        self._send([(sample, None) for sample in samples])

    def _turn_away(self) -> None:
        """End what came after the last mail that was read."""
        with self._lock:
            self._is_stopping = True
            left, self._mail = self._mail, _Mail()
        for ticket in left.arrived:
            for sample in ticket._samples:
                sample.request.end("abort")
                self._live[sample.request] = sample
            self._send([(sample, None) for sample in ticket._samples])

    def _tell(self, what: Callable[[Listener], None]) -> None:
        for listener in self._listeners:
            try:
                what(listener)
            except Exception:
                _log.exception("a listener failed")


def _deliver(updates: Sequence[tuple[Ticket, Update]]) -> None:
    """In the callers' event loop."""
    for ticket, update in updates:
        ticket._put(update)


def _update(sample: _Sample, done: RequestRound | None) -> Update:
    """What a round gave a sample, or, without one, all that has not been told yet. A step may hold two rounds of a
    request, its prefill and the first with a draft: the text comes with the last."""
    request = sample.request
    first = sample.num_seen
    token_ids = tuple(request.output_ids[first:]) if done is None else done.token_ids
    sample.num_seen += len(token_ids)
    is_last = sample.num_seen == len(request.output_ids)
    wants_tree = done is not None and sample.ticket._trees
    return Update(
        sample=request.sample,
        token_ids=token_ids,
        num_accepted=0 if done is None else done.num_accepted,
        num_nodes=0 if done is None else done.num_nodes,
        depth=0 if done is None else done.depth,
        text=request.stopper.take_delta() if is_last else "",
        logprobs=None if request.params.logprobs is None else tuple(request.logprobs[first : sample.num_seen]),
        tree=done.tree if wants_tree and done is not None else None,
        path=done.path if wants_tree and done is not None else (),
        completion=request.completion() if is_last and request.finish_reason is not None else None,
    )
