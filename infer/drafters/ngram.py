"""Lookup drafting: continue the text as it went on after the same last tokens, earlier in the prompt or the answer.

No model, no training (Saxena 2023, "Prompt lookup decoding"). Proposals are one-hot. Confidence in a match comes from
how often matches of that length were right so far in the same request, so one request never changes another's trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from infer.drafters.base import DraftLimit, Room, TextReader, TreeSettings
from infer.growth import TreeBuilder
from infer.request import Request
from infer.tree import ROOT, DraftTree, OneHot
from infer.verify import KindType

MAX_MATCH = 8
MIN_MATCH = 2
MAX_CONTINUATIONS = 3

# Pseudo-counts (right, wrong) of the next token after a match of that many tokens; a request's own record adds to them.
_PRIOR = {
    2: (1.0, 2.5),
    3: (1.5, 2.0),
    4: (2.0, 1.5),
    5: (2.5, 1.2),
    6: (3.0, 1.0),
    7: (3.5, 1.0),
    8: (4.0, 0.8),
}


@dataclass
class _History:
    """Where each n-gram of a request's text ended, and how its matches fared."""

    tokens: list[int] = field(default_factory=list)
    ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # n-gram -> index after it, oldest first
    right: dict[int, float] = field(default_factory=dict)
    wrong: dict[int, float] = field(default_factory=dict)
    guess: tuple[int, int, int] | None = None  # match length, index guessed, token

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self.guess is not None and self.guess[1] == len(self.tokens):
                record = self.right if self.guess[2] == token else self.wrong
                record[self.guess[0]] = record.get(self.guess[0], 0.0) + 1.0
            self.tokens.append(token)
            end = len(self.tokens)
            # An n-gram is indexed when the token after it arrives, so that a text never matches its own end.
            for size in range(MIN_MATCH, MAX_MATCH + 1):
                if end - 1 >= size:
                    self.ends.setdefault(tuple(self.tokens[end - 1 - size : end - 1]), []).append(end - 1)

    def matches(self) -> list[tuple[int, int]]:
        """(length, index of the token that followed) of earlier occurrences of the text's end, longest first."""
        found: list[tuple[int, int]] = []
        seen: set[int] = set()
        for size in range(min(MAX_MATCH, len(self.tokens)), MIN_MATCH - 1, -1):
            for start in reversed(self.ends.get(tuple(self.tokens[-size:]), ())):
                if start not in seen:
                    seen.add(start)
                    found.append((size, start))
                if len(found) == MAX_CONTINUATIONS:
                    return found
        return found

    def confidence(self, size: int) -> float:
        right, wrong = _PRIOR[size]
        right, wrong = right + self.right.get(size, 0.0), wrong + self.wrong.get(size, 0.0)
        return right / (right + wrong)


class NgramDrafter(TextReader):
    """See the module."""

    kinds: tuple[KindType, ...] = (OneHot,)
    spent_milliseconds = 0.0
    taps: tuple[int, ...] = ()

    def __init__(self, *, name: str = "ngram") -> None:
        self.name = name
        self._tree = TreeSettings()

    def open(self, room: Room) -> None:
        self._tree = room.tree

    def propose(self, requests: Sequence[Request], limits: Sequence[DraftLimit]) -> list[DraftTree]:
        return [self._propose(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def close(self, request: Request) -> None:
        request.draft_state.pop(self.name, None)

    def _read(self, request: Request) -> _History:
        """The request's text, up to its last token."""
        history = request.draft_state.setdefault(self.name, _History())
        assert isinstance(history, _History)
        history.extend(request.tokens_from(len(history.tokens)))
        return history

    def _propose(self, request: Request, limit: DraftLimit) -> DraftTree:
        history = self._read(request)
        builder = TreeBuilder()
        remaining = 1.0
        history.guess = None
        for rank, (size, start) in enumerate(history.matches()[: self._tree.branch]):
            confidence = history.confidence(size)
            if rank == 0:
                history.guess = (size, len(history.tokens), history.tokens[start])
            value, node = remaining * confidence, ROOT
            for offset in range(min(limit.max_depth, len(history.tokens) - start)):
                node = builder.add(node, history.tokens[start + offset], value)
                # A continuation that held for a while is trusted more: the match has grown with it.
                confidence += 0.3 * (1.0 - confidence)
                value *= confidence
            remaining *= 1.0 - history.confidence(size)
        return builder.build(OneHot())
