"""Live adaptation: trees follow what rounds have shown, drafting rests where it does not pay, and no token moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from infer.adaptation import Adaptation, Evidence
from infer.cost import CostModel
from infer.drafters import DraftLimit, NgramDrafter, ScriptedDrafter, TreeSettings
from infer.drafters.base import at_depth
from infer.engine import Engine
from infer.request import Request
from infer.sampling import SamplingParams
from infer.target import TargetModel
from infer.tree import ROOT, DraftTree, OneHot
from infer.verify import RULES
from tests.infer.helpers import plain_ids, sampling

PROMPT = [5, 17, 3, 9]
COST = CostModel(widths=(1, 64), milliseconds=(10.0, 73.0))
TREE = TreeSettings(max_nodes=8, max_depth=4, branch=2, beam=1)
LIMIT = DraftLimit(max_nodes=8, max_depth=4)


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Any]) -> TargetModel:
    return TargetModel.wrap(tiny_model("llama"))


class Rounds:
    """Rounds of one request after another under `adaptation`, without a model: chains of 4 tokens, each said to be
    right with chance `value`, in drafts of 4 ms. sizes: nodes verified; asked: whether a draft was asked for."""

    def __init__(self, target: TargetModel, *, value: float = 0.6, adaptive: bool = True) -> None:
        self.target, self.adaptive = target, adaptive
        self.adaptation = Adaptation()
        self.sizes: list[int] = []
        self.asked: list[bool] = []
        values = tuple(value**d for d in range(1, 5))
        tree = DraftTree(tokens=(1, 2, 3, 4), parents=(ROOT, 0, 1, 2), values=values, kind=OneHot())
        self.drafter = ScriptedDrafter(lambda request, limit: tree)
        self.drafter.spent_milliseconds = 4.0

    def answer(self, right: Callable[[int], int], *, num_rounds: int) -> Rounds:
        """`right(round)`: how many of the drafted tokens are, if so many are verified."""
        self.sizes, self.asked = [], []
        request = Request.create(
            PROMPT, sampling(), seed=0, sample=0, rule=RULES["match"], exactness="seed", target=self.target
        )
        for number in range(num_rounds):
            (tree,) = trees = self.adaptation.draft(self.drafter, [request], [LIMIT], COST, adaptive=self.adaptive)
            self.sizes.append(len(tree))
            self.asked.append(self.adaptation.num_drafted == 1)
            request.accepted_lengths.append(1 + min(len(tree), right(number)))
            if self.adaptive:
                self.adaptation.learn([request], trees)
        self.adaptation.forget(request)
        return self


def test_a_poor_draft_rests_and_tries_again(target):
    """Always wrong at 4 ms a draft: asked for the first rounds, then ever more seldom, in rests of up to 64 rounds."""
    rounds = Rounds(target).answer(lambda number: 0, num_rounds=300)
    assert all(rounds.asked[:2])
    assert 3 <= sum(rounds.asked[:50]) <= 20
    assert 1 <= sum(rounds.asked[150:]) <= 12
    assert [*rounds.asked[150:], True].index(True) <= 64


def test_trees_shrink_where_deep_nodes_are_wrong(target):
    """Of chains the first token alone is ever right: that is worth a draft, and in the end the second is only tried now
    and then."""
    rounds = Rounds(target).answer(lambda number: 1, num_rounds=80)
    assert rounds.sizes[0] > max(rounds.sizes[-20:])
    assert min(rounds.sizes[-20:]) == 1
    assert all(rounds.asked)


def test_a_good_draft_grows(target):
    """Always right though it says 0.45: more nodes are verified, and it never rests."""
    rounds = Rounds(target, value=0.45).answer(lambda number: 4, num_rounds=40)
    assert all(rounds.asked)
    assert rounds.sizes[0] < rounds.sizes[-1]


def test_it_recovers(target):
    """Wrong for 40 rounds, right from then on: after one more rest it is asked in every round."""
    rounds = Rounds(target).answer(lambda number: 4 if number >= 40 else 0, num_rounds=160)
    assert not all(rounds.asked[:40])
    assert all(rounds.asked[-40:])


def test_it_recovers_from_what_other_requests_have_shown(target):
    """After poor requests, one whose first token is always right (2 tokens in 15 ms instead of 20) is drafted for all
    along: rounds that pay follow each other, where lone tries between rests of 64 rounds would never make up for the
    others."""
    rounds = Rounds(target)
    for _ in range(10):
        rounds.answer(lambda number: 0, num_rounds=200)
    assert sum(rounds.answer(lambda number: 1, num_rounds=300).asked[100:]) > 150


def test_the_next_request_begins_with_what_the_last_has_shown(target):
    """A second request of a poor draft rests sooner than the first did."""
    rounds = Rounds(target)
    first = rounds.answer(lambda number: 0, num_rounds=100).asked.index(False)
    assert rounds.answer(lambda number: 0, num_rounds=100).asked.index(False) < first


def test_fixed_trees_do_not_adapt(target):
    rounds = Rounds(target, adaptive=False).answer(lambda number: 0, num_rounds=60)
    assert all(rounds.asked)
    assert set(rounds.sizes) == {4}


def test_the_load_enters_by_the_batch(target):
    """A table that charges batches for their rows: alone a request is given a tree, beside seven others a smaller."""

    class Loaded(CostModel):
        def at(self, *, context: int = 0, batch: int = 1) -> CostModel:
            return CostModel(widths=(1, 64), milliseconds=(10.0, 10.0 + 30.0 * batch))

    sizes = {}
    for batch in (1, 8):
        tree = DraftTree(tokens=(1, 2, 3), parents=(ROOT, 0, 1), values=(0.6, 0.3, 0.2), kind=OneHot())
        engine = Engine(
            target,
            ScriptedDrafter(lambda request, limit, tree=tree: tree),
            tree=TREE,
            cost=Loaded(widths=(1,), milliseconds=(1.0,)),
        )
        requests = engine.submit([PROMPT] * batch, sampling(max_tokens=12))
        engine.step()
        sizes[batch] = sum(map(len, engine._draft(requests, None))) / batch
    assert sizes[8] < sizes[1]


def test_drawn_trees_are_left_alone(target):
    """Requests of rejection rules are always drafted for, and their values stay what they were drawn with."""
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=8, ignore_eos=True)
    engine = Engine(target, ScriptedDrafter(lambda *_: DraftTree.empty()), rule="recursive", tree=TREE, cost=COST)
    (request,) = engine.submit([PROMPT], params)
    engine.step()
    adaptation, limit = Adaptation(), DraftLimit(max_nodes=4, max_depth=2)
    seen: list[DraftLimit] = []

    def script(request: Request, limit: DraftLimit) -> DraftTree:
        seen.append(limit)
        return DraftTree.empty()

    for _ in range(20):
        trees = adaptation.draft(ScriptedDrafter(script), [request], [limit], COST, adaptive=True)
        request.accepted_lengths.append(1)
        adaptation.learn([request], trees)
    assert seen == [limit] * 20


def test_evidence_by_hand():
    """Promised 0.8 and 0.4 a round, kept 1 and 0: ten rounds bring the first above what it was, the second to
    little; a third depth follows the second half of the way."""
    evidence = Evidence()
    assert evidence.trust(3, ()) == (1.0, 1.0, 1.0)
    for _ in range(10):
        evidence.see([0.8, 0.4], 1)
    one, two, three = evidence.trust(3, ())
    assert one == pytest.approx((3 + 10) / (3 + 8))
    assert two == pytest.approx(3 * one**0.5 / (3 + 4))
    assert three == pytest.approx(two**0.5)
    assert at_depth((one, two), 5) == two
    assert at_depth((), 5) == 1.0


def test_gain_by_hand():
    """Rounds of 2 tokens in 15 ms beside 10 ms plain: 1.33 times plain, from a belief of 1 that counts for 6 rounds."""
    evidence = Evidence()
    for _ in range(6):
        evidence.num_rounds += 1
        evidence.tokens += 2
        evidence.drafted += 15
        evidence.plain += 10
    assert evidence.gain(1.0) == pytest.approx((6 + 6 * 20 / 15) / 12)


def test_no_token_moves(target):
    """A lookup whose drafts seldom pay, greedy and sampled requests at once: all are plain decoding's, and in some
    rounds a request rested."""
    prompts = [PROMPT, [7, 7, 7, 7], [9, 8, 9, 8, 9]]
    params = [sampling(0.5 * i, max_tokens=40) for i in range(3)]
    drafter = NgramDrafter()
    drafter.spent_milliseconds = 6.0
    engine = Engine(target, drafter, tree=TREE, cost=COST)
    requests = engine.submit(prompts, params)
    num_drafted = []
    while any(request.finish_reason is None for request in requests):
        engine.step()
        num_drafted.append(engine.adaptation.num_drafted)
    assert min(num_drafted[:20]) < 3
    for request, prompt, one in zip(requests, prompts, params, strict=True):
        assert tuple(request.output_ids) == plain_ids(target, prompt, one)
