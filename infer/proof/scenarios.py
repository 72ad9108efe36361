"""Every lossless rule over every kind of draft that it takes, on targets and drafts with zeros, ties and filters.

Each scenario must keep the law to `EXACT`: enumeration leaves float64 rounding and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from infer.proof.enumeration import (
    Drafter,
    Model,
    Processed,
    RandomModel,
    Scenario,
    Tokens,
    UniformModel,
    coupled,
    greedy_sets,
    levels,
    nothing,
    sampled,
    top,
    top_tokens,
    uneven,
)

EXACT = 1e-12


# Processors.


def only_argmax(row: Tensor, context: Tokens) -> Tensor:
    """Greedy decoding."""
    return torch.zeros_like(row).index_fill_(0, row.argmax(), 1.0)


def keep_top(count: int) -> Callable[[Tensor, Tokens], Tensor]:
    """Top-k."""

    def process(row: Tensor, context: Tokens) -> Tensor:
        kept = torch.zeros_like(row)
        kept[top(row, count)] = row[top(row, count)]
        return kept / kept.sum()

    return process


def keep_mass(mass: float) -> Callable[[Tensor, Tokens], Tensor]:
    """Top-p: the likeliest tokens until their mass passes `mass`."""

    def process(row: Tensor, context: Tokens) -> Tensor:
        ordered, order = torch.sort(row, descending=True, stable=True)
        kept = torch.zeros_like(row)
        inside = order[ordered.cumsum(0) - ordered < mass]
        kept[inside] = row[inside]
        return kept / kept.sum()

    return process


def penalise(row: Tensor, context: Tokens) -> Tensor:
    """Tokens already seen lose three quarters of their weight, which makes the law depend on the whole path."""
    weights = row.clone()
    weights[list(set(context))] *= 0.25
    return weights / weights.sum()


def _penalised(size: int, seed: int) -> Model:
    return Processed(RandomModel(size, seed), penalise)


# Targets with drafts.

PAIRS: dict[str, tuple[Model, Model]] = {
    "random": (RandomModel(3, 0), RandomModel(3, 1)),
    "wider": (RandomModel(4, 2), RandomModel(4, 3)),
    "zeros": (RandomModel(3, 78, zeros=True), RandomModel(3, 79, zeros=True)),
    "more zeros": (RandomModel(4, 42, zeros=True), RandomModel(4, 43, zeros=True)),
    "zeros in the target": (RandomModel(3, 78, zeros=True), RandomModel(3, 11)),
    "zeros in the draft": (RandomModel(3, 12), RandomModel(3, 79, zeros=True)),
    "disjoint": (Processed(RandomModel(4, 5), keep_top(2)), Processed(RandomModel(4, 6), keep_top(2))),
    "ties": (UniformModel(3), UniformModel(3)),
    "ties in the draft": (RandomModel(3, 7), UniformModel(3)),
    "ties in the target": (UniformModel(3), RandomModel(3, 7)),
    "equal": (RandomModel(3, 8), RandomModel(3, 8)),
    "equal with zeros": (RandomModel(3, 78, zeros=True), RandomModel(3, 78, zeros=True)),
    "greedy": (Processed(RandomModel(3, 9), only_argmax), RandomModel(3, 10)),
    "greedy draft": (RandomModel(3, 9), Processed(RandomModel(3, 10), only_argmax)),
    "greedy twice": (Processed(RandomModel(3, 9), only_argmax), Processed(RandomModel(3, 10), only_argmax)),
    "penalties": (_penalised(3, 13), _penalised(3, 14)),
    "penalties that the draft ignores": (_penalised(3, 13), RandomModel(3, 14)),
    "one token": (UniformModel(1), UniformModel(1)),
    "two tokens": (RandomModel(2, 15), RandomModel(2, 16)),
}

# Drafts, and the rules that take them.

DRAFTERS: dict[str, Callable[[Model], Drafter]] = {
    "chain": lambda model: sampled(model, levels(1, 1, 1)),
    "chain, independent": lambda model: sampled(model, levels(1, 1, 1), replacement=True),
    "chain, one token": lambda model: sampled(model, levels(1)),
    "without replacement": lambda model: sampled(model, uneven),
    "without replacement, leaves": lambda model: sampled(model, levels(3)),
    "without replacement, deep": lambda model: sampled(model, levels(2, 1, 1)),
    "independent": lambda model: sampled(model, uneven, replacement=True),
    "independent, leaves": lambda model: sampled(model, levels(3), replacement=True),
    "greedy sets": lambda model: greedy_sets(model, levels(2, 2)),
    "greedy sets, wide": lambda model: greedy_sets(model, levels(3, 1)),
    "greedy sets, leaves": lambda model: greedy_sets(model, levels(3)),
    "greedy sets, chain": lambda model: greedy_sets(model, levels(1, 1)),
    "top tokens": lambda model: top_tokens(model, levels(2, 2, 1)),
    "top tokens, leaves": lambda model: top_tokens(model, levels(3)),
    "top tokens, chain": lambda model: top_tokens(model, levels(1, 1, 1)),
    "coupled": lambda model: coupled(model, levels(2, 2)),
    "coupled, leaves": lambda model: coupled(model, levels(3)),
    "coupled, chain": lambda model: coupled(model, levels(1, 1, 1)),
    "nothing": lambda model: nothing,
}

_CHAINS = ("chain", "chain, independent", "chain, one token", "nothing")
_TREES = (
    *_CHAINS,
    "without replacement",
    "without replacement, leaves",
    "without replacement, deep",
    "independent",
    "independent, leaves",
)
DRAFTERS_OF_RULE: dict[str, tuple[str, ...]] = {
    "token": _CHAINS,
    "block": _CHAINS,
    "recursive": _TREES,
    "traversal": _TREES,
    "greedy_set": ("greedy sets", "greedy sets, wide", "greedy sets, leaves", "greedy sets, chain", "nothing"),
    "match": (
        "top tokens",
        "top tokens, leaves",
        "top tokens, chain",
        "coupled",
        "coupled, leaves",
        "coupled, chain",
        "nothing",
    ),
}

_SLOW_DRAFTERS = ("independent", "without replacement, deep")
_SLOW_PAIRS = tuple(
    pair for pair in PAIRS if pair.startswith(("wider", "more", "penalties", "ties in", "zeros in the d"))
)
"""Slow drafters are not run on slow pairs, which takes tens of thousands of worlds each. The random pair and the zeros
cover these shapes."""

_SMALL, _SMALL_DRAFT = PAIRS["random"]
TWO_ROUNDS: tuple[tuple[str, Drafter], ...] = (
    ("token", sampled(_SMALL_DRAFT, levels(1, 1))),
    ("block", sampled(_SMALL_DRAFT, levels(1, 1))),
    ("recursive", sampled(_SMALL_DRAFT, levels(2))),
    ("recursive", sampled(_SMALL_DRAFT, levels(2), replacement=True)),
    ("traversal", sampled(_SMALL_DRAFT, levels(2))),
    ("traversal", sampled(_SMALL_DRAFT, levels(2), replacement=True)),
    ("greedy_set", greedy_sets(_SMALL_DRAFT, levels(2))),
    ("match", top_tokens(_SMALL_DRAFT, levels(2, 1))),
    ("match", coupled(_SMALL_DRAFT, levels(2))),
)


def scenario(rule: str, drafter: str, pair: str) -> Scenario:
    """One round of `rule` over a draft of that kind."""
    target, draft = PAIRS[pair]
    return Scenario(rule=rule, target=target, draft=DRAFTERS[drafter](draft), length=4)


def pairs_of(drafter: str) -> list[str]:
    """The pairs on which a kind of draft is enumerated."""
    return [pair for pair in PAIRS if not (pair in _SLOW_PAIRS and drafter in _SLOW_DRAFTERS)]


def two_rounds(rule: str, drafter: Drafter) -> Scenario:
    """Two rounds, one after the other: nothing that one learns of its numbers may bias the other."""
    return Scenario(rule=rule, target=_SMALL, draft=drafter, rounds=2, length=5)


class Named(NamedTuple):
    """A scenario under the name that a report gives it."""

    name: str
    scenario: Scenario


def all_scenarios() -> Iterator[Named]:
    """Every scenario that an audit enumerates, by rule."""
    for rule, drafters in DRAFTERS_OF_RULE.items():
        for drafter in drafters:
            for pair in pairs_of(drafter):
                yield Named(f"{rule}, {drafter}, {pair}", scenario(rule, drafter, pair))
    for number, (rule, drafter_function) in enumerate(TWO_ROUNDS, start=1):
        yield Named(f"{rule}, two rounds ({number})", two_rounds(rule, drafter_function))
