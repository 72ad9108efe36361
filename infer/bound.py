"""How much one step can accept at best: the yardstick that achieved acceptance is reported against.

Whatever the rule, a step that keeps the target's law accepts with probability at most
1 + min over token sets H of [target(H) - Pr(all drafts fall in H)], and some rule attains it. All figures are
for one position and one pair of distributions, in float64; nothing here draws a number or runs a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Probs = Tensor | NDArray[np.floating]
Floats = NDArray[np.float64]
Drafting = Literal["fixed", "independent", "without_replacement", "greedy_set"]

_STEP = 0.2
"""Grid step, in log time, of the quadrature below: analytic, so its error falls as exp(-10 / step)."""

QUICK_ERROR = 1e-3
"""How far `quick_without_replacement_bound` may lie above the reference (below it, less than 1e-4: its quadrature)."""
_QUICK_STEP = 0.5
_QUICK_GAP = 8e-4
"""Target mass between the prefixes that are tried; what is left of `QUICK_ERROR` is for the quadrature."""
_FEW_TOKENS, _MANY_DRAFTS = 256, 32
"""Where the reference is quick enough itself, and where the powers below would grow too large."""


def optimal_acceptance(target_probs: Probs, draft_probs: Probs, *, num_drafts: int, drafting: Drafting) -> float:
    """The most that any lossless rule accepts of `num_drafts` candidates made from `draft_probs` [V].

    "fixed" and "greedy_set" take the draft's top tokens, lower ids first on ties; a coupled top-k list is a
    draw "without_replacement".
    """
    _check_num_drafts(num_drafts)
    if drafting == "fixed":
        top = _top_tokens(_distribution(draft_probs, "draft"), num_drafts)
        return fixed_set_bound(target_probs, top.tolist())
    if drafting == "independent":
        return independent_bound(target_probs, draft_probs, num_drafts)
    if drafting == "without_replacement":
        return without_replacement_bound(target_probs, draft_probs, num_drafts)
    return greedy_set_acceptance(target_probs, draft_probs, num_drafts)


def token_level_acceptance(target_probs: Probs, draft_probs: Probs) -> float:
    """What token-level rejection accepts of one draft, and the bound for one draft: the common mass."""
    target, draft = _pair(target_probs, draft_probs)
    return float(np.minimum(target, draft).sum())


def fixed_set_bound(target_probs: Probs, tokens: Sequence[int]) -> float:
    """The bound for candidates fixed without randomness: the target's mass on them, which the match walk attains."""
    return float(_distribution(target_probs, "target")[sorted(set(tokens))].sum())


def independent_bound(target_probs: Probs, draft_probs: Probs, num_drafts: int) -> float:
    """The bound for independent drafts. By concavity a worst set is a prefix of the tokens by target/draft,
    ascending."""
    target, draft = _by_likeness(*_pair(target_probs, draft_probs))
    _check_num_drafts(num_drafts)
    return _one_plus_least(np.cumsum(target) - np.cumsum(draft) ** num_drafts)


def without_replacement_bound(target_probs: Probs, draft_probs: Probs, num_drafts: int) -> float:
    """The bound for drafts without replacement (all of the draft's support, if that is fewer than `num_drafts`).

    That a worst set is a prefix by target/draft has been checked on many cases, not proved; where it failed,
    this figure would be too high, never too low.
    """
    target, draft = _by_likeness(*_pair(target_probs, draft_probs))
    _check_num_drafts(num_drafts)
    return _one_plus_least(np.cumsum(target) - _all_drawn_in_prefix(draft, num_drafts))


def quick_without_replacement_bound(target_probs: Probs, draft_probs: Probs, num_drafts: int) -> float:
    """`without_replacement_bound` in a few milliseconds whatever the vocabulary, at most `QUICK_ERROR` too high.

    Not every prefix is tried: as all gaps grow with the target's mass, a prefix undercuts the next one that is tried by
    no more than the mass between them.
    """
    target, draft = _pair(target_probs, draft_probs)
    _check_num_drafts(num_drafts)
    drafted = np.flatnonzero(draft)
    target, draft = _by_likeness(target[drafted], draft[drafted])
    held = np.cumsum(target)
    if len(draft) <= _FEW_TOKENS or num_drafts > _MANY_DRAFTS:
        return _one_plus_least(held - _all_drawn_in_prefix(draft, num_drafts))
    crossings = np.flatnonzero(np.diff(np.floor(held / _QUICK_GAP)))
    last_tokens = np.append(crossings, len(held) - 1)
    return _one_plus_least(held[last_tokens] - _all_drawn_up_to(draft, last_tokens, num_drafts))


def greedy_set_acceptance(target_probs: Probs, draft_probs: Probs, num_drafts: int) -> float:
    """What the one test of greedy-set drafting accepts, which is also its bound."""
    target, draft = _pair(target_probs, draft_probs)
    _check_num_drafts(num_drafts)
    top = _top_tokens(draft, num_drafts - 1)
    held = float(target[top].sum())
    rest = draft.copy()
    rest[top] = 0.0
    mass = rest.sum()
    if mass == 0:
        return held
    return held + float(np.minimum(np.delete(target, top), np.delete(rest, top) / mass).sum())


def coupled_match_probability(target_probs: Probs, draft_probs: Probs) -> float:
    """Chance that the argmax of draft and target agree under the same Gumbel noise (Daliri et al. 2024).

    The sum over x of 1 / sum over y of max(target_y/target_x, draft_y/draft_x), in O(V log V): sorted by
    target/draft, the target's ratio is the larger from x on and the draft's before it.
    """
    target, draft = _pair(target_probs, draft_probs)
    target, draft = _by_likeness(target, draft)
    target_from = np.cumsum(target[::-1])[::-1]
    draft_before = np.cumsum(draft) - draft
    both = (target > 0) & (draft > 0)
    terms = 1.0 / (target_from[both] / target[both] + draft_before[both] / draft[both])
    return float(terms.sum())


def coupled_match_bounds(target_probs: Probs, draft_probs: Probs) -> tuple[float, float]:
    """Lower and upper bound of `coupled_match_probability`, from the total variation alone."""
    common = token_level_acceptance(target_probs, draft_probs)
    return common / (2.0 - common), common


def _all_drawn_in_prefix(draft: Floats, num_drafts: int) -> Floats:
    """[V]: the chance that draws without replacement all fall among the first i + 1 tokens.

    Give each token an exponential clock of rate `draft`; the draws are the clocks in the order they ring. All
    fall in H if `num_drafts` clocks of H ring before the first outside it, which has rate `outside`: an
    integral over that time. `fewer[j]` is the chance that j < num_drafts clocks of H have rung by then.
    """
    outside = np.append(np.cumsum(draft[::-1])[::-1], 0.0)[1:]  # summed from the end, or small tails cancel
    smallest = outside[outside > 0].min(initial=1.0)
    time = np.exp(np.arange(-40.0, np.log(50.0 / smallest), _STEP))  # [Z], even in log time
    fewer = np.zeros((num_drafts, len(time)))
    fewer[0] = 1.0
    inside = np.ones(len(draft))
    for i, (rate, rate_outside) in enumerate(zip(draft, outside, strict=True)):
        if rate_outside == 0:
            break  # the whole support is inside
        rung = -np.expm1(-rate * time)
        moved = fewer * rung
        fewer -= moved
        fewer[1:] += moved[:-1]
        density = rate_outside * time * np.exp(-rate_outside * time)
        inside[i] = _STEP * float(density @ (1.0 - fewer.sum(axis=0)))
    return inside


def _all_drawn_up_to(draft: Floats, last_tokens: NDArray[np.intp], num_drafts: int) -> Floats:
    """`_all_drawn_in_prefix` for the prefixes that end at `last_tokens` [I] alone, all at once.

    The clocks of the few largest rates go one by one, as there. By the time that most of them have rung `num_drafts`
    surely have, and the integral is over; all others are slow until then. How many of those have rung follows from
    the elementary symmetric polynomials of their odds, which Newton's identities make from cumulative sums of powers
    (and which cancel badly for large odds: hence the split).
    """
    num_large = 3 * num_drafts + 30
    large = np.zeros(len(draft), dtype=bool)
    large[np.argpartition(draft, -num_large)[-num_large:]] = True
    end = np.log(1.0 / draft[large].min())
    time = np.exp(np.arange(-14.0, end + _QUICK_STEP, _QUICK_STEP))  # [Z]
    exactly = _number_rung(draft[large], time, num_drafts)[np.cumsum(large)[last_tokens]]  # [I, num_drafts, Z]
    at_most = _number_rung_slow(np.where(large, 0.0, draft), last_tokens, time, num_drafts).cumsum(axis=0)
    fewer = sum(exactly[:, j] * at_most[num_drafts - 1 - j] for j in range(num_drafts))  # [I, Z]
    outside = np.append(np.cumsum(draft[::-1])[::-1], 0.0)[last_tokens + 1, None]
    missed = _QUICK_STEP * (outside * time * np.exp(-outside * time) * fewer).sum(axis=1)
    return np.asarray(1.0 - missed)


def _number_rung(rates: Floats, time: Floats, count: int) -> Floats:
    """[i, j, Z]: the chance that exactly j < `count` of the first i clocks have rung, for i from 0 to all of them."""
    table = np.zeros((len(rates) + 1, count, len(time)))
    table[0, 0] = 1.0
    for i, rate in enumerate(rates):
        rung = -np.expm1(-rate * time)
        table[i + 1] = table[i] * (1.0 - rung)
        table[i + 1, 1:] += table[i, :-1] * rung
    return table


def _number_rung_slow(rates: Floats, last_tokens: NDArray[np.intp], time: Floats, count: int) -> Floats:
    """[j, I, Z]: the same for exactly j of the clocks up to each of `last_tokens`, none of which is fast."""
    first_tokens = np.append(0, last_tokens[:-1] + 1)
    odds = np.expm1(rates[:, None] * time)  # [V, Z]
    power = np.ones_like(odds)
    sums: list[Floats] = []
    for _ in range(1, count):
        power = power * odds
        sums.append(np.add.reduceat(power, first_tokens, axis=0).cumsum(axis=0))
    rung = [np.exp(-np.cumsum(rates)[last_tokens, None] * time)]  # none yet
    for j in range(1, count):
        terms = [(-1) ** n * rung[j - 1 - n] * sums[n] for n in range(j)]
        rung.append(np.asarray(sum(terms)) / j)
    return np.stack(rung)


def _one_plus_least(gaps: Floats) -> float:
    """The bound from target(H) - Pr(all drafts in H) of every prefix H; the empty set's gap is 0."""
    return 1.0 + min(0.0, float(gaps.min()))


def _by_likeness(target: Floats, draft: Floats) -> tuple[Floats, Floats]:
    """Both distributions, tokens sorted by target/draft, ascending; tokens never drafted stand last."""
    likeness = np.divide(target, draft, out=np.full_like(target, np.inf), where=draft > 0)
    order = np.argsort(likeness, kind="stable")
    return target[order], draft[order]


def _top_tokens(draft: Floats, count: int) -> NDArray[np.intp]:
    """The `count` likeliest tokens of the draft's support, lower ids first on ties."""
    support = np.flatnonzero(draft)
    return support[np.argsort(-draft[support], kind="stable")[:count]]


def _pair(target_probs: Probs, draft_probs: Probs) -> tuple[Floats, Floats]:
    target, draft = _distribution(target_probs, "target"), _distribution(draft_probs, "draft")
    if target.shape != draft.shape:
        raise ValueError(
            f"target and draft must share one vocabulary: {len(target)} target and {len(draft)} draft"
            " probabilities; scatter a draft vocabulary to full size with zeros"
        )
    return target, draft


def _distribution(probs: Probs, role: str) -> Floats:
    """The probabilities as a float64 array [V], freed of float32's rounding of their sum."""
    values = probs.detach().double().cpu().numpy() if isinstance(probs, Tensor) else probs
    array = np.asarray(values, dtype=np.float64)
    total = array.sum()
    if array.ndim != 1 or not (array >= 0).all() or not abs(total - 1) < 1e-2:
        raise ValueError(
            f"{role} probabilities must be one non-negative vector that sums to 1, not shape {array.shape}"
            f" with sum {total:.6g}: apply softmax first"
        )
    return np.asarray(array / total, dtype=np.float64)


def _check_num_drafts(num_drafts: int) -> None:
    if num_drafts < 1:
        raise ValueError(f"a step has at least one draft, not {num_drafts}")
