"""The whole of tuning on a machine whose rounds cost what a formula says: prediction and choice can be held to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from infer.cost import CostModel
from infer.drafters import HybridDrafter, NgramDrafter
from infer.drafters.model import ModelDrafter
from infer.engine import Engine
from infer.sampling import SamplingParams
from infer.target import TargetModel
from infer.tune import measure
from infer.tune.record import Shape
from infer.tune.replay import Round
from infer.tune.rounds import TimedRound, timed_rounds
from infer.tune.search import PLAIN
from infer.tune.settings import Workload
from infer.tune.tuner import Prompts, Tuner

SHAPES = (Shape(branch=1, beam=1), Shape(branch=2, beam=2))
TEXTS = ((5, 17, 3, 9), (9, 8, 9, 8, 9), (40, 41, 42))
SAME = Prompts(tuning=TEXTS, held_out=TEXTS)
TABLE = CostModel(widths=(1, 64), milliseconds=(10.0, 40.0))


class Clock:
    """A machine: milliseconds of a draft's beginning and of a step; the rest is as `TABLE` says, and 0.4 a round."""

    def __init__(self, *, begin: float, step: float) -> None:
        self.begin, self.step = begin, step

    def timed(self, one: Round) -> TimedRound:
        draft = (self.begin + self.step * one.num_steps) * (one.num_asked > 0)
        forward = TABLE.target_milliseconds(one.num_rows)
        return TimedRound(round=one, milliseconds=draft + forward + 0.4, draft=draft, forward=forward)

    def rounds(
        self, engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[TimedRound]:
        return [self.timed(each.round) for each in timed_rounds(engine, prompts, params)]


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Any]) -> TargetModel:
    return TargetModel.wrap(tiny_model("llama"))


def tuner(target: TargetModel, monkeypatch: pytest.MonkeyPatch, clock: Clock, **more: Any) -> Tuner:
    monkeypatch.setattr(measure, "timed_rounds", clock.rounds)
    drafter = ModelDrafter.first_layers(2, target)
    drafter.stepper.begin_milliseconds = drafter.stepper.step_milliseconds = clock.step
    settings = {"prompts": SAME, "max_tokens": 12, "shapes": SHAPES, "table": TABLE, **more}
    return Tuner(target=target, drafters={False: drafter}, **settings)


def test_the_choice_is_the_best_of_all_and_predictions_are_right(target, monkeypatch):
    """Every setting measured, on the prompts that were tuned on: predictions are within a hundredth of what the
    machine's formula makes (the fit's corrections are all that could be off), and none beats the chosen by more."""
    one = tuner(target, monkeypatch, Clock(begin=0.5, step=1.0))
    (tuned,) = one.run([Workload()])
    assert tuned.choice.setting != PLAIN
    tuned = one.verify(tuned, everything=True)
    assert len(tuned.verified) == len(tuned.found.predictions) >= 40
    for each in tuned.verified:
        assert each.predicted_speedup == pytest.approx(each.measured_speedup, rel=0.01)
        assert each.prediction.accepted_length == pytest.approx(each.measured.accepted_length)
    assert tuned.regret is not None
    assert tuned.regret < 0.01


def test_plain_decoding_is_chosen_where_drafts_cost_too_much(target, monkeypatch):
    """What is written down still names the best tree, for who drafts all the same."""
    (tuned,) = tuner(target, monkeypatch, Clock(begin=100.0, step=50.0)).run([Workload()])
    assert tuned.choice.setting == PLAIN
    setting = tuned.setting()
    assert not setting.speculate
    assert tuned.found.best_draft is not None
    assert setting.tree == tuned.found.best_draft.setting.tree
    assert setting.predicted["speedup"] == pytest.approx(1.0)


def test_other_machines_are_tuned_otherwise(target, monkeypatch):
    """Where steps cost nothing drafts go deeper than where they cost much."""
    depths = []
    for step in (0.0, 3.0):
        (tuned,) = tuner(target, monkeypatch, Clock(begin=0.1, step=step)).run([Workload()])
        best = tuned.found.best_draft
        assert best is not None
        assert best.setting.tree is not None
        depths.append(best.setting.tree.max_depth)
    assert depths[0] > depths[1]


def test_batches_share_texts_and_contexts_do_not(target, monkeypatch):
    one = tuner(target, monkeypatch, Clock(begin=0.5, step=1.0), max_tokens=6)
    stages: list[str] = []
    one.progress = lambda stage, done, total: stages.append(stage)
    workloads = [Workload(), Workload(batch=2), Workload(context=30), Workload(temperature=1.0)]
    found = one.run(workloads)
    assert [each.workload for each in found] == workloads
    changes = [stage for before, stage in zip(["", *stages], stages, strict=False) if stage != before]
    assert sum("recording" in stage for stage in changes) == 3
    assert found[2].context >= 30 > found[0].context


def test_rejection_rules_only_where_asked(target, monkeypatch):
    """They are decoded, not replayed; the best seed-exact setting is kept beside them."""
    clock = Clock(begin=0.5, step=1.0)
    sampled = Workload(temperature=1.0)
    (exact,) = tuner(target, monkeypatch, clock, max_tokens=6).run([sampled])
    assert {each.setting.rule for each in exact.found.predictions} == {"match"}
    (tuned,) = tuner(target, monkeypatch, clock, max_tokens=6, rules=("block", "traversal")).run([sampled])
    assert {each.setting.rule for each in tuned.found.predictions} == {"match", "block", "traversal"}
    assert tuned.seed_exact().setting().rule == "match"
    (greedy,) = tuner(target, monkeypatch, clock, max_tokens=6, rules=("block",)).run([Workload()])
    assert {each.setting.rule for each in greedy.found.predictions} == {"match"}


def test_a_lookup_beside_the_network_is_searched_too(target, monkeypatch):
    one = tuner(target, monkeypatch, Clock(begin=0.5, step=1.0), max_tokens=6)
    drafter = one.drafters[False]
    both = replace(one, drafters={False: drafter, True: HybridDrafter([drafter, NgramDrafter()])})
    (tuned,) = both.run([Workload()])
    hybrids = [each.setting.hybrid for each in tuned.found.predictions if each.setting.tree is not None]
    assert sum(hybrids) == len(hybrids) / 2
