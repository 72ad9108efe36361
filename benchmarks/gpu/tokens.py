"""Every kind of draft against plain decoding, token for token."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from benchmarks.gpu.models import random_head
from benchmarks.gpu.session import Session
from infer.divergence import FirstDifference
from infer.drafters.base import Drafter, DraftLimit, TreeSettings
from infer.drafters.ngram import NgramDrafter
from infer.drafters.scripted import Script, ScriptedDrafter
from infer.engine import Engine
from infer.machine import dtype_name
from infer.request import Request
from infer.sampling import SamplingParams
from infer.target import TargetModel
from infer.tree import ROOT, DraftTree, OneHot

Answers = Mapping[tuple[tuple[int, ...], float], tuple[int, ...]]
"""Tokens of the answer to a prompt at a temperature."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way of drafting; `make` takes the plain answers, which only scripts look at."""

    name: str
    make: Callable[[Answers], Drafter | None]
    tree: TreeSettings = field(default_factory=lambda: TreeSettings(max_nodes=16, max_depth=8, adaptive=False))
    must_accept: bool = False


def token_methods(target: TargetModel) -> list[Method]:
    """The most telling first."""
    return [
        Method(name="plain", make=lambda answers: None),
        Method(
            name="scripted tree, half right",
            make=lambda answers: ScriptedDrafter(half_right(answers, target.vocab_size)),
            must_accept=True,
        ),
        Method(
            name="random head, tree of 16",
            make=lambda answers: random_head(target, seed=2),
            tree=TreeSettings(max_nodes=16, max_depth=4, branch=4, beam=4, adaptive=False),
        ),
        Method(name="n-gram", make=lambda answers: NgramDrafter()),
        Method(
            name="random head, chain of 4", make=lambda answers: random_head(target, seed=1), tree=TreeSettings.chain(4)
        ),
        Method(
            name="random head, tree of 32",
            make=lambda answers: random_head(target, seed=3),
            tree=TreeSettings(max_nodes=32, max_depth=5, branch=6, beam=6, adaptive=False),
        ),
    ]


def half_right(answers: Answers, vocab_size: int) -> Script:
    """Trees that hold the right continuation down to a random depth, among wrong siblings that have children too."""
    generator = np.random.default_rng(0)

    def script(request: Request, limit: DraftLimit) -> DraftTree:
        right = answers[request.prompt_ids, request.params.temperature][len(request.output_ids) :]
        tokens: list[int] = []
        parents: list[int] = []
        parent = ROOT
        for token in right[: min(int(generator.integers(0, 5)), limit.max_depth, limit.max_nodes // 4)]:
            level = [(token + shift) % vocab_size for shift in generator.permutation(3).tolist()]
            first = len(tokens)
            tokens += [*level, token]
            parents += [*[parent] * 3, first + (level.index(token) + 1) % 3]  # the last is below a wrong sibling
            parent = first + level.index(token)
        return DraftTree(tokens=tuple(tokens), parents=tuple(parents), kind=OneHot())

    return script


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Prompts at several temperatures, all prompts at the first one first."""

    prompts: list[list[int]]
    params: list[SamplingParams]

    @classmethod
    def of(cls, prompts: Sequence[list[int]], temperatures: Sequence[float], *, max_tokens: int) -> Asked:
        return cls(
            prompts=[prompt for _ in temperatures for prompt in prompts],
            params=[
                SamplingParams(temperature=temperature, seed=100 + index, max_tokens=max_tokens, ignore_eos=True)
                for temperature in temperatures
                for index in range(len(prompts))
            ],
        )

    def answers(self, engine: Engine) -> dict[tuple[tuple[int, ...], float], tuple[int, ...]]:
        completions = engine.generate(self.prompts, self.params)
        return {
            (tuple(prompt), params.temperature): completion.token_ids
            for prompt, params, completion in zip(self.prompts, self.params, completions, strict=True)
        }


def check_tokens(session: Session, dtype: str) -> None:
    """Every method, requests of all temperatures alone and together, against one-token decoding in ordinary rounds."""
    target, sizes = session.target(dtype), session.sizes
    prompts = session.prompts(target)
    together = Asked.of(prompts, sizes.temperatures, max_tokens=sizes.max_tokens)
    alone = Asked.of(prompts[: sizes.num_single_prompts], sizes.temperatures, max_tokens=sizes.max_tokens)
    answers = together.answers(Engine(target, max_requests=8, graphs=False))
    for method in token_methods(target):
        if session.is_late(dtype):
            session.skip(f"tokens, {dtype}", f"out of time before {method.name}")
            continue
        name = f"tokens, {dtype_name(target.dtype)}, {method.name}"
        check_answers(session, target, method, name, answers, [(1, alone), (8, together)], graphs=None)


def check_answers(
    session: Session,
    target: TargetModel,
    method: Method,
    name: str,
    answers: Answers,
    batches: Sequence[tuple[int, Asked]],
    *,
    graphs: bool | None,
) -> None:
    """The method's answers against plain ones. batches: requests at once, and what is asked. graphs: as in `Engine`."""
    num_identical = num_answers = 0
    differences: list[FirstDifference] = []
    lengths: list[int] = []
    is_as_asked = True
    for num_requests, asked in batches:
        engine = Engine(target, method.make(answers), max_requests=num_requests, tree=method.tree, graphs=graphs)
        for completion, params in zip(engine.generate(asked.prompts, asked.params), asked.params, strict=True):
            answer = answers[completion.prompt_token_ids, params.temperature]
            num_answers += 1
            num_identical += completion.token_ids == answer
            lengths.extend(completion.accepted_lengths[1:])
            if completion.token_ids != answer:
                found = FirstDifference.find(
                    target, completion.prompt_token_ids, params, expected=answer, got=completion.token_ids
                )
                differences.append(found)
        is_as_asked = is_as_asked and (not graphs or has_static_rounds(engine))
    passed = is_as_asked and all(difference.is_tie(target.dtype) for difference in differences)
    detail = f"{num_identical}/{num_answers} answers identical, {statistics.fmean(lengths):.2f} tokens a round"
    if not is_as_asked:
        detail += "; NO ROUND WAS STATIC"
    if differences:
        margins = sorted(math.inf if each.margin is None else each.margin for each in differences)
        detail += f"; largest margins at first differences {', '.join(f'{margin:.1e}' for margin in margins[-5:])}"
    # Only in float32: the script follows plain decoding's answer, which other roundings may leave early.
    if method.must_accept and target.dtype == torch.float32 and statistics.fmean(lengths) < 1.5:
        passed, detail = False, f"{detail}; too few tokens were accepted for this to prove anything"
    session.check(name, passed, detail)


def has_static_rounds(engine: Engine) -> bool:
    """Whether any round of the engine's went through a captured shape."""
    return engine.num_captured > 0


def check_bitwise(session: Session) -> None:
    """Ordinary rounds in forwards of one shape: bfloat16 tokens are plain decoding's to the bit, alone and together."""
    target, sizes = session.target("bfloat16"), session.sizes
    prompts = session.prompts(target)[: sizes.num_bitwise_prompts]
    together = Asked.of(prompts, sizes.temperatures, max_tokens=sizes.max_tokens)
    alone = Asked.of(prompts[:1], sizes.temperatures, max_tokens=sizes.max_tokens)
    answers = together.answers(Engine(target, exactness="bitwise", max_requests=8, graphs=False))
    num_identical = num_answers = 0
    for num_requests, asked in ((1, alone), (8, together)):
        drafter = ScriptedDrafter(half_right(answers, target.vocab_size))
        engine = Engine(target, drafter, exactness="bitwise", max_requests=num_requests, graphs=False)
        for question, answer in asked.answers(engine).items():
            num_answers += 1
            num_identical += answer == answers[question]
    session.check(
        "tokens, bfloat16, bitwise mode",
        num_identical == num_answers,
        f"{num_identical}/{num_answers} answers identical to the bit",
    )


def seeded_params(prompts: Sequence[Sequence[int]], temperature: float, max_tokens: int) -> list[SamplingParams]:
    return Asked.of([list(prompt) for prompt in prompts], [temperature], max_tokens=max_tokens).params


def token_ids(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in engine.generate(prompts, params)]
