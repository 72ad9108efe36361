"""What a user asks for (exactness) and the verification rule that serves it.

- `seed` (the default): in float32 the tokens are plain decoding's for the same seed; in lower precision near ties may
  round one way or the other. The match rule.
- `bitwise`: `seed`, and every forward has one fixed shape (`infer.fixed`), so that the tokens are plain decoding's in
  the same mode in any precision.
- `distribution`: the tokens follow the target's law, though not its seed. A rejection rule.
- `lossy`: neither; every result says so. Typical acceptance.
"""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

from infer.tree import Coupled, GreedySet, OneHot, Sampled
from infer.verify import RULES, KindType, Rule, check_kind, find_rule

EXACTNESS = ("bitwise", "seed", "distribution", "lossy")
"""What can be asked for, strictest first."""

ANY_KIND: tuple[KindType, ...] = (OneHot, Coupled, Sampled, GreedySet)


def find_exactness(name: str) -> str:
    """`name`, if it is one of `EXACTNESS`."""
    if name not in EXACTNESS:
        close = get_close_matches(str(name), EXACTNESS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"exactness {name!r} is unknown: expected {', '.join(EXACTNESS)}{hint}")
    return name


def choose_rule(
    exactness: str | None = None,
    rule: str | None = None,
    *,
    kinds: Collection[KindType] = ANY_KIND,
    chain: bool = False,
) -> Rule:
    """The rule that serves what was asked for, with a drafter whose proposals are of `kinds`.

    `rule` alone decides the exactness; with both, a rule that promises less is refused. `chain`: whether drafts have
    one token a depth. Raises ValueError where rule, exactness and proposals do not go together.
    """
    if exactness is not None:
        find_exactness(exactness)
    chosen = find_rule(rule) if rule is not None else _default_rule(exactness or "seed", kinds, chain=chain)
    if exactness is not None and EXACTNESS.index(chosen.exactness) > EXACTNESS.index(_promise(exactness)):
        raise ValueError(
            f"rule {chosen.name!r} gives exactness {chosen.exactness!r}, less than the {exactness!r} asked for: "
            f"say exactness {chosen.exactness!r}, or leave the rule out"
        )
    if not any(kind in chosen.kinds for kind in kinds):
        check_kind(chosen, next(iter(kinds)))
    return chosen


def _default_rule(exactness: str, kinds: Collection[KindType], *, chain: bool) -> Rule:
    if exactness == "lossy":
        return RULES["typical"]
    if exactness == "distribution" and Sampled in kinds:
        return RULES["block" if chain else "traversal"]
    return RULES["match"]  # it keeps the law as well, and is all that unsampled proposals can be given to


def _promise(exactness: str) -> str:
    """What a rule must promise: bitwise adds the forward's share to the rule's `seed`."""
    return "seed" if exactness == "bitwise" else exactness
