"""Exact laws of the verification rules, by enumeration of every random number that a round uses.

A `World` knows each uniform number only as an interval of [0, 1). A question about the number (is it below
0.3? which token does it pick?) splits the interval at its breakpoints; a replay for each piece, weighted by
the lengths of the intervals, gives the law of whatever ran: the very functions that the engine calls, to
float64 rounding. Numbers go by name, so noise that is used twice is enumerated as the same number, and its
faults show.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infer.tree import ROOT, Coupled, DraftTree, GreedySet, OneHot, Sampled
from infer.verify import RULES, Chance, Purpose, Rule, Verdict, verify

Tokens = tuple[int, ...]
Result = TypeVar("Result")


# Worlds: one replay each.


class World:
    """One replay: what is known of every number so far, steered by a script of choices."""

    def __init__(self, script: tuple[int, ...] = ()) -> None:
        self.script = script
        self.choices: list[int] = []
        self.alternatives: list[tuple[int, ...]] = []
        self.intervals: dict[Hashable, tuple[float, float]] = {}

    @property
    def weight(self) -> float:
        return float(np.prod([high - low for low, high in self.intervals.values()]))

    def piece(self, name: Hashable, edges: list[float]) -> int:
        """Which of the pieces between ascending `edges` (from 0 to 1) holds the number; splits what is
        known."""
        low, high = self.intervals.get(name, (0.0, 1.0))
        bounds = [(max(low, a), min(high, b)) for a, b in pairwise(edges)]
        options = [i for i, (a, b) in enumerate(bounds) if a < b]
        choice = 0
        if len(options) > 1:
            turn = len(self.choices)
            if turn < len(self.script):
                choice = self.script[turn]
            else:
                self.alternatives += [(*self.choices, other) for other in range(1, len(options))]
            self.choices.append(choice)
        self.intervals[name] = bounds[options[choice]]
        return options[choice]

    def invert(self, name: Hashable, weights: Tensor) -> int:
        """The index that the number picks from the cumulative sum of `weights`."""
        cumulative = np.cumsum(weights.tolist())
        assert cumulative[-1] > 0, "nothing to choose from"
        edges = [0.0, *(cumulative / cumulative[-1]).tolist()]
        return self.piece(name, edges)


def worlds(play: Callable[[World], Result]) -> Iterator[tuple[float, Result]]:
    """Every outcome of `play` with its probability."""
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        world = World(scripts.pop())
        result = play(world)
        scripts += world.alternatives
        yield world.weight, result


class Key(NamedTuple):
    """Full name of a number that a rule or a drafter asks for."""

    context_length: int
    round_index: int
    node: int
    purpose: Purpose
    trial: int


@dataclass(frozen=True)
class EnumeratedChance:
    """A `Chance` over a world. `rename` maps keys to numbers: the identity, or a reuse of noise to be
    caught."""

    world: World
    context_length: int = 0
    round_index: int = 0
    rename: Callable[[Key], Hashable] = lambda key: key

    def accept(self, probability: float, *, node: int, purpose: Purpose, trial: int = 0) -> bool:
        assert probability == probability, "an acceptance probability is NaN"
        edge = min(1.0, max(0.0, probability))
        return self.world.piece(self._name(node, purpose, trial), [0.0, edge, 1.0]) == 0

    def choose(self, weights: Tensor, *, node: int, purpose: Purpose, trial: int = 0) -> int:
        return self.world.invert(self._name(node, purpose, trial), weights)

    def _name(self, node: int, purpose: Purpose, trial: int) -> Hashable:
        return self.rename(Key(self.context_length, self.round_index, node, purpose, trial))


# Toy models: next-token laws that depend on the whole history.


class Model(Protocol):
    @property
    def size(self) -> int: ...
    def probs(self, context: Tokens) -> Tensor: ...


@dataclass(frozen=True)
class RandomModel:
    """A law for every context, drawn once from the seed; `zeros` removes about a third of the tokens."""

    size: int
    seed: int
    zeros: bool = False
    rows: dict[Tokens, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def probs(self, context: Tokens) -> Tensor:
        if context not in self.rows:
            rng = np.random.default_rng([self.seed, len(context), *context])
            weights = rng.dirichlet(np.full(self.size, 0.8)) + 0.01
            if self.zeros:
                removed = rng.random(self.size) < 0.35
                removed[rng.integers(self.size)] = False
                weights[removed] = 0
            self.rows[context] = torch.from_numpy(weights / weights.sum())
        return self.rows[context]


@dataclass(frozen=True)
class UniformModel:
    """Ties everywhere."""

    size: int

    def probs(self, context: Tokens) -> Tensor:
        return torch.full((self.size,), 1 / self.size, dtype=torch.float64)


@dataclass(frozen=True)
class Processed:
    """A model under a processor stack: `process(row, context)`."""

    model: Model
    process: Callable[[Tensor, Tokens], Tensor]

    @property
    def size(self) -> int:
        return self.model.size

    def probs(self, context: Tokens) -> Tensor:
        return self.process(self.model.probs(context), context)


# Drafters.


class Noise(Protocol):
    """The noise of the target's own draw after a node, as a drafter may peek at it."""

    def __call__(self, node: int, position: int, weights: Tensor) -> int: ...


Drafter = Callable[[Tokens, Chance, Noise], DraftTree]
Width = Callable[[Tokens], int]
"""How many children follow a drafted path: known before any of them is drawn."""

Propose = Callable[[int, Tokens, int], list[int]]


def grow(width: Width, propose: Propose) -> tuple[Tokens, Tokens]:
    """Tokens and parents of the tree that `propose(node, path, count)` makes, level by level."""
    tokens: list[int] = []
    parents: list[int] = []
    frontier: list[tuple[int, Tokens]] = [(ROOT, ())]
    while frontier:
        node, path = frontier.pop(0)
        count = width(path)
        for token in propose(node, path, count) if count else []:
            frontier.append((len(tokens), (*path, token)))
            tokens.append(token)
            parents.append(node)
    return tuple(tokens), tuple(parents)


def levels(*widths: int) -> Width:
    """The same width everywhere on a level: levels(1, 1, 1) is a chain of three, levels(3) leaves only."""
    return lambda path: widths[len(path)] if len(path) < len(widths) else 0


def uneven(path: Tokens) -> int:
    """A shape that depends on the tokens drawn so far."""
    return {0: 2, 1: 2 - (path or (0,))[0] % 2}.get(len(path), 0)


def as_drawn(drawn: list[int], row: Tensor) -> list[int]:
    return drawn


def sampled(
    model: Model,
    width: Width,
    *,
    replacement: bool = False,
    said: Model | None = None,
    tamper: Callable[[list[int], Tensor], list[int]] = as_drawn,
) -> Drafter:
    """Children drawn from the model. Faults: `said` is what the tree says they were drawn from; `tamper`
    rearranges siblings once drawn."""

    def draft(context: Tokens, chance: Chance, noise: Noise) -> DraftTree:
        rows: dict[int, Tensor] = {}

        def propose(node: int, path: Tokens, count: int) -> list[int]:
            weights = model.probs(context + path).clone()
            rows[node] = (said or model).probs(context + path)
            drawn: list[int] = []
            while len(drawn) < count and weights.sum() > 0:
                drawn.append(chance.choose(weights, node=node, purpose=Purpose.DRAFT, trial=len(drawn)))
                if not replacement:
                    weights[drawn[-1]] = 0
            return tamper(drawn, rows[node])

        tokens, parents = grow(width, propose)
        kind = Sampled(draft_probs=rows, replacement=replacement)
        return DraftTree(tokens=tokens, parents=parents, kind=kind)

    return draft


def top(row: Tensor, count: int) -> list[int]:
    order: list[int] = torch.sort(row, descending=True, stable=True).indices[:count].tolist()
    return [token for token in order if row[token] > 0]


def greedy_sets(model: Model, width: Width) -> Drafter:
    """All children but the last are the model's top tokens; the last is drawn from the rest."""

    def draft(context: Tokens, chance: Chance, noise: Noise) -> DraftTree:
        rows: dict[int, Tensor] = {}

        def propose(node: int, path: Tokens, count: int) -> list[int]:
            rows[node] = model.probs(context + path)
            elders = top(rows[node], count - 1)
            rest = rows[node].clone()
            rest[elders] = 0
            if rest.sum() == 0:
                return elders
            return [*elders, chance.choose(rest, node=node, purpose=Purpose.DRAFT)]

        tokens, parents = grow(width, propose)
        return DraftTree(tokens=tokens, parents=parents, kind=GreedySet(draft_probs=rows))

    return draft


def top_tokens(model: Model, width: Width) -> Drafter:
    """A fixed top-k tree."""

    def draft(context: Tokens, chance: Chance, noise: Noise) -> DraftTree:
        tokens, parents = grow(width, lambda node, path, count: top(model.probs(context + path), count))
        return DraftTree(tokens=tokens, parents=parents, kind=OneHot())

    return draft


def coupled(model: Model, width: Width) -> Drafter:
    """The token that the target's own noise picks from the draft's law, then the top ones. The noise also
    decides the order of siblings and thus their slots, which must not matter."""

    def draft(context: Tokens, chance: Chance, noise: Noise) -> DraftTree:
        def propose(node: int, path: Tokens, count: int) -> list[int]:
            row = model.probs(context + path)
            position = len(context) + len(path)
            first = noise(node, position, row)
            siblings = [first, *(token for token in top(row, count) if token != first)][:count]
            # Peek one position ahead too: the last slot's noise decides the order.
            swap = noise(node + 1, position + 1, torch.tensor([0.5, 0.5]))
            return siblings[::-1] if swap else siblings

        tokens, parents = grow(width, propose)
        return DraftTree(tokens=tokens, parents=parents, kind=Coupled())

    return draft


def nothing(context: Tokens, chance: Chance, noise: Noise) -> DraftTree:
    return DraftTree.empty()


# Scenarios: a target, a drafter and a rule, and the law of what they emit.


@dataclass(frozen=True)
class ToyLaw:
    """A node's law along its own path. A path that the target cannot take has no row: reading it is an
    error."""

    scenario: Scenario
    context: Tokens
    tree: DraftTree
    noise: Noise

    def draw(self, node: int) -> int:
        depth = 0 if node == ROOT else self.tree.depths[node]
        return self.noise(node, len(self.context) + depth, self.probs(node))

    def probs(self, node: int) -> Tensor:
        path = self.tree.path(node)
        tokens = tuple(self.tree.tokens[step] for step in path)
        for end, token in enumerate(tokens):
            possible = self.scenario.law_row(self.context, tokens[:end])[token] > 0
            assert possible, f"the row below an impossible token was read, at node {node}"
        return self.scenario.law_row(self.context, tokens)


class LengthAndTokens(NamedTuple):
    num_accepted: int
    tokens: Tokens


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """`law_row(context, path)` is what the rule is told of the target, `rename` how keys map to numbers and
    `slot_noise` ties the noise of draws to tree slots: honest by default, else a fault to be caught."""

    rule: str
    target: Model
    draft: Drafter
    rounds: int = 1
    length: int = 3
    read: Callable[[Model, Tokens, Tokens], Tensor] = lambda model, context, path: model.probs(context + path)
    rename: Callable[[Key], Hashable] = lambda key: key
    slot_noise: bool = False

    def law_row(self, context: Tokens, path: Tokens) -> Tensor:
        return self.read(self.target, context, path)

    def play(self, world: World, rules: Mapping[str, Rule] = RULES) -> LengthAndTokens:
        """Some rounds in one world: tokens accepted, and all tokens emitted."""
        context: Tokens = ()
        num_accepted = 0
        for round_index in range(self.rounds):
            verdict, tree = self._play_round(world, context, round_index, rules)
            context += verdict.tokens(tree)
            num_accepted += len(verdict.path)
        return LengthAndTokens(num_accepted, context)

    def _play_round(
        self, world: World, context: Tokens, round_index: int, rules: Mapping[str, Rule]
    ) -> tuple[Verdict, DraftTree]:
        def noise(node: int, position: int, weights: Tensor) -> int:
            name = ("slot", round_index, node) if self.slot_noise else ("position", position)
            return world.invert(name, weights)

        chance = EnumeratedChance(world, len(context), round_index, self.rename)
        tree = self.draft(context, chance, noise)
        return verify(rules[self.rule], tree, ToyLaw(self, context, tree, noise), chance), tree

    def outcomes(self, rules: Mapping[str, Rule] = RULES) -> dict[LengthAndTokens, float]:
        """Law of what the rounds accept and emit."""
        law: dict[LengthAndTokens, float] = {}
        for weight, outcome in worlds(lambda world: self.play(world, rules)):
            law[outcome] = law.get(outcome, 0.0) + weight
        return law

    def total_variation(self, rules: Mapping[str, Rule] = RULES) -> float:
        """Between the first `length` tokens of the rounds, completed by plain sampling, and plain sampling
        alone."""
        size = self.target.size
        emitted = np.zeros([size] * self.length)
        for (_, tokens), weight in self.outcomes(rules).items():
            start = tokens[: self.length]
            emitted[start] += weight * plain(self.target, start, self.length - len(start))
        return 0.5 * float(np.abs(emitted - plain(self.target, (), self.length)).sum())

    def expected_accepted(self) -> float:
        return sum(weight * num_accepted for (num_accepted, _), weight in self.outcomes().items())


def plain(model: Model, context: Tokens, length: int) -> NDArray[np.float64]:
    """Joint law of the next `length` tokens under plain sampling, [V] * length."""
    if length == 0:
        return np.ones(())
    row = model.probs(context).numpy()
    after = [
        plain(model, (*context, token), length - 1) if row[token] > 0 else np.zeros([len(row)] * (length - 1))
        for token in range(len(row))
    ]
    return np.stack([row[token] * after[token] for token in range(len(row))])
