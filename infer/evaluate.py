"""Acceptance, measured where it counts: in the real decode loop, on prompts, pooled over tokens.

Training chooses its best checkpoint by these figures and `headstart eval` prints them, so they are computed
in one place, from the lengths of a completion's rounds alone.

Definitions. A *draft round* is every round after the prefill, one in which nothing was drafted included. The
*accepted length* is the number of tokens emitted in draft rounds over the number of draft rounds: the
target's own token counts, tokens behind an end of text or beyond a length cap do not. *Acceptance at position
d* is the share of draft rounds that emitted more than d tokens, that is d draft tokens and one more. So the
accepted length is 1 plus the sum over d. What was accepted can be set beside the best that any lossless rule could
accept of the same candidates (`infer.bound_meter`).

Limits: a last round that ends in a draft token counts that token as the target's own. Figures depend on the
tree, which an adaptive engine fits to its machine and its load: compare heads with
`TreeSettings(adaptive=False)`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

from infer.bound_meter import BoundMeter, BoundReport
from infer.chat import render_prompt
from infer.drafters.base import RecordingDrafter
from infer.engine import Engine
from infer.prompts import EvaluationPrompt
from infer.repetition import is_looping
from infer.request import Completion
from infer.sampling import SamplingParams

DEFINITION = (
    "accepted length = tokens emitted in draft rounds / draft rounds "
    "(the target's own token included, the prefill's token excluded, nothing after an end of text)"
)
CONTEXT_BOUNDS = (128, 256, 512, 1024, 2048)

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class EvalPrompt:
    """A prompt as the engine takes it, with the domain that its figures are filed under."""

    domain: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What acceptance figures need of one answer. `round_lengths`: tokens emitted by each round after the
    prefill."""

    domain: str
    temperature: float
    num_prompt_tokens: int
    num_tokens: int
    round_lengths: tuple[int, ...]
    looping: bool

    @classmethod
    def of(cls, completion: Completion, *, domain: str, temperature: float) -> Trace:
        prefill, *rounds = completion.accepted_lengths
        assert prefill == 1, f"the prefill emits one token, not {prefill}"
        assert prefill + sum(rounds) == len(completion.token_ids), "rounds must add up to the answer"
        return cls(
            domain=domain,
            temperature=temperature,
            num_prompt_tokens=len(completion.prompt_token_ids),
            num_tokens=len(completion.token_ids),
            round_lengths=tuple(rounds),
            looping=is_looping(completion.token_ids),
        )

    def rounds_by_context(self) -> Iterable[tuple[int, int]]:
        """(tokens before the round, tokens that it emitted) of every draft round."""
        starts = accumulate(self.round_lengths, initial=self.num_prompt_tokens + 1)
        return zip(starts, self.round_lengths, strict=False)


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Figures of one pool of draft rounds. `by_position[d - 1]` is the acceptance at position d;
    `histogram` counts rounds by the tokens that they emitted. Without rounds the accepted length is 0."""

    num_rounds: int
    num_tokens: int
    accepted_length: float
    by_position: tuple[float, ...]
    histogram: dict[int, int]

    @classmethod
    def of(cls, round_lengths: Iterable[int]) -> Acceptance:
        counts = Counter(round_lengths)
        num_rounds = sum(counts.values())
        num_tokens = sum(length * count for length, count in counts.items())
        deepest = max(counts, default=1) - 1
        reached = [sum(count for length, count in counts.items() if length > d) for d in range(1, deepest + 1)]
        return cls(
            num_rounds=num_rounds,
            num_tokens=num_tokens,
            accepted_length=num_tokens / num_rounds if num_rounds else 0.0,
            by_position=tuple(count / num_rounds for count in reached),
            histogram=dict(sorted(counts.items())),
        )

    def at_position(self, position: int) -> float:
        """Acceptance at draft position `position`, counted from 1."""
        return self.by_position[position - 1] if position <= len(self.by_position) else 0.0


@dataclass(frozen=True, kw_only=True)
class AcceptanceReport:
    """Acceptance overall and by domain, temperature and context length, and without looping answers.

    The sum of `overall.num_tokens` and `num_prefill_tokens` is `num_completion_tokens`.
    """

    overall: Acceptance
    by_domain: dict[str, Acceptance]
    by_temperature: dict[float, Acceptance]
    by_context: dict[str, Acceptance]
    without_loops: Acceptance
    num_answers: int
    num_looping: int
    num_completion_tokens: int
    num_prefill_tokens: int
    definition: str = DEFINITION
    bound: BoundReport | None = None

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> AcceptanceReport:
        report = cls(
            overall=_pool(traces),
            by_domain=_pools(traces, lambda trace: trace.domain),
            by_temperature=_pools(traces, lambda trace: trace.temperature),
            by_context=_by_context(traces),
            without_loops=_pool([trace for trace in traces if not trace.looping]),
            num_answers=len(traces),
            num_looping=sum(trace.looping for trace in traces),
            num_completion_tokens=sum(trace.num_tokens for trace in traces),
            num_prefill_tokens=len(traces),
        )
        assert report.overall.num_tokens == report.num_completion_tokens - report.num_prefill_tokens
        return report

    @property
    def accepted_length(self) -> float:
        return self.overall.accepted_length

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON (whose writer turns the temperatures into strings); no bound where none was taken."""
        return {name: value for name, value in asdict(self).items() if name != "bound" or value is not None}


def evaluate(
    engine: Engine,
    prompts: Sequence[EvalPrompt],
    *,
    temperatures: Sequence[float] = (0.0,),
    max_tokens: int = 128,
    seed: int = 0,
    bound: bool = False,
    progress: Callable[[int], None] | None = None,
) -> AcceptanceReport:
    """Answer every prompt at every temperature and report what was accepted.

    Prompt i is drawn with seed `seed + i`. `bound` compares with the best acceptance there could be, where the drafter
    says what it drew from. `progress` is called with the tokens emitted by each step.
    """
    if not prompts or not temperatures:
        raise ValueError("evaluation needs at least one prompt and one temperature")
    traces: list[Trace] = []
    meter = BoundMeter(lambda request: prompts[request.seed - seed].domain)
    with _metered(engine, meter) if bound else nullcontext():
        for temperature in temperatures:
            params = [
                SamplingParams(temperature=temperature, seed=seed + index, max_tokens=max_tokens)
                for index in range(len(prompts))
            ]
            completions = engine.generate([prompt.token_ids for prompt in prompts], params, progress=progress)
            traces.extend(
                Trace.of(completion, domain=prompt.domain, temperature=temperature)
                for prompt, completion in zip(prompts, completions, strict=True)
            )
    return replace(AcceptanceReport.of(traces), bound=meter.report())


@contextmanager
def _metered(engine: Engine, meter: BoundMeter) -> Iterator[None]:
    """Show `meter` every verified tree within the block, unless the drafter cannot say what it drew from."""
    drafter = engine.drafter
    if not isinstance(drafter, RecordingDrafter):
        yield
        return
    records, drafter.records = drafter.records, True
    try:
        with engine.watched(meter):
            yield
    finally:
        drafter.records = records


def render_prompts(tokenizer: Any, prompts: Iterable[EvaluationPrompt], *, raw: bool = False) -> list[EvalPrompt]:
    """Chats as token ids; `raw` leaves out the chat template."""
    return [
        EvalPrompt(domain=prompt.domain, token_ids=tuple(render_prompt(tokenizer, prompt.messages, raw=raw)))
        for prompt in prompts
    ]


def limit_per_domain(prompts: Sequence[EvaluationPrompt], limit: int | None) -> list[EvaluationPrompt]:
    """The first `limit` prompts of each domain, in the order of the file."""
    if limit is None:
        return list(prompts)
    if limit < 1:
        raise ValueError(f"--limit must be at least 1 prompt of each domain, got {limit}")
    seen: Counter[str] = Counter()
    kept = []
    for prompt in prompts:
        seen[prompt.domain] += 1
        if seen[prompt.domain] <= limit:
            kept.append(prompt)
    return kept


def _pool(traces: Iterable[Trace]) -> Acceptance:
    return Acceptance.of(length for trace in traces for length in trace.round_lengths)


def _pools(traces: Sequence[Trace], key: Callable[[Trace], Key]) -> dict[Key, Acceptance]:
    keys = dict.fromkeys(key(trace) for trace in traces)
    return {each: _pool(trace for trace in traces if key(trace) == each) for each in keys}


def _by_context(traces: Iterable[Trace]) -> dict[str, Acceptance]:
    """Rounds filed under the number of tokens before them (prompt and answer)."""
    lengths: dict[int, list[int]] = {}
    for trace in traces:
        for context, length in trace.rounds_by_context():
            bucket = sum(context >= bound for bound in CONTEXT_BOUNDS)
            lengths.setdefault(bucket, []).append(length)
    return {_bucket_name(bucket): Acceptance.of(lengths[bucket]) for bucket in sorted(lengths)}


def _bucket_name(bucket: int) -> str:
    bounds = (0, *CONTEXT_BOUNDS)
    if bucket == len(CONTEXT_BOUNDS):
        return f"{bounds[bucket]}+"
    return f"{bounds[bucket]}-{bounds[bucket + 1] - 1}"
