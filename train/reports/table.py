"""Acceptance by draft position x domain x temperature x context length, as counts that can be added up.

Positions, rounds and lengths mean what they mean in `infer.evaluate`; a cell's share at position d is
`accepted[d - 1] / num_rounds`. Contexts are the tokens before a round, in the same steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infer.evaluate import CONTEXT_BOUNDS, Trace

KEYS = ("temperature", "domain", "context")
COLUMNS = (*KEYS, "position", "rounds", "accepted", "share")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The draft rounds of one temperature, domain and context length; accepted[d - 1]: those that emitted more than d
    tokens."""

    temperature: float
    domain: str
    context: str
    num_rounds: int
    num_tokens: int
    accepted: tuple[int, ...]

    @property
    def shares(self) -> tuple[float, ...]:
        return tuple(count / self.num_rounds for count in self.accepted)

    @property
    def accepted_length(self) -> float:
        return self.num_tokens / self.num_rounds

    def to_dict(self) -> dict[str, Any]:
        return {
            **{key: getattr(self, key) for key in KEYS},
            "num_rounds": self.num_rounds,
            "num_tokens": self.num_tokens,
            "accepted": list(self.accepted),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Cell:
        return cls(**{**values, "temperature": float(values["temperature"]), "accepted": tuple(values["accepted"])})


@dataclass(frozen=True, kw_only=True)
class AcceptanceTable:
    """Cells that hold rounds, in the order of temperature, domain (as they came) and context."""

    cells: tuple[Cell, ...]

    @classmethod
    def of(cls, traces: Iterable[Trace]) -> AcceptanceTable:
        rounds: dict[tuple[float, str, int], Counter[int]] = {}
        for trace in traces:
            for context, length in trace.rounds_by_context():
                bucket = sum(context >= bound for bound in CONTEXT_BOUNDS)
                rounds.setdefault((trace.temperature, trace.domain, bucket), Counter())[length] += 1
        domains = list(dict.fromkeys(domain for _, domain, _ in rounds))
        keys = sorted(rounds, key=lambda key: (key[0], domains.index(key[1]), key[2]))
        return cls(
            cells=tuple(
                _cell(rounds[key], temperature=key[0], domain=key[1], context=context_name(key[2])) for key in keys
            )
        )

    @classmethod
    def from_list(cls, values: Iterable[Mapping[str, Any]]) -> AcceptanceTable:
        return cls(cells=tuple(Cell.from_dict(one) for one in values))

    def to_list(self) -> list[dict[str, Any]]:
        return [cell.to_dict() for cell in self.cells]

    def pooled(self, *keys: str) -> list[Cell]:
        """Cells added up over all but `keys`; what was added up is called "all" (temperature: -1)."""
        pools: dict[tuple[Any, ...], list[Cell]] = {}
        for cell in self.cells:
            pools.setdefault(tuple(getattr(cell, key) for key in keys), []).append(cell)
        pooled = [_sum(cells, keys) for cells in pools.values()]
        if "context" in keys:
            order = {context_name(bucket): bucket for bucket in range(len(CONTEXT_BOUNDS) + 1)}
            pooled.sort(key=lambda cell: order.get(cell.context, -1))
        return pooled

    def rows(self) -> Iterator[tuple[float, str, str, int, int, int, float]]:
        """One row a cell and position (`COLUMNS`)."""
        for cell in self.cells:
            for position, (count, share) in enumerate(zip(cell.accepted, cell.shares, strict=True), start=1):
                yield cell.temperature, cell.domain, cell.context, position, cell.num_rounds, count, share


def context_name(bucket: int) -> str:
    """As `infer.evaluate` names it: the tokens from one bound to the next."""
    bounds = (0, *CONTEXT_BOUNDS)
    return f"{bounds[bucket]}+" if bucket == len(CONTEXT_BOUNDS) else f"{bounds[bucket]}-{bounds[bucket + 1] - 1}"


def _cell(lengths: Counter[int], *, temperature: float, domain: str, context: str) -> Cell:
    deepest = max(lengths) - 1
    return Cell(
        temperature=temperature,
        domain=domain,
        context=context,
        num_rounds=lengths.total(),
        num_tokens=sum(length * count for length, count in lengths.items()),
        accepted=tuple(sum(n for length, n in lengths.items() if length > d) for d in range(1, deepest + 1)),
    )


def _sum(cells: Sequence[Cell], keys: Sequence[str]) -> Cell:
    deepest = max(len(cell.accepted) for cell in cells)
    first = cells[0]
    return Cell(
        temperature=first.temperature if "temperature" in keys else -1.0,
        domain=first.domain if "domain" in keys else "all",
        context=first.context if "context" in keys else "all",
        num_rounds=sum(cell.num_rounds for cell in cells),
        num_tokens=sum(cell.num_tokens for cell in cells),
        accepted=tuple(
            sum(cell.accepted[place] for cell in cells if place < len(cell.accepted)) for place in range(deepest)
        ),
    )
