"""The optimal acceptance of one step, against brute force over every token set and against draws."""

from __future__ import annotations

from itertools import chain, combinations, permutations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from infer import bound

Floats = NDArray[np.float64]


def distribution(rng: np.random.Generator, size: int, *, zeros: bool) -> Floats:
    weights = rng.dirichlet(np.full(size, rng.choice([0.2, 1.0, 3.0])))
    if zeros:
        weights[rng.random(size) < 0.3] = 0
    if weights.sum() == 0:
        weights[rng.integers(size)] = 1.0
    return np.asarray(weights / weights.sum())


def pairs(count: int, *, seed: int = 0) -> list[tuple[Floats, Floats]]:
    """Small pairs with zeros, equal pairs and ties among them."""
    rng = np.random.default_rng(seed)
    made = [(distribution(rng, v, zeros=i % 2 == 1), distribution(rng, v, zeros=i % 3 == 1))
            for i, v in enumerate(rng.integers(1, 6, count))]  # fmt: skip
    uniform = np.full(4, 0.25)
    return [*made, (uniform, uniform), (uniform, np.array([0.5, 0.5, 0, 0])), (np.ones(1), np.ones(1))]


def drafts_inside_without_replacement(draft: Floats, inside: set[int], num_drafts: int) -> float:
    """By enumeration of the ordered draws."""
    support = [x for x in range(len(draft)) if draft[x] > 0]
    total = 0.0
    for draws in permutations(support, min(num_drafts, len(support))):
        probability, left = 1.0, 1.0
        for x in draws:
            probability *= draft[x] / left
            left = sum(draft[y] for y in support if y not in draws[: draws.index(x) + 1])
        total += probability * (set(draws) <= inside)
    return total


def brute_force(target: Floats, draft: Floats, num_drafts: int, drafting: str) -> float:
    size = len(target)
    gaps = []
    top = sorted(range(size), key=lambda x: (-draft[x], x))
    top = [x for x in top if draft[x] > 0]
    for tokens in chain.from_iterable(combinations(range(size), n) for n in range(size + 1)):
        inside = set(tokens)
        if drafting == "fixed":
            all_inside = float(set(top[:num_drafts]) <= inside)
        elif drafting == "independent":
            all_inside = sum(draft[x] for x in inside) ** num_drafts
        elif drafting == "without_replacement":
            all_inside = drafts_inside_without_replacement(draft, inside, num_drafts)
        else:
            elders, rest = set(top[: num_drafts - 1]), top[num_drafts - 1 :]
            mass = sum(draft[x] for x in rest)
            last_inside = sum(draft[x] for x in rest if x in inside) / mass if rest else 1.0
            all_inside = (elders <= inside) * last_inside
        gaps.append(sum(target[x] for x in inside) - all_inside)
    return float(1 + min(gaps))


@pytest.mark.parametrize("drafting", ["fixed", "independent", "without_replacement", "greedy_set"])
def test_bound_equals_brute_force_over_every_set(drafting: bound.Drafting) -> None:
    """1 + min over all H of [p(H) - Pr(all drafts in H)], not only over prefixes; the quadrature is good to
    1e-11."""
    for target, draft in pairs(120):
        for num_drafts in (1, 2, 3):
            expected = brute_force(target, draft, num_drafts, drafting)
            found = bound.optimal_acceptance(target, draft, num_drafts=num_drafts, drafting=drafting)
            assert found == pytest.approx(expected, abs=1e-11), (target, draft, num_drafts)


def test_one_draft_has_one_bound() -> None:
    """With one candidate drawn from q every sampled kind is bounded by the common mass, as token-level
    rejection."""
    for target, draft in pairs(30, seed=1):
        expected = bound.token_level_acceptance(target, draft)
        kinds: tuple[bound.Drafting, ...] = ("independent", "without_replacement", "greedy_set")
        for drafting in kinds:
            found = bound.optimal_acceptance(target, draft, num_drafts=1, drafting=drafting)
            assert found == pytest.approx(expected, abs=1e-11)


def test_bounds_grow_with_drafts_and_without_replacement_helps() -> None:
    """More candidates never hurt, and distinct ones are worth at least independent ones; probabilities here
    span many orders of magnitude."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(2, 2000)) * 4
    target, draft = np.exp(logits - logits.max(1, keepdims=True))
    target, draft = target / target.sum(), draft / draft.sum()
    independent = [bound.independent_bound(target, draft, k) for k in (1, 2, 4, 8)]
    distinct = [bound.without_replacement_bound(target, draft, k) for k in (1, 2, 4, 8)]
    assert independent == sorted(independent)
    assert distinct == sorted(distinct)
    assert all(a <= b + 1e-11 for a, b in zip(independent, distinct, strict=True))
    assert distinct[-1] <= 1


def wide_pair(rng: np.random.Generator, *, spread: float, gap: float) -> tuple[Floats, Floats]:
    """A target over 20,000 tokens, and a draft shaped like a head's: some 4,096 of them, near the target's logits."""
    logits = rng.normal(size=20_000) * spread
    known = np.unique(np.append(rng.choice(20_000, 4_096, replace=False), np.argsort(-logits)[:50]))
    weights = np.exp(logits + rng.normal(size=20_000) * gap)
    draft = np.zeros(20_000)
    draft[known] = np.exp(logits[known])
    return weights / weights.sum(), draft / draft.sum()


@pytest.mark.parametrize(
    ("spread", "gap"), [(0.0, 0.0), (0.1, 0.1), (1.0, 0.5), (3.0, 1.0), (4.0, 2.0), (6.0, 3.0), (15.0, 4.0)]
)
def test_the_quick_bound_is_never_low_and_hardly_high(spread: float, gap: float) -> None:
    """Against the reference, from flat laws to peaked ones: too high by at most the stated 1e-3 (target mass between
    the prefixes that are tried), too low by at most 1e-4 (quadrature)."""
    target, draft = wide_pair(np.random.default_rng(7), spread=spread, gap=gap)
    for num_drafts in (1, 2, 8, 20):
        expected = bound.without_replacement_bound(target, draft, num_drafts)
        found = bound.quick_without_replacement_bound(target, draft, num_drafts)
        assert -1e-4 < found - expected < bound.QUICK_ERROR


def test_the_quick_bound_where_one_token_has_nearly_all_of_the_draft() -> None:
    """All draws but the first come from the last 1e-6 of the draft, at its own scale; and a target that shares it."""
    rng = np.random.default_rng(8)
    tail = rng.dirichlet(np.full(4_000, 0.3))
    draft = np.append(1e-6 * tail, 1 - 1e-6)
    for mass in (1e-6, 0.3, 0.9):
        target = np.append(mass * rng.dirichlet(1e3 * tail + 1e-3), 1 - mass)
        for num_drafts in (2, 8):
            expected = bound.without_replacement_bound(target, draft, num_drafts)
            found = bound.quick_without_replacement_bound(target, draft, num_drafts)
            assert -1e-4 < found - expected < bound.QUICK_ERROR


def test_the_quick_bound_is_the_reference_for_few_tokens_and_for_many_drafts() -> None:
    for target, draft in pairs(30, seed=5):
        for num_drafts in (1, 3):
            expected = bound.without_replacement_bound(target, draft, num_drafts)
            assert bound.quick_without_replacement_bound(target, draft, num_drafts) == pytest.approx(
                expected, abs=1e-12
            )
    target, draft = wide_pair(np.random.default_rng(9), spread=3.0, gap=1.0)
    expected = bound.without_replacement_bound(target, draft, 40)
    assert bound.quick_without_replacement_bound(target, draft, 40) == pytest.approx(expected, abs=1e-12)


def coupled_by_definition(target: Floats, draft: Floats) -> float:
    total = 0.0
    for x in np.flatnonzero((target > 0) & (draft > 0)):
        total += 1 / float(np.maximum(target / target[x], draft / draft[x]).sum())
    return total


def test_coupled_match_probability_equals_its_definition_and_bounds() -> None:
    """The O(V log V) form is the double sum, and lies between (1-TV)/(1+TV) and 1-TV."""
    for target, draft in pairs(200, seed=2):
        found = bound.coupled_match_probability(target, draft)
        assert found == pytest.approx(coupled_by_definition(target, draft), abs=1e-12)
        low, high = bound.coupled_match_bounds(target, draft)
        assert low - 1e-12 <= found <= high + 1e-12


def test_coupled_match_probability_equals_draws() -> None:
    """Against a million Gumbel draws: 5 standard deviations, one false alarm in two million seeds (seed
    fixed)."""
    rng = np.random.default_rng(4)
    target, draft = distribution(rng, 6, zeros=False), distribution(rng, 6, zeros=False)
    noise = rng.gumbel(size=(1_000_000, 6))
    matches = ((np.log(target) + noise).argmax(1) == (np.log(draft) + noise).argmax(1)).mean()
    expected = bound.coupled_match_probability(target, draft)
    assert abs(matches - expected) < 5 * np.sqrt(expected * (1 - expected) / len(noise))


def test_inputs_are_checked_and_tensors_taken() -> None:
    """float32 tensors are fine; logits, unlike sizes and no drafts are refused with the reason."""
    probs = torch.tensor([0.25, 0.75])
    assert bound.independent_bound(probs, probs, 2) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="apply softmax"):
        bound.token_level_acceptance(torch.tensor([1.0, -2.0]), probs)
    with pytest.raises(ValueError, match="one vocabulary"):
        bound.token_level_acceptance(torch.tensor([0.5, 0.25, 0.25]), probs)
    with pytest.raises(ValueError, match="at least one draft"):
        bound.independent_bound(probs, probs, 0)
