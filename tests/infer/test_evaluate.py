"""Acceptance figures against values worked out by hand, and in the real decode loop."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from infer.bound_meter import BoundMeter, BoundReport
from infer.drafters.base import DraftLimit, TreeSettings
from infer.drafters.hybrid import HybridDrafter
from infer.drafters.ngram import NgramDrafter
from infer.drafters.scripted import ScriptedDrafter, replay
from infer.engine import Engine
from infer.evaluate import (
    Acceptance,
    AcceptanceReport,
    EvalPrompt,
    Trace,
    evaluate,
    limit_per_domain,
    render_prompts,
)
from infer.prompts import EvaluationPrompt
from infer.repetition import is_looping, repeated_share
from infer.request import Completion, Request
from infer.sampling import SamplingParams
from infer.stopping import StopChecker
from infer.target import TargetModel
from infer.tree import ROOT, Coupled, DraftTree, GreedySet, OneHot, Sampled
from tests.toy_tokenizer import toy_tokenizer


def completion(lengths: tuple[int, ...], *, num_prompt: int = 4) -> Completion:
    return Completion(
        prompt_token_ids=tuple(range(num_prompt)),
        token_ids=tuple(range(sum(lengths))),
        text="",
        finish_reason="length",
        stop_reason=None,
        num_rounds=len(lengths),
        accepted_lengths=lengths,
        seed=0,
        seconds=1.0,
        tokens_per_second=1.0,
    )


def trace(lengths: tuple[int, ...], *, domain: str = "chat", temperature: float = 0.0, num_prompt: int = 4) -> Trace:
    return Trace.of(completion(lengths, num_prompt=num_prompt), domain=domain, temperature=temperature)


def test_hand_computed_trace() -> None:
    """Accepted lengths are defined once: the target's token counts, the prefill's and what lies behind a cut
    do not.

    Rounds of the first answer: the prefill; 3 drafts accepted of 3; a round without a draft (1); nothing
    accepted (1); a block of 5 cut to 2 by an end of text. Of the second: the prefill; 1 accepted; a block cut
    to 3 by the length cap.
    """
    first, second = trace((1, 4, 1, 1, 2)), trace((1, 2, 3), domain="code", temperature=0.7)
    report = AcceptanceReport.of([first, second])

    assert report.overall.num_rounds == 6
    assert report.overall.num_tokens == 4 + 1 + 1 + 2 + 2 + 3 == 13
    assert report.accepted_length == pytest.approx(13 / 6)
    assert report.overall.by_position == pytest.approx((4 / 6, 2 / 6, 1 / 6))
    assert report.overall.histogram == {1: 2, 2: 2, 3: 1, 4: 1}
    assert report.accepted_length == pytest.approx(1 + sum(report.overall.by_position))
    assert report.by_domain["chat"].accepted_length == pytest.approx(8 / 4)
    assert report.by_domain["code"].by_position == pytest.approx((1.0, 0.5))
    assert report.by_domain["code"].at_position(3) == 0.0
    assert report.by_temperature[0.7].num_tokens == 5
    assert report.num_completion_tokens == 15
    assert report.num_prefill_tokens == 2
    assert report.overall.num_tokens == report.num_completion_tokens - report.num_prefill_tokens
    assert "prefill" in report.definition


def test_blocks_are_counted_as_the_stop_checker_cuts_them() -> None:
    """Tokens behind an end of text were once counted as accepted by other engines."""
    stopper = StopChecker(SamplingParams(max_tokens=12), eos_ids=frozenset({2}), tokenizer=None)
    kept = [stopper.push(block).num_kept for block in ([5], [5, 6, 7], [5, 2, 8, 9, 9])]
    assert trace(tuple(kept)).round_lengths == (3, 2)
    capped = StopChecker(SamplingParams(max_tokens=3), eos_ids=frozenset({2}), tokenizer=None)
    kept = [capped.push(block).num_kept for block in ([5], [5, 6, 7])]
    assert trace(tuple(kept)).round_lengths == (2,)


def test_answers_without_draft_rounds() -> None:
    """An answer of one token has no draft round: it adds nothing, and alone it divides nothing by zero."""
    report = AcceptanceReport.of([trace((1,))])
    assert report.overall == Acceptance(num_rounds=0, num_tokens=0, accepted_length=0.0, by_position=(), histogram={})
    assert report.by_context == {}
    assert AcceptanceReport.of([trace((1,)), trace((1, 2))]).accepted_length == 2.0


def test_rounds_are_filed_under_the_context_before_them() -> None:
    """A round that starts at 127 tokens belongs to the first bucket, the next one to the second."""
    report = AcceptanceReport.of([trace((1, 3, 2), num_prompt=126)])
    assert {name: pool.num_tokens for name, pool in report.by_context.items()} == {"0-127": 3, "128-255": 2}
    far = AcceptanceReport.of([trace((1, 3), num_prompt=4000)])
    assert list(far.by_context) == ["2048+"]


def test_looping_answers_are_set_apart() -> None:
    """Loops flatter the accepted length, so the report carries it without them as well."""
    looping = completion((1, 20, 20))
    looping = Completion(**{**vars(looping), "token_ids": (*range(21), *range(20))})
    assert is_looping(looping.token_ids)
    assert repeated_share(looping.token_ids) == pytest.approx(40 / 41)
    report = AcceptanceReport.of([Trace.of(looping, domain="chat", temperature=0.0), trace((1, 2, 2))])
    assert report.num_looping == 1
    assert report.without_loops.accepted_length == 2.0


def test_prompts_are_limited_per_domain_and_rendered() -> None:
    """The limit keeps the first prompts of each domain; raw rendering is on request only."""
    chats = [
        EvaluationPrompt(domain=domain, messages=({"role": "user", "content": text},))
        for domain, text in (("a", "one"), ("b", "two"), ("a", "three"))
    ]
    assert limit_per_domain(chats, 1) == chats[:2]
    assert limit_per_domain(chats, None) == chats
    (rendered,) = render_prompts(toy_tokenizer(), chats[:1])
    (raw,) = render_prompts(toy_tokenizer(), chats[:1], raw=True)
    assert rendered.domain == "a"
    assert len(rendered.token_ids) > len(raw.token_ids)


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Any]) -> TargetModel:
    return TargetModel.wrap(tiny_model("llama"))


PROMPTS = [
    EvalPrompt(domain="a", token_ids=(5, 6, 7)),
    EvalPrompt(domain="b", token_ids=tuple(range(3, 40))),
]


def test_the_real_loop_reports_a_perfect_drafter(target: TargetModel) -> None:
    """A drafter that knows the answer is accepted whole: depth + 1 tokens a round until the cap cuts the
    last."""
    prompt = PROMPTS[0]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    (plain,) = Engine(target).generate([prompt.token_ids], params)
    drafter = ScriptedDrafter(replay(plain.token_ids, depth=3))
    engine = Engine(target, drafter, tree=TreeSettings(adaptive=False))
    (drafted,) = engine.generate([prompt.token_ids], params)
    assert drafted.token_ids == plain.token_ids
    report = AcceptanceReport.of([Trace.of(drafted, domain="a", temperature=0.0)])
    assert report.overall.histogram == {3: 1, 4: 4}  # 1 + 4 * 4 + 3 = 20
    assert report.overall.at_position(2) == 1.0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_evaluation_is_repeatable_and_adds_up(target: TargetModel, temperature: float) -> None:
    """Same seed, same figures, in float32; without a drafter every round emits exactly one token."""
    engine = Engine(target, NgramDrafter(), tree=TreeSettings(adaptive=False))
    steps: list[int] = []
    first = evaluate(engine, PROMPTS, temperatures=[temperature], max_tokens=24, progress=steps.append)
    again = evaluate(engine, PROMPTS, temperatures=[temperature], max_tokens=24)
    assert first == again
    assert sum(steps) == first.num_completion_tokens
    assert set(first.by_domain) == {"a", "b"}
    plain = evaluate(Engine(target), PROMPTS, temperatures=[temperature], max_tokens=24)
    assert plain.accepted_length == 1.0
    assert plain.num_completion_tokens == first.num_completion_tokens
    assert json.loads(json.dumps(first.to_dict()))["overall"]["num_rounds"] == first.overall.num_rounds


def test_nothing_to_evaluate_is_refused(target: TargetModel) -> None:
    """An empty list gives no figure rather than a zero."""
    with pytest.raises(ValueError, match="at least one prompt"):
        evaluate(Engine(target), [], temperatures=[0.0], max_tokens=4)


class DrawingDrafter(ScriptedDrafter):
    """Proposes `num_drawn` children a node, two deep, from one fixed distribution over 8 tokens that is far from the
    target's; of coupled lists the first `num_kept` are left."""

    probs = torch.softmax(torch.arange(8.0) * 0.5, dim=0)

    def __init__(self, num_drawn: int, *, num_kept: int = 8) -> None:
        super().__init__(self.draw, name="drawing")
        self.records = False
        self.num_drawn, self.num_kept = num_drawn, num_kept
        self.generator = torch.Generator().manual_seed(0)

    def ranked(self, request: Request, depth: int) -> list[int]:
        if request.params.greedy:
            return self.probs.topk(self.num_drawn).indices.tolist()
        if Coupled in request.rule.kinds:
            scores = self.probs.log() + request.noise.at(request.num_tokens + depth)
            return scores.topk(self.num_drawn).indices.tolist()[: self.num_kept]
        fixed = self.probs.topk(self.num_drawn - 1).indices.tolist() if GreedySet in request.rule.kinds else []
        left = self.probs.clone()
        left[fixed] = 0
        drawn = torch.multinomial(left, self.num_drawn - len(fixed), generator=self.generator)
        return [*fixed, *drawn.tolist()]

    def draw(self, request: Request, limit: DraftLimit) -> DraftTree:
        tokens: list[int] = []
        parents: list[int] = []
        expanded = {}
        for depth in range(min(2, limit.max_depth)):
            for parent in [ROOT] if depth == 0 else list(range(len(tokens))):
                expanded[parent] = self.probs
                tokens += (children := self.ranked(request, depth))
                parents += [parent] * len(children)
        if request.params.greedy:
            kind: Any = OneHot()
        elif Coupled in request.rule.kinds:
            kind = Coupled(draft_probs=expanded if self.records else {}, num_drawn=self.num_drawn)
        else:
            kind = (Sampled if Sampled in request.rule.kinds else GreedySet)(draft_probs=expanded)
        return DraftTree(tokens=tuple(tokens), parents=tuple(parents), kind=kind, values=(0.5,) * len(tokens))


def measured_bound(
    tiny_model: Callable[..., Any], rule: str, num_drawn: int, *, num_kept: int = 8, temperature: float = 1.0
) -> BoundReport:
    target = TargetModel.wrap(tiny_model("llama", vocab_size=8, eos_token_id=None, pad_token_id=None))
    engine = Engine(target, DrawingDrafter(num_drawn, num_kept=num_kept), rule=rule, tree=TreeSettings(adaptive=False))
    prompts = [EvalPrompt(domain=f"d{i % 2}", token_ids=(5, 3, i % 8)) for i in range(24)]
    report = evaluate(engine, prompts, temperatures=[temperature], max_tokens=48, bound=True)
    assert (engine.observer, engine.drafter.records) == (None, False)
    assert report.bound is not None
    return report.bound


@pytest.mark.parametrize(("rule", "num_drawn"), [("token", 1), ("recursive", 1), ("greedy_set", 1), ("greedy_set", 3)])
def test_rules_that_attain_the_bound_measure_a_ratio_of_one(tiny_model, rule, num_drawn):
    """Over the whole pool and each position: within 4 standard errors, where a right measurement falls outside once in
    16,000 (six are looked at, seeds fixed); and the error is small enough to see a wrong bound."""
    report = measured_bound(tiny_model, rule, num_drawn)
    assert set(report.by_domain) == {"d0", "d1"}
    assert report.overall.standard_error < 0.05
    for pool in (report.overall, *report.by_position.values()):
        assert abs(pool.ratio - 1) < 4 * pool.standard_error


@pytest.mark.parametrize(
    ("rule", "num_drawn", "num_kept", "below"),
    [("match", 1, 8, False), ("match", 3, 8, False), ("match", 3, 1, True), ("recursive", 3, 8, False),
     ("traversal", 3, 8, False), ("block", 1, 8, False)],
)  # fmt: skip
def test_no_rule_measures_above_its_bound(tiny_model, rule, num_drawn, num_kept, below):
    """At most 1 within 4 standard errors; a coupled list that is cut after it was drawn, clearly below. Rules that look
    ahead are measured at the root alone."""
    report = measured_bound(tiny_model, rule, num_drawn, num_kept=num_kept)
    for pool in (report.overall, *report.by_position.values()):
        assert pool.ratio < 1 + 4 * pool.standard_error
    assert not below or report.overall.ratio < 1 - 4 * report.overall.standard_error
    assert set(report.by_position) == ({1} if rule in ("traversal", "block") else {1, 2})


def test_greedy_drafts_attain_their_bound_exactly(tiny_model):
    report = measured_bound(tiny_model, "match", 3, temperature=0.0)
    assert report.overall.ratio == 1.0
    assert report.overall.standard_error == 0.0
    assert 0 < report.overall.bound < 1


def test_bounds_are_measured_on_a_random_choice_of_nodes(tiny_model):
    """A cap thins evenly and keeps the counts; lossy rules, drafters without records and lookups have no bound."""
    target = TargetModel.wrap(tiny_model("llama", vocab_size=8, eos_token_id=None, pad_token_id=None))
    meter = BoundMeter(lambda request: "all", max_nodes=50)
    drafter = DrawingDrafter(2)
    engine = Engine(target, drafter, tree=TreeSettings(adaptive=False), observer=meter)
    params = [SamplingParams(temperature=t, seed=i, max_tokens=30) for i in range(10) for t in (0.5, 1.0)]
    assert meter.report() is None
    drafter.records = True
    engine.generate([[5, 3, 1]] * len(params), params)
    report = meter.report()
    assert all(20 <= pool.num_nodes <= 50 for pool in report.by_temperature.values())
    assert report.num_visited > 300
    assert report.num_without_record == 0

    prompts = [EvalPrompt(domain="a", token_ids=(5, 3, 1))]
    lossy = Engine(target, drafter, rule="typical", tree=TreeSettings(adaptive=False))
    lookup = Engine(target, NgramDrafter())
    for engine in (lossy, lookup, Engine(target)):
        found = evaluate(engine, prompts, temperatures=[1.0], max_tokens=20, bound=True)
        assert found.bound is None
        assert "bound" not in found.to_dict()
    hybrid = Engine(target, HybridDrafter([DrawingDrafter(2), NgramDrafter()]), tree=TreeSettings(adaptive=False))
    found = evaluate(hybrid, prompts, temperatures=[1.0], max_tokens=100, bound=True)
    assert found.bound.num_without_record > 0
    assert json.loads(json.dumps(found.to_dict()))["bound"]["overall"]["num_nodes"] == found.bound.overall.num_nodes
