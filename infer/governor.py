"""Whether to draft at all at a load, and how deep: what rounds have really made for their time.

A cost table knows what forwards cost when nothing else runs. A server's rounds also pay for drafting many requests, for
walking their trees and for whatever shares the machine; and the more requests share a forward, the less is left for
drafts to win. So depths are held against each other by the clock, apart for every load: the one that made the most
tokens a second is kept, and the others are tried again now and then, ever more rarely where they lose.

Only how deep is drafted follows from the clock, never a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

DEPTHS: tuple[int | None, ...] = (None, 1, 0)
"""What is held against each other: the engine's own depth, one token, no draft."""

_MEMORY = 0.97
"""What a round leaves of its depth's sums before it."""
_TRIAL_ROUNDS = 6
"""Rounds of a trial that count. The first does not: it reads what the drafter has missed."""
_TRIAL_MEMORY = 0.25
"""What a trial leaves of its depth's sums before it, which may be long out of date."""
_FIRST_TRIAL = 8
_TRIALS = (64, 1 << 15)
"""Rounds between trials of a depth that is not the best: before the first trial, and the fewest and the most later."""
_TRIAL_SHARE = 0.005
"""Of a load's time, what trials of a depth may lose: they begin with the reading of all that the drafter has missed."""
_MARGIN = 1.02
"""Another depth takes over if it makes so many times the tokens: less is noise."""
_LEAST_GAIN = 1.06
"""A draft must make so many times the tokens of none, since rounds do not show all that it costs."""
_OUTLIER = 2.5
"""A round that took so many times the mean was held up by something else, and counts as that long."""


@dataclass
class _Arm:
    """Fading sums over the rounds of one depth at one load. wait: rounds of the load until it is tried again; interval:
    the last such wait."""

    tokens: float = 0.0
    seconds: float = 0.0
    weight: float = 0.0
    wait: int = _FIRST_TRIAL
    interval: int = _TRIALS[0]

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def see(self, tokens: int, seconds: float) -> None:
        if self.weight > 1.0:
            seconds = min(seconds, _OUTLIER * self.seconds / self.weight)
        self.fade(_MEMORY)
        self.tokens += tokens
        self.seconds += seconds
        self.weight += 1.0

    def fade(self, share: float) -> None:
        self.tokens *= share
        self.seconds *= share
        self.weight *= share


@dataclass
class _Load:
    """The depths at one load, the one that is kept, and the one on trial with the rounds that it has left and what all
    its rounds have made and taken."""

    best: int
    arms: list[_Arm] = field(default_factory=lambda: [_Arm() for _ in DEPTHS])
    trial: int | None = None
    rounds_left: int = 0
    trial_tokens: int = 0
    trial_seconds: float = 0.0

    @property
    def choice(self) -> int:
        return self.best if self.trial is None else self.trial

    def see(self, place: int, tokens: int, seconds: float) -> None:
        if place != self.trial:
            self.arms[place].see(tokens, seconds)
            self._start_trial()
            return
        if self.rounds_left <= _TRIAL_ROUNDS:
            self.arms[place].see(tokens, seconds)
        self.trial_tokens += tokens
        self.trial_seconds += seconds
        self.rounds_left -= 1
        if not self.rounds_left:
            self._end_trial(place)

    def _start_trial(self) -> None:
        """The depths wait for their trials together, one after the other where several are due."""
        for place, arm in enumerate(self.arms):
            if place == self.best:
                continue
            arm.wait -= 1
            if arm.wait <= 0 and self.trial is None:
                self.trial, self.rounds_left = place, _TRIAL_ROUNDS + 1
                self.trial_tokens, self.trial_seconds = 0, 0.0
                arm.fade(_TRIAL_MEMORY)

    def _end_trial(self, place: int) -> None:
        self.trial = None
        arm, best = self.arms[place], self.arms[self.best]
        shortest, longest = _TRIALS
        if self._worth(place) > _MARGIN * self._worth(self.best):
            best.wait = best.interval = shortest
            self.best = place
        else:
            lost = self.trial_seconds - self.trial_tokens / best.rate
            arm.wait = min(longest, max(arm.interval, round(lost / (_TRIAL_SHARE * best.seconds / best.weight))))
            arm.interval = min(longest, 2 * arm.interval)

    def _worth(self, place: int) -> float:
        rate = self.arms[place].rate
        return rate if DEPTHS[place] == 0 else rate / _LEAST_GAIN


class Governor:
    """Depths by load: requests in a round, those of an octave (5 to 8, 9 to 16) taken together. A load that is new
    begins as the nearest one stands."""

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}

    def depth(self, num_requests: int) -> int | None:
        """How deep a round over so many requests drafts: 0 not at all, None as deep as the engine likes."""
        return DEPTHS[self._load(num_requests).choice]

    def see(self, num_requests: int, depth: int | None, *, tokens: int, seconds: float) -> None:
        """A round that drafted to `depth` emitted so many tokens."""
        self._load(num_requests).see(DEPTHS.index(depth), tokens, seconds)

    def _load(self, num_requests: int) -> _Load:
        octave = math.ceil(math.log2(num_requests))
        if octave not in self._loads:
            nearest = min(self._loads, key=lambda other: abs(other - octave), default=None)
            self._loads[octave] = _Load(best=0 if nearest is None else self._loads[nearest].best)
        return self._loads[octave]
