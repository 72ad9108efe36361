"""What the metrics count equals what the requests themselves counted, and hand-computed values of scripted rounds."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from infer.async_engine import AsyncEngine, EngineStatus
from infer.drafters import ScriptedDrafter, TreeSettings
from infer.drafters.base import DraftLimit
from infer.engine import Engine
from infer.request import Completion, Request
from infer.sampling import SamplingParams
from infer.serve.metrics import MAX_POSITIONS, MAX_TAGS, Metrics
from infer.serve.recent import ACCEPTANCE_SECONDS
from infer.target import TargetModel
from infer.tree import DraftTree
from tests.conftest import make_tiny_model
from tests.infer.helpers import plain_ids
from tests.infer.serve.listening import Clock, MadeRequest, made_round, step_of

PROMPT = [5, 9, 3]


def values(metrics: Metrics) -> dict[str, float]:
    """Every sample of a scrape by its name and labels, less the times of creation and the buckets."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            if not sample.name.endswith(("_created", "_bucket")):
                labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
                found[sample.name.removeprefix("headstart:") + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


# Scripted traces, through a real engine.


def follower(texts: Mapping[tuple[int, ...], Sequence[int]], plan: Callable[[int], tuple[int, int]]) -> ScriptedDrafter:
    """Chains along the known texts: at answer position p, `plan(p)` says how many tokens, and how many are right."""

    def draft(request: Request, limit: DraftLimit) -> DraftTree:
        position = len(request.output_ids)
        length, right = plan(position)
        known = list(texts[request.prompt_ids][position : position + min(length, limit.max_depth)])
        return DraftTree.chain(tuple(t if i < right else (t + 1) % 128 for i, t in enumerate(known)))

    return ScriptedDrafter(draft)


async def answer(engine: Engine, metrics: Metrics, params: SamplingParams, **fields: Any) -> list[Completion]:
    async with AsyncEngine(engine) as serving:
        serving.add_listener(metrics)
        return await serving.generate(PROMPT, params, **fields)


def scripted_engine(
    plan: Callable[[int], tuple[int, int]], *, eos_id: int | None = None, max_depth: int = 4
) -> tuple[Engine, list[int]]:
    """An engine over a tiny target, and the 24 tokens that it answers `PROMPT` with. Its end token, where asked for,
    is a token of that answer."""
    target = TargetModel.wrap(make_tiny_model("llama"))
    text = list(plain_ids(target, PROMPT, SamplingParams(max_tokens=24, ignore_eos=True)))
    if eos_id is not None:
        target = TargetModel.wrap(make_tiny_model("llama", eos_token_id=text[eos_id]))
    drafter = follower({tuple(PROMPT): text}, plan)
    tree = TreeSettings.chain(max_depth)
    return Engine(target, drafter, max_requests=4, max_length=64, tree=tree), text


def first_unique(text: Sequence[int], start: int) -> int:
    """The first place from `start` on whose token has not come before."""
    return next(place for place in range(start, len(text)) if text[place] not in text[:place])


def test_trace_by_hand() -> None:
    """Chains of 3 of which 2, 0, 3 tokens are right, then a round without a draft, then the cap. By hand, of 12 tokens:
    the prefill's 1; rounds of 3, 1, 4 and 1 tokens; then a chain that the cap cuts to 1 token, which is right: 2."""
    plan = {1: (3, 2), 4: (3, 0), 5: (3, 3), 9: (0, 0), 10: (3, 3)}
    engine, text = scripted_engine(lambda position: plan[position])
    metrics = Metrics()
    (completion,) = asyncio.run(answer(engine, metrics, SamplingParams(max_tokens=12, ignore_eos=True)))
    assert list(completion.token_ids) == text[:12]
    assert completion.accepted_lengths == (1, 3, 1, 4, 1, 2)
    found = values(metrics)
    assert found["spec_decode_num_drafts_total"] == 4
    assert found["spec_decode_num_draft_tokens_total"] == 3 + 3 + 3 + 1
    assert found["spec_decode_num_accepted_tokens_total"] == 2 + 0 + 3 + 1
    per_position = [found[f"spec_decode_num_accepted_tokens_per_pos_total{{position={p}}}"] for p in range(3)]
    assert per_position == [3, 2, 1]
    assert found["rounds_total{drafted=yes}"] == 4
    assert found["rounds_total{drafted=no}"] == 1
    assert found["generation_tokens_total"] == 12
    assert found["request_success_total{finished_reason=length}"] == 1
    assert found["mean_accepted_length"] == 1 + 6 / 4
    assert completion.speculation.mean_accepted_length == 1 + 6 / 4


def test_prompt_tokens_are_what_was_computed() -> None:
    """A prompt of three tokens is three rows; where a second request takes over rows of the first, it computes fewer,
    and the two counters add up to both prompts."""
    engine, _ = scripted_engine(lambda position: (0, 0))
    metrics = Metrics()

    async def run() -> None:
        async with AsyncEngine(engine) as serving:
            serving.add_listener(metrics)
            for _ in range(2):
                await serving.generate(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True))

    asyncio.run(run())
    found = values(metrics)
    assert found["prompt_tokens_total"] >= len(PROMPT)
    assert found["prompt_tokens_total"] + found["prompt_tokens_cached_total"] == 2 * len(PROMPT)


def test_end_of_text_within_a_block() -> None:
    """The end token is the second of three accepted tokens: what lies behind it is counted nowhere, and the draft that
    holds it counts two accepted tokens."""
    _, text = scripted_engine(lambda position: (0, 0))
    end = first_unique(text, 4)
    engine, _ = scripted_engine(lambda position: (3, 3) if position == end - 1 else (0, 0), eos_id=end)
    metrics = Metrics()
    (completion,) = asyncio.run(answer(engine, metrics, SamplingParams(max_tokens=24)))
    assert completion.finish_reason == "stop"
    assert list(completion.token_ids) == text[: end + 1]
    found = values(metrics)
    assert found["spec_decode_num_drafts_total"] == 1
    assert found["spec_decode_num_draft_tokens_total"] == 3
    assert found["spec_decode_num_accepted_tokens_total"] == 2
    assert found["generation_tokens_total"] == end + 1
    assert found["rounds_total{drafted=no}"] == end - 2  # the prefill's token, end - 2 rounds of one, then the block


@pytest.mark.parametrize("cancel", [False, True])
def test_counters_equal_what_requests_counted(cancel: bool) -> None:
    """Over many answers of random plans, some cancelled: every counter is the sum over requests, and tokens of rounds
    after the prefill add up to the answers' tokens but one each."""
    engine, _ = scripted_engine(lambda position: (3, (position * 7) % 4) if position % 3 else (0, 0))
    metrics = Metrics()
    ended: list[Request] = []

    async def run() -> None:
        async with AsyncEngine(engine) as serving:
            serving.add_listener(metrics)
            serving.add_listener(SimpleNamespace(stepped=lambda step: None, finished=ended.append))
            tickets = [
                await serving.submit(PROMPT, SamplingParams(max_tokens=8 + n, ignore_eos=True, n=1 + n % 2))
                for n in range(9)
            ]
            if cancel:
                for ticket in tickets[::2]:
                    ticket.cancel()
            for ticket in tickets:
                await ticket.completions()

    asyncio.run(run())
    found = values(metrics)
    counts = [request.speculation for request in ended]
    assert len(ended) == 13
    assert found["spec_decode_num_drafts_total"] == sum(one.num_drafts for one in counts)
    assert found["spec_decode_num_draft_tokens_total"] == sum(one.num_draft_tokens for one in counts)
    assert found["spec_decode_num_accepted_tokens_total"] == sum(one.num_accepted_tokens for one in counts)
    for depth in range(3):
        there = sum(one.accepted_per_position[depth] for one in counts if depth < len(one.accepted_per_position))
        assert found.get(f"spec_decode_num_accepted_tokens_per_pos_total{{position={depth}}}", 0) == there
    num_rounds = found["rounds_total{drafted=yes}"] + found["rounds_total{drafted=no}"]
    assert num_rounds == sum(one.num_rounds for one in counts)
    assert found["generation_tokens_total"] == sum(len(request.output_ids) for request in ended)
    started = [request for request in ended if request.output_ids]
    after_prefill = sum(sum(request.accepted_lengths[1:]) for request in started)
    assert after_prefill == found["generation_tokens_total"] - len(started)
    assert found["inter_token_latency_seconds_count"] == after_prefill
    assert found["time_to_first_token_seconds_count"] == len(started)
    reasons = ("stop", "length", "abort", "error")
    by_reason = {reason: found[f"request_success_total{{finished_reason={reason}}}"] for reason in reasons}
    assert by_reason == {reason: sum(request.finish_reason == reason for request in ended) for reason in reasons}


def test_a_preempted_request_is_one_request() -> None:
    """Its second prefill gives a token that was not drafted and no second time to a first token."""
    engine, text = scripted_engine(lambda position: (2, 2))
    metrics = Metrics()
    (request,) = engine.submit([PROMPT], SamplingParams(max_tokens=10, ignore_eos=True))
    step = 0
    while request.finish_reason is None:
        if step == 2:
            engine.preempt()
        engine.step()
        metrics.stepped(step_of(*engine.rounds))
        step += 1
    metrics.finished(request)
    assert request.output_ids == text[:10]
    found = values(metrics)
    assert found["generation_tokens_total"] == 10
    assert found["time_to_first_token_seconds_count"] == 1
    assert found["spec_decode_num_accepted_tokens_total"] == request.speculation.num_accepted_tokens
    assert found["rounds_total{drafted=yes}"] == request.speculation.num_drafts


# Times.


def test_times_by_hand() -> None:
    """A request submitted at 990, in a slot at 995, with tokens at 1000 (the prefill's), 1003 (three) and 1004 (one),
    ended at 1004: five gaps of 1, 1, 1 and 1 second for four tokens, in two blocks of 3 and 1 seconds."""
    clock = Clock()
    metrics = Metrics(clock=clock)
    request = MadeRequest(first_token_at=1000.0, finish_reason="length", finished_at=1004.0, output_ids=[1] * 5)
    metrics.stepped(step_of(made_round(request, 1, first=True), num_prompt_tokens=7))
    clock.now = 1003.0
    metrics.stepped(step_of(made_round(request, 3, nodes=3, accepted=2)))
    clock.now = 1004.0
    metrics.stepped(step_of(made_round(request, 1)))
    metrics.finished(request)
    found = values(metrics)
    assert found["time_to_first_token_seconds_sum"] == 10
    assert found["request_queue_time_seconds_sum"] == 5
    assert (found["inter_token_latency_seconds_count"], found["inter_token_latency_seconds_sum"]) == (4, 4)
    assert (found["inter_block_latency_seconds_count"], found["inter_block_latency_seconds_sum"]) == (2, 4)
    assert found["request_time_per_output_token_seconds_sum"] == 1
    assert found["e2e_request_latency_seconds_sum"] == 14
    assert found["step_seconds_sum"] == pytest.approx(0.3)
    assert found["prompt_tokens_total"] == 7


def test_a_step_that_holds_prefill_and_round() -> None:
    """The gap between them begins when the first token was there, within the step: not 0."""
    metrics = Metrics(clock=Clock(1000.0))
    request = MadeRequest(first_token_at=999.6)
    metrics.stepped(step_of(made_round(request, 1, first=True), made_round(request, 2, nodes=2, accepted=1)))
    found = values(metrics)
    assert found["time_to_first_token_seconds_sum"] == pytest.approx(9.6)
    assert found["inter_token_latency_seconds_sum"] == pytest.approx(0.4)


def test_cancelled_requests_have_no_latency() -> None:
    """When a client went away says nothing of the server; that it did is counted."""
    metrics = Metrics(clock=Clock())
    metrics.finished(MadeRequest(finish_reason="abort", finished_at=1004.0))
    found = values(metrics)
    assert found["e2e_request_latency_seconds_count"] == 0
    assert found["request_success_total{finished_reason=abort}"] == 1


def test_the_gauge_forgets() -> None:
    """The mean accepted length is of the last minute; NaN, not a stale figure, where that had no drafts."""
    clock = Clock()
    metrics = Metrics(clock=clock)
    assert math.isnan(metrics.recent.mean_accepted_length)
    request = MadeRequest()
    metrics.stepped(step_of(made_round(request, 3, nodes=4, accepted=2)))
    clock.now += ACCEPTANCE_SECONDS / 2
    metrics.stepped(step_of(made_round(request, 1, nodes=4)))
    assert metrics.recent.mean_accepted_length == 2
    clock.now += ACCEPTANCE_SECONDS * 0.6
    assert metrics.recent.mean_accepted_length == 1
    clock.now += ACCEPTANCE_SECONDS
    assert math.isnan(values(metrics)["mean_accepted_length"])


# Labels, gauges, registries.


def test_labels_are_bounded() -> None:
    """A client that gives every request a tag of its own, or a drafter of great depth, makes no more series."""
    metrics = Metrics(clock=Clock())
    rounds = [made_round(MadeRequest(tag=f"tag {n}"), 2, nodes=1, accepted=1) for n in range(10 * MAX_TAGS)]
    deep = made_round(MadeRequest(), 3 * MAX_POSITIONS, nodes=3 * MAX_POSITIONS, accepted=3 * MAX_POSITIONS - 1)
    metrics.stepped(step_of(*rounds, deep))
    found = values(metrics)
    tags = [name for name in found if name.startswith("spec_decode_num_drafts_by_tag")]
    assert len(tags) == MAX_TAGS + 2
    assert found["spec_decode_num_drafts_by_tag_total{tag=other}"] == 9 * MAX_TAGS
    assert found["spec_decode_num_drafts_by_tag_total{tag=none}"] == 1
    assert sum(found[name] for name in tags) == found["spec_decode_num_drafts_total"]
    positions = [name for name in found if name.startswith("spec_decode_num_accepted_tokens_per_pos")]
    assert len(positions) == MAX_POSITIONS
    assert sum(found[name] for name in positions) == found["spec_decode_num_accepted_tokens_total"]


def test_gauges_are_those_of_the_moment() -> None:
    """The engine is asked when it is scraped: an idle engine steps no more, and must not show what it did last."""
    told = {"num_running": 3, "num_waiting": 2, "num_slots": 4, "num_free_slots": 1, "num_cached_tokens": 99}
    flags = {"is_draining": True, "is_alive": True, "is_drafting": False}
    drift = SimpleNamespace(is_drifting=False)
    metrics = Metrics(status=lambda: EngineStatus(**told, **flags), drift=drift)
    found = values(metrics)
    assert found["num_requests_running"] == 3
    assert found["num_requests_waiting"] == 2
    assert (found["num_slots"], found["num_slots_free"], found["num_cached_tokens"]) == (4, 1, 99)
    assert (found["draining"], found["drafting"], found["acceptance_drift"]) == (1, 0, 0)
    told["num_running"], drift.is_drifting = 0, True
    found = values(metrics)
    assert (found["num_requests_running"], found["acceptance_drift"]) == (0, 1)


def test_two_servers_of_one_process() -> None:
    """Each has its own registry: what one counts the other does not show."""
    first, second = Metrics(), Metrics()
    first.observe_response("/v1/models", 200)
    assert values(first)["http_responses_total{route=/v1/models,status=200}"] == 1
    assert not any(name.startswith("http_responses_total") for name in values(second))


@pytest.fixture
def dashboards() -> list[str]:
    """Series that dashboards of vLLM ask for, by the names that vLLM exports them under."""
    return [
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:request_success_total",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:e2e_request_latency_seconds_bucket",
        "vllm:request_queue_time_seconds_bucket",
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    ]


def test_dashboards_of_vllm_fit(dashboards: list[str]) -> None:
    """Replacing the prefix is all that they need; every series is there before anything has happened."""
    names = {
        sample.name
        for family in text_string_to_metric_families(Metrics().render().decode())
        for sample in family.samples
    }
    assert {name.replace("vllm:", "headstart:") for name in dashboards} <= names
