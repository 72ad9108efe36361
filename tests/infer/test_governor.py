"""The governor finds the depth that makes the most of a load's time, keeps to it, and notices when that changes."""

from __future__ import annotations

import random

import pytest

from infer.drafters import NgramDrafter, TreeSettings
from infer.engine import Engine
from infer.governor import DEPTHS, Governor
from infer.request import DraftBounds
from infer.scheduling import Sharing
from infer.target import TargetModel
from tests.infer.helpers import plain_ids, sampling

Rates = dict[int | None, tuple[float, float]]
"""For each depth: tokens a request's round, and its seconds."""


def simulate(governor: Governor, rates: Rates, *, num_requests: int, rounds: int, seed: int = 0) -> tuple[float, float]:
    """(share of the best depth's tokens a second that was made, share of the rounds that drafted)."""
    rng = random.Random(seed)
    tokens = seconds = 0.0
    num_drafted = 0
    for _ in range(rounds):
        depth = governor.depth(num_requests)
        mean, time = rates[depth]
        made = sum(1 + (rng.random() < mean - 1) for _ in range(num_requests))
        took = time * rng.lognormvariate(0.0, 0.1) * (10.0 if rng.random() < 0.01 else 1.0)
        governor.see(num_requests, depth, tokens=made, seconds=took)
        tokens, seconds = tokens + made, seconds + min(took, 4 * time)
        num_drafted += depth != 0
    best = max(num_requests * mean / time for mean, time in rates.values())
    return tokens / seconds / best, num_drafted / rounds


@pytest.mark.parametrize("best", DEPTHS)
@pytest.mark.parametrize("num_requests", [1, 4, 16, 64])
def test_the_best_depth_is_found(best, num_requests):
    """A fifth better than the others, in noise of a tenth and with rounds that something held up: over 3,000 rounds at
    most 5 % are lost to finding out. 1.5 tokens a round are noisy when alone: there the sums need longer."""
    rates = {depth: (1.5, 1.0 if depth == best else 1.25) for depth in DEPTHS}
    made, drafted = simulate(Governor(), rates, num_requests=num_requests, rounds=3000)
    assert made > 0.93
    assert drafted < 0.2 if best == 0 else drafted > 0.8


def test_loads_are_apart():
    """Alone drafts pay, in a crowd they do not."""
    governor = Governor()
    for _ in range(20):
        simulate(governor, {None: (1.9, 1.2), 1: (1.5, 1.1), 0: (1.0, 1.0)}, num_requests=1, rounds=100)
        simulate(governor, {None: (1.9, 2.5), 1: (1.5, 1.8), 0: (1.0, 1.0)}, num_requests=32, rounds=100)
    assert governor.depth(1) is None
    assert governor.depth(32) == 0


def test_a_change_is_noticed():
    governor = Governor()
    simulate(governor, {None: (1.9, 2.5), 1: (1.5, 1.8), 0: (1.0, 1.0)}, num_requests=8, rounds=3000)
    _, drafted = simulate(governor, {None: (1.9, 1.1), 1: (1.5, 1.1), 0: (1.0, 1.0)}, num_requests=8, rounds=6000)
    assert drafted > 0.5


def test_no_token_follows_from_the_clock(tiny_model):
    target = TargetModel.wrap(tiny_model("llama"))
    params = sampling(max_tokens=60)
    prompts = [[5, 6, 7] * 4, [9, 8] * 5, [3]]
    engine = Engine(target, NgramDrafter(), sharing=Sharing(follow_clock=True), tree=TreeSettings(adaptive=False))
    answers = [one.token_ids for _ in range(3) for one in engine.generate(prompts, params)]
    assert answers == [plain_ids(target, prompt, params) for prompt in prompts] * 3


def test_rounds_of_requests_that_do_not_draft_say_nothing(tiny_model):
    """Plain requests between drafted ones must not make drafting look as slow, or as fast, as theirs."""
    target = TargetModel.wrap(tiny_model("llama"))
    engine = Engine(target, NgramDrafter(), sharing=Sharing(follow_clock=True))
    seen = []
    engine.governor.see = lambda *args, **_: seen.append(args)
    engine.enqueue(engine.prepare([5, 6, 7] * 3, sampling(), draft=DraftBounds(enabled=False)))
    while engine.num_running or engine.num_waiting:
        engine.step()
    assert seen == []
    engine.generate([[5, 6, 7] * 3], sampling())
    assert seen
