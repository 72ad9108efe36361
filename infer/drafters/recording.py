"""A drafter that proposes nothing and keeps the target's states of the text, beside those that draft (in a hybrid).

Decoding computes the states of every committed row anyway; here they are copied out, a bounded number a request, so
that a head can be trained on what was served without running the target again. They stay on the target's device, and
nothing is written anywhere.

Rows of one request are contiguous and end where its text does. Where a request takes over rows of another, their states
are taken over too, as far as they are there.

Shapes: n rows, W the width of all taps together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from infer.drafters.base import DraftLimit, Room
from infer.request import Request
from infer.tree import DraftTree
from infer.verify import KindType

MOST_ROWS = 1024
"""Rows kept of a request, its prompt's among them."""
LEAST_REQUESTS = 32
"""Requests for which there is room at least."""
CONTEXT_SHARE = 4
"""A part of so many of a request's rows is for its prompt, of which the end is kept."""
_MOST_PIECES = 64
_NAME = "learning"


@dataclass(eq=False)
class RecordedText:
    """The states of positions `start` to before `end`. version: of the head that drafted when the request began."""

    version: int
    start: int = 0
    num_rows: int = 0
    pieces: list[torch.Tensor] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + self.num_rows

    def add(self, first: int, states: torch.Tensor, *, earliest: int, most: int) -> None:
        """States [n, W] of position `first` and on; those before `earliest` are left out, and those beyond `most`."""
        if self.num_rows >= most:
            return
        skipped = max(0, earliest - first)
        first, states = first + skipped, states[skipped:]
        if self.num_rows and first != self.end:  # there are rows between that nobody showed
            self.pieces, self.num_rows = [], 0
        if not self.num_rows:
            self.start = first
        with torch.inference_mode(mode=False):  # a tensor that gradients may read
            piece = states[: most - self.num_rows].clone()
        if len(piece):
            self.pieces.append(piece)
            self.num_rows += len(piece)
        if len(self.pieces) > _MOST_PIECES:
            self.joined()

    def joined(self) -> torch.Tensor:
        """All of them [n, W]."""
        if len(self.pieces) > 1:
            with torch.inference_mode(mode=False):
                self.pieces = [torch.cat(self.pieces)]
        return self.pieces[0]


class StateRecorder:
    """See the module. `taps`: what to keep. most_tokens: of all requests that run or have just ended; a request
    keeps `MOST_ROWS` at most, or its share of them.

    version: of the head that drafts. When it changes, requests that come later take over no rows from those that began
    before: a head's own rows among them are the former head's.
    """

    name = _NAME
    kinds: tuple[KindType, ...] = ()
    spent_milliseconds = 0.0

    def __init__(self, taps: Sequence[int], *, most_tokens: int) -> None:
        self.taps = tuple(taps)
        self.version = 0
        self.fault: Exception | None = None
        self._most_tokens = most_tokens
        self._most_rows = min(MOST_ROWS, most_tokens // LEAST_REQUESTS)
        self._texts: dict[Request, RecordedText] = {}

    def open(self, room: Room) -> None:
        self._most_rows = min(MOST_ROWS, self._most_tokens // max(LEAST_REQUESTS, room.num_slots))

    def observe(self, request: Request, states: torch.Tensor | None) -> None:
        if states is not None:
            self._keep(request, request.num_cached - len(states), states)

    def propose(self, requests: Sequence[Request], limits: Sequence[DraftLimit]) -> list[DraftTree]:
        return [DraftTree.empty() for _ in requests]

    def num_kept(self, request: Request) -> int:
        text = request.draft_state.get(self.name)
        is_stale = isinstance(text, RecordedText) and text.version != self.version
        return 0 if is_stale else request.num_tokens

    def adopt(self, request: Request, source: Request, num_tokens: int) -> None:
        theirs = source.draft_state.get(self.name)
        if isinstance(theirs, RecordedText) and theirs.start < num_tokens <= theirs.end:
            self._keep(request, theirs.start, theirs.joined()[: num_tokens - theirs.start])

    def close(self, request: Request) -> None:
        request.draft_state.pop(self.name, None)

    def take_finished(self) -> list[tuple[Request, RecordedText]]:
        """Requests that were answered since the last call, each with what was kept of it."""
        ended = [request for request in self._texts if request.finish_reason is not None]
        taken = [(request, self._texts.pop(request)) for request in ended]
        return [(request, text) for request, text in taken if request.finish_reason in ("stop", "length")]

    def stop(self, fault: Exception) -> None:
        """Keep nothing any more."""
        self.fault = fault
        self._texts.clear()

    def _keep(self, request: Request, first: int, states: torch.Tensor) -> None:
        if self.fault is not None:
            return
        earliest = len(request.prompt_ids) - self._most_rows // CONTEXT_SHARE
        try:
            self._text_of(request).add(first, states, earliest=earliest, most=self._most_rows)
        except Exception as error:  # memory, above all: the request itself must not feel it
            self.stop(error)

    def _text_of(self, request: Request) -> RecordedText:
        """Of a request, from its first row on. One that was begun anew, after it had lost its slot, has a new one."""
        text = request.draft_state.get(self.name)
        if not isinstance(text, RecordedText):
            text = request.draft_state[self.name] = RecordedText(version=self.version)
            self._texts[request] = text
            self._forget_oldest()
        return text

    def _forget_oldest(self) -> None:
        """Ended requests that nobody took must not pile up."""
        num_tokens = sum(text.num_rows for text in self._texts.values())
        for request in [request for request in self._texts if request.finish_reason is not None]:
            if num_tokens <= self._most_tokens:
                break
            num_tokens -= self._texts.pop(request).num_rows
