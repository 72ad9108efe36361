"""What loads on a server have shown: figures of each, and drafted decoding beside plain of the same requests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from infer.json_values import for_json
from infer.serve.load import LoadResult, TimedAnswer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLAIN, DRAFTED, AS_SERVED = "plain", "drafted", "as served"
"""Ways of decoding: without drafts, with them, and what a server does that takes no word on it."""

DEFINITIONS = (
    "tokens/s: tokens of whole answers over the time from the first request to the last answer; medians over rounds",
    "x plain: drafted over plain tokens/s of the same round (the two in turn, on one server); median over rounds",
    "x alone: tokens/s over those of plain decoding at concurrency 1",
    "drafted: share of rounds after the prefill that verified at least one draft token",
    "accepted: 1 + accepted draft tokens / rounds that verified drafts",
    "identical: share of requests whose tokens (text, where a server tells no tokens) are the same drafted as plain",
    "TTFT: from the request sent to its first text; ITL: between tokens, where k tokens that come together after a gap "
    "of g count as k gaps of g / k; each with the percentiles 50, 95 and 99",
)


class Percentiles(NamedTuple):
    """Milliseconds; NaN where nothing was measured."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles:
        if not seconds:
            return cls(math.nan, math.nan, math.nan)
        return cls(*(float(value) for value in np.percentile(np.asarray(seconds) * 1e3, (50, 95, 99))))


@dataclass(frozen=True, kw_only=True)
class Level:
    """How hard a server is pressed: requests at once, or requests a second."""

    concurrency: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        return f"{self.concurrency} at once" if self.rate is None else f"{self.rate:g} a second"


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One load. gaps_ms: between chunks, as they came. client_share: of one processor, what the client itself took."""

    num_requests: int
    num_tokens: int
    tokens_per_second: float
    requests_per_second: float
    ttft_ms: Percentiles
    itl_ms: Percentiles
    gaps_ms: Percentiles
    answer_ms: Percentiles
    drafted_share: float | None
    accepted_length: float | None
    reused_share: float
    client_share: float
    errors: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, load: LoadResult) -> Figures:
        whole = [answer for answer in load.answers if answer.error is None]
        num_tokens = sum(answer.num_tokens for answer in whole)
        num_prompt = sum(answer.num_prompt_tokens for answer in whole)
        firsts = [answer.first_token_seconds for answer in whole if answer.first_token_seconds is not None]
        drafted_share, accepted_length = _speculation(whole)
        return cls(
            num_requests=len(whole),
            num_tokens=num_tokens,
            tokens_per_second=num_tokens / load.seconds,
            requests_per_second=len(whole) / load.seconds,
            ttft_ms=Percentiles.of(firsts),
            itl_ms=Percentiles.of([gap for answer in whole for gap in answer.token_gaps]),
            gaps_ms=Percentiles.of([gap for answer in whole for gap, _ in answer.gaps]),
            answer_ms=Percentiles.of([answer.seconds for answer in whole]),
            drafted_share=drafted_share,
            accepted_length=accepted_length,
            reused_share=sum(answer.num_reused_tokens for answer in whole) / max(1, num_prompt),
            client_share=load.client_share,
            errors=dict(Counter(answer.error for answer in load.answers if answer.error is not None)),
        )

    @classmethod
    def median(cls, rounds: Sequence[Figures]) -> Figures:
        """Medians of several loads; requests, tokens and errors are all of them together."""

        def middle(read: Callable[[Figures], float | None]) -> float | None:
            values = [value for value in map(read, rounds) if value is not None and not math.isnan(value)]
            return median(values) if values else None

        def number(read: Callable[[Figures], float]) -> float:
            value = middle(read)
            return math.nan if value is None else value

        def percentiles(read: Callable[[Figures], Percentiles]) -> Percentiles:
            return Percentiles(*(number(lambda one, i=i: read(one)[i]) for i in range(3)))  # type: ignore[misc]

        errors: Counter[str] = Counter()
        for one in rounds:
            errors.update(one.errors)
        return cls(
            num_requests=sum(one.num_requests for one in rounds),
            num_tokens=sum(one.num_tokens for one in rounds),
            tokens_per_second=number(lambda one: one.tokens_per_second),
            requests_per_second=number(lambda one: one.requests_per_second),
            ttft_ms=percentiles(lambda one: one.ttft_ms),
            itl_ms=percentiles(lambda one: one.itl_ms),
            gaps_ms=percentiles(lambda one: one.gaps_ms),
            answer_ms=percentiles(lambda one: one.answer_ms),
            drafted_share=middle(lambda one: one.drafted_share),
            accepted_length=middle(lambda one: one.accepted_length),
            reused_share=number(lambda one: one.reused_share),
            client_share=number(lambda one: one.client_share),
            errors=dict(errors),
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way of decoding at one level. ratio: drafted over plain. scaling: over plain at concurrency 1. identical:
    share of requests answered alike by both ways, of those that both answered."""

    level: Level
    way: str
    figures: Figures
    ratio: float | None = None
    scaling: float | None = None
    identical: float | None = None


@dataclass(frozen=True, kw_only=True)
class ServeReport:
    """All levels of one server. settings: what was asked of it."""

    model: str
    drafter: str
    rows: tuple[Row, ...]
    settings: Mapping[str, Any]
    interrupted: bool = False

    def to_dict(self) -> dict[str, Any]:
        """For --json; NaN, which is no JSON, becomes null."""
        return {**for_json(asdict(self)), "definitions": list(DEFINITIONS)}

    @property
    def errors(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for row in self.rows:
            total.update(row.figures.errors)
        return dict(total)


Rounds = Mapping[str, Sequence[LoadResult]]
"""The loads of one level by way of decoding, one a round."""


def rows_of(levels: Mapping[Level, Rounds]) -> tuple[Row, ...]:
    """What the loads of all levels come to."""
    figures = {
        level: {way: [Figures.of(load) for load in loads] for way, loads in rounds.items() if loads}
        for level, rounds in levels.items()
    }
    alone = figures.get(Level(concurrency=1), {}).get(PLAIN)
    base = Figures.median(alone).tokens_per_second if alone else None
    return tuple(_row(level, way, by_way, levels[level], base) for level, by_way in figures.items() for way in by_way)


def _row(level: Level, way: str, by_way: Mapping[str, Sequence[Figures]], rounds: Rounds, base: float | None) -> Row:
    middle = Figures.median(by_way[way])
    scaling = middle.tokens_per_second / base if base else None
    if way != DRAFTED or PLAIN not in by_way:
        return Row(level=level, way=way, figures=middle, scaling=scaling)
    pairs = list(zip(by_way[PLAIN], by_way[DRAFTED], strict=False))
    ratios = [two.tokens_per_second / one.tokens_per_second for one, two in pairs if one.tokens_per_second]
    return Row(
        level=level,
        way=way,
        figures=middle,
        ratio=median(ratios) if ratios else None,
        scaling=scaling,
        identical=identical_share(rounds[PLAIN], rounds[DRAFTED]),
    )


def identical_share(plain: Sequence[LoadResult], drafted: Sequence[LoadResult]) -> float | None:
    """The share of requests with the same answer in both, round by round; None where none was answered twice."""
    same = [
        _said(one) == _said(two)
        for before, after in zip(plain, drafted, strict=False)
        for one, two in _answered_twice(before.answers, after.answers)
    ]
    return sum(same) / len(same) if same else None


def _answered_twice(
    plain: Iterable[TimedAnswer], drafted: Iterable[TimedAnswer]
) -> Iterable[tuple[TimedAnswer, TimedAnswer]]:
    first = {answer.job: answer for answer in plain if answer.error is None}
    return [(first[answer.job], answer) for answer in drafted if answer.error is None and answer.job in first]


def _said(answer: TimedAnswer) -> tuple[int, ...] | str:
    return answer.text if answer.token_ids is None else answer.token_ids


def _speculation(answers: Sequence[TimedAnswer]) -> tuple[float | None, float | None]:
    """The share of rounds that drafted, and their mean accepted length."""
    told = [answer.acceptance for answer in answers if answer.acceptance is not None]
    num_rounds, num_drafts, num_accepted = (
        sum(one.get(name, 0) for one in told) for name in ("num_rounds", "num_drafts", "num_accepted_tokens")
    )
    share = num_drafts / num_rounds if num_rounds else None
    return share, 1 + num_accepted / num_drafts if num_drafts else None


def plot(report: ServeReport, path: Path) -> None:
    """Throughput, time to first token and between tokens against the load. Needs matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--picture needs matplotlib: pip install 'headstart[train]'") from error
    figure = Figure(figsize=(14, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    throughput, first, between = figure.subplots(1, 3)
    _draw(throughput, report, "output tokens a second", lambda one: (one.tokens_per_second,))
    _draw(first, report, "milliseconds to the first token (p50, dotted p95)", lambda one: one.ttft_ms[:2])
    _draw(between, report, "milliseconds between tokens (p50, dotted p95)", lambda one: one.itl_ms[:2])
    for row in report.rows:
        if row.ratio is not None:
            place = (_load_of(row.level), row.figures.tokens_per_second)
            throughput.annotate(
                f"{row.ratio:.2f} x", place, xytext=(0, 6), textcoords="offset points", ha="center", fontsize=8
            )
    throughput.legend(fontsize="small")
    figure.suptitle(f"{report.model}, drafts by {report.drafter}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


_COLOURS = {PLAIN: "#9aa4af", DRAFTED: "#4a86c5", AS_SERVED: "#4a86c5"}


def _draw(axes: Axes, report: ServeReport, title: str, read: Callable[[Figures], Sequence[float]]) -> None:
    """A line a way of decoding, and a dotted one for a second figure."""
    by_rate = all(row.level.rate is not None for row in report.rows)
    for way in dict.fromkeys(row.way for row in report.rows):
        rows = [row for row in report.rows if row.way == way and (row.level.rate is not None) == by_rate]
        loads = [_load_of(row.level) for row in rows]
        for style, values in zip(("o-", ":"), zip(*(read(row.figures) for row in rows), strict=True), strict=False):
            label = way if style == "o-" else None
            axes.plot(loads, values, style, color=_COLOURS[way], label=label)
    loads = sorted({_load_of(row.level) for row in report.rows if (row.level.rate is not None) == by_rate})
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads, [f"{load:g}" for load in loads])
    axes.minorticks_off()
    axes.set(xlabel="requests a second" if by_rate else "requests at once", ylim=(0, None))
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.25)


def _load_of(level: Level) -> float:
    load = level.concurrency if level.rate is None else level.rate
    assert load is not None
    return float(load)
