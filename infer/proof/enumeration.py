"""Exact laws of the verification rules, by enumeration of every random number that a round uses.

A `World` knows each uniform number only as an interval of [0, 1). A question about the number (is it below
0.3? which token does it pick?) splits the interval at its breakpoints; a replay for each piece, weighted by
the lengths of the intervals, gives the law of whatever ran: the very functions that the engine calls, to
float64 rounding. A number goes by the key that the engine's own `KeyedChance` would draw it with, so noise that
is used twice, keys that collide among it, is enumerated as the same number, and its faults show.

What this cannot see: rounding in float32, and faults of the engine around the rules (caches, masks, positions).
Those are what `infer.audit` measures on a real model.
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

from infer.noise import position_key
from infer.tree import ROOT, Coupled, DraftTree, GreedySet, OneHot, Sampled
from infer.verify import RULES, Chance, KeyedChance, NodeLaw, Purpose, Rule, Verdict, verify

Tokens = tuple[int, ...]
"""A history: tokens emitted so far, or a path in a tree."""

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Code:
    """The functions under enumeration: the engine's own, or those of an edited copy (`infer.proof.faults`)."""

    rules: Mapping[str, Rule] = field(default_factory=lambda: RULES)
    chance: Callable[..., KeyedChance] = KeyedChance
    position_key: Callable[[int, int, int, int], int] = position_key


ENGINE = Code()


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
        """The probability of this world: the product of its intervals' lengths."""
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
    """What a rule or a drafter asks a number for."""

    context_length: int
    round_index: int
    node: int
    purpose: Purpose
    trial: int


@dataclass(frozen=True)
class EnumeratedChance:
    """A `Chance` over a world. Two calls get one number if `code` would draw them with one key. `rename` plants a reuse
    of noise: it names the number itself, or returns None to leave it to the code."""

    world: World
    context_length: int = 0
    round_index: int = 0
    code: Code = ENGINE
    rename: Callable[[Key], Hashable | None] = lambda key: None
    names: dict[Key, Hashable] = field(default_factory=dict)
    """The keys found so far, shared by the worlds of one scenario."""

    def accept(self, probability: float, *, node: int, purpose: Purpose, trial: int = 0) -> bool:
        assert probability == probability, "an acceptance probability is NaN"
        edge = min(1.0, max(0.0, probability))
        return self.world.piece(self._name(node, purpose, trial), [0.0, edge, 1.0]) == 0

    def choose(self, weights: Tensor, *, node: int, purpose: Purpose, trial: int = 0) -> int:
        return self.world.invert(self._name(node, purpose, trial), weights)

    def _name(self, node: int, purpose: Purpose, trial: int) -> Hashable:
        key = Key(self.context_length, self.round_index, node, purpose, trial)
        if key not in self.names:
            planted = self.rename(key)
            self.names[key] = self._number(key) if planted is None else ("planted", planted)
        return self.names[key]

    def _number(self, key: Key) -> float:
        """The number that the engine would draw for seed 0. Equal keys give equal numbers, and in 53 bits no two other
        keys here do."""
        keyed = self.code.chance(seed=0, sample=0, attempt=0, round_index=key.round_index)
        return keyed._uniform(key.node, key.purpose, key.trial)


# Toy models: next-token laws that depend on the whole history.


class Model(Protocol):
    """A next-token law [V] float64 for every history."""

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
    """A model that gives all tokens the same probability, so that there are ties everywhere."""

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
"""Makes a tree for a history, from random numbers of its own and what it sees of the target's."""

Width = Callable[[Tokens], int]
"""How many children follow a drafted path; settled before any of them is drawn."""

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
    """The same number of children at every node of a level: levels(1, 1, 1) is a chain of three, levels(3) three
    leaves."""
    return lambda path: widths[len(path)] if len(path) < len(widths) else 0


def uneven(path: Tokens) -> int:
    """A shape that depends on the tokens drawn so far."""
    return {0: 2, 1: 2 - (path or (0,))[0] % 2}.get(len(path), 0)


def as_drawn(drawn: list[int], row: Tensor) -> list[int]:
    """Leaves siblings in the order drawn, as a drafter must."""
    return drawn


def sampled(
    model: Model,
    width: Width,
    *,
    replacement: bool = False,
    said: Model | None = None,
    tamper: Callable[[list[int], Tensor], list[int]] = as_drawn,
) -> Drafter:
    """Children drawn from the model. Two arguments plant faults: `said` is what the tree says that they were drawn
    from, `tamper` rearranges siblings once drawn."""

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
    """The `count` likeliest tokens of the support, lower ids first on ties."""
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
    """The token that the target's own noise picks from the draft's law, and then the likeliest ones. The noise also
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
    """A drafter that proposes nothing."""
    return DraftTree.empty()


# Scenarios: a target, a drafter and a rule, and the law of what they emit.


@dataclass(frozen=True)
class ToyLaw:
    """The law at each node, along the node's own path. A path that the target cannot take has no row, and reading it
    is an error."""

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
            possible = self.scenario.target.probs(self.context + tokens[:end])[token] > 0
            assert possible, f"the row below an impossible token was read, at node {node}"
        return self.scenario.target.probs(self.context + tokens)


class LengthAndTokens(NamedTuple):
    """What some rounds kept of their drafts, and all that they emitted."""

    num_accepted: int
    tokens: Tokens


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Rounds of a rule over drafts, whose law can be enumerated. Three fields plant faults, and are honest by default:
    `law` is what the rule is told of the target, `rename` makes numbers serve twice, `slot_noise` ties the noise of
    draws to tree slots."""

    rule: str
    target: Model
    draft: Drafter
    rounds: int = 1
    length: int = 3
    law: Callable[[Scenario, Tokens, DraftTree, Noise], NodeLaw] = ToyLaw
    rename: Callable[[Key], Hashable | None] = lambda key: None
    slot_noise: bool = False

    def play(self, world: World, code: Code, names: dict[Key, Hashable]) -> LengthAndTokens:
        """Play the rounds in one world."""
        context: Tokens = ()
        num_accepted = 0
        for round_index in range(self.rounds):
            chance = EnumeratedChance(world, len(context), round_index, code, self.rename, names)
            verdict, tree = self._play_round(context, chance)
            context += verdict.tokens(tree)
            num_accepted += len(verdict.path)
        return LengthAndTokens(num_accepted, context)

    def _play_round(self, context: Tokens, chance: EnumeratedChance) -> tuple[Verdict, DraftTree]:
        code = chance.code

        def noise(node: int, position: int, weights: Tensor) -> int:
            of_slot = ("slot", chance.round_index, node)
            of_position = ("position", code.position_key(0, 0, 0, position))
            return chance.world.invert(of_slot if self.slot_noise else of_position, weights)

        tree = self.draft(context, chance, noise)
        return verify(code.rules[self.rule], tree, self.law(self, context, tree, noise), chance), tree

    def outcomes(self, code: Code = ENGINE) -> dict[LengthAndTokens, float]:
        """The law of what the rounds accept and emit."""
        law: dict[LengthAndTokens, float] = {}
        names: dict[Key, Hashable] = {}
        for weight, outcome in worlds(lambda world: self.play(world, code, names)):
            law[outcome] = law.get(outcome, 0.0) + weight
        return law

    def total_variation(self, code: Code = ENGINE) -> float:
        """The total variation between the first `length` tokens of the rounds, completed by plain sampling, and those
        of plain sampling alone."""
        size = self.target.size
        emitted = np.zeros([size] * self.length)
        for (_, tokens), weight in self.outcomes(code).items():
            start = tokens[: self.length]
            emitted[start] += weight * plain(self.target, start, self.length - len(start))
        return 0.5 * float(np.abs(emitted - plain(self.target, (), self.length)).sum())

    def expected_accepted(self) -> float:
        """The mean number of draft tokens that the rounds keep."""
        return sum(weight * num_accepted for (num_accepted, _), weight in self.outcomes().items())


def plain(model: Model, context: Tokens, length: int) -> NDArray[np.float64]:
    """The joint law of the next `length` tokens under plain sampling, [V] * length."""
    if length == 0:
        return np.ones(())
    row = model.probs(context).numpy()
    after = [
        plain(model, (*context, token), length - 1) if row[token] > 0 else np.zeros([len(row)] * (length - 1))
        for token in range(len(row))
    ]
    return np.stack([row[token] * after[token] for token in range(len(row))])
