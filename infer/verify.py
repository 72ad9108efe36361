"""Verification: which draft tokens are kept, and the token of the target's own that follows them.

A rule is a pure function of a draft tree, the target's law at its nodes and a source of chance. Whatever the
draft, the tokens that a lossless rule emits are distributed as plain sampling from the target; the tests
enumerate these very functions to 1e-12. Nothing here knows about models, logits or requests, and no tensor
given is edited in place.

Words: `target_probs` [V] is the target's next-token distribution after the request's whole processor stack,
along the node's own path; `draft_probs` [V] is what the children of a node were really drawn from; `reach` is
the probability, on the rule's books, that a node's path is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import IntEnum
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from infer.noise import noise_key, uniform
from infer.tree import ROOT, Coupled, DraftTree, GreedySet, OneHot, Sampled


class Purpose(IntEnum):
    """What a random number is for; part of its key, so that no number serves twice."""

    DRAFT = 0
    """Drawing a child: `node` is the parent and `trial` counts its children."""
    ACCEPT = 1
    """Testing `node`."""
    EMIT = 2
    """Drawing the token that follows `node`."""


class NodeLaw(Protocol):
    """The target's next-token law after a node, processed along that node's own path; computed when asked."""

    def draw(self, node: int) -> int:
        """The seed-exact draw, with the noise of the node's absolute position; greedy: the lowest argmax."""
        ...

    def probs(self, node: int) -> Tensor:
        """The distribution itself, [V] float."""
        ...


class Chance(Protocol):
    """Fresh randomness, keyed by round, node and purpose."""

    def accept(self, probability: float, *, node: int, purpose: Purpose, trial: int = 0) -> bool:
        """True with the given probability: `u < probability` for u in [0, 1), so never at probability 0."""
        ...

    def choose(self, weights: Tensor, *, node: int, purpose: Purpose, trial: int = 0) -> int:
        """An index drawn in proportion to non-negative `weights` [V]; never an index of weight 0."""
        ...


def choose_index(weights: Tensor, uniform_number: float) -> int:
    """Invert the cumulative sum of the positive `weights` [V] at `uniform_number` in [0, 1).

    On the CPU in float64: the scan of an accelerator need not be monotone, nor the same from one to the next.
    """
    weights = weights.cpu()
    support = weights.nonzero().squeeze(1)
    cumulative = weights[support].double().cumsum(0)
    total = float(cumulative[-1]) if len(support) else 0.0
    if not 0 < total < math.inf:
        raise ValueError(f"cannot draw a token from weights that sum to {total}: check the model's output")
    above = int(torch.searchsorted(cumulative, uniform_number * total, right=True))
    return int(support[min(above, len(support) - 1)])


_CHANCE_DOMAIN = 0x7665726966790001
"""First part of every key here, which keeps these numbers apart from the Gumbel noise of positions."""


@dataclass(frozen=True)
class KeyedChance:
    """The `Chance` of one round of one request: a hash of keys, so the order of calls does not matter."""

    seed: int
    sample: int
    attempt: int
    round_index: int

    def accept(self, probability: float, *, node: int, purpose: Purpose, trial: int = 0) -> bool:
        return self._uniform(node, purpose, trial) < probability

    def choose(self, weights: Tensor, *, node: int, purpose: Purpose, trial: int = 0) -> int:
        return choose_index(weights, self._uniform(node, purpose, trial))

    def _uniform(self, node: int, purpose: Purpose, trial: int) -> float:
        key = (self.seed, self.sample, self.attempt, self.round_index, node - ROOT, int(purpose), trial)
        return uniform(noise_key(_CHANCE_DOMAIN, *key))


@dataclass(frozen=True)
class Verdict:
    """What a round emits: the tokens of the `path` nodes, root first, then the target's own `token`."""

    path: tuple[int, ...]
    token: int

    def tokens(self, tree: DraftTree) -> tuple[int, ...]:
        return (*(tree.tokens[node] for node in self.path), self.token)


# The arithmetic that the rules share.


def ratio(target_probs: Tensor, draft_probs: Tensor, token: int) -> float:
    """Target over draft probability of a drawn token; above 1 where the target likes it more."""
    target, draft = float(target_probs[token]), float(draft_probs[token])
    if not target >= 0:
        raise ValueError(f"the target gives token {token} probability {target}: check the model's output")
    if not draft > 0:
        raise ValueError(
            f"token {token} cannot have been drawn where its draft probability is {draft}: pass the law that"
            " the drafter sampled from, after temperature and filters, and siblings in the order drawn"
        )
    return target / draft


def excess(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Where the target's mass exceeds the draft's: [V], not normalised."""
    return (target_probs - draft_probs).clamp_min(0)


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """What is left to emit after a rejection: the excess, normalised; the target if rounding emptied it."""
    leftover = excess(target_probs, draft_probs)
    mass = leftover.sum()
    return leftover / mass if mass > 0 else target_probs


def remove(draft_probs: Tensor, tokens: Sequence[int]) -> Tensor:
    """The draft distribution without `tokens`, normalised; all zeros when nothing remains."""
    remaining = draft_probs.clone()
    for token in tokens:
        remaining[token] = 0
    mass = remaining.sum()
    return remaining / mass if mass > 0 else remaining


def share(leftover_mass: float, reach: float) -> float:
    """Chance that a path ends here, given that it goes no deeper; certain if it can end nowhere else."""
    # The brackets matter: (leftover_mass + 1) - reach loses a small leftover_mass to rounding.
    ending = leftover_mass + (1.0 - reach)
    return leftover_mass / ending if ending > 0 else 1.0


def _draft_row(tree: DraftTree, node: int, like: Tensor) -> Tensor:
    """What the children of `node` were drawn from, in the dtype and on the device of the target's row."""
    assert isinstance(tree.kind, Sampled | GreedySet), "verify() pairs rules with proposal kinds"
    return tree.kind.draft_probs[node].to(like)


def _after_rejecting(tree: DraftTree, draft_probs: Tensor, token: int) -> Tensor:
    """What the next sibling was drawn from, once `token` is out of the way."""
    assert isinstance(tree.kind, Sampled)
    return draft_probs if tree.kind.replacement else remove(draft_probs, [token])


def _child_with_token(tree: DraftTree, children: Sequence[int], token: int) -> int | None:
    return next((child for child in children if tree.tokens[child] == token), None)


# The rules.


def match_walk(tree: DraftTree, law: NodeLaw, chance: Chance | None = None) -> Verdict:
    """Draw the target's own token at each node and descend while the tree holds it.

    Exact for every tree and every pruning, and token for token what plain decoding with the same seed emits:
    the tree decides only where the round ends.
    """
    path: list[int] = []
    node = ROOT
    while True:
        token = law.draw(node)
        child = _child_with_token(tree, tree.children(node), token)
        if child is None:
            return Verdict(tuple(path), token)
        path.append(child)
        node = child


def token_rejection(tree: DraftTree, law: NodeLaw, chance: Chance) -> Verdict:
    """Chain: accept each token with min(1, target/draft); the first rejection emits from the residual."""
    node = ROOT
    for child in range(len(tree)):
        target_probs = law.probs(node)
        draft_probs = _draft_row(tree, node, target_probs)
        likeness = ratio(target_probs, draft_probs, tree.tokens[child])
        if not chance.accept(min(1.0, likeness), node=child, purpose=Purpose.ACCEPT):
            leftover = residual(target_probs, draft_probs)
            return Verdict(tree.path(node), chance.choose(leftover, node=node, purpose=Purpose.EMIT))
        node = child
    return Verdict(tree.path(node), chance.choose(law.probs(node), node=node, purpose=Purpose.EMIT))


def block_verification(tree: DraftTree, law: NodeLaw, chance: Chance) -> Verdict:
    """Chain: test every prefix and keep the longest that passes. No valid rule keeps more on average."""
    reach, kept = 1.0, ROOT
    target_probs = law.probs(ROOT)
    emit_from = target_probs
    if len(tree):
        draft_probs = _draft_row(tree, ROOT, target_probs)
        emit_from = residual(target_probs, draft_probs)
    for node, token in enumerate(tree.tokens):
        reach = min(1.0, reach * ratio(target_probs, draft_probs, token))
        if reach == 0:
            break  # nothing deeper can be kept, and its rows may not exist
        target_probs = law.probs(node)
        if node + 1 == len(tree):
            passes, emit_after = reach, target_probs
        else:
            draft_probs = _draft_row(tree, node, target_probs)
            leftover = excess(reach * target_probs, draft_probs)
            mass = float(leftover.sum())
            passes, emit_after = share(mass, reach), leftover if mass > 0 else target_probs
        if chance.accept(passes, node=node, purpose=Purpose.ACCEPT):
            kept, emit_from = node, emit_after
    return Verdict(tree.path(kept), chance.choose(emit_from, node=kept, purpose=Purpose.EMIT))


def recursive_rejection(tree: DraftTree, law: NodeLaw, chance: Chance) -> Verdict:
    """Tree: test siblings in the order drawn, each with what its rejected elders left of target and draft."""
    node = ROOT
    while children := tree.children(node):
        target_probs = law.probs(node)
        draft_probs = _draft_row(tree, node, target_probs)
        for child in children:
            token = tree.tokens[child]
            likeness = ratio(target_probs, draft_probs, token)
            if chance.accept(min(1.0, likeness), node=child, purpose=Purpose.ACCEPT):
                node = child
                break
            target_probs = residual(target_probs, draft_probs)
            draft_probs = _after_rejecting(tree, draft_probs, token)
        else:
            return Verdict(tree.path(node), chance.choose(target_probs, node=node, purpose=Purpose.EMIT))
    return Verdict(tree.path(node), chance.choose(law.probs(node), node=node, purpose=Purpose.EMIT))


def traversal(tree: DraftTree, law: NodeLaw, chance: Chance) -> Verdict:
    """Tree: block verification's gain on a tree. Leaves go first; a rejected node strengthens its parent."""
    verdict = _traverse(tree, law, chance, ROOT, 1.0)
    assert verdict is not None, "the root is accepted without a test"
    return verdict


def _traverse(tree: DraftTree, law: NodeLaw, chance: Chance, node: int, reach: float) -> Verdict | None:
    """The verdict if it ends at `node` or below; None if `node` and everything below it is rejected."""
    target_probs: Tensor | None = None
    if children := tree.children(node):
        target_probs = law.probs(node)
        draft_probs = _draft_row(tree, node, target_probs)
        for child in children:
            token = tree.tokens[child]
            child_reach = min(1.0, reach * ratio(target_probs, draft_probs, token))
            # At reach 0 nothing below can be kept, and its rows may not exist.
            verdict = _traverse(tree, law, chance, child, child_reach) if child_reach > 0 else None
            if verdict is not None:
                return verdict
            leftover = excess(reach * target_probs, draft_probs)
            mass = float(leftover.sum())
            if mass == 0:
                reach = 0.0
                break
            target_probs = leftover / mass
            draft_probs = _after_rejecting(tree, draft_probs, token)
            reach = share(mass, reach)
    if node != ROOT and not chance.accept(reach, node=node, purpose=Purpose.ACCEPT):
        return None
    emit_from = law.probs(node) if target_probs is None else target_probs
    return Verdict(tree.path(node), chance.choose(emit_from, node=node, purpose=Purpose.EMIT))


def greedy_set(tree: DraftTree, law: NodeLaw, chance: Chance) -> Verdict:
    """Tree of greedy sets: one test, of the drawn child; a residual token found among its elders descends."""
    node = ROOT
    while True:
        children = tree.children(node)
        emit_from = law.probs(node)
        if children:
            *elders, drawn = children
            draft_probs = remove(_draft_row(tree, node, emit_from), [tree.tokens[elder] for elder in elders])
            # No draft mass beside the top tokens: nothing was drawn, and the walk below is the match walk.
            if draft_probs.sum() > 0:
                likeness = ratio(emit_from, draft_probs, tree.tokens[drawn])
                if chance.accept(min(1.0, likeness), node=drawn, purpose=Purpose.ACCEPT):
                    node = drawn
                    continue
                emit_from = residual(emit_from, draft_probs)
        token = chance.choose(emit_from, node=node, purpose=Purpose.EMIT)
        child = _child_with_token(tree, children, token)
        if child is None:
            return Verdict(tree.path(node), token)
        node = child


def typical_acceptance(
    tree: DraftTree, law: NodeLaw, chance: Chance | None = None, *, epsilon: float = 0.09, delta: float = 0.3
) -> Verdict:
    """Lossy: keep the longest path of tokens that the target finds plausible, the likelier one on ties.

    Plausible means above min(epsilon, delta * exp(-entropy)). The output does not follow the target's law.
    """
    log_likelihoods = {ROOT: 0.0}
    best = (0, 0.0, ROOT)
    for parent in range(ROOT, len(tree)):
        children = tree.children(parent) if parent in log_likelihoods else []
        if not children:
            continue
        target_probs = law.probs(parent)
        entropy = float(torch.special.entr(target_probs).sum())
        threshold = min(epsilon, delta * math.exp(-entropy))
        for child in children:
            plausibility = float(target_probs[tree.tokens[child]])
            if plausibility > threshold:
                log_likelihoods[child] = log_likelihoods[parent] + math.log(plausibility)
                rank = (tree.depths[child], log_likelihoods[child], child)
                best = rank if rank[:2] > best[:2] else best
    kept = best[-1]
    return Verdict(tree.path(kept), law.draw(kept))


# The registry.

RuleFunction = Callable[[DraftTree, NodeLaw, Chance], Verdict]
KindType = type[OneHot] | type[Coupled] | type[Sampled] | type[GreedySet]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule with what it takes and what it promises.

    `exactness`: "seed" emits what plain decoding with the same seed emits, token for token; "distribution"
    keeps the target's law; "lossy" keeps neither, and every result made with it must say so. `looks_ahead`: it may give
    up acceptance at one node for the sake of those below, so that only whole paths have a bound.
    """

    name: str
    function: RuleFunction
    kinds: tuple[KindType, ...]
    needs_chain: bool
    exactness: Literal["seed", "distribution", "lossy"]
    paper: str
    looks_ahead: bool = False

    @property
    def lossless(self) -> bool:
        return self.exactness != "lossy"

    def accepts(self, tree: DraftTree) -> bool:
        """Whether the tree's proposals and shape suit the rule; an empty tree suits every rule."""
        suits = type(tree.kind) in self.kinds and (tree.is_chain or not self.needs_chain)
        return suits or not len(tree)


def typical_rule(*, epsilon: float = 0.09, delta: float = 0.3) -> Rule:
    """Typical acceptance with thresholds of one's own."""
    if not (0 <= epsilon <= 1 and 0 <= delta <= 1):
        raise ValueError(f"typical acceptance takes epsilon and delta from 0 to 1, not {epsilon} and {delta}")
    return Rule(
        name="typical",
        function=partial(typical_acceptance, epsilon=epsilon, delta=delta),
        kinds=(OneHot, Coupled, Sampled, GreedySet),
        needs_chain=False,
        exactness="lossy",
        paper="Cai et al. 2024, Medusa",
    )


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule(
            name="match",
            function=match_walk,
            kinds=(OneHot, Coupled),
            needs_chain=False,
            exactness="seed",
            paper="Daliri et al. 2024, Coupling without communication",
        ),
        Rule(
            name="token",
            function=token_rejection,
            kinds=(Sampled,),
            needs_chain=True,
            exactness="distribution",
            paper="Leviathan et al. 2023; Chen et al. 2023",
        ),
        Rule(
            name="block",
            function=block_verification,
            kinds=(Sampled,),
            needs_chain=True,
            exactness="distribution",
            paper="Sun et al. 2024, Block verification",
            looks_ahead=True,
        ),
        Rule(
            name="recursive",
            function=recursive_rejection,
            kinds=(Sampled,),
            needs_chain=False,
            exactness="distribution",
            paper="Jeon et al. 2024, Recursive speculative decoding",
        ),
        Rule(
            name="traversal",
            function=traversal,
            kinds=(Sampled,),
            needs_chain=False,
            exactness="distribution",
            paper="Weng et al. 2025, Traversal verification",
            looks_ahead=True,
        ),
        Rule(
            name="greedy_set",
            function=greedy_set,
            kinds=(GreedySet,),
            needs_chain=False,
            exactness="distribution",
            paper="Hu et al. 2025, Towards optimal multi-draft speculative decoding",
        ),
        typical_rule(),
    )
}


def find_rule(name: str) -> Rule:
    """The rule of that name."""
    if not isinstance(name, str) or name not in RULES:
        close = get_close_matches(str(name), RULES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"there is no verification rule {name!r}: the rules are {', '.join(RULES)}{hint}")
    return RULES[name]


def check_kind(rule: Rule, kind: KindType) -> None:
    """Refuse, before anything runs, a drafter whose proposals the rule would verify wrongly."""
    if kind not in rule.kinds:
        expected = " or ".join(accepted.__name__ for accepted in rule.kinds)
        fitting = [other.name for other in RULES.values() if kind in other.kinds and other.lossless]
        raise ValueError(
            f"rule {rule.name!r} verifies {expected} proposals, but the drafter makes {kind.__name__} ones:"
            f" choose rule {' or '.join(fitting)}, or a drafter that makes {expected} proposals"
        )


def check_pairing(rule: Rule, tree: DraftTree) -> None:
    """Refuse a tree that the rule would verify wrongly, with the reason."""
    if not len(tree):
        return
    check_kind(rule, type(tree.kind))
    if rule.needs_chain and not tree.is_chain:
        raise ValueError(
            f"rule {rule.name!r} verifies chains, but node parents are {tree.parents}: draft one token a"
            " depth, or choose rule recursive or traversal"
        )
    if isinstance(tree.kind, GreedySet) or (isinstance(tree.kind, Sampled) and not tree.kind.replacement):
        proposals = list(zip(tree.parents, tree.tokens, strict=True))
        if len(set(proposals)) < len(proposals):
            parent, token = next(proposal for proposal in proposals if proposals.count(proposal) > 1)
            raise ValueError(
                f"token {token} stands twice below node {parent}, though siblings are drawn without"
                " replacement: keep first appearances, or say replacement=True where draws are independent"
            )


def verify(rule: Rule, tree: DraftTree, law: NodeLaw, chance: Chance) -> Verdict:
    """Apply a rule to one tree, once the two are known to fit."""
    check_pairing(rule, tree)
    return rule.function(tree, law, chance)


def verify_batch(
    rule: Rule, trees: Sequence[DraftTree], laws: Sequence[NodeLaw], chances: Sequence[Chance]
) -> list[Verdict]:
    """Apply a rule to one tree of each request; requests do not touch each other."""
    return [verify(rule, *request) for request in zip(trees, laws, chances, strict=True)]
