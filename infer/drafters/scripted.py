"""A drafter that proposes what it is told: for tests, demonstrations and measuring the cost of a round.

The script sees a request and returns the tree; a perfect drafter, an always wrong one and one whose second child is
right are each a line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from infer.drafters.base import DraftLimit, Room, TextReader
from infer.request import Request
from infer.tree import Coupled, DraftTree, GreedySet, OneHot, Sampled
from infer.verify import KindType

Script = Callable[[Request, DraftLimit], DraftTree]


class ScriptedDrafter(TextReader):
    """Asks `script(request, limit)` for every tree, which may be of any of `kinds`.

    `taps` may be given to have states collected all the same.
    """

    spent_milliseconds = 0.0

    def __init__(
        self,
        script: Script,
        *,
        name: str = "scripted",
        taps: tuple[int, ...] = (),
        kinds: tuple[KindType, ...] = (OneHot, Coupled, Sampled, GreedySet),
    ) -> None:
        self.script = script
        self.name = name
        self.taps = taps
        self.kinds = kinds

    def open(self, room: Room) -> None:
        pass

    def propose(self, requests: Sequence[Request], limits: Sequence[DraftLimit]) -> list[DraftTree]:
        return [self.script(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def close(self, request: Request) -> None:
        pass


def replay(token_ids: Sequence[int], *, depth: int) -> Script:
    """A perfect drafter for one known answer: a chain of its next `depth` tokens."""

    def script(request: Request, limit: DraftLimit) -> DraftTree:
        start = len(request.output_ids)
        return DraftTree.chain(tuple(token_ids[start : start + min(depth, limit.max_depth)]))

    return script
