"""Acceptance curves of served traffic: how much of what was drafted was accepted, at which depth, for whom, and since
when.

Counted round by round, in windows of time and in a total that fades (half of it within `HALF_LIFE_SECONDS`), for all
rounds and apart by
    tag          the domain that a request names, `MAX_TAGS` of them at most
    temperature  greedy, (0, 0.5], (0.5, 1], >1
    context      tokens before the round, prompt and answer, in the ranges of `infer.evaluate`

Definitions (those of `infer.request.Speculation`, so that sums over requests agree): a draft is a round after the
prefill that verified at least one draft token. by_position[d - 1] is the share of drafts in which the token at depth
d was accepted and stands in the answer. given_drafted[d - 1] is the same share of the drafts whose tree reached depth
d, which does not fall when trees become shallow under load. mean_accepted_length is 1 + accepted tokens / drafts.

Windows go to sinks (`infer.serve.sinks`) in a thread of their own, never in the engine's. Whether
acceptance has fallen below the head's card is told by `infer.serve.drift`: one warning in the log, until it recovers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.drafters.spec import FOLDER, head_cards, parse_spec
from infer.evaluate import CONTEXT_BOUNDS
from infer.serve.drift import DriftChange, DriftWatch, figures_of
from infer.serve.metrics import Tags
from infer.serve.sinks import JsonLines, Sink, Writer

if TYPE_CHECKING:
    from infer.async_engine import Step
    from infer.engine import Engine
    from infer.request import Request, RequestRound
    from infer.sampling import SamplingParams

WINDOW_SECONDS = 60.0
NUM_WINDOWS = 60
"""Windows that are kept to be looked at; all go to the sinks."""
HALF_LIFE_SECONDS = 3600.0
MAX_DEPTH = 32
"""Deeper tokens are counted among the accepted, but have no place in the curves."""
DEFINITION = (
    "a draft is a round after the prefill that verified at least one draft token; by_position: share of drafts in "
    "which the token at that depth was accepted and stands in the answer; given_drafted: of those drafts whose tree "
    "reached the depth; mean_accepted_length = 1 + accepted draft tokens / drafts"
)

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Counts:
    """Sums over rounds after the prefill; fading makes them fractions. reached, accepted: by depth, from 1 on."""

    num_rounds: float = 0.0
    num_drafts: float = 0.0
    num_draft_tokens: float = 0.0
    num_accepted_tokens: float = 0.0
    num_tokens: float = 0.0
    reached: list[float] = field(default_factory=lambda: [0.0] * MAX_DEPTH)
    accepted: list[float] = field(default_factory=lambda: [0.0] * MAX_DEPTH)

    def see(self, one: RequestRound, depth: int) -> None:
        """`depth`: of the round's tree."""
        self.num_rounds += 1
        self.num_tokens += one.num_tokens
        if not one.num_nodes:
            return
        self.num_drafts += 1
        self.num_draft_tokens += one.num_nodes
        self.num_accepted_tokens += one.num_accepted
        for place in range(min(depth, MAX_DEPTH)):
            self.reached[place] += 1
            self.accepted[place] += place < one.num_accepted

    def add(self, other: Counts, share: float = 1.0) -> None:
        self.num_rounds += share * other.num_rounds
        self.num_drafts += share * other.num_drafts
        self.num_draft_tokens += share * other.num_draft_tokens
        self.num_accepted_tokens += share * other.num_accepted_tokens
        self.num_tokens += share * other.num_tokens
        for mine, theirs in ((self.reached, other.reached), (self.accepted, other.accepted)):
            for place, value in enumerate(theirs):
                mine[place] += share * value

    def to_dict(self) -> dict[str, Any]:
        """Counts and shares, rounded for people; null where there is nothing to divide by."""
        drafts = self.num_drafts
        deepest = max((place for place, count in enumerate(self.reached, start=1) if count), default=0)
        return {
            "num_rounds": round(self.num_rounds, 2),
            "num_drafts": round(drafts, 2),
            "num_draft_tokens": round(self.num_draft_tokens, 2),
            "num_accepted_tokens": round(self.num_accepted_tokens, 2),
            "num_tokens": round(self.num_tokens, 2),
            "drafted_share": _share(drafts, self.num_rounds),
            "mean_accepted_length": round(1 + self.num_accepted_tokens / drafts, 4) if drafts else None,
            "by_position": [_share(count, drafts) for count in self.accepted[:deepest]],
            "given_drafted": [
                _share(count, reached)
                for count, reached in zip(self.accepted[:deepest], self.reached[:deepest], strict=True)
            ],
        }


@dataclass(kw_only=True)
class Breakdown:
    """Counts of all rounds, and of the same rounds apart by the name of each key."""

    overall: Counts = field(default_factory=Counts)
    by_tag: dict[str, Counts] = field(default_factory=dict)
    by_temperature: dict[str, Counts] = field(default_factory=dict)
    by_context: dict[str, Counts] = field(default_factory=dict)

    def see(self, one: RequestRound, *, tag: str) -> None:
        depth = one.depth
        request = one.request
        context = request.num_tokens - one.num_tokens
        for counts in (
            self.overall,
            self.by_tag.setdefault(tag, Counts()),
            self.by_temperature.setdefault(temperature_band(request.params), Counts()),
            self.by_context.setdefault(context_range(context), Counts()),
        ):
            counts.see(one, depth)

    def faded(self, share: float) -> Breakdown:
        """A copy with `share` of every count."""
        copy = Breakdown()
        copy.add(self, share)
        return copy

    def add(self, other: Breakdown, share: float = 1.0) -> None:
        self.overall.add(other.overall, share)
        for mine, theirs in (
            (self.by_tag, other.by_tag),
            (self.by_temperature, other.by_temperature),
            (self.by_context, other.by_context),
        ):
            for name, counts in theirs.items():
                mine.setdefault(name, Counts()).add(counts, share)

    def to_dict(self) -> dict[str, Any]:
        groups = {"by_tag": self.by_tag, "by_temperature": self.by_temperature, "by_context": self.by_context}
        return {
            "overall": self.overall.to_dict(),
            **{name: {key: each[key].to_dict() for key in sorted(each, key=_order)} for name, each in groups.items()},
        }


class AcceptanceLog:
    """A listener of the engine (`infer.async_engine.Listener`) that keeps the curves.

    drift: watches acceptance against the head's card; None where there is nothing to hold it against. sinks: where
    closed windows go; they are the log's from now on. clock: seconds, for the windows.
    """

    def __init__(
        self,
        *,
        drift: DriftWatch | None = None,
        sinks: Sequence[Sink] = (),
        window_seconds: float = WINDOW_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._drift = drift
        self._clock = clock
        self._window_seconds = window_seconds
        self._start = clock()
        self._lock = threading.Lock()  # the engine's thread writes; those of requests to /status and of the sinks read
        self._tags = Tags()
        self._index = 0  # of the window that is open
        self._window = Breakdown()
        self._fading = Breakdown()
        self._total = Counts()
        self._recent: deque[dict[str, Any]] = deque(maxlen=NUM_WINDOWS)
        self._writer = Writer(sinks, tick=self._tick) if sinks else None

    @property
    def is_drifting(self) -> bool:
        return self._drift is not None and self._drift.is_drifting

    # What the engine says, in its thread.

    def stepped(self, step: Step) -> None:
        with self._lock:
            self._roll()
            for one in step.rounds:
                if not one.is_first:
                    self._window.see(one, tag=self._tags.name(one.request.tag))
            if self._drift is not None:
                self._drift.see(step.rounds)

    def finished(self, request: Request) -> None:
        if self._drift is None:
            return
        with self._lock:
            change = self._drift.finish(request)
        if change is not None:
            self._report(change)

    # What others ask.

    def snapshot(self) -> dict[str, Any]:
        """Everything that is kept, for JSON."""
        with self._lock:
            self._roll()
            faded = self._fading.faded(1.0)
            faded.add(self._window)
            total = Counts()
            total.add(self._total)
            total.add(self._window.overall)
            return {
                "definition": DEFINITION,
                "half_life_seconds": HALF_LIFE_SECONDS,
                "window_seconds": self._window_seconds,
                "since_start": total.to_dict(),
                "fading": faded.to_dict(),
                "windows": list(self._recent),
                "drift": None if self._drift is None else self._drift.snapshot(),
            }

    def close(self) -> None:
        """Close the open window and wait for the sinks, not for ever. The engine has stopped before."""
        with self._lock:
            self._close_window(self._clock())
        if self._writer is not None:
            self._writer.close()

    # Within; all but `_report` and `_tick` under the lock.

    def _tick(self) -> None:
        """From time to time, so that a window also ends where no traffic follows."""
        with self._lock:
            self._roll()

    def _roll(self) -> None:
        now = self._clock()
        index = int((now - self._start) / self._window_seconds)
        if index == self._index:
            return
        num_past = index - self._index
        self._close_window(self._start + (self._index + 1) * self._window_seconds)
        self._fading = self._fading.faded(0.5 ** (num_past * self._window_seconds / HALF_LIFE_SECONDS))
        self._index = index

    def _close_window(self, end: float) -> None:
        """A window without rounds leaves no trace."""
        window, self._window = self._window, Breakdown()
        if not window.overall.num_rounds:
            return
        self._fading.add(window)
        self._total.add(window.overall)
        seconds = round(end - self._start, 3)
        self._recent.append({"window": self._index, "end_seconds": seconds, **window.overall.to_dict()})
        self._put(
            {
                "event": "window",
                "window": self._index,
                "end_seconds": seconds,
                **window.to_dict(),
                "fading": self._fading.to_dict(),
                "since_start": self._total.to_dict(),
                "drift": None if self._drift is None else self._drift.snapshot(),
            }
        )

    def _report(self, change: DriftChange) -> None:
        (_log.warning if change.is_drifting else _log.info)("%s", change.line())
        self._put(
            {
                "event": "drift",
                "temperature": change.temperature,
                "drifting": change.is_drifting,
                "ratio_to_card": change.ratio,
                "end_seconds": round(self._clock() - self._start, 3),
                "message": change.line(),
            }
        )

    def _put(self, record: dict[str, Any]) -> None:
        if self._writer is not None:
            self._writer.put({"time": datetime.now(UTC).isoformat(timespec="seconds"), **record})


def temperature_band(params: SamplingParams) -> str:
    if params.greedy:
        return "greedy"
    return "(0, 0.5]" if params.temperature <= 0.5 else "(0.5, 1]" if params.temperature <= 1 else ">1"


def context_range(num_tokens: int) -> str:
    for low, high in pairwise((0, *CONTEXT_BOUNDS)):
        if num_tokens < high:
            return f"{low}-{high - 1}"
    return f"{CONTEXT_BOUNDS[-1]}+"


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


def _order(name: str) -> tuple[int, str]:
    """Ranges of contexts by their size, all else by name."""
    digits = name.rstrip("+").partition("-")[0]
    return (int(digits), "") if digits.isdecimal() else (-1, name)


def open_log(
    engine: Engine,
    head: str,
    *,
    file: Path | None = None,
    wandb_project: str | None = None,
    notice: Callable[[str], None],
) -> AcceptanceLog:
    """The log of an engine that drafts with `head`, with an alarm where the head's card has figures for it. file,
    wandb_project: where windows go. `notice` is told what cannot be."""
    facts = {
        "head": head,
        "target": engine.target.reference.name,
        "drafter": None if engine.drafter is None else engine.drafter.name,
        "tree": vars(engine.tree),
        "window_seconds": WINDOW_SECONDS,
        "definition": DEFINITION,
    }
    sinks: list[Sink] = []
    if file is not None:
        sinks.append(JsonLines(file, facts))
    if wandb_project is not None:
        from infer.serve.wandb_log import WandbLog

        name = f"serve-{Path(head).name or 'head'}"
        sinks.append(WandbLog(project=wandb_project, name=name, config=facts, notice=notice))
    return AcceptanceLog(drift=watch_of(head, engine, notice=notice), sinks=sinks)


def watch_of(head: str, engine: Engine, *, notice: Callable[[str], None]) -> DriftWatch | None:
    """What holds the engine's acceptance against the head's card; None, said once, where the card cannot tell."""
    if engine.drafter is None:
        return None
    reason = None
    specs = parse_spec(head)
    cards = head_cards(head)
    figures = figures_of(cards[0].acceptance) if cards else []
    if len(cards) != 1 or specs[0].kind != FOLDER:
        reason = "it needs a trained head, alone or first of those joined, and its card"
    elif cards[0].target.fingerprint != engine.target.fingerprint:
        reason = "the head's card is about another version of the target"
    elif not figures:
        reason = "the head's card has no figures (`headstart train` writes them)"
    if reason is not None:
        notice(f"no alarm if acceptance falls: {reason}")
        return None
    return DriftWatch(figures=figures, adaptive=engine.tree.adaptive)
