"""What enumeration does not see: float edges, keys of random numbers, refusals, and the lossy rule."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from infer import verify as verify_module
from infer.proof.enumeration import (
    Drafter,
    Model,
    RandomModel,
    Tokens,
    coupled,
    greedy_sets,
    levels,
    nothing,
    sampled,
    top_tokens,
    uneven,
)
from infer.tree import ROOT, Coupled, DraftTree, GreedySet, OneHot, ProposalKind, Sampled
from infer.verify import (
    RULES,
    Chance,
    KeyedChance,
    Purpose,
    Rule,
    Verdict,
    check_kind,
    choose_index,
    find_rule,
    ratio,
    remove,
    residual,
    share,
    typical_rule,
    verify,
    verify_batch,
)


@dataclass(frozen=True)
class FixedLaw:
    """Rows by node; draws take the argmax."""

    rows: dict[int, Tensor]

    def probs(self, node: int) -> Tensor:
        return self.rows[node]

    def draw(self, node: int) -> int:
        return int(self.rows[node].argmax())


def rows_of(model: Model, tree: DraftTree, context: Tokens = ()) -> dict[int, Tensor]:
    """float32 rows of every node; NaN below tokens that the target cannot emit."""
    rows: dict[int, Tensor] = {}
    for node in range(ROOT, len(tree)):
        tokens = tuple(tree.tokens[step] for step in tree.path(node))
        possible = all(model.probs(context + tokens[:end])[token] > 0 for end, token in enumerate(tokens))
        row = model.probs(context + tokens).float()
        rows[node] = row if possible else torch.full_like(row, math.nan)
    return rows


def no_noise(node: int, position: int, weights: Tensor) -> int:
    return int(weights.argmax())


@dataclass
class Recording:
    """A chance that remembers its keys."""

    chance: Chance
    keys: list[tuple[int, Purpose, int]] = field(default_factory=list)

    def accept(self, probability: float, *, node: int, purpose: Purpose, trial: int = 0) -> bool:
        self.keys.append((node, purpose, trial))
        return self.chance.accept(probability, node=node, purpose=purpose, trial=trial)

    def choose(self, weights: Tensor, *, node: int, purpose: Purpose, trial: int = 0) -> int:
        self.keys.append((node, purpose, trial))
        return self.chance.choose(weights, node=node, purpose=purpose, trial=trial)


@dataclass(frozen=True)
class Contrary:
    """Rejects whatever is not certain, as if every number were the largest below 1."""

    def accept(self, probability: float, *, node: int, purpose: Purpose, trial: int = 0) -> bool:
        return probability > 1 - 2**-53

    def choose(self, weights: Tensor, *, node: int, purpose: Purpose, trial: int = 0) -> int:
        return choose_index(weights, 1 - 2**-53)


def drafters(draft: Model) -> dict[str, list[Drafter]]:
    trees = [
        sampled(draft, uneven),
        sampled(draft, levels(2, 2, 1)),
        sampled(draft, uneven, replacement=True),
    ]
    return {
        "match": [top_tokens(draft, levels(3, 2)), coupled(draft, levels(2, 2)), nothing],
        "token": [sampled(draft, levels(1, 1, 1)), nothing],
        "block": [sampled(draft, levels(1, 1, 1)), nothing],
        "recursive": [*trees, nothing],
        "traversal": [*trees, nothing],
        "greedy_set": [greedy_sets(draft, levels(3, 2)), nothing],
        "typical": [top_tokens(draft, levels(3, 2)), *trees, nothing],
    }


def rounds(rule: Rule, target: Model, draft: Model, count: int) -> list[tuple[Verdict, DraftTree, Recording]]:
    """`count` rounds of every drafter that suits the rule, under keyed chance, from float32 rows."""
    made = []
    for drafter in drafters(draft)[rule.name]:
        for seed in range(count):
            chance = Recording(KeyedChance(seed, 0, 0, 0))
            tree = drafter((), chance, no_noise)
            made.append((verify(rule, tree, FixedLaw(rows_of(target, tree)), chance), tree, chance))
    return made


# Keys and numbers.


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_no_number_serves_twice_in_a_round(rule: Rule) -> None:
    """Drafting, tests and emission ask for different keys, and the drafter's purpose is its own."""
    for _, _, chance in rounds(rule, RandomModel(5, 0), RandomModel(5, 1), count=40):
        assert max(Counter(chance.keys).values(), default=1) == 1


def test_keyed_chance_depends_on_every_part_and_on_nothing_else() -> None:
    """Same key, same number, in any order; any part changed, another number."""
    base = (1, 2, 3, 4)
    numbers = set()
    for part in range(4):
        for value in range(50):
            key = tuple(value + 10 if i == part else old for i, old in enumerate(base))
            numbers.add(KeyedChance(*key)._uniform(0, Purpose.ACCEPT, 0))
    chance = KeyedChance(*base)
    for node in range(ROOT, 50):
        for purpose in Purpose:
            for trial in range(4):
                numbers.add(chance._uniform(node, purpose, trial))
    assert len(numbers) == 4 * 50 + 51 * 3 * 4
    assert chance._uniform(7, Purpose.DRAFT, 1) == KeyedChance(*base)._uniform(7, Purpose.DRAFT, 1)


def test_keyed_chance_follows_the_law() -> None:
    """Chi-square of two tokens over 6,000 seeded rounds of block verification: 16 cells, so above 44 once
    in ten thousand seed ranges."""
    target, draft = RandomModel(4, 2), RandomModel(4, 3)
    counts = np.zeros((4, 4))
    drafter = sampled(draft, levels(1, 1))
    for seed in range(6000):
        emitted: Tokens = ()
        for round_index in range(2):
            chance = KeyedChance(seed, 0, 0, round_index)
            tree = drafter(emitted, chance, no_noise)
            law = FixedLaw(rows_of(target, tree, emitted))
            emitted += verify(RULES["block"], tree, law, chance).tokens(tree)
        counts[emitted[:2]] += 1
    first = target.probs(())
    expected = torch.stack([first[token] * target.probs((token,)) for token in range(4)]).numpy() * counts.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 44


def test_accept_is_strict_and_choose_skips_weight_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """At u = 0 a probability of 0 is still refused (`u <= p` is the classic slip), and zeros at either end
    stay out."""
    chance = KeyedChance(0, 0, 0, 0)
    weights = torch.tensor([0.0, 0.0, 0.3, 0.0, 0.7, 0.0])
    for number, chosen in ((0.0, 2), (1 - 2**-53, 4)):
        monkeypatch.setattr(verify_module, "uniform", lambda key, number=number: number)
        assert not chance.accept(0.0, node=0, purpose=Purpose.ACCEPT)
        assert chance.accept(1.0, node=0, purpose=Purpose.ACCEPT)
        assert chance.choose(weights, node=0, purpose=Purpose.EMIT) == chosen
    monkeypatch.setattr(verify_module, "uniform", lambda key: 0.0)
    assert chance.accept(5e-324, node=0, purpose=Purpose.ACCEPT)


def test_choose_index_inverts_the_cumulative_sum() -> None:
    """Unnormalised float32 weights over a real vocabulary, against numpy."""
    rng = np.random.default_rng(0)
    weights = rng.gamma(0.1, size=50_000).astype(np.float32) * 17
    weights[rng.random(50_000) < 0.5] = 0
    cumulative = np.cumsum(weights.astype(np.float64))
    for number in rng.random(100):
        expected = np.searchsorted(cumulative, number * cumulative[-1], side="right")
        assert choose_index(torch.from_numpy(weights), number) == expected


# Float edges.


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_impossible_tokens_are_never_emitted_and_rows_below_them_never_read(rule: Rule) -> None:
    """Rows below a token of probability 0 are NaN here, in float32; `min(1.0, nan)` is 1.0, a certain false
    accept."""
    for seed in range(20):
        target, draft = RandomModel(4, 2 * seed, zeros=True), RandomModel(4, 2 * seed + 1)
        for verdict, tree, _ in rounds(rule, target, draft, count=3):
            emitted = verdict.tokens(tree)
            assert all(target.probs(emitted[:end])[token] > 0 for end, token in enumerate(emitted))


@pytest.mark.parametrize("rule", ["token", "block", "recursive", "traversal"])
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_residual_emptied_by_rounding_emits_from_the_target(rule: str, num_nodes: int) -> None:
    """Rows equal but for a last bit, all of it on the draft's side: a rejection is possible and leaves
    nothing."""
    draft = torch.full((4,), 0.25)
    target = torch.nextafter(draft, torch.zeros(4))
    tree = DraftTree.chain((1,) * num_nodes, Sampled(draft_probs={node: draft for node in range(ROOT, num_nodes - 1)}))
    verdict = verify(RULES[rule], tree, FixedLaw({node: target for node in range(ROOT, num_nodes)}), Contrary())
    assert verdict == Verdict((), 3)
    assert residual(target, draft) is target


def test_greedy_set_with_nothing_left_to_draw_is_the_match_walk() -> None:
    """The top tokens hold all of the draft's mass, so the last child was not drawn: tests would divide 0 by
    0."""
    draft = torch.tensor([0.0, 1.0, 0.0])
    tree = DraftTree(tokens=(1, 2), parents=(ROOT, ROOT), kind=GreedySet(draft_probs={ROOT: draft}))
    target = torch.tensor([0.0, 0.0, 1.0])
    verdict = verify(RULES["greedy_set"], tree, FixedLaw({ROOT: target, 1: target}), Contrary())
    assert verdict == Verdict((1,), 2)


def test_share_keeps_small_masses() -> None:
    """(1e-20 + 1) - 1 is 0 in floats, so the brackets decide; nothing left is certain at reach 1,
    impossible below."""
    assert share(1e-20, 1.0) == 1.0
    assert share(1e-20, 0.5) == pytest.approx(2e-20, rel=1e-12)
    assert share(0.0, 1.0) == 1.0
    assert share(0.0, 0.5) == 0.0


def test_removal_of_everything_leaves_zeros() -> None:
    """Not NaN: the drafter stops there, and a sibling that exists nevertheless is refused by name."""
    row = torch.tensor([0.25, 0.75])
    assert remove(row, [0, 1]).tolist() == [0, 0]
    assert remove(row, []).tolist() == row.tolist()


@pytest.mark.parametrize("rule", ["token", "block", "recursive", "traversal"])
def test_equal_laws_accept_the_first_path_whole(rule: str) -> None:
    """A model that drafts for itself loses nothing, in float32."""
    model = RandomModel(5, 4)
    for verdict, tree, _ in rounds(RULES[rule], model, model, count=20):
        first: list[int] = []
        while children := tree.children(first[-1] if first else ROOT):
            first.append(children[0])
        assert verdict.path == tuple(first)


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_inputs_are_not_edited(rule: Rule) -> None:
    """Neither the target's rows nor the draft's, which a cache or the next rule may share."""
    for drafter in drafters(RandomModel(5, 1))[rule.name]:
        for seed in range(10):
            tree = drafter((), KeyedChance(seed, 0, 0, 0), no_noise)
            rows = rows_of(RandomModel(5, 0), tree)
            draft_rows = getattr(tree.kind, "draft_probs", {})
            before = {node: row.clone() for node, row in rows.items()}
            draft_before = {node: row.clone() for node, row in draft_rows.items()}
            verify(rule, tree, FixedLaw(rows), KeyedChance(seed, 0, 0, 1))
            assert all(torch.equal(rows[node], before[node]) for node in rows)
            assert all(torch.equal(draft_rows[node], draft_before[node]) for node in draft_rows)


def test_batch_is_a_loop() -> None:
    """Requests do not touch each other."""
    rule, target = RULES["recursive"], RandomModel(5, 0)
    chances = [KeyedChance(seed, 0, 0, 0) for seed in range(8)]
    trees = [sampled(RandomModel(5, 1), uneven)((), chance, no_noise) for chance in chances]
    laws = [FixedLaw(rows_of(target, tree)) for tree in trees]
    alone = [verify(rule, *request) for request in zip(trees, laws, chances, strict=True)]
    assert verify_batch(rule, trees, laws, chances) == alone


# Refusals.

ROW = torch.tensor([0.5, 0.5])
KINDS: list[ProposalKind] = [
    OneHot(),
    Coupled(),
    Sampled(draft_probs={ROOT: ROW}),
    GreedySet(draft_probs={ROOT: ROW}),
]


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
def test_kinds_that_a_rule_cannot_verify_are_refused(rule: Rule, kind: ProposalKind) -> None:
    """A sampled token taken for one-hot, or a coupled one tested by rejection, breaks the law without a
    trace: the error names the rule, both kinds, and a rule that would do."""
    tree = DraftTree(tokens=(0,), parents=(ROOT,), kind=kind)
    law = FixedLaw({ROOT: ROW, 0: ROW})
    if type(kind) in rule.kinds:
        assert rule.accepts(tree)
        check_kind(rule, type(kind))
        verify(rule, tree, law, Contrary())
        return
    assert not rule.accepts(tree)
    name = type(kind).__name__
    with pytest.raises(ValueError, match=rf"rule '{rule.name}' verifies .* makes {name} ones: choose"):
        verify(rule, tree, law, Contrary())


def test_trees_that_a_rule_cannot_verify_are_refused() -> None:
    """Branches under a chain rule, and twins among siblings drawn without replacement."""
    branches = DraftTree(tokens=(0, 1), parents=(ROOT, ROOT), kind=KINDS[2])
    twins = DraftTree(tokens=(0, 0), parents=(ROOT, ROOT), kind=KINDS[2])
    law = FixedLaw({ROOT: ROW, 0: ROW, 1: ROW})
    for name in ("token", "block"):
        assert not RULES[name].accepts(branches)
        with pytest.raises(ValueError, match=r"verifies chains.*recursive or traversal"):
            verify(RULES[name], branches, law, Contrary())
    for name in ("recursive", "traversal"):
        with pytest.raises(ValueError, match="token 0 stands twice below node -1"):
            verify(RULES[name], twins, law, Contrary())
    greedy_twins = DraftTree(tokens=(0, 0), parents=(ROOT, ROOT), kind=GreedySet(draft_probs={ROOT: ROW}))
    with pytest.raises(ValueError, match="token 0 stands twice below node -1"):
        verify(RULES["greedy_set"], greedy_twins, law, Contrary())
    independent = DraftTree(
        tokens=(0, 0), parents=(ROOT, ROOT), kind=Sampled(draft_probs={ROOT: ROW}, replacement=True)
    )
    verify(RULES["recursive"], independent, law, Contrary())


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
@pytest.mark.parametrize("kind", [OneHot(), Sampled(draft_probs={})], ids=lambda kind: type(kind).__name__)
def test_an_empty_tree_suits_every_rule(rule: Rule, kind: ProposalKind) -> None:
    """A drafter with nothing to say leaves plain decoding."""
    tree = DraftTree(tokens=(), parents=(), kind=kind)
    law = FixedLaw({ROOT: torch.tensor([0.0, 1.0])})
    assert rule.accepts(tree)
    assert verify(rule, tree, law, Contrary()) == Verdict((), 1)


def test_broken_rows_are_refused() -> None:
    """NaN from a model, a token that its own law rules out, and weights with nothing in them."""
    with pytest.raises(ValueError, match="check the model's output"):
        ratio(torch.tensor([math.nan, 1.0]), ROW, 0)
    with pytest.raises(ValueError, match="cannot have been drawn"):
        ratio(ROW, torch.tensor([0.0, 1.0]), 0)
    for weights in (torch.zeros(3), torch.tensor([math.nan, 1.0]), torch.tensor([math.inf, 1.0])):
        with pytest.raises(ValueError, match="cannot draw a token"):
            choose_index(weights, 0.5)


def test_unknown_rules_name_the_nearest() -> None:
    """And list the others."""
    assert find_rule("block") is RULES["block"]
    with pytest.raises(ValueError, match=r"rule 'traversel'.*match, token.*did you mean 'traversal'"):
        find_rule("traversel")


def test_registry_says_what_each_rule_promises() -> None:
    """One rule reproduces plain decoding's tokens, one is lossy, the rest keep the law."""
    promises = {name: rule.exactness for name, rule in RULES.items()}
    assert [name for name, exactness in promises.items() if exactness == "seed"] == ["match"]
    assert [name for name, rule in RULES.items() if not rule.lossless] == ["typical"]
    assert all(rule.name == name and rule.paper for name, rule in RULES.items())


# The lossy rule.


def test_typical_acceptance_keeps_the_longest_plausible_path() -> None:
    """Longest first, the likelier on ties; a token at or below the threshold ends its path."""
    sure = torch.tensor([0.05, 0.05, 0.9])  # entropy 0.39: threshold min(0.09, 0.3 * 0.67) = 0.09
    flat = torch.tensor([0.4, 0.3, 0.3])  # entropy 1.09: threshold 0.09
    tree = DraftTree(tokens=(0, 1, 0, 2, 0), parents=(ROOT, ROOT, 0, 0, 1), kind=OneHot())
    law = FixedLaw({ROOT: flat, 0: sure, 1: flat, 2: flat, 3: flat, 4: flat})
    assert verify(RULES["typical"], tree, law, Contrary()) == Verdict((0, 3), 0)
    tied = FixedLaw({**law.rows, 0: flat})
    assert verify(RULES["typical"], tree, tied, Contrary()) == Verdict((0, 2), 0)
    single = DraftTree.chain((1,))
    assert verify(RULES["typical"], single, law, Contrary()) == Verdict((0,), 2)
    strict = typical_rule(epsilon=0.95, delta=1.0)  # threshold exp(-1.09) = 0.34, above token 1's 0.3
    assert verify(strict, single, law, Contrary()) == Verdict((), 0)


def test_typical_acceptance_at_temperature_zero_is_greedy() -> None:
    """A one-hot row accepts its own token alone."""
    one_hot = torch.tensor([0.0, 1.0])
    tree = DraftTree(tokens=(0, 1, 0), parents=(ROOT, ROOT, 1), kind=OneHot())
    law = FixedLaw({node: one_hot for node in range(ROOT, 3)})
    assert verify(RULES["typical"], tree, law, Contrary()) == Verdict((1,), 1)


def test_typical_thresholds_are_checked() -> None:
    """Probabilities, both."""
    with pytest.raises(ValueError, match="from 0 to 1"):
        typical_rule(epsilon=1.5)
