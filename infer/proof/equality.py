"""Speculative answers beside plain ones: are the tokens the same, and if not, where do they part?

Plain decoding answers each prompt once, in one large batch; then the same prompts with the same seeds go through the
draft, under trees and in batches of every size. What counts as evidence is what was drafted and accepted: a draft
that is never right shows nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from infer.divergence import FirstDifference, first_difference, is_tie
from infer.drafters.base import TreeSettings
from infer.engine import Engine
from infer.evaluate import EvalPrompt
from infer.request import Completion
from infer.sampling import SamplingParams
from infer.target import TargetModel

CHAIN, TREE16, TREE32 = "chain of 4", "tree of 16", "tree of 32"
TREES = {
    CHAIN: TreeSettings.chain(4),
    TREE16: TreeSettings(max_nodes=16, max_depth=5, adaptive=False),
    TREE32: TreeSettings(max_nodes=32, max_depth=6, adaptive=False),
}
BATCHES = {8: 8, 4: 8, 1: 2}
SMALL_BATCHES = {4: 4, 2: 4, 1: 1}
"""Requests that run at once, and how many of a sweep's prompts are answered so. More prompts than slots, so that slots
are reused."""

TEMPERATURES = (0.0, 0.7, 1.0)
_SHORTEST = 16
"""Answers shorter than this hardly leave the draft time to be right."""
_MOST_SWEEPS = 3
"""A draft that is seldom right gets up to this many times the tokens to show its evidence."""
_WHOLE = 5000
"""Tokens from which batches have their full sizes."""

DEEP = 3
"""A token accepted at this depth or below was drafted on the head's own guesses."""

_PLAIN: dict[str, Any] = {}
FILTERS: dict[str, dict[str, Any]] = {
    "": _PLAIN,
    "top-k 40, top-p 0.95": {"top_k": 40, "top_p": 0.95},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.1},
}
"""What requests ask for beside a temperature: every other request nothing, and the rest take the others in turn."""

EngineMaker = Callable[[TreeSettings, int], Engine]
"""An engine with the draft under audit, for a tree and a number of requests at once."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A prompt, how it is sampled, and plain decoding's answer."""

    number: int
    prompt: EvalPrompt
    params: SamplingParams
    filters: str
    plain: Completion


@dataclass(frozen=True, kw_only=True)
class Tally:
    """How much was compared.

    answers: answers compared. identical: those of them that are plain decoding's. tokens: tokens of all answers.
    emitted: tokens before the first difference. accepted: those of `emitted` that were drafted and accepted. deep:
    those of `accepted` at depth `DEEP` or below.
    """

    answers: int = 0
    identical: int = 0
    tokens: int = 0
    emitted: int = 0
    accepted: int = 0
    deep: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(**{item.name: getattr(self, item.name) + getattr(other, item.name) for item in fields(Tally)})


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where an answer first leaves plain decoding's.

    prompt, domain: the prompt's number and domain.
    temperature, filters, seed: how the request is sampled.
    tree, batch: the draft tree, and how many requests ran at once.
    token_index: the token's index in the answer.
    expected, got, margin, best_score: see `infer.divergence.FirstDifference`.
    round: the round that emitted it; the prefill is round 0.
    depth: its depth in the tree of that round, counted from 1.
    drafted: whether it was a draft token, rather than the target's own.
    error: why the request ended, if it failed.
    """

    prompt: int
    domain: str
    temperature: float
    filters: str
    seed: int
    tree: str
    batch: int
    token_index: int
    expected: int | None
    got: int | None
    margin: float | None
    best_score: float
    round: int
    depth: int
    drafted: bool
    error: str | None

    def describe(self, name: Callable[[int | None], str]) -> str:
        """One line; `name` shows a token."""
        where = f"prompt {self.prompt} ({self.domain}), temperature {self.temperature:g}"
        where += f", {self.filters}" if self.filters else ""
        kind = "a draft token" if self.drafted else "the target's own token"
        place = f"in round {self.round} at depth {self.depth} of its tree ({kind})" if self.round else "in the prefill"
        margin = f"margin {self.margin:.2g}" if self.margin is not None else "one of which is ruled out or missing"
        ended = f"; the request ended: {self.error}" if self.error else ""
        return (
            f"{where}, seed {self.seed}, {self.tree}, batch {self.batch}: token {self.token_index} is "
            f"{name(self.got)}, expected {name(self.expected)}, {place}, {margin}{ended}"
        )


@dataclass
class Evidence:
    """What comparisons showed. `cells` are keyed by temperature, tree and batch. `rounding`: the precision whose
    rounding may explain a difference; None where nothing may."""

    rounding: torch.dtype | None
    cells: dict[tuple[float, str, int], Tally] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)

    @property
    def total(self) -> Tally:
        return sum(self.cells.values(), start=Tally())

    @property
    def faults(self) -> list[Difference]:
        """Differences that rounding does not explain."""
        return [each for each in self.differences if not self._is_tie(each)]

    @property
    def ties(self) -> list[Difference]:
        """Differences that rounding explains."""
        return [each for each in self.differences if self._is_tie(each)]

    def _is_tie(self, difference: Difference) -> bool:
        return self.rounding is not None and is_tie(self.rounding, difference.margin, difference.best_score)

    def add(self, cell: tuple[float, str, int], tally: Tally, differences: Sequence[Difference]) -> None:
        self.cells[cell] = self.cells.get(cell, Tally()) + tally
        self.differences += differences

    def figures(self) -> dict[str, Any]:
        """Plain values for a report."""
        cells = [
            {"temperature": temperature, "tree": tree, "batch": batch, **asdict(tally)}
            for (temperature, tree, batch), tally in sorted(self.cells.items())
        ]
        total = {**asdict(self.total), "near_ties": len(self.ties)}
        return {**total, "cells": cells, "differences": [asdict(each) for each in self.differences]}


def gather(
    prompts: Sequence[EvalPrompt],
    plain: Callable[[int], Engine],
    drafting: EngineMaker,
    *,
    trees: Sequence[str],
    needs: Tally,
    rounding: torch.dtype | None,
    max_tokens: int,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> Evidence:
    """Compare over temperatures, trees and batches.

    Stops when `needs` is met, when a fault is found, or after `_MOST_SWEEPS` times the tokens asked for.
    """
    batches = BATCHES if needs.emitted >= _WHOLE else SMALL_BATCHES
    count = sum(batches.values())
    share = needs.emitted / (len(TEMPERATURES) * len(trees) * count)
    max_tokens = min(max_tokens, max(_SHORTEST, math.ceil(1.1 * share)))
    reference = plain(count)
    evidence = Evidence(rounding=rounding)
    for sweep, temperature in ((sweep, temperature) for sweep in itertools.count() for temperature in TEMPERATURES):
        if sweep and _suffices(evidence, needs):  # the first sweep is over all temperatures
            break
        numbers = range(sweep * count, (sweep + 1) * count)
        cases = make_cases(reference, prompts, numbers, temperature=temperature, max_tokens=max_tokens, seed=seed)
        for turn, tree in enumerate(trees):
            for batch, part in shares(cases, batches, sweep + turn):
                engine = drafting(TREES[tree], batch)
                found = compare(engine, part, tree=tree, batch=batch, progress=progress)
                evidence.add((temperature, tree, batch), *found)
    return evidence


def _suffices(evidence: Evidence, needs: Tally) -> bool:
    total = evidence.total
    spent = total.tokens >= _MOST_SWEEPS * needs.emitted
    shown = total.emitted >= needs.emitted and total.accepted >= needs.accepted and total.deep >= needs.deep
    return spent or shown or bool(evidence.faults)


def interleave(prompts: Sequence[EvalPrompt]) -> list[EvalPrompt]:
    """One prompt of each domain, then the next of each, so that the first few are of all domains."""
    turns: dict[str, int] = {}
    ranked = []
    for prompt in prompts:
        turns[prompt.domain] = turns.get(prompt.domain, -1) + 1
        ranked.append((turns[prompt.domain], prompt))
    return [prompt for _, prompt in sorted(ranked, key=lambda entry: entry[0])]


def make_cases(
    plain: Engine,
    prompts: Sequence[EvalPrompt],
    numbers: Sequence[int],
    *,
    temperature: float,
    max_tokens: int,
    seed: int,
) -> list[Case]:
    """Plain decoding's answers to the prompts of these `numbers` (beyond the last prompt they start again at the
    first), each with a seed of its own."""
    others = [name for name in FILTERS if name]
    names = ["" if number % 2 == 0 else others[number // 2 % len(others)] for number in numbers]
    params = [
        SamplingParams(temperature=temperature, seed=seed + number, max_tokens=max_tokens, **FILTERS[name])
        for number, name in zip(numbers, names, strict=True)
    ]
    chosen = [number % len(prompts) for number in numbers]
    completions = plain.generate([prompts[index].token_ids for index in chosen], params)
    return [
        Case(number=index, prompt=prompts[index], params=one, filters=name, plain=completion)
        for index, one, name, completion in zip(chosen, params, names, completions, strict=True)
    ]


def shares(cases: Sequence[Case], batches: Mapping[int, int], turn: int) -> Iterator[tuple[int, list[Case]]]:
    """The cases split over the batch sizes, another way at each `turn`."""
    start = turn * len(cases) // 3 % len(cases)
    rest = [*cases[start:], *cases[:start]]
    for batch, number in batches.items():
        part, rest = rest[:number], rest[number:]
        yield batch, part


def compare(
    engine: Engine,
    cases: Sequence[Case],
    *,
    tree: str,
    batch: int,
    progress: Callable[[int], None] | None = None,
) -> tuple[Tally, list[Difference]]:
    """Answer the cases with `engine` and hold the tokens against plain decoding's."""
    params = [case.params for case in cases]
    completions = engine.generate([case.prompt.token_ids for case in cases], params, progress=progress)
    tally = Tally()
    differences: list[Difference] = []
    for case, completion in zip(cases, completions, strict=True):
        same = completion.token_ids == case.plain.token_ids
        at = first_difference(case.plain.token_ids, completion.token_ids)
        tally += _tally(completion, at, same)
        if not same:
            differences.append(_difference(engine.target, case, completion, tree=tree, batch=batch))
    return tally, differences


def _tally(completion: Completion, end: int, same: bool) -> Tally:
    """Evidence of an answer whose first `end` tokens agree."""
    places = [locate(completion.accepted_lengths, index) for index in range(end)]
    depths = [depth for _, depth, drafted in places if drafted]
    return Tally(
        answers=1,
        identical=int(same),
        tokens=len(completion.token_ids),
        emitted=end,
        accepted=len(depths),
        deep=sum(depth >= DEEP for depth in depths),
    )


def locate(round_lengths: Sequence[int], index: int) -> tuple[int, int, bool]:
    """Round, depth in its tree, and whether it was drafted, of the token at `index` of an answer.

    The last token of a round is the target's own (a draft token, if that ended the answer: it counts as the former).
    """
    for number, length in enumerate(round_lengths):
        if index < length:
            return number, index + 1, index + 1 < length
        index -= length
    return len(round_lengths), index + 1, False


def _difference(target: TargetModel, case: Case, completion: Completion, *, tree: str, batch: int) -> Difference:
    first = FirstDifference.find(
        target, case.prompt.token_ids, case.params, expected=case.plain.token_ids, got=completion.token_ids
    )
    number, depth, drafted = locate(completion.accepted_lengths, first.position)
    return Difference(
        prompt=case.number,
        domain=case.prompt.domain,
        temperature=case.params.temperature,
        filters=case.filters,
        seed=case.params.seed or 0,
        tree=tree,
        batch=batch,
        token_index=first.position,
        expected=first.expected,
        got=first.got,
        margin=first.margin,
        best_score=first.best_score,
        round=number,
        depth=depth,
        drafted=drafted,
        error=completion.error,
    )
