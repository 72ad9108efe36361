"""What a run measures of its head: consistent with itself, with the decode loop and with what is served."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from configs.schema import CHAIN_RULES, DraftShape, EvalConfig, RuleName, RunConfig
from heads.base import DraftHead
from infer.chat import Rendered
from infer.cost import CostModel
from infer.drafters.growing import TreeGrower
from infer.drafters.spec import head_drafter
from infer.engine import Engine
from infer.evaluate import Acceptance, AcceptanceReport, EvalPrompt, Trace
from infer.sampling import SamplingParams
from infer.target import TargetModel
from infer.verify import RULES
from tests.train.measuring import decode_acceptance
from tests.train.training_fixtures import tiny_recipe, write_chats
from train.batch import pack_batch
from train.corpus.dataset import TrainingData, load_data
from train.evaluation import CHAIN_DEPTH, decoding_copy, drafted_shape, simulate
from train.evaluator import Evaluator, states_of
from train.reports.evaluation import Evaluation, Parity
from train.setup import make_head
from train.unroll import Teacher, plan_rows, unrolled_loss

TEMPERATURES = (0.0, 1.0)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    chats = write_chats(tmp_path_factory.mktemp("data") / "chats.jsonl")
    return tiny_recipe(chats, eval__prompts=6, eval__max_tokens=24, eval__temperatures=TEMPERATURES, eval__samples=2)


@pytest.fixture(scope="module")
def data(config: RunConfig, target: TargetModel) -> TrainingData:
    return load_data(config.data, target.tokenizer, seed=0)


def greedy_rows(target: TargetModel, prompts: Sequence[EvalPrompt], *, max_tokens: int = 24) -> list[Rendered]:
    """What the target itself writes greedily after the prompts."""
    answers = Engine(target).generate([one.token_ids for one in prompts], SamplingParams(max_tokens=max_tokens))
    return [
        Rendered(
            token_ids=[*answer.prompt_token_ids, *answer.token_ids],
            loss_mask=[False] * len(answer.prompt_token_ids) + [True] * len(answer.token_ids),
        )
        for answer in answers
    ]


def teacher_of(target: TargetModel, head: DraftHead) -> Teacher:
    return Teacher(weight=target.lm_head_weight.index_select(0, head.target_ids))


def fit(head: DraftHead, target: TargetModel, rows: list[Rendered], *, num_steps: int = 40) -> None:
    """Some optimiser steps on `rows`."""
    batch = pack_batch(rows, states_of(target, head.config.taps).get_many(rows), device="cpu", dtype=torch.float32)
    plan = plan_rows(batch.loss_mask, batch.lengths, 4)
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-3)
    for _ in range(num_steps):
        weights = [1 / len(part) for part in plan]
        loss, _ = unrolled_loss(head, batch, plan, teacher_of(target, head), loss="ce", step_weights=weights)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def greedy(target: TargetModel) -> tuple[list[EvalPrompt], list[Rendered]]:
    """Random prompts, and greedy rows of them."""
    chance = random.Random(0)
    token_ids = [tuple(chance.randrange(4, 260) for _ in range(chance.randint(3, 9))) for _ in range(10)]
    prompts = [EvalPrompt(domain="greedy", token_ids=one) for one in token_ids]
    return prompts, greedy_rows(target, prompts)


@pytest.fixture(scope="module")
def head(config: RunConfig, target: TargetModel, data: TrainingData, greedy: Any) -> DraftHead:
    """Fitted to part of the target's own greedy text, so that rounds of several lengths occur."""
    torch.manual_seed(0)
    head = make_head(config, target, data).to(target.device).bind(target.weights).train()
    fit(head, target, [*greedy[1][:6], *greedy_rows(target, data.prompts[:4])])
    return head


@pytest.fixture(scope="module")
def evaluator(config: RunConfig, target: TargetModel, data: TrainingData, head: DraftHead) -> Evaluator:
    return Evaluator(config, target, data, teacher_of(target, head), dtype=torch.float32)


@pytest.fixture(scope="module")
def evaluation(evaluator: Evaluator, head: DraftHead, target: TargetModel) -> Evaluation:
    return evaluator.evaluate(head, target, 5)


def test_an_evaluation_is_plain_json_with_finite_curves(evaluation: Evaluation) -> None:
    """Strict JSON reads it, and the curves are finite numbers under flat names."""
    json.loads(json.dumps(evaluation.to_dict(), allow_nan=False))
    curves = evaluation.curves()
    assert all(name.startswith("eval/") and math.isfinite(value) for name, value in curves.items())
    names = (
        "accepted_length",
        "accepted_length_t0",
        "accepted_length_t1",
        "acceptance_t0_1",
        "agreement_1",
        "overlap_1",
    )
    assert {f"eval/{name}" for name in names} <= curves.keys()
    card = evaluation.for_card()
    assert {"accepted_length", "acceptance", "agreement", "overlap", "speed"} <= card.keys()
    assert "samples" not in card, "held-out text does not travel with a head"


def test_figures_are_the_decode_loops(
    evaluation: Evaluation, config: RunConfig, data: TrainingData, target: TargetModel, head: DraftHead
) -> None:
    """The same report as a plain call of the decode loop, and what chooses is its figure at the first temperature."""
    report = decode_acceptance(target, head, data.prompts, config.eval)
    assert evaluation.report == report
    assert evaluation.accepted_length == report.by_temperature[0.0].accepted_length


@pytest.mark.parametrize("key", ["temperature", "domain", "context"])
def test_the_cross_table_adds_up_to_the_report(evaluation: Evaluation, key: str) -> None:
    """Every cell's rounds and counts by position, added up over the other columns, are the report's own pools."""
    assert evaluation.table is not None
    pools = {str(name): pool for name, pool in getattr(evaluation.report, f"by_{key}").items()}
    cells = {str(getattr(cell, key)): cell for cell in evaluation.table.pooled(key)}
    assert cells.keys() == pools.keys()
    for name, pool in pools.items():
        assert (cells[name].num_rounds, cells[name].num_tokens) == (pool.num_rounds, pool.num_tokens)
        assert cells[name].shares == pytest.approx(pool.by_position)


def test_emitted_tokens_are_accounted_for(evaluation: Evaluation) -> None:
    """Tokens of all cells = answers' tokens less one of each prefill; the histogram tells of the same rounds."""
    report, table = evaluation.report, evaluation.table
    assert table is not None
    assert sum(cell.num_tokens for cell in table.cells) == report.num_completion_tokens - report.num_prefill_tokens
    histogram = report.overall.histogram
    assert sum(histogram.values()) == sum(cell.num_rounds for cell in table.cells)


def test_samples_show_the_answers_as_they_were_drafted(
    evaluation: Evaluation, config: RunConfig, data: TrainingData, target: TargetModel
) -> None:
    """The pieces are the plain greedy answer, and a token is marked unless it ended a round."""
    assert len(evaluation.samples) == 2
    plain = Engine(target).generate(
        [prompt.token_ids for prompt in data.prompts[:2]], SamplingParams(max_tokens=config.eval.max_tokens)
    )
    for sample, answer in zip(evaluation.samples, plain, strict=True):
        assert "".join(text for text, _ in sample.pieces) == answer.text
        assert len(sample.pieces) == len(answer.token_ids)
        assert sample.pieces[0][1] == 0, "the prefill's token is the target's"
    num_drafted = sum(position > 0 for sample in evaluation.samples for _, position in sample.pieces)
    assert num_drafted > 0


def test_calibration_counts_every_draft_that_was_verified(evaluation: Evaluation) -> None:
    """At temperature 0 a chain's accepted drafts are the observations that came true."""
    curve = evaluation.calibration[0.0]
    greedy = evaluation.report.by_temperature[0.0]
    accepted = greedy.num_tokens - greedy.num_rounds
    came_true = sum(one.num_observations * one.observed for one in curve.bins)
    # A last round cut at the end of an answer may have accepted drafts that no longer counted.
    assert accepted <= round(came_true) <= accepted + CHAIN_DEPTH * evaluation.num_prompts
    assert curve.num_observations == sum(one.num_observations for one in curve.bins)


def test_simulated_length_is_the_decoders_on_greedy_text(
    config: RunConfig, target: TargetModel, data: TrainingData, head: DraftHead, greedy: Any
) -> None:
    """float32, held-out rows that the target wrote greedily: the training graph's rounds are the decode loop's own.

    Heads have looked good in training and served at a tenth of it; within 5 % is asked, equal is what float32 gives.
    """
    prompts, rows = greedy[0][6:], greedy[1][6:]
    held_out = replace(data, held_out=rows, prompts=prompts)
    evaluator = Evaluator(config, target, held_out, teacher_of(target, head), dtype=torch.float32)
    decoded = evaluator.evaluate(head, target, 0)
    simulated = evaluator._simulated(head.eval(), evaluator._batches(head, target))
    assert decoded.parity is not None
    assert decoded.parity.holds
    assert decoded.parity.simulated_length == decoded.parity.decoded_length == simulated.accepted_length
    assert simulated.accepted_length == decoded.report.by_temperature[0.0].accepted_length > 1
    assert simulated.simulated
    assert simulated.report.overall == decoded.report.by_temperature[0.0]
    assert [sample.pieces for sample in simulated.samples] == [sample.pieces for sample in decoded.samples]
    head.train()


def test_several_answers_of_a_row_are_simulated_each(target: TargetModel, head: DraftHead, greedy: Any) -> None:
    """No draft crosses from one answer of a conversation into the next, and packing changes nothing."""
    one, other = greedy[1][0], greedy[1][1]
    both = Rendered(token_ids=[*one.token_ids, *other.token_ids], loss_mask=[*one.loss_mask, *other.loss_mask])

    def simulated(rows: list[Rendered]) -> list[tuple[int, ...]]:
        features = states_of(target, head.config.taps).get_many(rows)
        batch = pack_batch(rows, features, device="cpu", dtype=torch.float32)
        return [answer.round_lengths for answer in simulate(head.eval(), batch, depth=CHAIN_DEPTH)]

    alone = [simulated([row])[0] for row in (one, other)]
    assert simulated([one, other]) == alone
    lengths = simulated([both])
    assert len(lengths) == 2
    assert lengths[0] == alone[0]
    assert [sum(part) + 1 for part in lengths] == [sum(one.loss_mask), sum(other.loss_mask)]
    head.train()


def test_a_difference_between_training_and_serving_is_named() -> None:
    """More than 5 % apart: a warning with both figures and the first draft position at which they part."""
    same = Acceptance.of([1, 2, 3, 3])
    assert Parity.of(same, same).holds
    broken = Parity.of(Acceptance.of([1, 1, 1, 2]), Acceptance.of([3, 2, 3, 2]))
    assert not broken.holds
    assert broken.first_depth == 1
    assert "draft position 1" in broken.warning()
    later = Parity.of(Acceptance.of([2, 2, 2, 2]), Acceptance.of([2, 4, 4, 2]))
    assert later.first_depth == 2


@pytest.mark.parametrize(
    ("shape", "rule"),
    [(shape, rule) for shape in get_args(DraftShape) for rule in get_args(RuleName)],
)
def test_acceptance_is_measured_under_the_verification_asked_for(
    config: RunConfig, target: TargetModel, data: TrainingData, head: DraftHead, shape: DraftShape, rule: RuleName
) -> None:
    """Every lossless rule, on every shape that it verifies: what chooses is an engine's figure with that rule and that
    shape, and the record says which. On chains, greedy rounds are the same under all rules; on trees they are no
    shorter, and what the training graph says is still compared with chains."""
    if shape == "tree" and RULES[rule].needs_chain:
        with pytest.raises(ValueError, match="verifies chains"):
            replace(config.eval, shape=shape, rule=rule)
        return
    settings = replace(config.eval, shape=shape, rule=rule, prompts=3, max_tokens=12, temperatures=(1.0, 0.0))
    evaluator = Evaluator(replace(config, eval=settings), target, data, teacher_of(target, head), dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.evaluator.decode_speed", lambda *_: {})
        found = evaluator.evaluate(head, target, 0)
    engine = Engine(
        target,
        head_drafter(decoding_copy(head, target), target),
        rule=rule,
        tree=drafted_shape(settings),
        cost=CostModel.free(),
    )
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=12) for seed in range(3)]
    answers = engine.generate([prompt.token_ids for prompt in data.prompts[:3]], params)
    lengths = [length for answer in answers for length in answer.accepted_lengths[1:]]
    assert found.accepted_length == pytest.approx(sum(lengths) / len(lengths))
    assert (found.shape, found.rule) == (shape, rule)
    assert {"shape": shape, "rule": rule}.items() <= found.to_dict().items()
    assert {"shape", "rule"} <= found.for_card().keys()
    assert (f"({shape}, {rule} rule)" in found.describe()) == ((shape, rule) != ("chain", "match"))
    assert set(found.calibration) == ({0.0, 1.0} if rule == "match" else {0.0})
    chain = decode_acceptance(target, head, data.prompts, replace(settings, shape="chain", rule="match"))
    greedy = found.report.by_temperature[0.0].accepted_length
    if shape == "chain":
        assert greedy == chain.by_temperature[0.0].accepted_length
    assert greedy >= chain.by_temperature[0.0].accepted_length - 0.2
    assert found.parity is not None
    assert found.parity.holds
    assert found.parity.decoded_length == chain.by_temperature[0.0].accepted_length


def test_the_rules_that_can_be_asked_for_are_the_lossless_ones() -> None:
    """Those that any trained head's drafts can be given to, since all heads draft through one grower."""
    assert set(get_args(RuleName)) == {name for name, rule in RULES.items() if rule.lossless}
    assert set(CHAIN_RULES) == {name for name, rule in RULES.items() if rule.lossless and rule.needs_chain}
    assert all(set(TreeGrower.kinds) & set(RULES[name].kinds) for name in get_args(RuleName))


def test_a_verification_that_would_show_nothing_is_refused(config: RunConfig) -> None:
    """A rule where nothing is drawn, and anything but a greedy chain where nothing is decoded."""
    with pytest.raises(ValueError, match=r"eval\.rule is 'block', but all of eval\.temperatures are 0"):
        EvalConfig(rule="block")
    stored = replace(config.target, features="features")
    assert replace(config, target=stored).eval.is_plain
    changed: list[dict[str, Any]] = [{"shape": "tree"}, {"rule": "block"}]
    for changes in changed:
        with pytest.raises(ValueError, match=r"eval\.shape is .* and eval\.rule .* target\.features"):
            replace(config, target=stored, eval=replace(config.eval, **changes))


def test_block_weights_belong_to_the_loss_of_the_text(config: RunConfig) -> None:
    with pytest.raises(ValueError, match=r"train\.step_weighting is 'block'.* train\.loss is 'lk'"):
        replace(config.train, step_weighting="block")
    assert replace(config.train, step_weighting="block", loss="label").step_smoothing == 0.5


def test_the_head_is_left_as_it_was(evaluator: Evaluator, head: DraftHead, target: TargetModel) -> None:
    """Mode, gradients and weights; also when measuring fails."""
    head.train()
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    evaluator.evaluate(head, target, 1)
    assert head.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in head.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in head.state_dict().items())

    def broken(target: TargetModel, head: DraftHead) -> AcceptanceReport:
        raise RuntimeError("no")

    failing = Evaluator(evaluator.config, target, evaluator.data, evaluator.teacher, dtype=torch.float32, decode=broken)
    with pytest.raises(RuntimeError):
        failing.evaluate(head, target, 1)
    assert head.training


def test_figures_that_rest_on_one_prompt_say_so(
    evaluation: Evaluation, evaluator: Evaluator, target: TargetModel, head: DraftHead
) -> None:
    """Without an error bar and with a warning; with several prompts the other way round."""
    assert evaluation.standard_error is not None
    assert evaluation.standard_error >= 0
    assert not evaluation.warnings
    data = replace(evaluator.data, held_out=evaluator.data.held_out[:1], prompts=evaluator.data.prompts[:1])
    alone = Evaluator(evaluator.config, target, data, evaluator.teacher, dtype=torch.float32).evaluate(head, target, 0)
    assert alone.standard_error is None
    assert "1 held-out prompt:" in alone.warnings[0]
    assert "eval/accepted_length_error" not in alone.curves()


def test_a_decode_loop_that_stands_in_is_believed(evaluator: Evaluator, target: TargetModel, head: DraftHead) -> None:
    """Only its report counts: nothing is timed, decoded or shown besides."""
    trace = Trace(domain="all", temperature=0.0, num_prompt_tokens=1, num_tokens=4, round_lengths=(3,), looping=False)
    stub = Evaluator(
        evaluator.config,
        target,
        evaluator.data,
        evaluator.teacher,
        dtype=torch.float32,
        decode=lambda target, head: AcceptanceReport.of([trace]),
    )
    evaluation = stub.evaluate(head, target, 0)
    assert evaluation.accepted_length == 3
    assert evaluation.agreement
    assert (evaluation.speed, evaluation.samples, evaluation.parity) == ({}, (), None)
    assert evaluation.describe().startswith("accepted length 3.000 on held-out prompts")


def test_without_a_target_to_decode_with_acceptance_is_simulated(
    config: RunConfig, target: TargetModel, data: TrainingData, head: DraftHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From held-out states alone, marked as such, in the same form."""
    stored: Any = FeaturesOnly(target)
    monkeypatch.setattr("train.evaluator.states_of", lambda _, taps, **kwargs: states_of(target, taps, **kwargs))
    evaluator = Evaluator(config, stored, data, teacher_of(target, head), dtype=torch.float32)
    evaluation = evaluator.evaluate(head, stored, 0)
    assert evaluation.simulated
    assert evaluation.to_dict()["simulated"] is True
    assert "simulated" in evaluation.describe()
    assert evaluation.speed == {}
    assert evaluation.accepted_length >= 1
    assert evaluation.table is not None
    assert evaluation.calibration
    assert evaluation.samples[0].simulated


class FeaturesOnly:
    """A target known by its stored states: it has no layers."""

    def __init__(self, target: TargetModel) -> None:
        self.tokenizer, self.device = target.tokenizer, target.device


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_only_the_head_computes_in_the_runs_dtype(
    target: TargetModel, config: RunConfig, data: TrainingData, dtype: torch.dtype
) -> None:
    """A float32 target under a head in half precision: its states are those that training sees, rounded once to what
    the head computes in. Under autocast they would be another target's, or the target would not run at all.
    """
    head = make_head(config, target, data).bind(target.weights)
    teacher = Teacher(weight=target.lm_head_weight.index_select(0, head.target_ids).to(dtype))
    evaluator = Evaluator(config, target, data, teacher, dtype=dtype)
    evaluation = evaluator.evaluate(head, target, 1)
    assert evaluation.parity is not None
    (batch, *_) = evaluator._batches(head, target)
    rows = data.held_out[: len(batch.lengths)]
    features = states_of(target, head.config.taps).get_many(rows)
    assert torch.equal(batch.taps, torch.cat([one.taps for one in features]).to(dtype))
