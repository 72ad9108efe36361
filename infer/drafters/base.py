"""What a drafter is: something that proposes a `DraftTree` for each request, whatever it is made of.

A drafter may read target states (`taps`) and keeps what it remembers of a request in `request.draft_state[name]`, so
two drafters of one engine need different names. It proposes generously; the engine prunes trees to the size that pays
on this machine (`infer.growth.fit`).

What a tree is made of follows `request.rule`: a drafter proposes one of its `kinds` that the rule takes. Greedy
requests get one-hot trees under every rule, which the engine verifies by the match walk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from infer.cache import SlotCache
from infer.cost import CostModel
from infer.request import Request
from infer.tree import DraftTree
from infer.verify import KindType


@dataclass(frozen=True, kw_only=True)
class TreeSettings:
    """Bounds of a request's tree.

    max_nodes: most draft nodes a request verifies in a round. max_depth: longest path. branch: candidates a node.
    beam: nodes expanded at a depth. adaptive: take fewer nodes where the cost model says that they do not pay.
    """

    max_nodes: int = 32
    max_depth: int = 6
    branch: int = 8
    beam: int = 6
    adaptive: bool = True

    def __post_init__(self) -> None:
        for name in ("max_nodes", "max_depth", "branch", "beam"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")

    @classmethod
    def chain(cls, depth: int, *, adaptive: bool = False) -> TreeSettings:
        return cls(max_nodes=depth, max_depth=depth, branch=1, beam=1, adaptive=adaptive)


@dataclass(frozen=True, kw_only=True)
class Room:
    """What an engine gives its drafter to work in.

    num_slots: requests at once. num_columns: most rows of one, its tree included. tree: bounds of the trees asked for.
    cost: what the target's forwards cost. cache: the target's own, for drafters that run parts of the target: of each
    request the first `num_cached` columns hold its text, and the next `max_depth * beam + 1` are there to be written
    to, since verification writes them anew.
    """

    num_slots: int
    num_columns: int
    tree: TreeSettings
    cost: CostModel
    cache: SlotCache | None = None


@dataclass(frozen=True, kw_only=True)
class DraftLimit:
    """What a request can still use: nodes beyond its cache slot or paths beyond its last token are of no use.

    trust: what values at each depth have been worth in this request (`infer.adaptation`; empty: what they say), for
    drafters that ask whether a further step pays. The engine corrects the trees that it is given.
    """

    max_nodes: int
    max_depth: int
    trust: tuple[float, ...] = ()


def at_depth(trust: Sequence[float], depth: int) -> float:
    """What values at `depth` (from 1 on) are worth; deeper than was seen, what those at the last depth seen are."""
    return trust[min(depth, len(trust)) - 1] if trust else 1.0


@runtime_checkable
class Drafter(Protocol):
    """See the module. `kinds` are the kinds of proposals that it can make; `taps` the `hidden_states` indices whose
    states `observe` is given (none: `states=None`); `spent_milliseconds` what the last `propose` took, by the drafter's
    own measure of its steps on this machine (0 where that is next to nothing)."""

    @property
    def name(self) -> str: ...

    @property
    def kinds(self) -> tuple[KindType, ...]: ...

    @property
    def taps(self) -> tuple[int, ...]: ...

    @property
    def spent_milliseconds(self) -> float: ...

    def open(self, room: Room) -> None:
        """Make room for requests; called before the first of them, and again if the engine's cache is rebuilt."""

    def observe(self, request: Request, states: torch.Tensor | None) -> None:
        """New rows of the request's text are committed: `states` [n, taps * H] of positions num_cached - n and on."""

    def propose(self, requests: Sequence[Request], limits: Sequence[DraftLimit]) -> list[DraftTree]:
        """A tree for each request, below its last emitted token."""

    def close(self, request: Request) -> None:
        """The request has left."""


@runtime_checkable
class PrefixDrafter(Drafter, Protocol):
    """A drafter that can go on from another request's text. Only such drafters are given requests whose beginning is
    not computed again; `observe` then tells of the rows behind it.

    Until `close`, what it knows of a request that has left stays as it was.
    """

    def num_kept(self, request: Request) -> int:
        """How many tokens of the request's text, from the first on, a request that begins alike need not read again."""
        ...

    def adopt(self, request: Request, source: Request, num_tokens: int) -> None:
        """`request`, which has a slot (maybe the very slot of `source`), begins with the first `num_tokens` tokens of
        `source` and with the one after them; what is known of these is `request`'s too."""


@runtime_checkable
class RecordingDrafter(Drafter, Protocol):
    """A drafter that can say what its coupled trees were drawn from (`infer.tree.Coupled`): set `records` to have it.

    The other kinds carry that anyway.
    """

    records: bool


class TextReader:
    """What drafters share that read a text from its tokens alone, when they are asked for a draft."""

    def observe(self, request: Request, states: torch.Tensor | None) -> None:
        pass

    def num_kept(self, request: Request) -> int:
        return request.num_tokens

    def adopt(self, request: Request, source: Request, num_tokens: int) -> None:
        pass
