"""From data files to what is trained on, visit by visit; held-out rows and prompts; an account of every conversation.

Files are held in memory, or streamed (`data.streaming`): then the first rows are scanned for the draft vocabulary, the
held-out prompts and the account, and training reads the source from its beginning. The same rules decide what is
trained on either way, and a conversation on the held-out side of the split is trained on from no file and at no place
of it.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from configs.schema import DataConfig
from infer.chat import Rendered, render_prompt
from infer.evaluate import EvalPrompt
from infer.prompts import NO_DOMAIN
from train.corpus.contamination import Contamination, decontaminate
from train.corpus.conversations import (
    CUT,
    RAW_PROMPT_TOKENS,
    Conversation,
    LoadReport,
    TrainingRow,
    conversation_rows,
    holdout_threshold,
    is_held_out,
    label_counts,
    load_conversations,
    masked_runs,
    parse_row,
    raw_prompt,
    tokenize_conversations,
)
from train.corpus.filters import repeated_share
from train.corpus.order import MixedVisits, RowVisits, Shares, Visits, derived_seed
from train.corpus.reading import RowFault, Source, open_source
from train.corpus.stream import StreamVisits, Used

FEW_LABELS, REPETITIVE = "few labels", "repetitive"


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """`rows`: all that is trained on, or the scanned beginning of a stream. `account`: what became of every
    conversation; of a stream it grows as the stream is read.

    num_rows: of an epoch; None where that is unknown. data_hash: whatever decides what is visited when, but the seed.
    row_weights: how often each row is visited, where sources are mixed by weights.
    """

    rows: list[Rendered]
    held_out: list[Rendered]
    prompts: list[EvalPrompt]
    visits: Visits
    num_rows: int | None
    data_hash: str
    account: dict[str, Any] = field(default_factory=dict)
    row_weights: Sequence[float] | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)

    @property
    def label_counts(self) -> Counter[int]:
        """Tokens under the loss, by id; as often as they are visited, where sources are mixed by weights."""
        if self.row_weights is None:
            return label_counts(self.rows)
        weighted: dict[int, float] = defaultdict(float)
        for row, weight in zip(self.rows, self.row_weights, strict=True):
            for token, count in label_counts([row]).items():
                weighted[token] += weight * count
        return Counter({token: math.ceil(count) for token, count in weighted.items()})

    def epochs(self, visits: int) -> dict[str, float]:
        """How often each source has been gone through after so many visits; of sources whose length is known."""
        return {
            one["source"]: visits / one["visits_per_epoch"]
            for one in self.account["sources"]
            if one.get("visits_per_epoch")
        }


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """What is kept out of training: prompts of `data.eval`, or by hash one side of a threshold. `conversations` are
    those that are measured on.
    """

    conversations: list[Conversation]
    keys: frozenset[str] = frozenset()
    threshold: int = 0

    def __contains__(self, conversation: Conversation) -> bool:
        key = conversation.prompt_key
        return key in self.keys or is_held_out(key, self.threshold)

    @property
    def identity(self) -> str:
        return _digest([sorted(self.keys), self.threshold])


def load_data(settings: DataConfig, tokenizer: Any, *, seed: int, max_prompt_tokens: int | None = None) -> TrainingData:
    """Read, clean, split and render. Evaluation prompts of the shipped set are never trained on.

    `max_prompt_tokens`: held-out prompts longer than this leave the target no room to answer, and are left out.
    """
    longest = settings.max_length - 1 if max_prompt_tokens is None else min(settings.max_length - 1, max_prompt_tokens)
    if settings.weights is not None or settings.streaming:
        _refuse_repeated(settings.train)
    if settings.streaming:
        return _stream(settings, tokenizer, seed=seed, longest=longest)
    report = LoadReport()
    conversations = _read(settings.train, report, raw=settings.raw)
    conversations = decontaminate(conversations, report, files=settings.decontaminate)
    random.Random(seed).shuffle(conversations)
    found = _prepare(conversations[: settings.max_conversations], report, settings, tokenizer, longest=longest)
    found.account["beyond_max_conversations"] = max(0, len(conversations) - (settings.max_conversations or 10**18))
    by_source = _by_source(found.rows, settings.train)
    if settings.weights is None:
        visits: Visits = RowVisits(found.rows, seed=seed)
        shares = [len(rows) / len(found.rows) for rows in by_source.values()]
        weights, data_hash = None, rows_hash(found.rows)
    else:
        mixture = Shares(settings.weights)
        visits, shares = _mixed(by_source, mixture, found.account, seed=seed), mixture.fractions
        weights = _row_weights(found.rows, settings.train, shares)
        data_hash = _digest([rows_hash(found.rows), [len(rows) for rows in by_source.values()], mixture.counts])
    found.account["sources"] = [
        {"source": name, "rows": len(rows), "share": share, "visits_per_epoch": len(rows) / share if rows else None}
        for (name, rows), share in zip(by_source.items(), shares, strict=True)
    ]
    return TrainingData(
        rows=list(found.rows),
        held_out=found.held_rows,
        prompts=found.prompts,
        visits=visits,
        num_rows=len(found.rows),
        data_hash=data_hash,
        account=found.account,
        row_weights=weights,
    )


def rows_hash(rows: Iterable[Rendered]) -> str:
    """Content hash of token ids and masks, in order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(torch.tensor(row.token_ids, dtype=torch.int64).numpy().tobytes())
        digest.update(bytes(row.loss_mask) + b"|")
    return digest.hexdigest()[:32]


def source_of(row: Rendered) -> str:
    """Where a row came from, for error messages."""
    return row.conversation.source if isinstance(row, TrainingRow) else "unknown source"


def domain_of(row: Rendered) -> str:
    """What a row's figures are filed under."""
    domain = row.conversation.domain if isinstance(row, TrainingRow) else None
    return domain or NO_DOMAIN


# What is common to files in memory and the scanned beginning of a stream


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    rows: list[TrainingRow]
    held_out: HeldOut
    held_rows: list[Rendered]
    prompts: list[EvalPrompt]
    account: dict[str, Any]


def _prepare(
    conversations: list[Conversation], report: LoadReport, settings: DataConfig, tokenizer: Any, *, longest: int
) -> _Prepared:
    held_out = _hold_out(conversations, settings)
    train = [conversation for conversation in conversations if conversation not in held_out]
    if not train:
        raise ValueError(
            f"holding out {'what data.eval holds' if settings.eval else settings.holdout_fraction} of "
            f"{len(conversations)} conversations ({len({one.prompt_key for one in conversations})} different prompts) "
            "leaves none to train on, since answers to one prompt stay together: add data"
        )
    measured = _distinct(held_out.conversations)[: settings.max_holdout]
    account: dict[str, Any] = {
        "conversations_read": report.rows_in,
        "dropped_in_reading": {reason: len(lines) for reason, lines in report.dropped.items()},
        "held_out": len(measured),
        "held_out_unused": len(conversations) - len(train) - (0 if settings.eval else len(measured)),
    }
    rendering = LoadReport()
    rendered = tokenize_conversations(train, tokenizer, settings.max_length, raw=settings.raw, report=rendering)
    account["dropped_in_rendering"] = {reason: len(lines) for reason, lines in rendering.dropped.items()}
    account["cut"] = len(rendering.fixed[CUT])
    rows = _usable(rendered, settings, account)
    # A long raw text has several rows; its first one stands for it.
    held_rows = _first_rows(tokenize_conversations(measured, tokenizer, settings.max_length, raw=settings.raw))
    prompts = _raw_prompts(held_rows, longest) if settings.raw else _prompts(measured, tokenizer, longest)
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
    return _Prepared(rows=rows, held_out=held_out, held_rows=list(held_rows), prompts=prompts, account=account)


def _hold_out(conversations: Sequence[Conversation], settings: DataConfig) -> HeldOut:
    if settings.eval:
        found = _read(settings.eval, LoadReport(), raw=settings.raw)
        return HeldOut(conversations=found, keys=frozenset(one.prompt_key for one in found))
    # Beyond max_holdout more rows are worth more in training than in measuring.
    fraction = min(settings.holdout_fraction, settings.max_holdout / max(1, len(conversations)))
    keys = [conversation.prompt_key for conversation in conversations]
    threshold = holdout_threshold(keys, fraction)
    return HeldOut(
        conversations=[one for one, key in zip(conversations, keys, strict=True) if is_held_out(key, threshold)],
        threshold=threshold,
    )


def _read(sources: Sequence[str], report: LoadReport, *, raw: bool) -> list[Conversation]:
    conversations: list[Conversation] = []
    for source in sources:
        found, part = load_conversations(source, raw=raw)
        conversations.extend(found)
        report.rows_in += part.rows_in
        report.kept += part.kept
        for reason, lines in part.dropped.items():
            report.dropped[reason].extend(lines)
    return conversations


def _distinct(conversations: Iterable[Conversation]) -> list[Conversation]:
    """Without those that say the same as one before: two files may hold one conversation."""
    by_text = {json.dumps(conversation.messages): conversation for conversation in reversed(list(conversations))}
    return list(reversed(by_text.values()))


def _usable(rows: Sequence[Rendered], settings: DataConfig, account: dict[str, Any]) -> list[TrainingRow]:
    faults = Counter[str]()
    kept = []
    for row in rows:
        fault = _fault(row, settings)
        if fault is None:
            assert isinstance(row, TrainingRow)
            kept.append(row)
        else:
            faults[fault] += 1
    account["dropped_few_labels"], account["dropped_repetitive"] = faults[FEW_LABELS], faults[REPETITIVE]
    if not kept:
        raise ValueError(
            f"no training row is left: {faults[FEW_LABELS]} have fewer than {settings.min_label_tokens} labels and "
            f"{faults[REPETITIVE]} repeat themselves in more than {settings.max_repeat_fraction:.0%} of an answer"
        )
    return kept


def _fault(row: Rendered, settings: DataConfig) -> str | None:
    """Too few labels, or loops: greedy answers of small models loop, and looping text flatters."""
    runs = list(masked_runs(row))
    # An answer's first token is the target's own, so one of a single token leaves nothing to draft.
    if row.num_supervised < settings.min_label_tokens or all(len(run) < 2 for run in runs):
        return FEW_LABELS
    if max(repeated_share(run) for run in runs) > settings.max_repeat_fraction:
        return REPETITIVE
    return None


def _first_rows(rows: Sequence[Rendered]) -> list[TrainingRow]:
    first: dict[int, TrainingRow] = {}
    for row in rows:
        assert isinstance(row, TrainingRow)
        first.setdefault(id(row.conversation), row)
    return list(first.values())


def _prompts(conversations: Sequence[Conversation], tokenizer: Any, max_tokens: int) -> list[EvalPrompt]:
    """Each held-out conversation up to its last answer."""
    prompts = []
    for conversation in conversations:
        messages = conversation.messages
        last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        token_ids = render_prompt(tokenizer, messages[:last])
        if len(token_ids) <= max_tokens:
            prompts.append(EvalPrompt(token_ids=tuple(token_ids), domain=conversation.domain or NO_DOMAIN))
    return prompts


def _raw_prompts(rows: Sequence[TrainingRow], max_tokens: int) -> list[EvalPrompt]:
    """The first half of each held-out text, for the target to go on with."""
    most = min(RAW_PROMPT_TOKENS, max_tokens)
    return [EvalPrompt(token_ids=tuple(raw_prompt(row, most)), domain=domain_of(row)) for row in rows]


# Several sources


def _refuse_repeated(sources: Sequence[str]) -> None:
    for name, count in Counter(sources).items():
        if count > 1:
            raise ValueError(f"data.train names {name} {count} times; name it once and raise its weight (data.weights)")


def _file_of(row: TrainingRow) -> str:
    return row.conversation.source.rpartition(":")[0]


def _by_source(rows: Sequence[TrainingRow], sources: Sequence[str]) -> dict[str, list[TrainingRow]]:
    found: dict[str, list[TrainingRow]] = {name: [] for name in sources}
    for row in rows:
        found[_file_of(row)].append(row)
    return found


def _mixed(
    by_source: dict[str, list[TrainingRow]], shares: Shares, account: dict[str, Any], *, seed: int
) -> MixedVisits:
    for (name, rows), share in zip(by_source.items(), shares.fractions, strict=True):
        if not rows:
            raise ValueError(
                f"data.weights gives {name} {share:.2%} of the visits, but none of its conversations is left to train "
                f"on; of all sources: {account}"
            )
    return MixedVisits(
        [RowVisits(rows, seed=derived_seed(seed, source)) for source, rows in enumerate(by_source.values())], shares
    )


def _row_weights(rows: Sequence[TrainingRow], sources: Sequence[str], shares: Sequence[float]) -> list[float]:
    """How often each row is visited while as many rows are visited as there are."""
    counts = Counter(_file_of(row) for row in rows)
    share_of = dict(zip(sources, shares, strict=True))
    return [share_of[_file_of(row)] * len(rows) / counts[_file_of(row)] for row in rows]


# Streams


def _stream(settings: DataConfig, tokenizer: Any, *, seed: int, longest: int) -> TrainingData:
    shares = _stream_shares(settings)
    sources = [open_source(name) for name in settings.train]
    contamination = Contamination.of(settings.decontaminate)
    report = LoadReport()
    scanned: list[Conversation] = []
    for name, source, share in zip(settings.train, sources, shares.fractions, strict=True):
        scanned += _scan(name, source, max(1, round(settings.scan_rows * share)), settings, report)
    clean = contamination.without(scanned, report)
    if not clean:
        raise ValueError(f"{', '.join(settings.train)}: nothing is left of what was scanned: {_in_one_line(report)}")
    found = _prepare(clean, report, settings, tokenizer, longest=longest)
    use = _row_rule(settings, tokenizer, contamination, found.held_out)
    parts = [
        StreamVisits(source, use, name=name, block_size=settings.shuffle_block, seed=derived_seed(seed, number))
        for number, (name, source) in enumerate(zip(settings.train, sources, strict=True))
    ]
    found.account["scanned"] = True
    found.account["sources"] = [
        {"source": part.name, "share": share, "read": part.counts}
        for part, share in zip(parts, shares.fractions, strict=True)
    ]
    identity = [
        rows_hash(found.rows),
        rows_hash(found.held_rows),
        found.held_out.identity,
        contamination.identity,
        [source.identity for source in sources],
        shares.counts,
        settings.shuffle_block,
    ]
    mixed = len(parts) > 1
    return TrainingData(
        rows=list(found.rows),
        held_out=found.held_rows,
        prompts=found.prompts,
        visits=MixedVisits(parts, shares) if mixed else parts[0],
        num_rows=None,
        data_hash=_digest(identity),
        account=found.account,
        row_weights=_row_weights(found.rows, settings.train, shares.fractions) if mixed else None,
    )


def _stream_shares(settings: DataConfig) -> Shares:
    if settings.weights is None and len(settings.train) > 1:
        raise ValueError(
            f"data.streaming with {len(settings.train)} sources in data.train needs data.weights, their shares of the "
            "visits: how many rows each has is not known. Files that are one source may stand in a folder"
        )
    return Shares(settings.weights or [1])


def _scan(name: str, source: Source, num_rows: int, settings: DataConfig, report: LoadReport) -> list[Conversation]:
    """The conversations in a source's first rows."""
    reader = source.open()
    found: list[Conversation] = []
    first: Any = None
    for _ in range(num_rows):
        numbered = reader.read()
        if numbered is None:
            break
        number, row = numbered
        first = first or row
        report.rows_in += 1
        try:
            found.append(parse_row(row, f"{name}:{number}", raw=settings.raw)[0])
        except RowFault as fault:
            report.dropped[str(fault)].append(number)
    reader.pause()
    report.kept += len(found)
    if not found:
        raise ValueError(
            f"{name}: no conversation in its first {num_rows:,} rows: {_in_one_line(report)}; the first row is "
            f"{str(first)[:300]!r}"
        )
    return found


def _row_rule(
    settings: DataConfig, tokenizer: Any, contamination: Contamination, held_out: HeldOut
) -> Callable[[Any, str], Used]:
    """What the rules for files in memory make of a single row."""

    def use(row: Any, where: str) -> Used:
        conversation, _ = parse_row(row, where, raw=settings.raw)
        if (reason := contamination.reason(conversation)) is not None:
            raise RowFault(reason)
        if conversation in held_out:
            raise RowFault("held out")
        try:
            rows = conversation_rows(conversation, tokenizer, settings.max_length, raw=settings.raw)
        except ValueError as error:
            raise RowFault("refused by the chat template or its mask") from error
        if not rows:
            raise RowFault("no token to train on within the length limit")
        faults = [_fault(one, settings) for one in rows]
        return Used(
            rows=[one for one, fault in zip(rows, faults, strict=True) if fault is None],
            dropped=[fault for fault in faults if fault is not None],
        )

    return use


def _in_one_line(report: LoadReport) -> str:
    return "; ".join(line.strip() for line in report.summary().splitlines())


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
