"""Speed against plain decoding, measured so that the comparison is fair.

One process, one set of weights, one prompt at a time. Every method answers a prompt before the next prompt is
taken, in an order that rotates, so that what disturbs the machine disturbs all methods alike. Methods:

    plain          this engine without a draft: what a draft has to beat
    stock          transformers' `generate` on the same weights
    prompt_lookup  transformers' `generate` with its own n-gram lookup
    headstart      this engine with its drafter

Ratios are medians over prompts of one prompt's speed over the other method's on the same prompt, prefill
included. Round costs leave the prefill out. Speeds say nothing about answers, so the share of answers equal
to plain decoding's stands beside them, and every first difference is shown with its margin.

Limits: batch size 1. Sampled answers of the stock methods are drawn with torch's generator and are other
texts.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from infer.divergence import FirstDifference
from infer.drafters.base import TreeSettings
from infer.engine import Engine
from infer.evaluate import DEFINITION, Acceptance, EvalPrompt
from infer.machine import NOISY_LOAD, dtype_name, machine_facts
from infer.repetition import LOOP_SHARE, is_looping
from infer.sampling import SamplingParams
from infer.target import TargetModel

METHODS = ("plain", "stock", "prompt_lookup", "headstart")
LOOKUP_TOKENS = 10


@dataclass(frozen=True, kw_only=True)
class Run:
    """One answer and its times. `round_seconds`: the time of the `num_timed_rounds` rounds after the engine's first
    step, which holds the prefill. The stock methods report no rounds. has_parts: whether draft, verification and
    forward can be told apart: not in rounds that run whole on the device."""

    token_ids: tuple[int, ...]
    seconds: float
    round_lengths: tuple[int, ...] = ()
    round_seconds: float = 0.0
    num_timed_rounds: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    forward_seconds: float = 0.0
    has_parts: bool = True

    @property
    def tokens_per_second(self) -> float:
        return len(self.token_ids) / self.seconds


@dataclass(frozen=True, kw_only=True)
class Answers:
    """How every method answered one prompt at one temperature."""

    index: int
    domain: str
    temperature: float
    runs: Mapping[str, Run]

    @property
    def looping(self) -> bool:
        return is_looping(self.runs["plain"].token_ids)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method at one temperature over a set of prompts. None: not defined for the method.

    tokens_per_second pools tokens over time, median_tokens_per_second is over prompts.
    break_even_accepted_length: a round's cost in steps of plain decoding, which the accepted length has to
    exceed; expected_speedup is the one over the other. The shares are of the whole time, prefill included:
    drafting, forwards, and verification beside them.
    """

    method: str
    temperature: float
    dtype: str
    num_prompts: int
    num_tokens: int
    tokens_per_second: float
    median_tokens_per_second: float
    accepted_length: float | None
    ratio_to_plain: float
    ratio_to_stock: float | None
    identical_to_plain: float | None
    break_even_accepted_length: float | None
    expected_speedup: float | None
    draft_share: float | None
    verify_share: float | None
    forward_share: float | None
    domain: str | None = None

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        return values if self.domain is not None else {k: v for k, v in values.items() if k != "domain"}


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where an answer first differs from plain decoding's (`infer.divergence`). `margin`: the gap between the two
    tokens as logits, None where one of them is missing or ruled out; a near tie is one that rounding can turn over."""

    prompt: int
    temperature: float
    position: int
    margin: float | None
    near_tie: bool


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """What `benchmark` found; `to_dict` is the file that `headstart bench --json` writes."""

    machine: Mapping[str, Any]
    target: str
    head: str
    settings: Mapping[str, Any]
    results: tuple[Row, ...]
    by_domain: tuple[Row, ...]
    without_loops: tuple[Row, ...]
    first_divergences: tuple[Divergence, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "machine": dict(self.machine),
            "target": self.target,
            "head": self.head,
            "settings": dict(self.settings),
            "definition": DEFINITION,
            "results": [row.to_dict() for row in self.results],
            "by_domain": [row.to_dict() for row in self.by_domain],
            "without_loops": [row.to_dict() for row in self.without_loops],
            "first_divergences": [asdict(divergence) for divergence in self.first_divergences],
        }

    def advice(self) -> list[str]:
        """What the figures call for: slower than plain, answers that differ, a busy machine."""
        lines = []
        for row in self.results:
            if row.method == "headstart" and row.ratio_to_plain < 1:
                lines.append(
                    f"At temperature {row.temperature:g} the draft makes decoding slower here "
                    f"({row.ratio_to_plain:.2f}x plain): accepted length {row.accepted_length or 0:.2f} against a "
                    f"break-even of {row.break_even_accepted_length or 0:.2f}. Use fewer nodes (--nodes, --depth), "
                    "or none (--no-draft)."
                )
        faults = [each for each in self.first_divergences if not each.near_tie]
        if faults:
            lines.append(
                f"{len(faults)} answers differ from plain decoding by more than rounding explains: "
                "that is a fault of headstart, please report it."
            )
        if self.machine["load"] is not None and self.machine["load"] > NOISY_LOAD:
            lines.append(
                f"The load average was {self.machine['load']:.1f} at the start: other work ran beside this, "
                "and the times are noisy."
            )
        return lines


def benchmark(
    engine: Engine,
    prompts: Sequence[EvalPrompt],
    *,
    head: str,
    temperatures: Sequence[float] = (0.0,),
    max_tokens: int = 128,
    methods: Sequence[str] = METHODS,
    repeats: int = 1,
    seed: int = 0,
    progress: Callable[[], None] | None = None,
) -> BenchReport:
    """Compare `engine` (with its drafter) with the other `methods`; `plain` is always among them, and is bitwise where
    the engine is.

    Prompt i is drawn with seed `seed + i`. Of `repeats` runs the median one counts. `progress` is called
    after each run.
    """
    methods = _checked_methods(methods, engine)
    if not prompts or not temperatures or repeats < 1:
        raise ValueError("a benchmark needs at least one prompt, one temperature and one repeat")
    machine = machine_facts()
    bench = _Bench(engine, prompts, methods=methods, max_tokens=max_tokens, seed=seed)
    bench.warm_up(max(temperatures))
    answers = [
        bench.answer(index, temperature, repeats=repeats, progress=progress)
        for temperature in temperatures
        for index in range(len(prompts))
    ]
    dtype = dtype_name(engine.target.dtype)
    by_domain = {each.domain: [other for other in answers if other.domain == each.domain] for each in answers}
    return BenchReport(
        machine=machine,
        target=engine.target.name,
        head=head,
        settings={**bench.settings(), "repeats": repeats},
        results=_rows(answers, methods, dtype),
        by_domain=tuple(row for domain, some in by_domain.items() for row in _rows(some, methods, dtype, domain)),
        without_loops=_rows([each for each in answers if not each.looping], methods, dtype),
        first_divergences=tuple(bench.divergences(answers)),
    )


class _Bench:
    """The engines, built once, and how each method answers a prompt."""

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[EvalPrompt],
        *,
        methods: Sequence[str],
        max_tokens: int,
        seed: int,
    ) -> None:
        self.target = engine.target
        self.engine = engine
        self.plain = Engine(
            engine.target,
            max_requests=1,
            max_length=engine.max_length,
            exactness="bitwise" if engine.exactness == "bitwise" else None,
            row_width=engine.row_width,
            tree=TreeSettings(adaptive=False),
        )
        self.prompts = prompts
        self.methods = tuple(methods)
        self.max_tokens = max_tokens
        self.seed = seed

    def params(self, index: int, temperature: float) -> SamplingParams:
        return SamplingParams(temperature=temperature, seed=self.seed + index, max_tokens=self.max_tokens)

    def settings(self) -> dict[str, Any]:
        return {
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "num_prompts": len(self.prompts),
            "first_prompt_hash": ids_hash(self.prompts[0].token_ids),
            "tree": asdict(self.engine.tree),
            "exactness": self.engine.exactness,
            "rule": self.engine.rule.name,
            "lossless": self.engine.rule.lossless,
            "row_width": self.engine.row_width,
            "prompt_lookup_num_tokens": LOOKUP_TOKENS,
            "loop_share": LOOP_SHARE,
        }

    def warm_up(self, temperature: float, *, num_tokens: int = 8) -> None:
        """Allocate room for the longest prompt, and let every method run once untimed."""
        longest = max(self.prompts, key=lambda prompt: len(prompt.token_ids)).token_ids
        for engine in (self.plain, self.engine):
            engine.submit([longest], self.params(0, temperature))
            engine.abort()
        params = SamplingParams(temperature=temperature, seed=self.seed, max_tokens=min(num_tokens, self.max_tokens))
        for method in self.methods:
            self.run(method, self.prompts[0].token_ids, params)

    def answer(self, index: int, temperature: float, *, repeats: int, progress: Callable[[], None] | None) -> Answers:
        """Every method's median run on one prompt, interleaved in an order that the prompt's number
        rotates."""
        prompt = self.prompts[index]
        runs: dict[str, list[Run]] = {method: [] for method in self.methods}
        for repeat in range(repeats):
            start = (index + repeat) % len(self.methods)
            for method in (*self.methods[start:], *self.methods[:start]):
                runs[method].append(self.run(method, prompt.token_ids, self.params(index, temperature)))
                if progress is not None:
                    progress()
        return Answers(
            index=index,
            domain=prompt.domain,
            temperature=temperature,
            runs={method: _median_run(each) for method, each in runs.items()},
        )

    def run(self, method: str, token_ids: Sequence[int], params: SamplingParams) -> Run:
        if method in ("plain", "headstart"):
            return run_engine(self.plain if method == "plain" else self.engine, token_ids, params)
        lookup_tokens = LOOKUP_TOKENS if method == "prompt_lookup" else None
        return run_stock(self.target, token_ids, params, lookup_tokens=lookup_tokens)

    def divergences(self, answers: Sequence[Answers]) -> list[Divergence]:
        """First differences from plain decoding, where the engine promises none."""
        if "headstart" not in self.methods:
            return []
        found = []
        for each in answers:
            plain, drafted = each.runs["plain"].token_ids, each.runs["headstart"].token_ids
            seed_exact = self.engine.rule.exactness == "seed" or each.temperature == 0
            if plain == drafted or not (seed_exact and self.engine.rule.lossless):
                continue
            first = FirstDifference.find(
                self.target,
                self.prompts[each.index].token_ids,
                self.params(each.index, each.temperature),
                expected=plain,
                got=drafted,
            )
            found.append(
                Divergence(
                    prompt=each.index,
                    temperature=each.temperature,
                    position=first.position,
                    margin=first.margin,
                    near_tie=self.engine.exactness != "bitwise" and first.is_tie(self.target.tie_dtype),
                )
            )
        return found


def run_engine(engine: Engine, token_ids: Sequence[int], params: SamplingParams) -> Run:
    """One prompt through the engine alone."""
    before = (engine.draft_seconds, engine.verify_seconds, engine.forward_seconds)
    marks = [time.perf_counter()]
    (completion,) = engine.generate([token_ids], params, progress=lambda num_tokens: marks.append(time.perf_counter()))
    seconds = time.perf_counter() - marks[0]
    after = (engine.draft_seconds, engine.verify_seconds, engine.forward_seconds)
    draft, verify, forward = (new - old for new, old in zip(after, before, strict=True))
    return Run(
        token_ids=completion.token_ids,
        seconds=seconds,
        round_lengths=completion.accepted_lengths[1:],
        round_seconds=marks[-1] - marks[1],
        num_timed_rounds=len(marks) - 2,
        draft_seconds=draft,
        verify_seconds=verify,
        forward_seconds=forward,
        has_parts=not engine.num_captured,
    )


def run_stock(
    target: TargetModel,
    token_ids: Sequence[int],
    params: SamplingParams,
    *,
    lookup_tokens: int | None = None,
    assistant: Any = None,
    early_exit: int | None = None,
) -> Run:
    """One prompt through transformers' `generate` on the target's own weights, with nothing inherited from
    defaults. Its drafts: `lookup_tokens` looked up in the text, or those of an `assistant` model, or of the target's
    own first `early_exit` layers."""
    from transformers import GenerationConfig

    sampling = {} if params.greedy else {"temperature": params.temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    eos_ids = sorted(target.eos_ids)
    config = GenerationConfig(
        max_new_tokens=params.max_tokens,
        do_sample=not params.greedy,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        use_cache=True,
        eos_token_id=eos_ids or None,
        pad_token_id=eos_ids[0] if eos_ids else 0,
        prompt_lookup_num_tokens=lookup_tokens,
        assistant_early_exit=early_exit,
        **sampling,
    )
    input_ids = torch.tensor([list(token_ids)], device=target.device)
    with target.stock() as model, torch.inference_mode(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(params.seed or 0)
        start = time.perf_counter()
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            generation_config=config,
            assistant_model=assistant,
        )
        answer = tuple(output[0, input_ids.shape[1] :].tolist())
        seconds = time.perf_counter() - start
    return Run(token_ids=answer, seconds=seconds)


def ids_hash(token_ids: Sequence[int]) -> str:
    """Short hash of a rendered prompt, by which two programs can tell that they gave the same one."""
    return hashlib.sha256(" ".join(map(str, token_ids)).encode()).hexdigest()[:12]


def _checked_methods(methods: Sequence[str], engine: Engine) -> tuple[str, ...]:
    unknown = sorted(set(methods) - set(METHODS))
    if unknown:
        raise ValueError(f"there is no method {unknown[0]!r}: the methods are {', '.join(METHODS)}")
    wanted = {"plain", *methods}
    if engine.drafter is None:
        wanted.discard("headstart")
    return tuple(method for method in METHODS if method in wanted)


def _median_run(runs: Sequence[Run]) -> Run:
    return sorted(runs, key=lambda run: run.seconds)[(len(runs) - 1) // 2]


def _rows(answers: Sequence[Answers], methods: Sequence[str], dtype: str, domain: str | None = None) -> tuple[Row, ...]:
    temperatures = dict.fromkeys(each.temperature for each in answers)
    return tuple(
        _row(method, [each for each in answers if each.temperature == temperature], dtype, domain)
        for temperature in temperatures
        for method in methods
    )


def _row(method: str, answers: Sequence[Answers], dtype: str, domain: str | None) -> Row:
    runs = [each.runs[method] for each in answers]
    plain = [each.runs["plain"] for each in answers]
    stock = [each.runs["stock"] for each in answers if "stock" in each.runs]
    temperature = answers[0].temperature
    seconds = sum(run.seconds for run in runs)
    is_engine = method in ("plain", "headstart")
    has_parts = is_engine and all(run.has_parts for run in runs)
    comparable = is_engine or temperature == 0
    accepted = Acceptance.of(length for run in runs for length in run.round_lengths).accepted_length
    break_even = _round_cost(runs, plain) if is_engine else None
    num_tokens = sum(len(run.token_ids) for run in runs)
    identical = [run.token_ids == other.token_ids for run, other in zip(runs, plain, strict=True)]
    return Row(
        method=method,
        temperature=temperature,
        dtype=dtype,
        num_prompts=len(runs),
        num_tokens=num_tokens,
        tokens_per_second=num_tokens / seconds,
        median_tokens_per_second=statistics.median(run.tokens_per_second for run in runs),
        accepted_length=accepted if is_engine else 1.0 if method == "stock" else None,
        ratio_to_plain=_ratio(runs, plain),
        ratio_to_stock=_ratio(runs, stock) if stock else None,
        identical_to_plain=statistics.fmean(identical) if comparable else None,
        break_even_accepted_length=break_even,
        expected_speedup=accepted / break_even if break_even else None,
        draft_share=sum(run.draft_seconds for run in runs) / seconds if has_parts else None,
        verify_share=sum(run.verify_seconds for run in runs) / seconds if has_parts else None,
        forward_share=sum(run.forward_seconds for run in runs) / seconds if has_parts else None,
        domain=domain,
    )


def _ratio(runs: Sequence[Run], others: Sequence[Run]) -> float:
    return statistics.median(
        run.tokens_per_second / other.tokens_per_second for run, other in zip(runs, others, strict=True)
    )


def _round_cost(runs: Sequence[Run], plain: Sequence[Run]) -> float | None:
    """A round's seconds over a plain step's, prefills left out; None if no answer was long enough to time
    one."""
    num_rounds, num_steps = (sum(run.num_timed_rounds for run in each) for each in (runs, plain))
    if not num_rounds or not num_steps:
        return None
    round_seconds, step_seconds = (sum(run.round_seconds for run in each) for each in (runs, plain))
    return (round_seconds / num_rounds) / (step_seconds / num_steps)
