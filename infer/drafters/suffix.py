"""Lookup by suffixes of any length: continue the text as it went on wherever its end, or a part of that, stood before.

After SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975), here with a suffix automaton of the request's own text:
constant time for a token on average, memory in proportion to the text. A shared corpus of token sequences may join in,
through a suffix array as in REST (He et al. 2023, arXiv 2311.08252). No model, no training; proposals are one-hot.

What may come next is estimated as in prediction by partial matching. The longest end of the text that stood somewhere
before is asked first: with what confidence is the next token one of those that followed there, and in which shares, by
their counts? If it is none of them, the next shorter end that had others is asked, and so on. The path to a node counts
as text, so a draft goes on past the place that it was copied from. Confidence is learned, for matches of each length,
from the request's own answer: one request never changes another's trees.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from infer.drafters.base import DraftLimit, Room, TextReader, TreeSettings
from infer.growth import TreeBuilder
from infer.request import Request
from infer.tree import ROOT, DraftTree, OneHot
from infer.verify import KindType

MIN_MATCH = 1
MAX_ORDERS = 3
"""Most ends that are asked for a node's children."""
NEGLIGIBLE = 0.01
"""Nodes less likely than this to be reached never pay for their row."""
_MAX_LINKS = 64
"""Most ends of a text that are looked at, or counted for a new token. Where one phrase is repeated over and over there
are as many as repetitions; the counts of the shortest then stand still."""
_EMPTY = 0
"""The automaton's state of the empty string."""
_CORPUS_MATCH = 32
"""Longest end of a text that is looked for in a corpus."""
_CORPUS_SAMPLE = 1024
"""Occurrences in a corpus that are counted, evenly chosen where there are more."""
_END = -1
"""Stands behind each sequence of a corpus: no token."""


class SuffixAutomaton:
    """All substrings of a growing text, each with the tokens that followed it and how often it occurs.

    Substrings that end at the same places share a state; a state's link is that of its longest suffix which also ends
    elsewhere (Blumer et al. 1985). A text of n tokens has less than 2n states and 3n transitions.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.lengths = [0]  # of a state's longest string
        self.links = [-1]
        self.transitions: list[dict[int, int]] = [{}]  # token -> the state of the string that it makes
        self.counts = [0]  # places at which a state's strings end
        self.last = _EMPTY

    def append(self, token: int) -> None:
        new = self._add_state(self.num_tokens + 1, {}, count=0)
        state = self.last
        while state != -1 and token not in self.transitions[state]:
            self.transitions[state][token] = new
            state = self.links[state]
        self.links[new] = _EMPTY if state == -1 else self._exact(state, token)
        self.num_tokens += 1
        self.last = new
        for ending in self._suffixes(new):
            self.counts[ending] += 1

    def contexts(self, state: int, length: int) -> Iterator[tuple[int, int]]:
        """(state, length) of the ends of a string of that `length` in `state`, longest first, which went on."""
        for ending in self._suffixes(state):
            length = min(length, self.lengths[ending])
            if length < MIN_MATCH:
                return
            if self.transitions[ending]:
                yield ending, length

    def continuations(self, state: int) -> dict[int, int]:
        """The tokens that followed a state's strings, and how often."""
        return {token: self.counts[after] for token, after in self.transitions[state].items()}

    def _suffixes(self, state: int) -> Iterator[int]:
        for _ in range(_MAX_LINKS):
            if state == _EMPTY:
                return
            yield state
            state = self.links[state]

    def _exact(self, state: int, token: int) -> int:
        """The state of the longest string in `state` followed by `token`, split off where longer ones share it."""
        shared = self.transitions[state][token]
        length = self.lengths[state] + 1
        if self.lengths[shared] == length:
            return shared
        split = self._add_state(length, dict(self.transitions[shared]), count=self.counts[shared])
        self.links[split] = self.links[shared]
        self.links[shared] = split
        while state != -1 and self.transitions[state].get(token) == shared:
            self.transitions[state][token] = split
            state = self.links[state]
        return split

    def _add_state(self, length: int, transitions: dict[int, int], *, count: int) -> int:
        self.lengths.append(length)
        self.links.append(_EMPTY)
        self.transitions.append(transitions)
        self.counts.append(count)
        return len(self.lengths) - 1


class Corpus:
    """Token sequences that any request may continue from: a suffix array, never written to after it is made."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        parts = [np.asarray(part, dtype=np.int64) for sequence in sequences for part in (sequence, [_END])]
        if any(sequence.ndim != 1 or (sequence < 0).any() for sequence in parts[::2]):
            raise ValueError("a corpus is a list of lists of token ids, none of them negative")
        self._tokens: npt.NDArray[np.int64] = np.concatenate(parts)
        self._order = _sorted_suffixes(self._tokens)
        for array in (self._tokens, self._order):
            array.setflags(write=False)

    def find(self, text: Sequence[int]) -> _Rows | None:
        """The rows of the longest end of `text` (up to `_CORPUS_MATCH` tokens) that stands in the corpus."""
        found: _Rows | None = None
        shortest, longest = MIN_MATCH, min(_CORPUS_MATCH, len(text))
        while shortest <= longest:
            length = (shortest + longest + 1) // 2
            rows = self._rows(list(text[-length:]))
            if rows.first < rows.stop:
                found, shortest = rows, length + 1
            else:
                longest = length - 1
        return found

    def narrow(self, rows: _Rows, token: int) -> _Rows | None:
        """The rows of the same string with `token` behind it."""
        bounds = [
            bisect_left(range(rows.first, rows.stop), value, key=lambda row: self._after(row, rows.length))
            for value in (token, token + 1)
        ]
        first, stop = (rows.first + bound for bound in bounds)
        return _Rows(first, stop, rows.length + 1) if first < stop else None

    def continuations(self, rows: _Rows) -> dict[int, int]:
        """The tokens that followed, and how often (in a sample, where there are very many)."""
        step = -(-(rows.stop - rows.first) // _CORPUS_SAMPLE)
        after = self._tokens[self._order[rows.first : rows.stop : step] + rows.length]
        counts: Counter[int] = Counter(after.tolist())
        del counts[_END]
        return counts

    def _rows(self, string: list[int]) -> _Rows:
        def start(row: int) -> list[int]:
            begin = self._order[row]
            tokens: list[int] = self._tokens[begin : begin + len(string)].tolist()
            return tokens

        everything = range(len(self._order))
        first = bisect_left(everything, string, key=start)
        return _Rows(first, bisect_right(everything, string, lo=first, key=start), len(string))

    def _after(self, row: int, length: int) -> int:
        return int(self._tokens[self._order[row] + length])


class _Rows(NamedTuple):
    """Rows [first, stop) of a suffix array, which begin with one string of `length` tokens."""

    first: int
    stop: int
    length: int


def _sorted_suffixes(tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where the suffixes of `tokens` begin, in order; by doubling the length that they are sorted by."""
    _, ranks = np.unique(tokens, return_inverse=True)
    width = 1
    while True:
        following = np.concatenate([ranks[width:] + 1, np.zeros(min(width, len(ranks)), dtype=np.int64)])
        keys = ranks * (len(ranks) + 1) + following
        order = np.argsort(keys, kind="stable")
        ranks = np.empty_like(keys)
        ranks[order] = np.cumsum(np.diff(keys[order], prepend=keys[order[:1]]) > 0)
        width *= 2
        if ranks[order[-1]] == len(ranks) - 1 or width >= len(ranks):
            return order


class _Place(NamedTuple):
    """Where a text and a path below it end: in a state of the request's automaton, as a string of `length`, and in rows
    of the corpus."""

    state: int
    length: int
    rows: _Rows | None


def _class_of(length: int) -> int:
    return min(length, 8) if length < 16 else min(length.bit_length() + 4, 10)


_PRIORS = {
    (True, True): (0.21, 0.43, 0.51, 0.59, 0.61, 0.65, 0.73, 0.78, 0.89, 0.97),
    (True, False): (0.33, 0.58, 0.50, 0.61, 0.63, 0.65, 0.70, 0.75, 0.85, 0.95),
    (False, True): (0.11, 0.20, 0.22, 0.36, 0.43, 0.50),
    (False, False): (0.25, 0.40, 0.38, 0.44, 0.50),
}
"""Confidence before a request has shown any, by length from 1 on: how often it was right in the answers that
SmolLM2-135M gave to nearly 300 prompts."""
_PRIOR_WEIGHT = 6.0
"""Tokens of an answer that the prior counts for."""


class _Kind(NamedTuple):
    """What the confidence in an end's new continuations depends on: whether no longer end was asked before, its
    `length` (from 16 on in powers of two), whether they were seen once only, and whether in the request's own text."""

    is_first: bool
    length: int
    is_single: bool
    is_own: bool

    @property
    def prior(self) -> float:
        table = _PRIORS[self.is_first, self.is_single]
        return table[min(self.length, len(table)) - 1]


@dataclass(frozen=True, kw_only=True)
class _Order:
    """One end of a text that went on before. shares: its continuations that no longer end had, adding up to one.
    kind: what its confidence is learned for. state: of the automaton (None: of the corpus)."""

    shares: Mapping[int, float]
    kind: _Kind
    state: int | None
    length: int


class _Candidate(NamedTuple):
    """A node that a tree may get: `token` below `parent`, which ends at `place`; `order` speaks for it."""

    parent: int
    token: int
    place: _Place
    order: _Order
    depth: int


@dataclass
class _History:
    """A request's text, and how often what followed an end of it followed again."""

    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    tail: deque[int] = field(default_factory=lambda: deque(maxlen=_CORPUS_MATCH))
    found: tuple[int, _Rows | None] = (0, None)  # the corpus's rows for the text's end, when it had so many tokens
    right: Counter[_Kind] = field(default_factory=Counter)
    wrong: Counter[_Kind] = field(default_factory=Counter)

    def confidence(self, kind: _Kind) -> float:
        right, wrong = self.right[kind], self.wrong[kind]
        return (_PRIOR_WEIGHT * kind.prior + right) / (_PRIOR_WEIGHT + right + wrong)

    def learn(self, orders: Sequence[_Order], token: int) -> None:
        for order in orders:
            if token in order.shares:
                self.right[order.kind] += 1
                return
            self.wrong[order.kind] += 1

    def append(self, token: int) -> None:
        self.automaton.append(token)
        self.tail.append(token)


class SuffixDrafter(TextReader):
    """See the module. `corpus`: token sequences that every request may continue from, such as earlier answers that all
    may see."""

    kinds: tuple[KindType, ...] = (OneHot,)
    spent_milliseconds = 0.0
    taps: tuple[int, ...] = ()

    def __init__(self, *, corpus: Sequence[Sequence[int]] = (), name: str = "suffix") -> None:
        self.name = name
        self._corpus = Corpus(corpus) if any(map(len, corpus)) else None
        self._tree = TreeSettings()

    def open(self, room: Room) -> None:
        self._tree = room.tree

    def propose(self, requests: Sequence[Request], limits: Sequence[DraftLimit]) -> list[DraftTree]:
        return [self._propose(self._read(request), limit) for request, limit in zip(requests, limits, strict=True)]

    def close(self, request: Request) -> None:
        request.draft_state.pop(self.name, None)

    def _read(self, request: Request) -> _History:
        """The request's text, up to its last token."""
        history = request.draft_state.setdefault(self.name, _History())
        assert isinstance(history, _History)
        start = history.automaton.num_tokens
        for position, token in enumerate(request.tokens_from(start), start=start):
            if position >= len(request.prompt_ids):  # what a prompt repeats says little of what its answer will
                history.learn(self._orders(history, self._end(history)), token)
            history.append(token)
        return history

    def _propose(self, history: _History, limit: DraftLimit) -> DraftTree:
        """The likeliest nodes, each of which puts its children up as candidates."""
        max_nodes = min(limit.max_nodes, self._tree.max_nodes)
        max_depth = min(limit.max_depth, self._tree.max_depth)
        builder = TreeBuilder()
        num_expanded: Counter[int] = Counter()
        candidates: list[tuple[float, int, _Candidate]] = []  # a heap, likeliest first, equal ones as they came
        numbers = itertools.count()

        def expand(node: int, place: _Place, value: float, depth: int) -> None:
            if depth == max_depth or num_expanded[depth] == self._tree.beam:
                return
            num_expanded[depth] += 1
            for token, share, order in self._likeliest(history, place):
                if value * share >= NEGLIGIBLE:
                    child = _Candidate(node, token, place, order, depth + 1)
                    heapq.heappush(candidates, (-value * share, next(numbers), child))

        expand(ROOT, self._end(history), 1.0, 0)
        while candidates and len(builder) < max_nodes:
            value, _, child = heapq.heappop(candidates)
            node = builder.add(child.parent, child.token, -value)
            expand(node, self._after(history, child), -value, child.depth)
        return builder.build(OneHot())

    def _likeliest(self, history: _History, place: _Place) -> list[tuple[int, float, _Order]]:
        """The likeliest tokens at a place, their estimated probabilities, and the end of it that speaks for each."""
        remaining = 1.0
        found: list[tuple[int, float, _Order]] = []
        for order in self._orders(history, place):
            confidence = remaining * history.confidence(order.kind)
            remaining -= confidence
            found += [(token, confidence * share, order) for token, share in order.shares.items()]
        return heapq.nlargest(self._tree.branch, found, key=lambda each: each[1])

    def _end(self, history: _History) -> _Place:
        automaton = history.automaton
        rows = None if self._corpus is None else self._rows(history, self._corpus)
        return _Place(automaton.last, automaton.num_tokens, rows)

    def _rows(self, history: _History, corpus: Corpus) -> _Rows | None:
        """The rows of the text's longest end in the corpus: where there are such, those of the longest end a token ago
        followed by the last token."""
        num_tokens = history.automaton.num_tokens
        seen, rows = history.found
        if seen < num_tokens:
            is_next = seen == num_tokens - 1 and rows is not None and rows.length < _CORPUS_MATCH
            rows = corpus.narrow(rows, history.tail[-1]) if rows is not None and is_next else None
            rows = rows or corpus.find(list(history.tail))
            history.found = (num_tokens, rows)
        return rows

    def _orders(self, history: _History, place: _Place) -> list[_Order]:
        """The ends of a place that say something new, longest first."""
        orders: list[_Order] = []
        seen: set[int] = set()
        for state, length in self._ends(history, place):
            counts = self._continuations(history, place, state)
            new = {token: count for token, count in counts.items() if token not in seen}
            if not new:
                continue
            total = sum(new.values())
            kind = _Kind(is_first=not orders, length=_class_of(length), is_single=total == 1, is_own=state is not None)
            shares = {token: count / total for token, count in new.items()}
            orders.append(_Order(shares=shares, kind=kind, state=state, length=length))
            if len(orders) == MAX_ORDERS:
                break
            seen.update(new)
        return orders

    def _ends(self, history: _History, place: _Place) -> Iterator[tuple[int | None, int]]:
        """(state, length) of the ends of a place that went on, longest first; the corpus has no state."""
        own: Iterator[tuple[int | None, int]] = history.automaton.contexts(place.state, place.length)
        corpus = [] if place.rows is None else [(None, place.rows.length)]
        return heapq.merge(own, corpus, key=lambda end: -end[1])

    def _continuations(self, history: _History, place: _Place, state: int | None) -> dict[int, int]:
        if state is not None:
            return history.automaton.continuations(state)
        assert self._corpus is not None
        assert place.rows is not None
        return self._corpus.continuations(place.rows)

    def _after(self, history: _History, child: _Candidate) -> _Place:
        """Where a node leads."""
        automaton, place = history.automaton, child.place
        state, length = _EMPTY, 0
        for end, matched in self._ends_that_say(history, child):
            if child.token in automaton.transitions[end]:
                state, length = automaton.transitions[end][child.token], matched + 1
                break
        rows = None if place.rows is None or self._corpus is None else self._corpus.narrow(place.rows, child.token)
        return _Place(state, length, rows)

    def _ends_that_say(self, history: _History, child: _Candidate) -> Iterable[tuple[int, int]]:
        """(state, length) of the ends in the request's own text that may go on with a node's token, longest first."""
        if child.order.state is not None:
            return [(child.order.state, child.order.length)]
        return itertools.chain(history.automaton.contexts(child.place.state, child.place.length), [(_EMPTY, 0)])
