"""From data files to training rows, held-out rows and held-out prompts, with an account of every conversation.

The order in which rows are visited is a function of (seed, visit number) alone, so a run that is resumed at visit n
goes on exactly where it stopped and no position in any file needs to be remembered.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from configs.schema import DataConfig
from infer.chat import Rendered, render_prompt
from infer.evaluate import EvalPrompt
from train.corpus.conversations import (
    CUT,
    Conversation,
    LoadReport,
    TrainingRow,
    decontaminate,
    load_conversations,
    masked_runs,
    split_holdout,
    tokenize_conversations,
)
from train.corpus.filters import repeated_share

UNKNOWN_DOMAIN = "other"


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """`account` tells what became of every conversation; `label_counts` the tokens under the loss, by id."""

    rows: list[Rendered]
    held_out: list[Rendered]
    prompts: list[EvalPrompt]
    account: dict[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)

    @property
    def label_counts(self) -> Counter[int]:
        counts: Counter[int] = Counter()
        for row in self.rows:
            for run in masked_runs(row):
                counts.update(run)
        return counts


def load_data(settings: DataConfig, tokenizer: Any, *, seed: int, max_prompt_tokens: int | None = None) -> TrainingData:
    """Read, clean, split and render. Evaluation prompts of the shipped set are never trained on.

    `max_prompt_tokens`: held-out prompts longer than this leave the target no room to answer, and are left out.
    """
    report = LoadReport()
    conversations = _read(settings.train, report)
    conversations = decontaminate(conversations, report)
    random.Random(seed).shuffle(conversations)
    if settings.max_conversations is not None:
        conversations = conversations[: settings.max_conversations]
    if settings.eval:
        held_out = _read(settings.eval, LoadReport())
        held_keys = {conversation.prompt_key for conversation in held_out}
        train = [one for one in conversations if one.prompt_key not in held_keys]
    else:
        # Beyond max_holdout more rows are worth more in training than in measuring.
        fraction = min(settings.holdout_fraction, settings.max_holdout / max(1, len(conversations)))
        train, held_out = split_holdout(conversations, fraction)
    held_out = held_out[: settings.max_holdout]
    account: dict[str, Any] = {
        "conversations_read": report.rows_in,
        "dropped_in_reading": {reason: len(lines) for reason, lines in report.dropped.items()},
        "held_out": len(held_out),
    }
    rendering = LoadReport()
    rendered = tokenize_conversations(train, tokenizer, settings.max_length, report=rendering)
    account["dropped_in_rendering"] = {reason: len(lines) for reason, lines in rendering.dropped.items()}
    account["cut"] = len(rendering.fixed[CUT])
    rows = _usable(rendered, settings, account)
    held_rows = tokenize_conversations(held_out, tokenizer, settings.max_length)
    longest = settings.max_length - 1 if max_prompt_tokens is None else min(settings.max_length - 1, max_prompt_tokens)
    prompts = _prompts(held_out, tokenizer, longest)
    if not prompts:
        raise ValueError(
            "no held-out prompt is left to choose the best head by: raise data.holdout_fraction or data.max_length, "
            "lower eval.max_tokens, or name a file in data.eval"
        )
    account |= {
        "rows": len(rows),
        "tokens": sum(len(row.token_ids) for row in rows),
        "label_tokens": sum(row.num_supervised for row in rows),
    }
    return TrainingData(rows=rows, held_out=held_rows, prompts=prompts, account=account)


def _read(sources: Sequence[str], report: LoadReport) -> list[Conversation]:
    conversations: list[Conversation] = []
    for source in sources:
        found, part = load_conversations(source)
        conversations.extend(found)
        report.rows_in += part.rows_in
        report.kept += part.kept
        for reason, lines in part.dropped.items():
            report.dropped[reason].extend(lines)
    return conversations


def _usable(rows: list[Rendered], settings: DataConfig, account: dict[str, Any]) -> list[Rendered]:
    """Rows with enough labels and without loops; greedy answers of small models loop, and looping text flatters."""
    kept, too_short, looping = [], 0, 0
    for row in rows:
        runs = list(masked_runs(row))
        if row.num_supervised < settings.min_label_tokens:
            too_short += 1
        elif max(repeated_share(run) for run in runs) > settings.max_repeat_fraction:
            looping += 1
        else:
            kept.append(row)
    account["dropped_few_labels"], account["dropped_repetitive"] = too_short, looping
    if not kept:
        raise ValueError(
            f"no training row is left: {too_short} have fewer than {settings.min_label_tokens} labels and {looping} "
            f"repeat themselves in more than {settings.max_repeat_fraction:.0%} of an answer"
        )
    return kept


def _prompts(conversations: Sequence[Conversation], tokenizer: Any, max_tokens: int) -> list[EvalPrompt]:
    """Each held-out conversation up to its last answer."""
    prompts = []
    for conversation in conversations:
        messages = conversation.messages
        last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        token_ids = render_prompt(tokenizer, messages[:last])
        if len(token_ids) <= max_tokens:
            prompts.append(EvalPrompt(token_ids=tuple(token_ids), domain=conversation.domain or UNKNOWN_DOMAIN))
    return prompts


class VisitOrder:
    """Which row is visited at visit n: every epoch a fresh permutation drawn from (seed, epoch)."""

    def __init__(self, num_rows: int, *, seed: int) -> None:
        self._num_rows, self._seed = num_rows, seed
        self._permutation = lru_cache(maxsize=2)(self._permute)

    def __getitem__(self, visit: int) -> int:
        epoch, place = divmod(visit, self._num_rows)
        return self._permutation(epoch)[place]

    def _permute(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        return torch.randperm(self._num_rows, generator=generator).tolist()


def source_of(row: Rendered) -> str:
    """Where a row came from, for error messages."""
    return row.conversation.source if isinstance(row, TrainingRow) else "unknown source"
