"""Requests that join and leave between rounds: prompts in chunks, beginnings taken over from others, cancellations,
faults. Whatever goes on beside it, a request's tokens are those it has alone, and so is what is accepted of its drafts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from infer.cost import CostModel
from infer.drafters import HybridDrafter, NgramDrafter, TreeSettings
from infer.drafters.base import PrefixDrafter
from infer.drafters.head import HeadDrafter
from infer.drafters.model import ModelDrafter
from infer.drafters.scripted import ScriptedDrafter
from infer.drafters.spec import head_drafter
from infer.drafters.suffix import SuffixDrafter
from infer.engine import MOST_DRAFT_FAULTS, Engine
from infer.request import Completion, DraftBounds, Request
from infer.sampling import SamplingParams
from infer.scheduling import Sharing
from infer.target import TargetModel
from infer.tree import DraftTree
from tests.head_families import VARIANTS, tiny_head
from tests.infer.helpers import plain, plain_ids, sampling

TREE = TreeSettings(max_nodes=24, max_depth=4, branch=12, beam=4, adaptive=False)
MAX_LENGTH = 160
VOCAB_SIZE = 48
SHARED = [7, 3, 11, 5, 9, 2, 30, 31] * 5
"""The 40 tokens that several chats begin with."""

Make = Callable[[TargetModel], Any]
DRAFTERS: dict[str, Make] = {
    **{name: lambda target, name=name: head_drafter(tiny_head(name, target), target) for name in VARIANTS},
    "ngram": lambda target: NgramDrafter(),
    "suffix": lambda target: SuffixDrafter(),
    "model": lambda target: ModelDrafter.of_model(target, target),
    "first layer": lambda target: ModelDrafter.first_layers(1, target),
    "hybrid": lambda target: HybridDrafter([head_drafter(tiny_head("eagle3", target), target), NgramDrafter()]),
}
every_drafter = pytest.mark.parametrize("name", DRAFTERS)


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Any]) -> TargetModel:
    return TargetModel.wrap(tiny_model("llama", vocab_size=VOCAB_SIZE))


def serving_engine(target: TargetModel, drafter: Any, *, max_requests: int = 3, isolate_faults: bool = False) -> Engine:
    """As a server has it: few slots, small chunks, beginnings taken over."""
    sharing = Sharing(prefill_chunk=7, reuse_prefixes=True, isolate_faults=isolate_faults)
    engine = Engine(target, drafter, max_length=MAX_LENGTH, max_requests=max_requests, tree=TREE, sharing=sharing)
    engine.reserve()
    return engine


def run(engine: Engine, requests: Sequence[Request] = ()) -> None:
    while engine.num_running or engine.num_waiting:
        engine.step()
    assert all(request.finish_reason is not None for request in requests)


def alone(target: TargetModel, drafter: Any, prompt: Sequence[int], params: SamplingParams) -> Completion:
    """The answer of a fresh engine that computes everything."""
    return Engine(target, drafter, max_length=MAX_LENGTH, tree=TREE).generate([prompt], params)[0]


def same(request: Request, expected: Completion) -> None:
    assert tuple(request.output_ids) == expected.token_ids
    assert tuple(request.accepted_lengths) == expected.accepted_lengths
    assert request.speculation == expected.speculation


@every_drafter
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_two_chats_that_begin_alike(name, temperature, target):
    """The second takes over 39 of the 40 shared rows: the last is computed again beside its new successor. Its tokens
    and its accepted lengths are those of a cold run, from a slot in use and from one that was left, copied and in
    place."""
    params = sampling(temperature, max_tokens=30)
    prompts = [[*SHARED, 40, 41], [*SHARED, 22, 23, 24]]
    expected = [alone(target, DRAFTERS[name](target), prompt, params) for prompt in prompts]
    assert expected[0].token_ids == plain_ids(target, prompts[0], params)

    drafter = DRAFTERS[name](target)
    assert isinstance(drafter, PrefixDrafter)
    engine = serving_engine(target, drafter)
    (first,) = engine.submit([prompts[0]], params)
    engine.step()
    engine.step()
    (second,) = engine.submit([prompts[1]], params)
    run(engine, [first, second])
    same(first, expected[0])
    same(second, expected[1])
    assert second.num_reused == 39
    (third,) = engine.submit([prompts[0]], params)
    run(engine)
    same(third, expected[0])
    assert third.num_reused >= 39


@every_drafter
def test_a_chat_that_goes_on_keeps_its_slot(name, target):
    """The next turn begins with the last one's prompt and answer."""
    params = sampling(max_tokens=20)
    engine = serving_engine(target, DRAFTERS[name](target))
    prompt = [5, 9, 13, 21, 6, 7, 8, 10, 12, 3]
    slots = set()
    for turn in range(3):
        (request,) = engine.submit([prompt], params)
        run(engine)
        same(request, alone(target, DRAFTERS[name](target), prompt, params))
        slots.add(request.slot)
        assert turn == 0 or request.num_reused > len(prompt) - 16
        prompt = [*prompt, *request.output_ids, 2, 4]
    assert len(slots) == 1


def test_the_draft_after_a_taken_over_prefix_is_that_of_a_fresh_prefill(target):
    """The head's logits at the boundary, where a row that pairs the shared state with the old successor would be
    wrong."""
    head = tiny_head("eagle3", target)
    params = sampling(max_tokens=8)
    engine = serving_engine(target, HeadDrafter(head))
    for prompt in ([*SHARED, 40, 41], [*SHARED, 22, 23]):
        cold = Engine(target, HeadDrafter(head), max_length=MAX_LENGTH, tree=TREE)
        pairs = [(each, each.submit([prompt], params)[0]) for each in (engine, cold)]
        logits = []
        for each, request in pairs:
            each._admit()
            each._round((), each._prompt_shares())
            logits.append(each.drafter.stepper.next_logits(request))
        torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=1e-5)
        engine.abort()


@pytest.mark.parametrize("mixes", [False, True], ids=["apart", "mixed"])
@every_drafter
def test_chunks_do_not_change_an_answer(name, mixes, target, monkeypatch):
    """A long prompt, prefilled in shares of 7 rows while another decodes, in forwards of its own and in the round's;
    long ones, too, of which the head reads parts early."""
    monkeypatch.setattr(Engine, "_mixes", mixes)
    params = sampling(0.8, max_tokens=20)
    prompts = [[4, 5, 6], list(range(3, 45)) * 2, [9, 9, 8, 7] * 9]
    expected = [alone(target, DRAFTERS[name](target), prompt, params) for prompt in prompts]
    engine = serving_engine(target, DRAFTERS[name](target))
    (first,) = engine.submit(prompts[:1], params)
    engine.step()
    others = engine.submit(prompts[1:], params)
    num_rows = []
    while engine.num_running or engine.num_waiting:
        engine.step()
        num_rows.append(engine.num_prompt_rows)
        assert first.finish_reason is not None or num_rows[-1] <= 7
    assert sum(num_rows) == sum(map(len, prompts[1:]))
    for request, answer in zip([first, *others], expected, strict=True):
        same(request, answer)


@pytest.mark.parametrize("name", ["eagle3", "model", "hybrid"])
def test_samples_of_a_prompt_compute_it_once(name, target):
    """The first is prefilled, the others take its rows over; each says what it says alone."""
    params = sampling(0.9, n=3, max_tokens=12)
    expected = Engine(target, DRAFTERS[name](target), max_length=MAX_LENGTH, tree=TREE).generate([SHARED], params)
    engine = serving_engine(target, DRAFTERS[name](target))
    requests = engine.submit([SHARED], params)
    run(engine)
    for request, answer in zip(requests, expected, strict=True):
        same(request, answer)
    assert [request.num_reused for request in requests] == [0, 39, 39]


@pytest.mark.parametrize("name", ["eagle3", "medusa", "model", "ngram"])
def test_rows_of_a_request_that_does_not_draft_are_of_use_to_one_that_does(name, target):
    """A load at which nothing is drafted must not cost the beginnings: states that wait are handed on."""
    params = sampling(max_tokens=20)
    expected = alone(target, DRAFTERS[name](target), [*SHARED, 40], params)
    engine = serving_engine(target, DRAFTERS[name](target))
    engine.share(replace(engine.sharing, follow_clock=True))
    engine.governor.depth = lambda num_requests: 0
    engine.governor.see = lambda *_, **__: None
    (first,) = engine.submit([[*SHARED, 22, 23]], sampling(max_tokens=60))
    for _ in range(50):
        engine.step()
    assert first.speculation.num_drafts == 0
    engine.share(replace(engine.sharing, follow_clock=False))
    (second,) = engine.submit([[*SHARED, 40]], params)
    run(engine)
    same(second, expected)
    assert second.num_reused == 39
    assert tuple(first.output_ids) == plain_ids(target, first.prompt_ids, first.params)


def test_a_long_prompt_stops_nobody(target):
    """While it is prefilled, the others emit in every step; and a short one that came later is through before it."""
    engine = serving_engine(target, NgramDrafter())
    (running,) = engine.submit([[5, 6]], sampling(max_tokens=60))
    engine.step()
    (long,) = engine.submit([list(range(40)) * 3], sampling(max_tokens=5))
    (short,) = engine.submit([[1, 2, 3, 4]], sampling(max_tokens=5))
    while not long.output_ids:
        before = len(running.output_ids)
        engine.step()
        assert len(running.output_ids) > before
    assert short.first_token_at < long.first_token_at


@pytest.mark.parametrize("name", ["eagle3", "medusa", "hybrid", "model", "ngram"])
@pytest.mark.parametrize("seed", range(3))
def test_any_schedule_of_joining_cancelling_and_finishing(name, seed, target):
    """200 events: the slots come back, and every finished text is its solo run's."""
    rng = random.Random(seed)
    engine = serving_engine(target, DRAFTERS[name](target))
    live: list[Request] = []
    finished: list[Request] = []
    for _ in range(200):
        event = rng.random()
        if event < 0.25:
            prompt = [*SHARED[: rng.choice([0, 12, 40])], *(rng.randrange(3, 48) for _ in range(rng.randint(1, 12)))]
            params = sampling(rng.choice([0.0, 0.9]), seed=rng.randrange(5), max_tokens=rng.randint(1, 25))
            live += engine.submit([prompt], params)
        elif event < 0.32 and live:
            engine.abort([live.pop(rng.randrange(len(live)))])
        elif event < 0.36:
            engine.preempt([request for request in engine._running if rng.random() < 0.5])
        else:
            engine.step()
        finished += [request for request in live if request.finish_reason is not None]
        live = [request for request in live if request.finish_reason is None]
    run(engine)
    assert engine.num_free_slots == engine.num_slots == 3
    for request in [*finished, *live]:
        assert tuple(request.output_ids) == plain_ids(target, request.prompt_ids, request.params)


def test_a_requests_own_bounds(target):
    """Off, narrower and shallower than the engine's; never wider. The tokens are the same."""
    params = sampling(max_tokens=30)
    sizes: dict[str, list[int]] = {}
    for name, bounds in {
        "off": DraftBounds(enabled=False),
        "narrow": DraftBounds(max_nodes=3),
        "shallow": DraftBounds(max_depth=1),
        "default": None,
    }.items():
        engine = serving_engine(target, DRAFTERS["eagle3"](target))
        requests = engine.prepare(SHARED, params, draft=bounds)
        engine.enqueue(requests)
        sizes[name] = []
        depths = set()
        while engine.num_running or engine.num_waiting:
            engine.step()
            sizes[name] += [one.num_nodes for one in engine.rounds if not one.is_first]
            depths |= {one.depth for one in engine.rounds if not one.is_first}
        assert tuple(requests[0].output_ids) == plain_ids(target, SHARED, params)
        if name == "shallow":
            assert depths <= {0, 1}
    assert set(sizes["off"]) == {0}
    assert max(sizes["narrow"]) == 3
    assert max(sizes["default"]) > 3


@pytest.mark.parametrize("bounds", [{"max_nodes": 25}, {"max_depth": 5}])
def test_bounds_beyond_the_engines_are_refused(bounds, target):
    engine = serving_engine(target, NgramDrafter())
    with pytest.raises(ValueError, match=r"draft\.max_.* at most"):
        engine.prepare([1, 2], sampling(), draft=DraftBounds(**bounds))


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"max_nodes": 0}, "max_nodes"),
        ({"max_depth": True}, "max_depth"),
        ({"enabled": 1}, "enabled"),
        ({"enabled": False, "max_nodes": 2}, "drafting is off"),
    ],
)
def test_bounds_that_mean_nothing_are_refused(bounds, message):
    with pytest.raises(ValueError, match=message):
        DraftBounds(**bounds)


def test_counts_are_of_what_stands_in_the_answer(target):
    """A perfect draft of 5 whose last block is cut by the length: 1 from the prefill, blocks of 6, and what is left.
    Every token is counted once: those accepted, and one of the target's own a round, but for the block that was cut."""
    params = sampling(max_tokens=1 + 6 + 6 + 4)
    answer = plain_ids(target, [5, 3], params)

    def script(request, limit):
        return DraftTree.chain(tuple(answer[len(request.output_ids) :][:5]))

    engine = Engine(target, ScriptedDrafter(script), tree=TreeSettings(max_depth=8, adaptive=False))
    done = engine.generate([[5, 3]], params)[0]
    counts = done.speculation
    assert done.accepted_lengths == (1, 6, 6, 4)
    assert (counts.num_rounds, counts.num_drafts, counts.num_draft_tokens) == (3, 3, 5 + 5 + 4)
    assert counts.num_accepted_tokens == 5 + 5 + 4
    assert counts.accepted_per_position == [3, 3, 3, 3, 2]
    assert counts.mean_accepted_length == 1 + 14 / 3
    assert sum(done.accepted_lengths) == len(done.token_ids)


def test_rounds_without_a_draft_are_no_drafts(target):
    counts = plain(target, [5, 3], sampling(max_tokens=9)).speculation
    assert (counts.num_rounds, counts.num_drafts, counts.num_draft_tokens, counts.accepted_per_position) == (
        8,
        0,
        0,
        [],
    )
    assert counts.mean_accepted_length != counts.mean_accepted_length  # not a number


class Faulty(NgramDrafter):
    """Raises when it is asked about a text with `poison`."""

    def __init__(self, poison: int, *, where: str = "propose") -> None:
        super().__init__()
        self.poison, self.where = poison, where

    def propose(self, requests, limits):
        self._check("propose", requests)
        return super().propose(requests, limits)

    def observe(self, request, states):
        self._check("observe", [request])
        super().observe(request, states)

    def _check(self, where, requests):
        if where == self.where and any(self.poison in request.prompt_ids for request in requests):
            raise RuntimeError("the draft does not fit")


@pytest.mark.parametrize("where", ["propose", "observe"])
def test_a_draft_that_fails_ends_no_request(where, target, caplog):
    """Those beside it go on without drafts; later ones draft again."""
    params = sampling(max_tokens=24)
    prompts = [[5, 6, 7] * 3, [9, 8] * 4, [47, 3, 3], [1, 2, 1, 2, 1]]
    engine = serving_engine(target, Faulty(47, where=where), max_requests=4, isolate_faults=True)
    requests = engine.submit(prompts, params)
    run(engine)
    assert [tuple(request.output_ids) for request in requests] == [plain_ids(target, p, params) for p in prompts]
    assert "the draft does not fit" in caplog.text
    assert engine.is_drafting
    (later,) = engine.submit([prompts[0]], params)
    run(engine)
    assert later.speculation.num_drafts > 0


def test_a_drafter_that_always_fails_is_given_up(target, caplog):
    engine = serving_engine(target, Faulty(47), isolate_faults=True)
    for _ in range(MOST_DRAFT_FAULTS):
        assert engine.is_drafting
        (request,) = engine.submit([[47, 3]], sampling(max_tokens=6))
        run(engine)
        assert request.finish_reason == "length"
    assert not engine.is_drafting
    assert "decoded plainly" in caplog.text


def test_a_fault_ends_the_request_that_it_is_for_and_no_other(target, caplog):
    """In verification, and in a forward that serves several."""
    params = sampling(max_tokens=12)
    prompts = [[5, 6], [47, 3], [9, 8]]
    expected = [plain_ids(target, prompt, params) for prompt in prompts]
    for place in ("processor", "forward"):
        engine = serving_engine(target, None, isolate_faults=True)
        requests = engine.submit(prompts, params)
        if place == "processor":
            requests[1].processor.scores = _raise
        else:
            engine.target = _FaultyTarget(target, slot=1)
        run(engine)
        assert requests[1].finish_reason == "error"
        assert requests[1].is_fault
        assert "internal error" in requests[1].error
        assert [tuple(requests[i].output_ids) for i in (0, 2)] == [expected[0], expected[2]]
        assert engine.num_free_slots == engine.num_slots


def test_faults_are_the_callers_where_they_are_not_isolated(target):
    engine = serving_engine(target, Faulty(47))
    engine.submit([[47, 3]], sampling())
    with pytest.raises(RuntimeError, match="does not fit"):
        run(engine)


def test_adaptive_trees_get_narrower_with_load(target):
    """Where rows are dear, many requests share what few had."""
    cost = CostModel(widths=(1, 8, 64), milliseconds=(10.0, 10.5, 30.0))

    def nodes(num_requests: int) -> float:
        def script(request, limit):
            tokens = [(request.output_ids[-1] + 1 + k) % VOCAB_SIZE for k in range(6)]
            return DraftTree(
                tokens=tuple(tokens), parents=(-1,) * 6, values=(0.3, 0.2, 0.1, 0.05, 0.05, 0.05), kind=_ONE
            )

        engine = Engine(
            target, ScriptedDrafter(script), tree=TreeSettings(max_depth=4), cost=cost, max_requests=num_requests
        )
        engine.submit([[5, 3, k] for k in range(num_requests)], sampling(max_tokens=10))
        engine.step()
        return sum(one.num_nodes for one in engine.rounds if not one.is_first) / num_requests

    assert nodes(1) > nodes(8) > nodes(24)


def test_slots_that_memory_cannot_hold_are_refused_at_once(target, monkeypatch):
    monkeypatch.setattr("infer.engine.available_bytes", lambda device: 1000)
    engine = Engine(target, max_requests=64, max_length=128)
    with pytest.raises(ValueError, match=r"64 requests of 128 tokens take .* GB .* lower max_requests"):
        engine.reserve()
    with pytest.raises(ValueError, match="max_length"):
        Engine(target).reserve()


_ONE = DraftTree.empty().kind


def _raise(*_: Any) -> None:
    raise RuntimeError("a fault in a processor")


class _FaultyTarget:
    """A target whose forwards fail where a slot is in them."""

    def __init__(self, target: TargetModel, *, slot: int) -> None:
        self._target, self._slot = target, slot

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(self, groups, *args, **kwargs):
        if any(group.slot == self._slot for group in groups):
            raise RuntimeError("out of memory")
        return self._target.forward(groups, *args, **kwargs)
