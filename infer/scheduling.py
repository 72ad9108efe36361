"""Who is served next, in which slot, and what the free slots still hold.

A slot that is left keeps its rows until another request needs the place, so that a request whose text begins alike
takes them over instead of computing them again. Knows requests and slots, and nothing about models or forwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from infer.request import Request

LEAST_REUSED = 8
"""Shorter beginnings are computed again: a forward has other rows anyway."""


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How an engine is shared by requests of many callers. By default it is one caller's, who gives it all work at
    once.

    prefill_chunk: while others decode, prompts are prefilled in shares of so many rows a step, so that none of them
    waits for a long one ("auto": as many as take five plain steps on this machine; None: at once). reuse_prefixes: take
    over the rows of a request, running or gone, whose text begins alike. isolate_faults: what raises ends the request
    that it was for, and no other, and drafts that raise are done without (else it is for the caller, who must abort
    all). follow_clock: draft less, or not at all, at loads where that has been faster (`infer.governor`); what is
    accepted then differs from run to run, the tokens do not.
    """

    prefill_chunk: int | Literal["auto"] | None = None
    reuse_prefixes: bool = False
    isolate_faults: bool = False
    follow_clock: bool = False

    def __post_init__(self) -> None:
        chunk = self.prefill_chunk
        if chunk not in (None, "auto") and (not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1):
            raise ValueError(f"prefill_chunk must be 'auto' or at least 1 row, got {chunk!r}")

    @classmethod
    def among_callers(
        cls,
        *,
        prefill_chunk: int | Literal["auto"] | None = "auto",
        reuse_prefixes: bool = True,
        follow_clock: bool = True,
    ) -> Sharing:
        """As a server has it."""
        return cls(
            prefill_chunk=prefill_chunk, reuse_prefixes=reuse_prefixes, isolate_faults=True, follow_clock=follow_clock
        )


class WaitingLine:
    """Requests without a slot. The next is of the owner who has the fewest slots, and of that owner's the oldest.

    A request without an owner is an owner of its own, so where none is told, the oldest is next.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def extend(self, requests: Sequence[Request]) -> None:
        self._requests.extend(requests)

    def put_first(self, request: Request) -> None:
        self._requests.insert(0, request)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def next(
        self, running: Sequence[Request], is_held: Callable[[Request], bool] = lambda request: False
    ) -> Request | None:
        """Who is next, beside those that run and but for those that are held back; stays in the line."""
        num_slots = Counter(request.owner for request in running if request.owner)
        ready = (request for request in self._requests if not is_held(request))
        if not num_slots:
            return next(ready, None)
        return min(ready, key=lambda request: num_slots[request.owner], default=None)  # of equals the first: the oldest


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """The first `num_tokens` tokens of a request are those of `source`, whose slot holds their rows."""

    source: Request
    num_tokens: int


class SlotTable:
    """The slots of a cache: who runs in them, and whose rows the free ones still hold.

    lowest_first: always take the lowest free slot, for forwards that compute every slot between the first and the last
    that they touch. Else the slot left longest ago is taken, so that texts are kept as long as may be.
    """

    def __init__(self, num_slots: int, *, lowest_first: bool = False) -> None:
        self.num_slots = num_slots
        self._lowest_first = lowest_first
        self._free = list(range(num_slots))  # those that hold nothing of use first, then by when they were left
        self._running: dict[int, Request] = {}
        self._kept: dict[int, Request] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def kept(self) -> tuple[Request, ...]:
        """The requests that have left and whose rows are still there."""
        return tuple(self._kept.values())

    @property
    def num_kept_tokens(self) -> int:
        """Tokens whose rows the free slots hold."""
        return sum(request.num_cached for request in self.kept)

    @property
    def next_free(self) -> int:
        """The slot that `take` hands out where no prefix decides."""
        assert self._free, "no slot is free: the caller admits a request only when one is"
        return min(self._free) if self._lowest_first or not self._kept else self._free[0]

    def longest_prefix(
        self, token_ids: Sequence[int], usable: Callable[[Request, int], int], *, least: int = LEAST_REUSED
    ) -> Prefix | None:
        """The request, running or gone, from which the most rows can be taken over. `usable(source, num_shared)`: how
        many that is, where so many tokens are the same."""
        best = None
        for source in (*self._running.values(), *self._kept.values()):
            num_tokens = usable(source, _num_shared(token_ids, source))
            if num_tokens >= least and (best is None or num_tokens > best.num_tokens):
                best = Prefix(source=source, num_tokens=num_tokens)
        return best

    def take(self, request: Request, prefix: Prefix | None = None) -> Request | None:
        """Give `request` a slot; returns the request whose rows it held, which are lost.

        A text that goes on where another ended takes that one's slot, and no row is moved.
        """
        slot = self._choose(prefix)
        self._free.remove(slot)
        self._running[slot] = request
        request.slot = slot
        return self._kept.pop(slot, None)

    def release(self, request: Request, *, keep: bool) -> None:
        """The slot of `request` is free; `keep`: its rows stay until the place is needed."""
        slot = request.slot
        assert self._running.get(slot) is request, f"slot {slot} was released by a request that does not run there"
        del self._running[slot]
        if keep:
            self._kept[slot] = request
            self._free.append(slot)
        else:
            self._free.insert(0, slot)

    def _choose(self, prefix: Prefix | None) -> int:
        slot = self.next_free
        if prefix is None or prefix.source.slot not in self._kept:
            return slot
        source = prefix.source
        if 2 * prefix.num_tokens >= source.num_cached or len(self._free) == 1:
            return source.slot
        if slot == source.slot and not self._lowest_first:
            return self._free[1]  # the rows are copied, and the source's text stays for others
        return slot


def share_rows(wanted: Sequence[int], budget: int) -> list[int]:
    """How many of `budget` rows each gets who wants so many: equal shares, and what one leaves goes to the others."""
    shares = [0] * len(wanted)
    left = sorted(range(len(wanted)), key=wanted.__getitem__)
    while left and budget > 0:
        place = left.pop(0)
        shares[place] = min(wanted[place], -(-budget // (len(left) + 1)))
        budget -= shares[place]
    return shares


def _num_shared(token_ids: Sequence[int], source: Request) -> int:
    """How many tokens a text begins with like the rows of `source`."""
    known = source.tokens_from(0)[: source.num_cached]
    low, high = 0, min(len(token_ids), len(known))
    if not high or token_ids[0] != known[0]:
        return 0
    while low < high:  # comparing slices is quick, so the place where they part is searched by halves
        middle = (low + high + 1) // 2
        if list(token_ids[low:middle]) == known[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
