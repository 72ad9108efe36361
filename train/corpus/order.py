"""Which row is trained on at visit n: permutations of rows in memory, and fixed shares of the visits for each source.

An order is a function of (seed, visit number) alone, so a run that is resumed at visit n goes on exactly where it
stopped, whatever the number of processes and the batch size.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, Protocol

import torch

from infer.chat import Rendered

MAX_PERIOD = 10_000
"""Visits after which the mixture of sources repeats, at most: no share is further off than one part in so many."""


class Visits(Protocol):
    """What is trained on, visit by visit."""

    def at(self, visit: int) -> Rendered:
        """Asked for in ascending order; any of the last few thousand may be asked for again."""

    def state(self, visit: int) -> dict[str, Any]:
        """JSON-able: what `seek` needs to go on at `visit`."""

    def seek(self, visit: int, state: Mapping[str, Any]) -> None:
        """Go on at `visit`, of which `state` told in an earlier process; an empty one: reread from the beginning."""


class VisitOrder:
    """Which row is visited at visit n: every epoch a fresh permutation drawn from (seed, epoch)."""

    def __init__(self, num_rows: int, *, seed: int) -> None:
        self._num_rows, self._seed = num_rows, seed
        self._permutation = lru_cache(maxsize=2)(self._permute)

    def __getitem__(self, visit: int) -> int:
        epoch, place = divmod(visit, self._num_rows)
        return self._permutation(epoch)[place]

    def _permute(self, epoch: int) -> list[int]:
        return permutation(self._num_rows, self._seed * 1_000_003 + epoch)


class Shares:
    """Which source is visited at visit n, and how many visits it had before: evenly spread, exact over a period."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.counts = _counts(weights)
        self.period = sum(self.counts)
        places = sorted(
            ((2 * number + 1) / (2 * count), source)  # the middle of the number-th of `count` equal parts
            for source, count in enumerate(self.counts)
            for number in range(count)
        )
        self._sources = [source for _, source in places]
        self._places = [[i for i, found in enumerate(self._sources) if found == one] for one in range(len(self.counts))]

    @property
    def fractions(self) -> list[float]:
        """Of the visits, by source."""
        return [count / self.period for count in self.counts]

    def __getitem__(self, visit: int) -> tuple[int, int]:
        """(source, number of its visits before this one)."""
        source = self._sources[visit % self.period]
        return source, self.before(visit, source)

    def before(self, visit: int, source: int) -> int:
        """Visits of `source` among the first `visit`."""
        periods, place = divmod(visit, self.period)
        return periods * self.counts[source] + bisect_left(self._places[source], place)


class RowVisits:
    """Rows in memory, in permutations."""

    def __init__(self, rows: Sequence[Rendered], *, seed: int) -> None:
        self._rows, self._order = rows, VisitOrder(len(rows), seed=seed)

    def at(self, visit: int) -> Rendered:
        return self._rows[self._order[visit]]

    def state(self, visit: int) -> dict[str, Any]:
        return {}

    def seek(self, visit: int, state: Mapping[str, Any]) -> None:
        """Nothing to do: the order is a function of the visit."""


class MixedVisits:
    """Several sources in fixed shares, each in its own order."""

    def __init__(self, parts: Sequence[Visits], shares: Shares) -> None:
        self._parts, self._shares = parts, shares

    def at(self, visit: int) -> Rendered:
        source, place = self._shares[visit]
        return self._parts[source].at(place)

    def state(self, visit: int) -> dict[str, Any]:
        states = [part.state(self._shares.before(visit, source)) for source, part in enumerate(self._parts)]
        return {"sources": states} if any(states) else {}

    def seek(self, visit: int, state: Mapping[str, Any]) -> None:
        states = state.get("sources", [{}] * len(self._parts))
        if len(states) != len(self._parts):
            raise ValueError(f"the checkpoint tells of {len(states)} data sources, this run has {len(self._parts)}")
        for source, (part, one) in enumerate(zip(self._parts, states, strict=True)):
            part.seek(self._shares.before(visit, source), one)


def permutation(size: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed % 2**63)
    return torch.randperm(size, generator=generator).tolist()


def derived_seed(*parts: int | str) -> int:
    """A seed of its own for each combination of parts."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _counts(weights: Sequence[float]) -> list[int]:
    """Visits of each source in a period: exact where the decimals written in a recipe allow it, else rounded."""
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    shares = [weight / total for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= MAX_PERIOD:
        return [int(share * period) for share in shares]
    counts = [int(share * MAX_PERIOD) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda source: counts[source] - shares[source] * MAX_PERIOD)
    for source in by_remainder[: MAX_PERIOD - sum(counts)]:
        counts[source] += 1
    if 0 in counts:
        raise ValueError(
            f"data.weights {list(weights)} give source {counts.index(0) + 1} less than one visit in {MAX_PERIOD:,}: "
            "raise its weight, or leave it out"
        )
    return counts
