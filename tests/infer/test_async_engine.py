"""Many callers of one engine: each gets what it would get alone, and what happens to one happens to no other."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from infer.async_engine import AsyncEngine, Draining, QueueFull, Step, Ticket
from infer.drafters import NgramDrafter, TreeSettings
from infer.drafters.spec import head_drafter
from infer.engine import Engine
from infer.request import DraftBounds, Request
from infer.target import TargetModel
from tests.head_families import tiny_head
from tests.infer.helpers import plain, plain_ids, sampling
from tests.toy_tokenizer import toy_tokenizer

TREE = TreeSettings(max_nodes=12, max_depth=4, adaptive=False)
PATIENCE = 60.0
"""Seconds after which a test that hangs fails."""


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Any]) -> TargetModel:
    tokenizer = toy_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=1, pad_token_id=1)
    return TargetModel.wrap(model, tokenizer=tokenizer)


def engine_of(target: TargetModel, drafter: Any = None, **changes: Any) -> Engine:
    settings = {"max_requests": 3, "max_length": 200, "tree": TREE}
    return Engine(target, drafter or NgramDrafter(), **{**settings, **changes})


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, PATIENCE))


class Recorder:
    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.ended: list[Request] = []

    def stepped(self, step: Step) -> None:
        self.steps.append(step)

    def finished(self, request: Request) -> None:
        self.ended.append(request)


def test_every_caller_gets_its_own_answer(target):
    """Twenty callers over three slots, some of whom go away: the others' tokens and texts are those they have alone."""
    rng = random.Random(0)
    recorder = Recorder()

    async def caller(engine: AsyncEngine, number: int, *, goes_away: bool) -> None:
        prompt = [rng.randrange(3, target.vocab_size) for _ in range(rng.randint(1, 30))]
        params = sampling(rng.choice([0.0, 0.8]), seed=number, max_tokens=rng.randint(1, 30))
        token_ids: list[int] = []
        text = ""
        async for update in engine.stream(prompt, params, draft=DraftBounds(enabled=number % 2 == 0)):
            token_ids += update.token_ids
            text += update.text
            assert update.num_accepted <= len(update.token_ids)
            if goes_away and len(token_ids) > 2:
                return
        expected = plain(target, prompt, params)
        assert tuple(token_ids) == expected.token_ids
        assert text == expected.text
        assert update.completion is not None
        assert update.completion.token_ids == expected.token_ids

    async def work() -> None:
        async with AsyncEngine(engine_of(target)) as engine:
            engine.add_listener(recorder)
            await asyncio.gather(*(caller(engine, number, goes_away=number % 5 == 4) for number in range(20)))
        status = engine.status()
        assert (status.num_running, status.num_waiting, status.num_free_slots) == (0, 0, 3)
        assert status.is_draining
        assert not status.is_alive

    run(work())
    assert len(recorder.ended) == 20
    emitted = sum(one.num_tokens for step in recorder.steps for one in step.rounds)
    assert emitted == sum(len(request.output_ids) for request in recorder.ended)
    assert all(step.num_running <= 3 for step in recorder.steps)


def test_samples_of_one_call(target):
    async def work() -> None:
        params = sampling(0.9, n=3)
        async with AsyncEngine(engine_of(target)) as engine:
            done = await engine.generate([5, 6, 7], params)
        assert [one.sample for one in done] == [0, 1, 2]
        expected = Engine(target).generate([[5, 6, 7]], params)
        assert [one.token_ids for one in done] == [one.token_ids for one in expected]
        assert len({one.token_ids for one in done}) == 3

    run(work())


def test_cancelling_frees_the_slot_for_those_who_wait(target):
    async def work() -> None:
        recorder = Recorder()
        async with AsyncEngine(engine_of(target, max_requests=1)) as engine:
            engine.add_listener(recorder)
            first = await engine.submit([5, 6], sampling(max_tokens=190))
            second = await engine.submit([7, 8], sampling(max_tokens=4))
            await anext(first)
            assert engine.status().num_waiting == 1
            first.cancel()
            first.cancel()
            done = await second.completions()
            assert done[0].token_ids == plain_ids(target, [7, 8], sampling(max_tokens=4))
            (aborted,) = await first.completions()
            assert aborted.finish_reason == "abort"
            assert len(aborted.token_ids) < 190
            first.cancel()
        assert [request.finish_reason for request in recorder.ended] == ["abort", "length"]

    run(work())


def test_a_caller_that_is_cancelled_takes_its_requests_along(target):
    async def work() -> None:
        async with AsyncEngine(engine_of(target)) as engine:
            task = asyncio.create_task(engine.generate([5, 6], sampling(max_tokens=190, n=2)))
            while engine.status().num_running < 2:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while engine.status().num_running:
                await asyncio.sleep(0.001)
            assert engine.status().num_free_slots == 3

    run(work())


def test_a_full_line_turns_callers_away_and_lets_them_in_later(target):
    async def work() -> None:
        async with AsyncEngine(engine_of(target, max_requests=1), max_waiting=2) as engine:
            tickets = [await engine.submit([5, 6], sampling(max_tokens=150)) for _ in range(3)]
            with pytest.raises(QueueFull) as full:
                await engine.submit([5, 6], sampling())
            assert full.value.retry_after >= 1
            with pytest.raises(QueueFull):
                await engine.submit([5, 6], sampling(n=2))
            tickets[0].cancel()
            await tickets[0].completions()
            await engine.generate([5, 6], sampling(max_tokens=2))
            for ticket in tickets:
                ticket.cancel()

    run(work())


def test_what_cannot_be_served_is_refused_and_leaves_no_trace(target):
    async def work() -> None:
        async with AsyncEngine(engine_of(target)) as engine:
            with pytest.raises(ValueError, match="at most 200 fit"):
                await engine.submit([5] * 300, sampling())
            with pytest.raises(ValueError, match="at most 12"):
                await engine.submit([5], sampling(), draft=DraftBounds(max_nodes=13))
            status = engine.status()
            assert (status.num_running, status.num_waiting) == (0, 0)

    run(work())


def test_an_engine_that_was_not_started_says_so(target):
    with pytest.raises(ValueError, match="async with AsyncEngine"):
        run(AsyncEngine(engine_of(target)).generate([5, 6], sampling()))


def test_draining_answers_what_is_at_hand_and_takes_no_more(target):
    async def work() -> None:
        engine = AsyncEngine(engine_of(target, max_requests=1))
        engine.start()
        tickets = [await engine.submit([5, 6], sampling(seed=seed)) for seed in range(3)]
        closing = asyncio.create_task(engine.close(drain_seconds=None))
        await asyncio.sleep(0)
        with pytest.raises(Draining):
            await engine.submit([5, 6], sampling())
        done = [(await ticket.completions())[0].finish_reason for ticket in tickets]
        await closing
        assert done == ["length"] * 3

    run(work())


def test_closing_without_patience_ends_every_call(target):
    async def work() -> None:
        engine = AsyncEngine(engine_of(target, max_requests=1))
        engine.start()
        tickets = [await engine.submit([5, 6], sampling(max_tokens=190)) for _ in range(3)]
        await engine.close(drain_seconds=0.0)
        for ticket in tickets:
            (done,) = await ticket.completions()
            assert done.finish_reason in ("abort", "length")
        assert engine.status().num_waiting == 0

    run(work())


def test_a_step_that_fails_ends_those_at_hand_and_the_engine_goes_on(target, caplog):
    async def work() -> None:
        inner = engine_of(target)
        async with AsyncEngine(inner) as engine:
            step = inner.step

            def failing() -> int:
                inner.step = step
                raise RuntimeError("the engine stumbles")

            inner.step = failing
            (done,) = await engine.generate([5, 6], sampling())
            assert done.finish_reason == "error"
            assert done.is_fault
            (done,) = await engine.generate([5, 6], sampling())
            assert done.token_ids == plain_ids(target, [5, 6], sampling())
            assert engine.status().num_free_slots == 3

    run(work())
    assert "the engine stumbles" in caplog.text


def test_an_engine_that_always_fails_says_so(target):
    async def work() -> None:
        inner = engine_of(target)
        async with AsyncEngine(inner) as engine:

            def failing() -> int:
                raise RuntimeError("broken")

            inner.step = failing
            while engine.status().is_alive:
                (done,) = await engine.generate([5, 6], sampling())
                assert done.is_fault
            with pytest.raises(Draining, match="given up"):
                await engine.generate([5, 6], sampling())

    run(work())


def test_a_listener_that_fails_harms_nobody(target, caplog):
    class Broken(Recorder):
        def stepped(self, step: Step) -> None:
            raise RuntimeError("cannot count")

    async def work() -> None:
        async with AsyncEngine(engine_of(target)) as engine:
            engine.add_listener(Broken())
            (done,) = await engine.generate([5, 6], sampling())
            assert done.token_ids == plain_ids(target, [5, 6], sampling())

    run(work())
    assert "cannot count" in caplog.text


def test_trees_come_where_they_are_asked_for(target):
    async def work() -> None:
        async with AsyncEngine(engine_of(target)) as engine:
            prompt, params = [5, 6, 7] * 4, sampling(max_tokens=30)
            seen = [update async for update in engine.stream(prompt, params, trees=True)]
            without = [update async for update in engine.stream(prompt, params)]
        trees = [update.tree for update in seen if update.tree is not None and len(update.tree)]
        assert trees
        assert all(update.tree is None for update in without)
        for update in seen:
            if update.tree is not None:
                accepted = [update.tree.tokens[node] for node in update.path[: update.num_accepted]]
                assert accepted == list(update.token_ids[: update.num_accepted])
                assert (update.num_nodes, update.depth) == (len(update.tree), max(update.tree.depths, default=0))

    run(work())


def test_a_caller_whose_loop_is_gone_does_not_stop_the_engine(target):
    engine = AsyncEngine(engine_of(target))
    engine.start()
    left: list[Ticket] = []

    async def leave() -> None:
        left.append(await engine.submit([5, 6], sampling(max_tokens=190)))

    asyncio.run(leave())

    async def work() -> None:
        while engine.status().num_free_slots < 3:  # the slot of whom nobody listens to is freed, not decoded to its end
            await asyncio.sleep(0.001)
        assert len(left[0]._samples[0].request.output_ids) < 190
        (done,) = await engine.generate([5, 6], sampling())
        assert done.token_ids == plain_ids(target, [5, 6], sampling())
        await engine.close(drain_seconds=None)
        assert engine.status().num_waiting == 0

    run(work())


def test_a_step_that_fails_after_it_has_committed_still_ends_every_call(target):
    """What its rounds emitted had not been told yet: the last update brings it."""

    async def work() -> None:
        inner = engine_of(target)
        step, steps = inner.step, []

        def fails_late() -> int:
            num_tokens = step()
            steps.append(num_tokens)
            if len(steps) == 3:
                raise RuntimeError("after the commit")
            return num_tokens

        inner.step = fails_late
        async with AsyncEngine(inner) as engine:
            (done,) = await engine.generate([5, 6, 7], sampling())
            assert (done.finish_reason, done.is_fault) == ("error", True)
            assert len(done.token_ids) == sum(steps)
            assert engine.status().num_waiting == 0

    run(work())


class Panic(BaseException):
    """As pyo3's PanicException, which is no Exception."""


@pytest.mark.parametrize("where", ["keep", "prepare", "step"])
def test_a_panic_of_a_library_leaves_nobody_waiting(where, target):
    inner = engine_of(target)
    call = getattr(inner, {"keep": "_keep", "prepare": "prepare", "step": "_round"}[where])
    bad = sampling(seed=13)

    def panics(*given: Any, **options: Any) -> Any:
        if where == "step" or bad in given or getattr(given[0], "params", None) == bad:
            raise Panic("rust")
        return call(*given, **options)

    setattr(inner, {"keep": "_keep", "prepare": "prepare", "step": "_round"}[where], panics)

    async def work() -> None:
        async with AsyncEngine(inner) as engine:
            calls = [engine.generate([5, 6, 7], params) for params in (sampling(), bad)]
            good, failed = await asyncio.gather(*calls, return_exceptions=True)
            if where == "prepare":
                assert isinstance(failed, RuntimeError)
            else:
                assert failed[0].is_fault
            if where != "step":
                assert good[0].token_ids == plain_ids(target, [5, 6, 7], sampling())
            assert engine.status().num_waiting == 0

    run(work())


@pytest.mark.parametrize("case", ["heads", "grammars"])
def test_two_engines_over_one_target_do_not_meet(case, target):
    """Hooks that tap states must not collect those of another thread's forward, and a parser is read by one thread at a
    time."""
    made = {"heads": lambda: head_drafter(tiny_head("eagle3", target), target), "grammars": lambda: None}[case]
    extra = {"heads": {}, "grammars": {"regex": "[a-z]{4,15}"}}[case]
    jobs = [([5, 6, 7, 10 + index], sampling(0.9, seed=index, max_tokens=20, **extra)) for index in range(12)]

    async def work() -> None:
        async with AsyncEngine(engine_of(target, made())) as one, AsyncEngine(engine_of(target, made())) as other:
            answers = await asyncio.gather(*(each.generate(*job) for job in jobs for each in (one, other)))
        assert {answer.error for (answer,) in answers} == {None}
        expected = [plain_ids(target, *job) for job in jobs for _ in range(2)]
        assert [answer.token_ids for (answer,) in answers] == expected

    run(work())
