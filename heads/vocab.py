"""The reduced draft vocabulary: which target tokens a head can propose, and the maps between the two numberings.

A draft token `i` stands for the target token `target_ids[i]`, ascending. On disk the map has the EAGLE-3 form:
`d2t` holds *offsets* (target = draft + d2t[draft]) and `t2d` marks the target tokens that have a draft token.
Knows nothing about texts: counts and the ids to keep come from the caller.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

NO_DRAFT_TOKEN = -1
"""What `draft_ids` gives for a target token outside the draft vocabulary."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that `always_kept_ids` needs."""

    all_special_ids: list[int]
    special_tokens_map: dict[str, Any]

    def get_added_vocab(self) -> dict[str, int]: ...

    def get_vocab(self) -> dict[str, int]: ...


@dataclass(frozen=True, kw_only=True)
class VocabularyProvenance:
    """What a map was counted from; a map is only good for the target and tokenizer it names."""

    target_fingerprint: str = ""
    tokenizer_hash: str = ""
    data_hash: str = ""

    def conflict(self, other: VocabularyProvenance) -> str | None:
        """The first field on which both sides are known and differ, said in words; None where they agree."""
        for name in ("target_fingerprint", "tokenizer_hash"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine and theirs and mine != theirs:
                return f"{name.replace('_', ' ')} is {mine}, expected {theirs}"
        return None


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftVocabulary:
    """`target_ids` [draft size] int64, strictly ascending, all below `vocab_size` (rows of the target's LM head)."""

    target_ids: torch.Tensor
    vocab_size: int
    provenance: VocabularyProvenance = field(default_factory=VocabularyProvenance)

    def __post_init__(self) -> None:
        ids = self.target_ids
        if ids.dtype != torch.int64 or ids.ndim != 1 or ids.numel() == 0:
            raise ValueError(
                "a draft vocabulary is a non-empty int64 vector of target ids, "
                f"got {ids.dtype} of shape {list(ids.shape)}"
            )
        if int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size:
            raise ValueError(
                f"draft vocabulary maps to target ids {int(ids.min())}..{int(ids.max())}, "
                f"but the target's vocabulary is 0..{self.vocab_size - 1}"
            )
        steps = ids.diff()
        if bool((steps <= 0).any()):
            where = int((steps <= 0).nonzero()[0])
            problem = "twice" if int(steps[where]) == 0 else "out of order"
            raise ValueError(
                f"draft vocabulary must be strictly ascending (one draft token a target token): "
                f"draft token {where + 1} lists target id {int(ids[where + 1])} {problem}, after {int(ids[where])}"
            )

    def __len__(self) -> int:
        return self.target_ids.numel()

    @classmethod
    def from_counts(
        cls,
        counts: Mapping[int, int],
        *,
        size: int,
        vocab_size: int,
        keep_ids: Iterable[int] = (),
        provenance: VocabularyProvenance | None = None,
    ) -> DraftVocabulary:
        """The `keep_ids`, then the most frequent tokens, then (if the corpus is too small) the lowest unused ids.

        Low ids are early merges in byte-pair vocabularies, so they are the best guess for tokens not seen.
        """
        keep = set(keep_ids)
        if not 0 < size <= vocab_size:
            raise ValueError(f"draft vocabulary size {size} must lie between 1 and the target's {vocab_size}")
        if len(keep) > size:
            raise ValueError(
                f"{len(keep)} tokens are always kept (special, chat and byte tokens), "
                f"more than the draft vocabulary size {size}: choose a larger size"
            )
        outside = sorted(token for token in keep | set(counts) if not 0 <= token < vocab_size)
        if outside:
            raise ValueError(f"token ids {outside[:5]} lie outside the target's vocabulary of {vocab_size}")
        by_frequency = sorted((token for token in counts if counts[token] > 0), key=lambda t: (-counts[t], t))
        chosen = dict.fromkeys(keep)
        for token in (*by_frequency, *range(vocab_size)):
            if len(chosen) == size:
                break
            chosen.setdefault(token)
        target_ids = torch.tensor(sorted(chosen), dtype=torch.int64)
        return cls(target_ids=target_ids, vocab_size=vocab_size, provenance=provenance or VocabularyProvenance())

    @classmethod
    def full(cls, vocab_size: int) -> DraftVocabulary:
        """No reduction: draft and target numberings are the same."""
        return cls(target_ids=torch.arange(vocab_size), vocab_size=vocab_size)

    @classmethod
    def from_maps(
        cls,
        d2t: torch.Tensor,
        t2d: torch.Tensor | None = None,
        *,
        vocab_size: int,
        absolute: bool = False,
        provenance: VocabularyProvenance | None = None,
    ) -> DraftVocabulary:
        """From the on-disk maps; `absolute` says that `d2t` holds target ids instead of offsets.

        A `d2t` of zeros is most likely a buffer that was never filled: it is only believed if `t2d` says the same.
        """
        if d2t.is_floating_point() or d2t.ndim != 1:
            raise ValueError(f"d2t must be a vector of integers, got {d2t.dtype} of shape {list(d2t.shape)}")
        size = d2t.numel()
        names_first_tokens = t2d is not None and bool(t2d[:size].all()) and not bool(t2d[size:].any())
        if size < vocab_size and not bool(d2t.any()) and not names_first_tokens:
            raise ValueError(
                f"d2t is all zeros: the map of the {size}-token draft vocabulary was never filled in, "
                "and would silently mean the first ids of the target"
            )
        target_ids = d2t.to(torch.int64) if absolute else d2t.to(torch.int64) + torch.arange(size)
        vocabulary = cls(target_ids=target_ids, vocab_size=vocab_size, provenance=provenance or VocabularyProvenance())
        if t2d is not None:
            vocabulary._check_marks(t2d)
        return vocabulary

    def _check_marks(self, t2d: torch.Tensor) -> None:
        if list(t2d.shape) != [self.vocab_size]:
            raise ValueError(
                f"t2d must mark each of the target's {self.vocab_size} tokens, got shape {list(t2d.shape)}"
            )
        differing = (t2d.to(torch.bool) != self.t2d).nonzero().flatten().tolist()
        if differing:
            raise ValueError(f"t2d and d2t disagree on {len(differing)} target tokens, first {differing[:5]}")

    @property
    def d2t(self) -> torch.Tensor:
        """[draft size] int64 offsets: target = draft + d2t[draft]."""
        return self.target_ids - torch.arange(len(self), device=self.target_ids.device)

    @property
    def t2d(self) -> torch.Tensor:
        """[vocab_size] bool: does this target token have a draft token?"""
        marks = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.target_ids.device)
        marks[self.target_ids] = True
        return marks

    @property
    def draft_ids(self) -> torch.Tensor:
        """[vocab_size] int64: the draft token of each target token, `NO_DRAFT_TOKEN` where there is none."""
        ids = torch.full((self.vocab_size,), NO_DRAFT_TOKEN, dtype=torch.int64)
        ids[self.target_ids] = torch.arange(len(self))
        return ids

    def coverage(self, token_ids: Sequence[int]) -> float:
        """Share of `token_ids` that the draft vocabulary holds: an upper bound for depth-1 acceptance."""
        if not token_ids:
            return float("nan")
        return float(self.t2d[torch.tensor(token_ids)].float().mean())


def always_kept_ids(tokenizer: Tokenizer, extra_ids: Iterable[int] = (), *, used_ids: Collection[int] = ()) -> set[int]:
    """The named special tokens (end of sequence and the like), what the chat template prints, all byte-level tokens,
    and `extra_ids`; of `used_ids`, the ids found in texts, those that are special.

    Frequency alone drops rare bytes, and then accented letters and other scripts can never be drafted. Tokens that are
    only reserved are not kept: some tokenizers have thousands, more than a draft vocabulary has room for.
    """
    ids, added = tokenizer.get_vocab(), tokenizer.get_added_vocab()
    kept = {ids[str(token)] for token in tokenizer.special_tokens_map.values() if str(token) in ids}
    printed = _template_text(tokenizer)
    kept.update(token_id for token, token_id in added.items() if token in printed)
    kept.update({*tokenizer.all_special_ids, *_marked_special(tokenizer)}.intersection(used_ids))
    kept.update(token_id for token, token_id in ids.items() if _is_byte_token(token))
    return kept.union(extra_ids)


def _template_text(tokenizer: Tokenizer) -> str:
    """The chat template, and what it prints: markers are written in it, or put together from a role's name."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return ""
    texts = [template] if isinstance(template, str) else [str(template)]
    turns = [{"role": role, "content": "x"} for role in ("system", "user", "assistant", "user")]
    for chat in (turns, turns[1:]):
        try:
            texts.append(str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)))  # type: ignore[attr-defined]
        except Exception:  # templates raise whatever they like, some at a system message
            continue
    return "\n".join(texts)


def _marked_special(tokenizer: Tokenizer) -> set[int]:
    decoder: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return {token_id for token_id, token in decoder.items() if token.special}


def _is_byte_token(token: str) -> bool:
    """A byte-level BPE symbol (one printable stand-in a byte), or SentencePiece's `<0xNN>`."""
    return token in BYTE_SYMBOLS or (len(token) == 6 and token.startswith("<0x") and token.endswith(">"))


def _byte_symbols() -> frozenset[str]:
    """The 256 characters that stand for bytes in byte-level BPE: GPT-2's table, printable ones for themselves."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = range(256, 256 + 256 - len(printable))
    return frozenset(chr(code) for code in (*printable, *stand_ins))


BYTE_SYMBOLS = _byte_symbols()


def provenance_from_dict(values: Mapping[str, Any]) -> VocabularyProvenance:
    """From a card's `vocabulary` entry; keys this version does not know are ignored."""
    names = ("target_fingerprint", "tokenizer_hash", "data_hash")
    return VocabularyProvenance(**{name: str(values.get(name, "")) for name in names})
