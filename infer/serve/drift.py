"""Whether a head still does what its card says: an alarm on acceptance in production.

What is compared. A served request's accepted length says little of the head: the engine drafts only where it pays,
rests requests whose drafts came to nothing, and shrinks trees under load, so that raw accepted length falls at noon
and rises at night with the same head. The card's figures are of a plain chain, drafted in every round
(`train.evaluation`). So the chain is looked for within each verified tree: the *principal path* goes from the root to
the child listed first, and so on, which is what the head, drafting a chain, would have drafted (siblings stand in the
order in which they were drawn, and of a head's children the first is the likeliest to be kept when trees are cut).
Whether its first token was accepted is a trial of the same kind as the card's acceptance at position 1, however wide
or narrow the tree around it was.

- *Depth.* Deeper nodes are drafted where values are high, which selects text that is easy: if trees adapt, only
  position 1 is compared. A fall of the accepted length is then taken to come from the same relative fall at each
  depth. Where nothing is cut by value (`--chain`, `--no-adaptive`) the whole path is compared, with what the card
  says of a chain that long.
- *Load.* Where many requests run, drafts may pay for the surest of them alone, and of their trees for the surest node
  alone, which says nothing of the others. So steps of more than `FEW_REQUESTS` requests count only if next to all of
  them verified `LEAST_NODES` nodes or more, as where drafts pay at any load. A server that is always busy beyond what
  pays gives no verdict. (One head on a CPU, the same prompts: accepted over promised was 0.91 by plain chains, 0.93 by
  adaptive trees for one request at a time, 1.08 for four, and, without this bound, 1.64 for sixteen.)
- *Rests.* A request rests where its drafts are bad, so rounds with a draft are the good ones. A round with a draft
  stands for the rounds without that came before it in its request, up to `MAX_STANDS_FOR`, since it is how the rest
  ended.
- *Requests.* Those whose law is the card's: rule match, the temperature of a figure on the card (greedy against 0),
  without filters (which change nothing of a greedy answer), penalties, biases or constraints. Others are not looked
  at.
- What remains makes drafts look better than they are (a lookup joined to the head, trees cut to nothing), never
  worse: it may hide a small fall, but raises no alarm.

The test. Answers are the units, since rounds of one answer resemble each other: of an answer only the first
`MAX_ROUNDS` rounds with a draft are looked at, and it counts once. Its ratio r of accepted to promised tokens is
taken to be normal around R with the variance v + t2: v is what chance within its rounds makes, by the card; t2 is how
much answers differ, estimated as they come. All is well while R is `sound` or above, 1 less the standard error of the
card's own figure (but at most a third of the fall). It has fallen where R is `fallen`: where the accepted length is
`DROP` below the card's. The logarithms of the likelihood ratio are summed up from answer to answer, never below 0
(Page's cusum). The alarm comes when the sum reaches ln `PATIENCE`, and ends when the same sum the other way has.

How often it errs. While R is no lower than `sound`, there are on average at least `PATIENCE` (10,000) answers to a
false alarm, for each temperature on the card (Lorden's bound, as far as r is normal). With R = 1 it is some 10,000
times that. A fall of 15 % in accepted length is noticed within a few thousand rounds. Both are simulated in the
tests, with answers that differ among each other as real ones do.

An alarm means that text is accepted less than on the card: because the traffic is unlike the text that the head was
measured on, or because the target, the head or the engine has changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from infer.tree import ROOT, DraftTree

if TYPE_CHECKING:
    from infer.request import Request, RequestRound
    from infer.sampling import SamplingParams

DROP = 0.15
"""The fall in accepted length that is looked for, as a share of it."""
PATIENCE = 10_000
"""Answers to a false alarm, at the least and on average."""
MAX_STANDS_FOR = 16
"""Rounds that one round with a draft stands for at most: more would let single rounds decide."""
MAX_ROUNDS = 256
"""Rounds with a draft of an answer that are looked at: one endless answer must not raise an alarm."""
SAME_TEMPERATURE = 0.1
FEW_REQUESTS, LEAST_NODES, MOST_ROUNDS = 4, 4, 0.9
"""A step of more requests than the first is looked at only if the last share of them verified so many nodes each."""

_PRIOR_ANSWERS, _PRIOR_VARIANCE = 20.0, 0.06
"""What is believed of how much answers differ (t2) before there are any, and how many answers that counts for."""
_LEAST_VARIANCE = 0.01
_VARIANCE_MEMORY = 0.998
_RATIO_MEMORY = 0.98
_MOST_RATIO = 3.0
"""A looping answer is accepted almost whole: beyond this ratio it must not outweigh the others."""


@dataclass(frozen=True, kw_only=True)
class CardFigure:
    """What a card says of one temperature. by_position: share of rounds in which a chain's token at each depth was
    accepted. relative_error: standard error of the sum of them, over the sum."""

    temperature: float
    by_position: tuple[float, ...]
    relative_error: float

    @property
    def accepted_length(self) -> float:
        return 1 + sum(self.by_position)

    def promised(self, depth: int) -> float:
        """Tokens of a chain of `depth` that are accepted, on average."""
        return sum(self.by_position[:depth])

    def variance(self, depth: int) -> float:
        """Of the number of tokens accepted of such a chain."""
        squares = sum((2 * place - 1) * share for place, share in enumerate(self.by_position[:depth], start=1))
        return max(0.0, squares - self.promised(depth) ** 2)

    def share_after(self, drop: float, *, depth: int) -> float:
        """What is left of `promised(depth)` where the accepted length has fallen by the share `drop`, by the same
        factor at each depth. 0 where no acceptance is left."""
        wanted = self.accepted_length * (1 - drop) - 1
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            reached = sum(share * middle**place for place, share in enumerate(self.by_position, start=1))
            low, high = (middle, high) if reached < wanted else (low, middle)
        left = sum(share * low**place for place, share in enumerate(self.by_position[:depth], start=1))
        return left / self.promised(depth)


def figures_of(acceptance: Mapping[str, Any]) -> list[CardFigure]:
    """The figures by temperature on a head's card (`HeadCard.acceptance`); none where it has none that can be read."""
    try:
        pools = acceptance["acceptance"]["by_temperature"]
        first = next(iter(pools.values()))
        error = float(acceptance.get("standard_error") or 0.0) / max(1e-9, float(first["accepted_length"]) - 1)
        figures = [
            CardFigure(
                temperature=float(temperature),
                by_position=tuple(float(share) for share in pool["by_position"]),
                relative_error=error * math.sqrt(first["num_rounds"] / pool["num_rounds"]),
            )
            for temperature, pool in pools.items()
            if pool["num_rounds"] > 0
        ]
    except (KeyError, TypeError, ValueError, AttributeError, StopIteration):
        return []
    return [figure for figure in figures if figure.by_position and figure.by_position[0] > 0]


@dataclass(kw_only=True)
class Evidence:
    """What one answer has shown: tokens that the card promises for its rounds, their variance within the rounds, and
    those that were accepted. num_undrafted: rounds without a draft since the last with one."""

    promised: float = 0.0
    variance: float = 0.0
    accepted: float = 0.0
    num_rounds: int = 0
    num_undrafted: int = 0

    def see(self, figure: CardFigure, *, depth: int, accepted: int) -> None:
        """A round that verified a principal path of `depth`, of which `accepted` tokens stand."""
        stands_for = min(1 + self.num_undrafted, MAX_STANDS_FOR)
        self.num_undrafted = 0
        self.num_rounds += 1
        self.promised += stands_for * figure.promised(depth)
        self.variance += stands_for**2 * figure.variance(depth)
        self.accepted += stands_for * accepted


class SequentialTest:
    """Page's cusum of answers against a card's figure; see the module.

    depth: positions compared. ratio: accepted over promised of the latest answers, for people.
    """

    def __init__(self, figure: CardFigure, *, depth: int, drop: float = DROP, patience: float = PATIENCE) -> None:
        self.figure = figure
        self.depth = min(depth, len(figure.by_position))
        self.fallen = figure.share_after(drop, depth=self.depth)
        self.sound = 1 - min(figure.relative_error, (1 - self.fallen) / 3)
        self.is_drifting = False
        self.num_answers = 0
        self._limit = math.log(patience)
        self._sum = 0.0
        self._squares = _PRIOR_VARIANCE * _PRIOR_ANSWERS
        self._weights = _PRIOR_ANSWERS
        self._promised = self._accepted = 0.0

    @property
    def ratio(self) -> float:
        return self._accepted / self._promised if self._promised else float("nan")

    @property
    def variance(self) -> float:
        """t2: how much the ratios of answers differ beyond chance within them."""
        return max(_LEAST_VARIANCE, self._squares / self._weights)

    def add(self, answer: Evidence) -> bool:
        """One answer; returns whether `is_drifting` has changed."""
        if answer.promised <= 0:
            return False
        self.num_answers += 1
        ratio = min(_MOST_RATIO, answer.accepted / answer.promised)
        chance = answer.variance / answer.promised**2
        weight = (self.sound - self.fallen) / (chance + self.variance)
        evidence = weight * ((self.sound + self.fallen) / 2 - ratio)
        self._learn(answer, ratio, chance)
        self._sum = max(0.0, self._sum + (-evidence if self.is_drifting else evidence))
        if self._sum < self._limit:
            return False
        self.is_drifting, self._sum = not self.is_drifting, 0.0
        return True

    def _learn(self, answer: Evidence, ratio: float, chance: float) -> None:
        """After its use, so that an answer does not widen the scale that it is measured with."""
        centre = min(_MOST_RATIO, self.ratio) if self.num_answers > _PRIOR_ANSWERS else self.sound
        weight = (_PRIOR_VARIANCE / (chance + _PRIOR_VARIANCE)) ** 2  # of short answers little is known
        self._squares = _VARIANCE_MEMORY * self._squares + weight * ((ratio - centre) ** 2 - chance)
        self._weights = _VARIANCE_MEMORY * self._weights + weight
        self._promised = _RATIO_MEMORY * self._promised + answer.promised
        self._accepted = _RATIO_MEMORY * self._accepted + answer.accepted


@dataclass(frozen=True, kw_only=True)
class DriftChange:
    """An alarm, or its end. ratio: accepted over promised of late."""

    temperature: float
    is_drifting: bool
    ratio: float
    card_length: float
    estimated_length: float

    def line(self) -> str:
        what = f"at temperature {self.temperature:g}" if self.temperature else "of greedy answers"
        if not self.is_drifting:
            return f"acceptance {what} is back at what the head's card says"
        return (
            f"acceptance {what} has fallen below the head's card: an accepted length of about "
            f"{self.estimated_length:.2f} where the card says {self.card_length:.2f}. The traffic is unlike what the "
            "head was measured on, or target, head or engine have changed (train on served text, or look it over with "
            "`headstart doctor`)"
        )


@dataclass
class DriftWatch:
    """All tests of a head, fed with rounds. adaptive: whether the engine cuts its trees to what pays."""

    figures: Sequence[CardFigure]
    adaptive: bool = True
    tests: list[SequentialTest] = field(init=False)
    _open: dict[Request, tuple[SequentialTest, Evidence] | None] = field(default_factory=dict)  # None: is not compared

    def __post_init__(self) -> None:
        self.tests = [
            SequentialTest(figure, depth=1 if self.adaptive else len(figure.by_position)) for figure in self.figures
        ]

    @property
    def is_drifting(self) -> bool:
        return any(test.is_drifting for test in self.tests)

    def see(self, rounds: Sequence[RequestRound]) -> None:
        """The rounds of one step."""
        drafting = [one for one in rounds if not one.is_first and one.request.draft.enabled]
        if self.adaptive and len(drafting) > FEW_REQUESTS:
            num_whole = sum(one.num_nodes >= LEAST_NODES for one in drafting)
            if num_whole < MOST_ROUNDS * len(drafting):
                return
        for one in drafting:
            self._see(one)

    def _see(self, one: RequestRound) -> None:
        if one.request not in self._open:
            test = self._test_for(one.request)
            self._open[one.request] = None if test is None else (test, Evidence())
        entry = self._open[one.request]
        if entry is None:
            return
        test, answer = entry
        if not one.num_nodes:
            answer.num_undrafted += 1
        elif answer.num_rounds < MAX_ROUNDS:
            # As on the card, the last token of a round is the target's, also where an end of text cut the round.
            depth, accepted = principal(one.tree, one.path[: min(one.num_accepted, one.num_tokens - 1)])
            answer.see(test.figure, depth=min(depth, test.depth), accepted=min(accepted, test.depth))

    def finish(self, request: Request) -> DriftChange | None:
        """The request has ended, or was cancelled; returns an alarm or its end."""
        entry = self._open.pop(request, None)
        if entry is None:
            return None
        test, answer = entry
        if not test.add(answer):
            return None
        return DriftChange(
            temperature=test.figure.temperature,
            is_drifting=test.is_drifting,
            ratio=test.ratio,
            card_length=test.figure.accepted_length,
            estimated_length=1 + min(1.0, test.ratio) * (test.figure.accepted_length - 1),
        )

    def snapshot(self) -> list[dict[str, Any]]:
        return [
            {
                "temperature": test.figure.temperature,
                "drifting": test.is_drifting,
                "ratio_to_card": None if math.isnan(test.ratio) else test.ratio,
                "alarm_at_ratio": test.fallen,
                "card_accepted_length": test.figure.accepted_length,
                "positions": test.depth,
                "answers": test.num_answers,
            }
            for test in self.tests
        ]

    def _test_for(self, request: Request) -> SequentialTest | None:
        if request.rule.name != "match" or not has_plain_law(request.params):
            return None
        if request.params.greedy:
            return next((test for test in self.tests if test.figure.temperature == 0), None)
        warm = [test for test in self.tests if test.figure.temperature > 0]
        nearest = min(warm, key=lambda test: abs(test.figure.temperature - request.params.temperature), default=None)
        if nearest is None or abs(nearest.figure.temperature - request.params.temperature) > SAME_TEMPERATURE:
            return None
        return nearest


def has_plain_law(params: SamplingParams) -> bool:
    """Whether temperature alone shapes the law of the answers, as on a card."""
    shaped = (
        params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
        or bool(params.logit_bias)
        or bool(params.bad_words)
        or params.no_repeat_ngram_size != 0
        or params.min_tokens != 0
        or params.ignore_eos
        or params.constraint is not None
    )
    filtered = params.top_k != 0 or params.top_p < 1 or params.min_p > 0
    return not shaped and (params.greedy or not filtered)


def principal(tree: DraftTree, accepted: Sequence[int]) -> tuple[int, int]:
    """Length of the tree's principal path, and how many of its nodes, from the root on, are among the `accepted`."""
    kept = frozenset(accepted)
    first_child: dict[int, int] = {}
    for node, parent in enumerate(tree.parents):
        first_child.setdefault(parent, node)
    node, depth, num_accepted = ROOT, 0, 0
    while node in first_child:
        node = first_child[node]
        num_accepted += node in kept and num_accepted == depth
        depth += 1
    return depth, num_accepted
