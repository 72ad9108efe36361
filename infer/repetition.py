"""How much of a text repeats itself. Small models loop when decoded greedily, and loops are easy to draft:
figures are reported with and without looping answers, and training text is filtered by the same measure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

LOOP_SHARE = 0.3
"""An answer with more than this share of its tokens in repeated n-grams counts as looping."""


def repeated_share(token_ids: Sequence[int], order: int = 8) -> float:
    """Share of tokens that lie in an n-gram (n = `order`) occurring more than once in the text."""
    grams = [tuple(token_ids[start : start + order]) for start in range(len(token_ids) - order + 1)]
    counts = Counter(grams)
    covered = [False] * len(token_ids)
    for start, gram in enumerate(grams):
        if counts[gram] > 1:
            covered[start : start + order] = [True] * order
    return sum(covered) / len(token_ids) if token_ids else 0.0


def is_looping(token_ids: Sequence[int]) -> bool:
    return repeated_share(token_ids) > LOOP_SHARE
