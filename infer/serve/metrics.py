"""What a server counts and times, for Prometheus.

Names are vLLM's with its prefix `vllm:` replaced by `headstart:`, so that a dashboard made for vLLM is adapted by
replacing one word; what vLLM has no name for is named in the same manner. Every server has a registry of its own: two
in one process do not meet, and nothing of the process's default registry is shown.

Definitions, where more than one would do:

- spec_decode_num_drafts: rounds that verified at least one draft token. spec_decode_num_draft_tokens: nodes of their
  trees. spec_decode_num_accepted_tokens: of them, those that stand in an answer; nothing behind an end of text or a
  length cap. spec_decode_num_accepted_tokens_per_pos: by `position` from 0, as vLLM counts: drafts of which the token
  at depth position + 1 was accepted.
- mean_accepted_length: 1 + accepted tokens / drafts, as in vLLM. The target's own token counts, rounds without a draft
  do not.
- generation_tokens: tokens of answers, the prefill's included: what the API's usage adds up to.
- inter_token_latency_seconds: a round of k tokens after a gap of s seconds counts as k gaps of s / k. So sum over
  count is the time of a token, and quantiles are those of the pace at which text comes. (vLLM counts such a round as
  one gap of s, which hides what drafts save.)
- inter_block_latency_seconds: the gap itself, once a round: what vLLM's inter_token_latency_seconds measures, and how
  long a streaming client waits for its next chunk.
- time_to_first_token_seconds, request_queue_time_seconds and e2e_request_latency_seconds run from the submission on.
  The last is of answers that ended by themselves ("stop" and "length"): when a client goes away says nothing of the
  server.
- learning_seconds: spent on training the head, while requests ran (`busy`) or none did (`idle`). busy over itself and
  step_seconds_sum is the share of time that learning took from serving.

Labels are bounded: routes are those of the application, and of the tags that clients give the first `MAX_TAGS` have a
name of their own, the others are "other".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from infer.serve.recent import Recent

if TYPE_CHECKING:
    from infer.async_engine import EngineStatus, Step
    from infer.learning import LearningStatus
    from infer.request import Request, RequestRound

PREFIX = "headstart:"
MAX_TAGS = 32
OTHER_TAG, NO_TAG = "other", "none"
MAX_POSITIONS = 32
"""Deeper positions are counted with the last: a label must be bounded."""

_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_WAIT_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_ANSWERED = ("stop", "length")


class Tags:
    """Names of the tags that clients give, of which there are at most `MAX_TAGS` and two more, whatever clients do."""

    def __init__(self, most: int = MAX_TAGS) -> None:
        self._most = most
        self._known: set[str] = set()

    def name(self, tag: str) -> str:
        if not tag:
            return NO_TAG
        if tag not in self._known:
            if len(self._known) >= self._most:
                return OTHER_TAG
            self._known.add(tag)
        return tag


class Drift(Protocol):
    """Whether acceptance has fallen below what the head's card says (`infer.serve.acceptance`)."""

    @property
    def is_drifting(self) -> bool: ...


class Metrics:
    """A listener of the engine (`infer.async_engine.Listener`), and what a scrape of it shows.

    status: the engine's state when it is asked. drift: of the head's acceptance; without one the gauge stays 0.
    learning: what a head that goes on learning shows; without one nothing is said of it.
    clock: of the requests' times (perf_counter). `recent`: what it did of late, also for `/status`.
    """

    def __init__(
        self,
        *,
        status: Callable[[], EngineStatus] | None = None,
        drift: Drift | None = None,
        learning: Callable[[], LearningStatus] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.registry = CollectorRegistry()
        self.content_type = CONTENT_TYPE_LATEST
        self.recent = Recent(clock)
        self._status = status
        self._drift = drift
        self._clock = clock
        self._tags = Tags()
        self._last_emitted: dict[Request, float] = {}
        self._make_speculation_counters()
        self._make_request_metrics()
        self._make_gauges()
        if learning is not None:
            self.registry.register(_LearningMetrics(learning))

    # What the engine says, in its thread.

    def stepped(self, step: Step) -> None:
        now = self._clock()
        self._step_seconds.observe(step.seconds)
        self._prompt_tokens.inc(step.num_prompt_tokens)
        for one in step.rounds:
            self._generation_tokens.inc(one.num_tokens)
            self._observe_gap(one, now)
            if not one.is_first:
                self._count_round(one)
        self.recent.stepped(step)

    def finished(self, request: Request) -> None:
        """Also aborted and failed requests."""
        self._last_emitted.pop(request, None)
        reason = request.finish_reason or "abort"
        self._requests.labels(finished_reason=reason).inc()
        self._cached_tokens.inc(request.num_reused)
        if reason not in _ANSWERED or request.finished_at is None:
            return
        self._latency.observe(request.finished_at - request.submitted)
        num_gaps = len(request.output_ids) - 1
        if num_gaps > 0 and request.first_token_at is not None:
            self._time_per_token.observe((request.finished_at - request.first_token_at) / num_gaps)

    # What the application says.

    def observe_response(self, route: str, status: int) -> None:
        """A response has begun. `route`: the route's own path, with its parameters as they are declared."""
        self._responses.labels(route=route, status=str(status)).inc()

    def render(self) -> bytes:
        """All of it, in Prometheus's text form."""
        self._refresh_gauges()
        return generate_latest(self.registry)

    # Within.

    def _count_round(self, one: RequestRound) -> None:
        self._rounds.labels(drafted="yes" if one.num_nodes else "no").inc()
        if not one.num_nodes:
            return
        tag = self._tags.name(one.request.tag)
        self._drafts.inc()
        self._draft_tokens.inc(one.num_nodes)
        self._accepted_tokens.inc(one.num_accepted)
        self._tag_drafts.labels(tag=tag).inc()
        self._tag_accepted_tokens.labels(tag=tag).inc(one.num_accepted)
        for position in range(one.num_accepted):
            self._accepted_per_position.labels(position=str(min(position, MAX_POSITIONS - 1))).inc()

    def _observe_gap(self, one: RequestRound, now: float) -> None:
        request = one.request
        last = self._last_emitted.get(request)
        if last is None:
            # A step may hold a prefill and the round behind it: the gap between them begins within the step.
            first = now if request.first_token_at is None else request.first_token_at
            self._first_token.observe(max(0.0, first - request.submitted))
            self._queue_time.observe(max(0.0, request.started - request.submitted))
            self._last_emitted[request] = first
            return
        self._last_emitted[request] = now
        gap = max(0.0, now - last)
        self._block_latency.observe(gap)
        for _ in range(one.num_tokens):
            self._token_latency.observe(gap / one.num_tokens)

    def _refresh_gauges(self) -> None:
        self._recent_length.set(self.recent.mean_accepted_length)
        self._drifting.set(self._drift is not None and self._drift.is_drifting)
        if self._status is None:
            return
        status = self._status()
        self._running.set(status.num_running)
        self._waiting.set(status.num_waiting)
        self._slots.set(status.num_slots)
        self._free_slots.set(status.num_free_slots)
        self._kept_tokens.set(status.num_cached_tokens)
        self._drafting.set(status.is_drafting)
        self._draining.set(status.is_draining)

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(PREFIX + name, text, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(PREFIX + name, text, registry=self.registry, buckets=buckets)

    def _make_speculation_counters(self) -> None:
        self._drafts = self._counter("spec_decode_num_drafts", "Rounds that verified at least one draft token.")
        self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "Draft tokens verified.")
        self._accepted_tokens = self._counter(
            "spec_decode_num_accepted_tokens", "Draft tokens that were accepted and stand in an answer."
        )
        self._accepted_per_position = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by their position, from 0.", ["position"]
        )
        self._accepted_per_position.labels(position="0")  # so that rates begin at 0, not at the first accepted token
        self._tag_drafts = self._counter(
            "spec_decode_num_drafts_by_tag", "Rounds with a draft, by the request's tag.", ["tag"]
        )
        self._tag_accepted_tokens = self._counter(
            "spec_decode_num_accepted_tokens_by_tag", "Accepted draft tokens, by the request's tag.", ["tag"]
        )
        self._rounds = self._counter(
            "rounds", "Rounds of requests after their prefill, by whether they verified a draft.", ["drafted"]
        )
        for drafted in ("yes", "no"):
            self._rounds.labels(drafted=drafted)

    def _make_request_metrics(self) -> None:
        self._prompt_tokens = self._counter("prompt_tokens", "Prefill tokens processed.")
        self._cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens whose rows were there already.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens of answers.")
        self._requests = self._counter("request_success", "Ended requests by finish reason.", ["finished_reason"])
        for reason in (*_ANSWERED, "abort", "error"):
            self._requests.labels(finished_reason=reason)
        self._responses = self._counter("http_responses", "HTTP responses by route and status.", ["route", "status"])
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's submission to its first token.", _WAIT_SECONDS
        )
        self._token_latency = self._histogram(
            "inter_token_latency_seconds",
            "Time of a token: a round's gap over its tokens, once a token.",
            _STEP_SECONDS,
        )
        self._block_latency = self._histogram(
            "inter_block_latency_seconds", "Gap between two rounds of a request that emitted tokens.", _STEP_SECONDS
        )
        self._time_per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time of a token behind the first, by request.", _STEP_SECONDS
        )
        self._latency = self._histogram(
            "e2e_request_latency_seconds",
            "From a request's submission to its end, where it ended by itself.",
            _WAIT_SECONDS,
        )
        self._queue_time = self._histogram(
            "request_queue_time_seconds", "From a request's submission to its slot.", _WAIT_SECONDS
        )
        self._step_seconds = self._histogram("step_seconds", "Time of an engine step.", _STEP_SECONDS)

    def _make_gauges(self) -> None:
        self._running = self._gauge("num_requests_running", "Requests that have a slot.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait for a slot.")
        self._slots = self._gauge("num_slots", "Requests that can run at once.")
        self._free_slots = self._gauge("num_slots_free", "Slots without a running request.")
        self._kept_tokens = self._gauge("num_cached_tokens", "Tokens whose rows the slots hold.")
        self._recent_length = self._gauge(
            "mean_accepted_length", "1 + accepted tokens / drafts over the last minute; NaN without drafts."
        )
        self._drifting = self._gauge(
            "acceptance_drift", "1 while acceptance is below what the head's card says (see --acceptance-log)."
        )
        self._drafting = self._gauge("drafting", "1 while there is a drafter that has not been given up after faults.")
        self._draining = self._gauge("draining", "1 while the server answers what it has and takes no more.")


class _LearningMetrics(Collector):
    """What a head that goes on learning shows when it is asked."""

    def __init__(self, status: Callable[[], LearningStatus]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        counts = {
            "learning_answers": ("Finished answers that learning took.", status.num_answers),
            "learning_held_out_answers": ("Of them, those that are never trained on.", status.num_held_out),
            "learning_steps": ("Optimiser steps on what was served.", status.num_steps),
            "learning_swaps": ("Times that a better head took over.", status.num_swaps),
            "learning_rollbacks": ("Times that the former head came back.", status.num_rollbacks),
        }
        for name, (text, count) in counts.items():
            yield CounterMetricFamily(PREFIX + name, text, value=count)
        seconds = CounterMetricFamily(PREFIX + "learning_seconds", "Time spent on learning.", labels=["when"])
        seconds.add_metric(["busy"], status.busy_seconds)
        seconds.add_metric(["idle"], status.idle_seconds)
        yield seconds
        length = GaugeMetricFamily(
            PREFIX + "learning_held_out_length", "Accepted length on held-out answers, last compared.", labels=["head"]
        )
        length.add_metric(["served"], status.length_served)
        length.add_metric(["learned"], status.length_learned)
        yield length
        yield GaugeMetricFamily(PREFIX + "learning_tokens", "Tokens whose states are held.", value=status.num_tokens)
        yield GaugeMetricFamily(
            PREFIX + "learning", "1 while the head learns, 0 once a fault has ended it.", value=status.is_on
        )
