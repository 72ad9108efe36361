"""Filters for machine-written text: loops, non-requests, near duplicates. Pure functions of text or token
ids.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from infer.prompts import normalise_text
from infer.repetition import repeated_share as repeated_share

_REQUEST_VERBS = """
    add analyse analyze answer arrange briefly build calculate change choose classify combine compare
    complete compose compute construct convert correct create define describe design determine develop
    discuss draft edit evaluate explain extract fill find fix for generate give given how identify if
    implement improve in list make modify name outline plan predict prove provide put read recommend
    rewrite share show simplify solve sort suggest summarise summarize teach tell translate turn use using
    write
"""
_REQUEST = re.compile(
    r"\?"
    r"|\b(?:can|could|would|will) you\b|\bhow (?:do|to|can|should)\b"
    r"|\b(?:please|help|advice|tips|tell me|let me know|i need|i want|i'd like|i would like|looking for)\b"
    r"|\b(?:what|why|which|who)\b"
    rf"|^\W*(?:{'|'.join(_REQUEST_VERBS.split())})\b",
    re.IGNORECASE,
)
_CODE_MARKS = ("```", "def ", "{", "};", "=>", "import ", "<html", "SELECT ", "\\")


def first_repetition(token_ids: Sequence[int], order: int = 8) -> int:
    """Where the text first begins an n-gram that it has written before; its length if it never does."""
    seen = set()
    for start in range(len(token_ids) - order + 1):
        gram = tuple(token_ids[start : start + order])
        if gram in seen:
            return start
        seen.add(gram)
    return len(token_ids)


def prompt_fault(text: str, token_ids: Sequence[int]) -> str | None:
    """Why a self-written user turn is not worth answering, or None."""
    words = text.split()
    if len(words) < 3:
        return "prompt too short"
    if "\ufffd" in text:
        return "prompt not valid text"
    if repeated_share(token_ids) > 0 or len({word.casefold() for word in words}) < 0.45 * len(words):
        return "prompt loops"
    if not _REQUEST.search(text):
        return "prompt asks nothing"
    if not any(mark in text for mark in _CODE_MARKS) and _looks_garbled(text, words):
        return "prompt garbled"
    return None


def _looks_garbled(text: str, words: Sequence[str]) -> bool:
    letters = sum(character.isalpha() or character.isspace() for character in text)
    longest = max(len(part) for word in words for part in re.split(r"[-/_.,:]", word))
    return letters < 0.75 * len(text) or longest > 24


def shingles(text: str, order: int = 3) -> frozenset[tuple[str, ...]]:
    """Word n-grams of the normalised text (the whole text where it is shorter)."""
    words = normalise_text(text).split()
    if len(words) <= order:
        return frozenset([tuple(words)])
    return frozenset(tuple(words[start : start + order]) for start in range(len(words) - order + 1))


class NearDuplicates:
    """Texts seen so far; tells whether a new one repeats one of them almost word for word.

    Similarity is the Jaccard index of word 3-grams, found through an inverted index, so a look-up costs the
    number of seen texts that share a 3-gram.
    """

    def __init__(self, texts: Iterable[str] = (), *, threshold: float = 0.6) -> None:
        self.threshold = threshold
        self._sizes: list[int] = []
        self._rows_with: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for text in texts:
            self.add(text)

    def add(self, text: str) -> None:
        grams = shingles(text)
        for gram in grams:
            self._rows_with[gram].append(len(self._sizes))
        self._sizes.append(len(grams))

    def __contains__(self, text: object) -> bool:
        assert isinstance(text, str)
        grams = shingles(text)
        shared: Counter[int] = Counter()
        for gram in grams:
            shared.update(self._rows_with.get(gram, ()))
        return any(count >= self.threshold * (len(grams) + self._sizes[row] - count) for row, count in shared.items())
