"""Keeping the features of many rows ahead of training, with an account of every row.

Rows already there are read once, so that what the account calls kept has just been found whole. Whatever interrupts the
filling, the next one goes on from what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from infer.chat import Rendered
from train.features.rows import row_key
from train.features.source import CachedFeatures
from train.world import World

OnRow = Callable[[int], None]
"""Told the tokens of each row that is done with."""


@dataclass(frozen=True, kw_only=True)
class Count:
    """Some rows and their tokens."""

    rows: int = 0
    tokens: int = 0

    @classmethod
    def of(cls, rows: Sequence[Rendered]) -> Count:
        return cls(rows=len(rows), tokens=sum(len(row.token_ids) for row in rows))

    def __add__(self, other: Count) -> Count:
        return Count(rows=self.rows + other.rows, tokens=self.tokens + other.tokens)

    def __str__(self) -> str:
        return f"{self.rows:,} rows ({self.tokens:,} tokens)"


@dataclass(frozen=True, kw_only=True)
class Account:
    """What became of `given`: the four others add up to it. repeated: rows equal to an earlier one. beyond: there was
    no room, by the budget or on the disk."""

    given: Count
    present: Count
    stored: Count
    repeated: Count
    beyond: Count

    def __add__(self, other: Account) -> Account:
        """Of two parts of the rows, the second one filled after the first."""
        names = [field.name for field in fields(self)]
        return Account(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def describe(self) -> str:
        parts = {
            "new": self.stored,
            "already there": self.present,
            "repeated": self.repeated,
            "without room": self.beyond,
        }
        told = [f"{count} {name}" for name, count in parts.items() if count.rows]
        return f"{self.given}: {', '.join(told)}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def fill(
    source: CachedFeatures, rows: Sequence[Rendered], *, world: World | None = None, on_row: OnRow | None = None
) -> Account:
    """Keep what there is room for. Of several processes each takes its share; all get the account of them together."""
    world = world or World()
    different = list({row_key(row.token_ids): row for row in reversed(rows)}.values())[::-1]
    own = different[world.rank :: world.size]
    present: list[Rendered] = []
    others: list[Rendered] = []
    try:
        for place in range(-(-len(different) // world.size)):  # as many turns in each process
            turn = own[place : place + 1]
            for row in turn:
                (others if source.store.get(row.token_ids) is None else present).append(row)
            source.keep(turn)
            for row in turn:
                if on_row is not None:
                    on_row(len(row.token_ids))
    finally:
        source.flush()
    new = [row for row in others if row_key(row.token_ids) in source.store]
    counts = {"present": Count.of(present), "stored": Count.of(new)}
    counts["beyond"] = _difference(Count.of(own), *counts.values())
    totals = world.sum([number for count in counts.values() for number in (count.rows, count.tokens)])
    summed = {
        name: Count(rows=int(totals[2 * place]), tokens=int(totals[2 * place + 1])) for place, name in enumerate(counts)
    }
    repeated = _difference(Count.of(rows), Count.of(different))
    return Account(given=Count.of(rows), repeated=repeated, **summed)


def _difference(whole: Count, *parts: Count) -> Count:
    return Count(
        rows=whole.rows - sum(part.rows for part in parts), tokens=whole.tokens - sum(part.tokens for part in parts)
    )
