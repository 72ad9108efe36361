"""The benchmark's arithmetic, fairness and honesty. Nothing here asserts a wall time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from infer import bench
from infer.bench import (
    Answers,
    BenchReport,
    Divergence,
    Run,
    benchmark,
    ids_hash,
    run_engine,
    run_stock,
)
from infer.drafters.base import TreeSettings
from infer.drafters.ngram import NgramDrafter
from infer.engine import Engine
from infer.evaluate import EvalPrompt
from infer.sampling import SamplingParams
from infer.target import TargetModel

PROMPTS = [
    EvalPrompt(domain="a", token_ids=(5, 6, 7, 5, 6, 7, 5, 6)),
    EvalPrompt(domain="b", token_ids=tuple(range(3, 30))),
]
ROW_FIELDS = {
    "method",
    "temperature",
    "dtype",
    "tokens_per_second",
    "accepted_length",
    "ratio_to_plain",
    "ratio_to_stock",
    "identical_to_plain",
    "break_even_accepted_length",
    "draft_share",
    "verify_share",
    "forward_share",
    "expected_speedup",
    "num_prompts",
}


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Any]) -> TargetModel:
    return TargetModel.wrap(tiny_model("llama"), name="tiny")


def lookup_engine(target: TargetModel) -> Engine:
    return Engine(target, NgramDrafter(), max_requests=1, tree=TreeSettings(adaptive=False))


def plain_run(tokens: Sequence[int], seconds: float) -> Run:
    num_steps = len(tokens) - 2
    return Run(
        token_ids=tuple(tokens),
        seconds=seconds,
        round_lengths=(1,) * (len(tokens) - 1),
        round_seconds=0.1 * num_steps,
        num_timed_rounds=num_steps,
        forward_seconds=seconds,
    )


def test_rows_match_hand_computed_figures() -> None:
    """Pooled speed is tokens over time; ratios are medians over prompts; a round's cost is in plain steps."""
    # Of 10 tokens, headstart emits 1 by prefill and 9 in rounds of 3; the first step holds prefill and one round.
    drafted = Run(
        token_ids=tuple(range(10)),
        seconds=0.5,
        round_lengths=(3, 3, 3),
        round_seconds=0.3,
        num_timed_rounds=2,
        draft_seconds=0.1,
        verify_seconds=0.05,
        forward_seconds=0.25,
    )
    answers = [
        Answers(
            index=index,
            domain="a",
            temperature=0.0,
            runs={
                "plain": plain_run(range(10), seconds=1.0),
                "stock": Run(token_ids=tuple(range(10)), seconds=2.0),
                "headstart": replace(drafted, seconds=seconds),
            },
        )
        for index, seconds in enumerate((0.5, 0.25, 1.0))
    ]
    plain, stock, headstart = bench._rows(answers, ("plain", "stock", "headstart"), "float32")
    assert plain.ratio_to_plain == 1.0
    assert plain.ratio_to_stock == 2.0
    assert plain.break_even_accepted_length == pytest.approx(1.0)
    assert stock.accepted_length == 1.0
    assert stock.draft_share is None
    assert headstart.tokens_per_second == pytest.approx(30 / 1.75)
    assert headstart.median_tokens_per_second == pytest.approx(20.0)
    assert headstart.ratio_to_plain == pytest.approx(2.0)  # of 2, 4 and 1
    assert headstart.accepted_length == 3.0
    assert headstart.break_even_accepted_length == pytest.approx(1.5)  # 0.15 s a round, 0.1 s a step
    assert headstart.expected_speedup == pytest.approx(2.0)
    assert headstart.draft_share == pytest.approx(0.3 / 1.75)
    assert headstart.identical_to_plain == 1.0


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_benchmark_of_a_tiny_model(target: TargetModel, temperature: float) -> None:
    """In float32 drafted answers equal plain ones at any temperature, and stock ones at temperature 0."""
    runs: list[None] = []
    report = benchmark(
        lookup_engine(target),
        PROMPTS,
        head="ngram",
        temperatures=[temperature],
        max_tokens=12,
        progress=lambda: runs.append(None),
    )
    assert len(runs) == len(PROMPTS) * 4
    assert [row.method for row in report.results] == list(bench.METHODS)
    rows = {row.method: row for row in report.results}
    assert rows["headstart"].identical_to_plain == 1.0
    assert rows["headstart"].num_tokens == rows["plain"].num_tokens
    assert rows["stock"].identical_to_plain == (1.0 if temperature == 0 else None)
    assert report.first_divergences == ()
    assert {row.domain for row in report.by_domain} == {"a", "b"}
    assert not any("fault" in line for line in report.advice())

    values = json.loads(json.dumps(report.to_dict()))
    assert set(values) >= {"machine", "target", "head", "results", "by_domain", "without_loops", "first_divergences"}
    assert set(values["results"][0]) >= ROW_FIELDS
    assert values["by_domain"][0]["domain"] == "a"
    assert values["settings"]["first_prompt_hash"] == ids_hash(PROMPTS[0].token_ids)
    assert {"cpu", "cores", "threads", "torch", "transformers", "avx512_bf16", "load"} <= set(values["machine"])


def test_without_a_drafter_there_is_no_drafted_row(target: TargetModel) -> None:
    """`headstart bench none` compares plain decoding with transformers; unknown methods are named."""
    report = benchmark(Engine(target), PROMPTS[:1], head="none", max_tokens=4, methods=["stock"])
    assert [row.method for row in report.results] == ["plain", "stock"]
    with pytest.raises(ValueError, match="no method 'vllm'"):
        benchmark(Engine(target), PROMPTS, head="none", methods=["vllm"])


def test_methods_are_interleaved_in_a_rotating_order(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt is answered by every method before the next one, and no method always goes first."""
    calls: list[tuple[str, tuple[int, ...]]] = []

    def run(self: Any, method: str, token_ids: Sequence[int], params: SamplingParams) -> Run:
        calls.append((method, tuple(token_ids)))
        return plain_run((1, 2, 3), seconds=1.0)

    monkeypatch.setattr(bench._Bench, "run", run)
    benchmark(lookup_engine(target), PROMPTS, head="ngram", max_tokens=4, methods=["headstart"], repeats=2)
    warm_up, timed = calls[:2], calls[2:]
    assert {prompt for _, prompt in warm_up} == {PROMPTS[0].token_ids}
    assert [prompt for _, prompt in timed] == [PROMPTS[0].token_ids] * 4 + [PROMPTS[1].token_ids] * 4
    order = ["plain", "headstart", "headstart", "plain"]
    assert [method for method, _ in timed] == [*order, *reversed(order[:2]), *order[:2]]


def test_looping_answers_are_left_out_of_the_second_table(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops flatter a drafter. The plain answer decides, so that all methods keep the same prompts."""

    def run(self: Any, method: str, token_ids: Sequence[int], params: SamplingParams) -> Run:
        loops = tuple(token_ids) == PROMPTS[0].token_ids
        return plain_run([1, 2, 3] * 10 if loops else range(30), seconds=1.0)

    monkeypatch.setattr(bench._Bench, "run", run)
    report = benchmark(lookup_engine(target), PROMPTS, head="ngram", max_tokens=30)
    assert {row.num_prompts for row in report.results} == {2}
    assert {row.num_prompts for row in report.without_loops} == {1}


def test_an_answer_that_differs_is_reported_as_a_fault(target: TargetModel) -> None:
    """A first difference with a margin beyond rounding must not pass as a near tie."""
    engine = lookup_engine(target)
    inner = bench._Bench(engine, PROMPTS, methods=bench.METHODS, max_tokens=8, seed=0)
    plain = inner.run("plain", PROMPTS[1].token_ids, inner.params(1, 0.0))
    wrong = (*plain.token_ids[:3], plain.token_ids[3] + 1, *plain.token_ids[4:])
    answers = Answers(
        index=1, domain="b", temperature=0.0, runs={"plain": plain, "headstart": replace(plain, token_ids=wrong)}
    )
    (divergence,) = inner.divergences([answers])
    assert (divergence.prompt, divergence.position, divergence.near_tie) == (1, 3, False)
    assert divergence.margin is not None
    assert divergence.margin > 0


def test_advice_names_what_is_wrong(target: TargetModel) -> None:
    """Slower than plain, faulty answers and a busy machine are said in words, not left to the reader of a
    table."""
    report = benchmark(lookup_engine(target), PROMPTS[:1], head="ngram", max_tokens=6)
    slow = tuple(
        replace(row, ratio_to_plain=0.8, accepted_length=1.1, break_even_accepted_length=1.4)
        if row.method == "headstart"
        else row
        for row in report.results
    )
    fault = Divergence(prompt=0, temperature=0.0, position=2, margin=1.5, near_tie=False)
    bad: BenchReport = replace(
        report, results=slow, first_divergences=(fault,), machine={**report.machine, "load": 7.0}
    )
    text = "\n".join(bad.advice())
    assert "--no-draft" in text
    assert "break-even of 1.40" in text
    assert "fault of headstart" in text
    assert "load average was 7.0" in text
    quick = tuple(replace(row, ratio_to_plain=1.5) for row in report.results)
    assert replace(report, results=quick, machine={**report.machine, "load": 0.1}).advice() == []


def test_runs_repeat_in_float32(target: TargetModel) -> None:
    """The rounds of a run are a function of prompt and seed: the same three times over."""
    engine = lookup_engine(target)
    params = SamplingParams(max_tokens=16, temperature=0.7, seed=3)
    runs = [run_engine(engine, PROMPTS[0].token_ids, params) for _ in range(3)]
    assert len({run.round_lengths for run in runs}) == 1
    assert len({run.token_ids for run in runs}) == 1
    assert all(run.num_timed_rounds == max(0, len(run.round_lengths) - 1) for run in runs)


def test_stock_runs_leave_the_model_and_the_generator_alone(target: TargetModel) -> None:
    """A baseline must not change what comes after it: packed decoding works again, torch's generator is
    untouched."""
    params = SamplingParams(max_tokens=8, temperature=0.9, seed=5)
    state = torch.random.get_rng_state()
    first = run_stock(target, PROMPTS[0].token_ids, params)
    assert torch.equal(state, torch.random.get_rng_state())
    assert run_stock(target, PROMPTS[0].token_ids, params).token_ids == first.token_ids
    greedy = SamplingParams(max_tokens=8)
    plain = run_engine(Engine(target), PROMPTS[0].token_ids, greedy)
    for lookup_tokens in (None, 4):
        stock = run_stock(target, PROMPTS[0].token_ids, greedy, lookup_tokens=lookup_tokens)
        assert stock.token_ids == plain.token_ids
