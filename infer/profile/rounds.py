"""Where the time of a round goes: a real engine's rounds on real prompts, part by part (`infer.profile.watch`), beside
what each takes at least.

A figure is the mean over the middle half of the rounds, by their time: outliers are left out, as from a median, and the
parts add up, as medians do not.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

from infer.drafters.growing import TreeGrower
from infer.drafters.hybrid import parts_of
from infer.drafters.stepper import Stepper
from infer.engine import Engine
from infer.intake import Prompt
from infer.profile.drafts import DraftRows, draft_work
from infer.profile.floors import Floor, ForwardWork, Speeds, Work, measure_bandwidth
from infer.profile.watch import BEGIN, PARTS, STEPS, TARGET, Round, Watch
from infer.sampling import SamplingParams

NOTABLE_SHARE = 0.15
_NUM_WARM_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class RoundPart:
    """`floor`: the least that it could take, None where nothing is known to bound it."""

    name: str
    milliseconds: float
    median_milliseconds: float
    share: float
    floor: Floor | None = None


@dataclass(frozen=True, kw_only=True)
class RoundProfile:
    """A round of `batch` requests, of `num_rounds` measured.

    num_resting: rounds without a draft that were left out. width: rows of the forward. context: tokens of a request
    before the round. tokens: emitted by a round and request. num_steps: forwards of the draft network below the root.
    """

    batch: int
    temperature: float
    num_rounds: int
    num_resting: int
    context: float
    width: float
    tokens: float
    num_steps: float
    milliseconds: float
    median_milliseconds: float
    parts: tuple[RoundPart, ...]

    @property
    def notable(self) -> tuple[RoundPart, ...]:
        """The parts beside the target's forward that take more than `NOTABLE_SHARE` of the round, largest first."""
        large = [part for part in self.parts if part.name != TARGET and part.share > NOTABLE_SHARE]
        return tuple(sorted(large, key=lambda part: -part.share))


def measure_rounds(
    engine: Engine,
    prompts: Sequence[Prompt],
    speeds: Speeds,
    *,
    batch: int = 1,
    temperature: float = 0.0,
    max_tokens: int = 64,
    num_rounds: int = 48,
) -> RoundProfile:
    """Answer `prompts`, `batch` at a time and over again, until `num_rounds` rounds of all of a batch were timed.

    The engine must be idle. Rounds in which a request begins or ends are left out, and so are rounds without a draft,
    if the engine has a drafter and any have one.
    """
    if not prompts:
        raise ValueError("rounds are measured on prompts, and none was given: give at least one")
    if not 1 <= batch <= engine.max_requests:
        raise ValueError(f"a batch of {batch} does not run at once in an engine of max_requests={engine.max_requests}")
    if num_rounds < 1:
        raise ValueError(f"num_rounds must be at least 1, got {num_rounds}")
    watch = Watch(engine.target.device)
    with watch.over(engine):
        timed = _timed_rounds(engine, watch, prompts, batch, temperature, max_tokens)
        try:
            rounds = list(islice(timed, _NUM_WARM_ROUNDS, _NUM_WARM_ROUNDS + num_rounds))
        finally:
            engine.abort()
    drafted = [each for each in rounds if each.is_drafted] or rounds
    return _summary(engine, drafted, speeds, batch=batch, temperature=temperature, num_all=len(rounds))


def _timed_rounds(
    engine: Engine, watch: Watch, prompts: Sequence[Prompt], batch: int, temperature: float, max_tokens: int
) -> Iterator[Round]:
    """The rounds of a batch of prompts after another, without end."""
    given = cycle(prompts)
    for seed in range(1 << 30):
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed, ignore_eos=True)
        requests = engine.submit(list(islice(given, batch)), params)
        engine.step()  # the prefill, and a round that is timed with it
        num_seen = 0
        while True:
            each = watch.round(engine)
            if any(request.finish_reason is not None for request in requests):
                break
            num_seen += 1
            yield each
        engine.abort()
        if not num_seen and seed > len(prompts):
            raise ValueError(
                f"no round of {batch} requests came to an end within {max_tokens} tokens: let answers be longer"
            )


def _summary(
    engine: Engine,
    rounds: Sequence[Round],
    speeds: Speeds,
    *,
    batch: int,
    temperature: float,
    num_all: int,
) -> RoundProfile:
    ordered = sorted(rounds, key=lambda each: each.total)
    quarter = len(ordered) // 4
    middle = ordered[quarter : len(ordered) - quarter]
    milliseconds = 1e3 * _mean([each.total for each in middle])
    floors = _floors(engine, middle, speeds, batch=batch)
    parts = []
    for name in PARTS:
        if any(name in each.seconds for each in rounds):
            mean = 1e3 * _mean([each.seconds.get(name, 0.0) for each in middle])
            median = 1e3 * statistics.median(each.seconds.get(name, 0.0) for each in rounds)
            parts.append(
                RoundPart(
                    name=name,
                    milliseconds=mean,
                    median_milliseconds=median,
                    share=mean / milliseconds,
                    floor=floors.get(name),
                )
            )
    return RoundProfile(
        batch=batch,
        temperature=temperature,
        num_rounds=len(rounds),
        num_resting=num_all - len(rounds),
        context=_mean([group.prefix for each in middle for group in each.groups]),
        width=_mean([sum(len(group.tokens) for group in each.groups) for each in middle]),
        tokens=_mean([each.num_tokens / batch for each in middle]),
        num_steps=_mean([each.num_steps for each in middle]),
        milliseconds=milliseconds,
        median_milliseconds=1e3 * statistics.median(each.total for each in rounds),
        parts=tuple(parts),
    )


def _floors(engine: Engine, rounds: Sequence[Round], speeds: Speeds, *, batch: int) -> dict[str, Floor]:
    """Of the forwards. A draft network is read over and over within a round, and so, if it is small, from a cache."""
    of_forward = ForwardWork(engine.target)
    forward = sum((of_forward.of(each.groups) for each in rounds), Work()).over(len(rounds))
    floors = {TARGET: forward.floor(speeds)}
    num_steps = _mean([each.num_steps for each in rounds])
    rows = DraftRows(
        begin=max(batch, round(_mean([each.num_tokens for each in rounds]))),
        step=max(1, round(_mean([each.num_step_rows for each in rounds]) / (num_steps or 1))),
        batch=batch,
        context=round(_mean([group.prefix for each in rounds for group in each.groups])),
    )
    works = [draft_work(stepper, rows) for stepper in _steppers(engine)]
    known = [work for work in works if work is not None]
    if not known or len(known) < len(works):
        return floors
    floors[BEGIN] = sum((work.begin for work in known), Work()).floor(speeds)
    step = sum((work.step for work in known), Work()).over(len(known))
    again = measure_bandwidth(engine.target.dtype, engine.target.device, num_bytes=int(step.num_bytes))
    cached = replace(speeds, bytes_per_second=max(again, speeds.bytes_per_second))
    floors[STEPS] = step.times(num_steps).floor(cached)
    return floors


def _steppers(engine: Engine) -> list[Stepper]:
    return [part.stepper for part in parts_of(engine.drafter) if isinstance(part, TreeGrower)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
