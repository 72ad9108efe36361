"""What the target's forward costs on this machine: against its width, its context and the requests it serves.

The tree budget comes from this table, not from a constant. Measured once for a target, dtype, device, thread count and
way of computing, kept in the user's cache folder. The table decides only how wide a tree is, never which tokens come
out.

A forward's *width* is all of its rows, over the `batch` requests that share it; each of them has `context` columns in
the cache.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from infer.machine import cache_folder, cpu_name, load_average
from infer.rows import RowGroup

if TYPE_CHECKING:
    from infer.target import TargetModel

WIDTHS = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 128)
CONTEXT = 256

TABLE_VERSION = 2
"""Part of the key under which a table is kept: one of an older making is never read."""
_MAX_CACHE_BYTES = 512 << 20  # of the slots that a slice is measured over
_MEASURING_SECONDS = 3.0
_SLOW_MILLISECONDS = 100.0  # of one row: then two rounds through all places would take ten seconds
_MOST_ROUNDS = 7
_CONTEXT_GRAIN = 32
_LEAST_SHARE = 0.1  # of the table's own time: no difference between two noisy times makes a forward cheaper than this


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Milliseconds of a target forward at each of `widths` rows (ascending)."""

    widths: tuple[int, ...]
    milliseconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if (
            not self.widths
            or len(self.widths) != len(self.milliseconds)
            or list(self.widths) != sorted(set(self.widths))
            or not all(isinstance(width, int) and width >= 1 for width in self.widths)
        ):
            raise ValueError(
                f"a cost table needs ascending widths with one time each, got {self.widths} and {self.milliseconds}"
            )
        if not all(math.isfinite(each) and each > 0 for each in self.milliseconds):
            raise ValueError(f"a cost table needs times above 0 milliseconds, got {self.milliseconds}")

    @classmethod
    def free(cls) -> CostModel:
        """A machine on which width costs nothing, so that every node is kept (tests, exactness checks)."""
        return cls(widths=(1,), milliseconds=(1.0,))

    def at(self, *, context: int = CONTEXT, batch: int = 1) -> CostModel:
        """The table of forwards that serve `batch` requests of `context` tokens; this one, if it knows no others."""
        _check_place(context, batch)
        return self

    def in_steps_of(self, row_width: int) -> CostModel:
        """The table of an engine whose forwards all have `row_width` rows: the time of as many as the rows fill."""
        return FixedWidthCost(widths=self.widths, milliseconds=self.milliseconds, row_width=row_width, table=self)

    def most_rows(self, milliseconds: float, *, among: Sequence[int]) -> int:
        """The largest of the widths `among` (ascending) whose forward takes at most so long; the first if none does."""
        return max((width for width in among if self.target_milliseconds(width) <= milliseconds), default=among[0])

    def target_milliseconds(self, width: int) -> float:
        """Interpolated between measured widths; beyond the last, on the line through the last two."""
        if len(self.widths) == 1 or width <= self.widths[0]:
            return self.milliseconds[0]
        right = min(bisect_right(self.widths, width), len(self.widths) - 1)
        left = right - 1
        share = (width - self.widths[left]) / (self.widths[right] - self.widths[left])
        return self.milliseconds[left] + share * (self.milliseconds[right] - self.milliseconds[left])


@dataclass(frozen=True, kw_only=True)
class FixedWidthCost(CostModel):
    """A cost table where every forward has `row_width` rows, filled or not. table: the ordinary forwards'."""

    row_width: int
    table: CostModel | None = None

    def at(self, *, context: int = CONTEXT, batch: int = 1) -> CostModel:
        if self.table is None:
            return super().at(context=context, batch=batch)
        return self.table.at(context=context, batch=batch).in_steps_of(self.row_width)

    def target_milliseconds(self, width: int) -> float:
        return -(-width // self.row_width) * super().target_milliseconds(self.row_width)


@dataclass(frozen=True, kw_only=True)
class CostSlice(CostModel):
    """Milliseconds, as measured, of forwards over `batch` requests of `context` tokens."""

    batch: int
    context: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_place(self.context, self.batch)


@dataclass(frozen=True, kw_only=True)
class CostTable(CostModel):
    """The table of one request with `context` tokens, and what other contexts and batches add to it.

    slices: forwards measured elsewhere, at a few widths each. `at` adds to this table's times what a slice's lie
    above them, on lines between the measured widths, contexts and batches. Without slices every context and batch
    costs the same.
    """

    context: int = CONTEXT
    slices: tuple[CostSlice, ...] = ()

    def at(self, *, context: int = CONTEXT, batch: int = 1) -> CostModel:
        """The table of forwards that serve `batch` requests of `context` tokens, from a width of `batch` rows on.

        `context` is taken to the nearest 32, so that rounds of growing texts share tables.
        """
        _check_place(context, batch)
        return _interpolated(self, round(context / _CONTEXT_GRAIN) * _CONTEXT_GRAIN, batch)

    def extra_milliseconds(self, width: int, *, context: int, batch: int) -> float:
        """What a forward of `width` rows takes longer there than over one request of this table's context."""
        contexts: dict[int, dict[int, float]] = {1: {self.context: 0.0}}
        for each in self.slices:
            extras = [ms - self.target_milliseconds(w) for w, ms in zip(each.widths, each.milliseconds, strict=True)]
            contexts.setdefault(each.batch, {})[each.context] = _on_lines(width, each.widths, extras)
        batches = sorted(contexts)
        extras = [_on_lines(context, *zip(*sorted(contexts[each].items()), strict=True)) for each in batches]
        return _on_lines(batch, batches, extras)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CostTable:
        """Raises KeyError, TypeError or ValueError where `values` are not what `to_dict` gave."""
        return cls(
            widths=tuple(values["widths"]),
            milliseconds=tuple(values["milliseconds"]),
            context=values["context"],
            slices=tuple(
                CostSlice(
                    widths=tuple(each["widths"]),
                    milliseconds=tuple(each["milliseconds"]),
                    batch=each["batch"],
                    context=each["context"],
                )
                for each in values["slices"]
            ),
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_place(self.context, 1)


@lru_cache(maxsize=256)
def _interpolated(table: CostTable, context: int, batch: int) -> CostModel:
    widths = [batch, *(width for width in table.widths if width > batch)]
    times: list[float] = []
    for width in widths:
        own = table.target_milliseconds(width)
        extra = table.extra_milliseconds(width, context=context, batch=batch)
        times.append(max(own + extra, _LEAST_SHARE * own, *times[-1:]))
    return CostModel(widths=tuple(widths), milliseconds=tuple(times))


def _on_lines(place: float, places: Sequence[int], values: Sequence[float]) -> float:
    """`values` at `places`, interpolated. Before the first its value; beyond the last on the line through the last two
    if it rises, else the last value."""
    if len(places) == 1 or place <= places[0]:
        return values[0]
    right = min(bisect_right(places, place), len(places) - 1)
    left = right - 1
    slope = (values[right] - values[left]) / (places[right] - places[left])
    if place > places[right]:
        return values[right] + max(0.0, slope) * (place - places[right])
    return values[left] + slope * (place - places[left])


def _check_place(context: int, batch: int) -> None:
    if not isinstance(context, int) or not isinstance(batch, int) or context < 0 or batch < 1:
        raise ValueError(f"a forward serves at least 1 request of at least 0 tokens, got {batch} of {context}")


def median_milliseconds(action: Callable[[], object], *, repeats: int) -> float:
    """Median time of `action` after one untimed call."""
    (median,) = medians_milliseconds([action], repeats=repeats)
    return median


def medians_milliseconds(
    actions: Sequence[Callable[[], object]], *, repeats: int, seconds: float = math.inf
) -> list[float]:
    """Median time of each of `actions` after one untimed call, over at most `repeats` rounds through all of them.

    In turn, so that what disturbs the machine disturbs all alike. No round begins after `seconds`, but for the first.
    """
    start = time.perf_counter()
    for action in actions:
        action()
    times: list[list[float]] = [[] for _ in actions]
    for number in range(repeats):
        if number and time.perf_counter() - start > seconds:
            break
        for action, each in zip(actions, times, strict=True):
            _synchronize()
            before = time.perf_counter()
            action()
            _synchronize()
            each.append(time.perf_counter() - before)
    return [1e3 * statistics.median(each) for each in times]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure_target(
    target: TargetModel,
    *,
    widths: Sequence[int] = WIDTHS,
    context: int = CONTEXT,
    batch: int = 1,
    repeats: int = 7,
) -> CostModel:
    """Time the target's forward over tree-like groups of each width, over `batch` requests of `context` tokens.

    Widths below `batch` are left out, and so is what the target's positions cannot hold. Times never fall with width
    (`rising`), since a dip is noise.
    """
    place = Place(batch, context, tuple(widths)).within(target)
    times = medians_milliseconds(_forwards(target, [place]), repeats=repeats)
    return CostModel(widths=place.widths, milliseconds=rising(times))


def measure_table(target: TargetModel, *, seconds: float = _MEASURING_SECONDS) -> CostTable:
    """Time the target's forward over the widths of one request, and over a few of longer texts and more requests.

    Takes about `seconds`; more where one forward is slow, and then other contexts and batches are left out.
    """
    own = Place(1, CONTEXT, WIDTHS).within(target)
    one_row = median_milliseconds(*_forwards(target, [own._replace(widths=(1,))]), repeats=1)
    others = [] if one_row > _SLOW_MILLISECONDS else [place for place in _OTHER_PLACES if place.fits(target)]
    times = iter(medians_milliseconds(_forwards(target, [own, *others]), repeats=_MOST_ROUNDS, seconds=seconds))
    return CostTable(
        widths=own.widths,
        milliseconds=rising([next(times) for _ in own.widths]),
        context=own.context,
        slices=tuple(
            CostSlice(batch=batch, context=context, widths=widths, milliseconds=tuple(next(times) for _ in widths))
            for batch, context, widths in others
        ),
    )


class Place(NamedTuple):
    """Where forwards are measured: over `batch` requests of `context` tokens, at each of `widths` rows."""

    batch: int
    context: int
    widths: tuple[int, ...]

    @property
    def num_columns(self) -> int:
        """Columns of a slot that the widest forward needs."""
        return self.context + -(-max(self.widths) // self.batch)

    def within(self, target: TargetModel) -> Place:
        """The widths of at least `batch` rows that the target's positions hold, and the context left beside them."""
        fitting = [width for width in self.widths if self.batch <= width < self.batch * target.max_length]
        place = self._replace(context=0, widths=tuple(fitting) or (self.batch,))
        return place._replace(context=max(0, min(self.context, target.max_length - place.num_columns)))

    def fits(self, target: TargetModel) -> bool:
        num_bytes = target.new_cache(num_slots=1, num_columns=1).num_bytes * self.batch * self.num_columns
        return self.num_columns <= target.max_length and num_bytes <= _MAX_CACHE_BYTES


_OTHER_PLACES = (
    Place(1, 1024, (1, 64)),
    Place(1, 32, (1, 64)),
    Place(8, CONTEXT, (8, 64)),
    Place(8, 32, (8, 64)),
    Place(32, CONTEXT, (32, 128)),
    Place(32, 32, (32, 128)),
)


def _forwards(target: TargetModel, places: Sequence[Place]) -> list[Callable[[], object]]:
    """The forwards of `places`, in order."""
    columns: dict[int, int] = {}
    for place in places:
        columns[place.batch] = max(columns.get(place.batch, 0), place.num_columns)
    caches = {batch: target.new_cache(num_slots=batch, num_columns=number) for batch, number in columns.items()}
    token = min(7, target.vocab_size - 1)
    return [
        partial(target.forward, spread_rows(width, batch=batch, context=context, token=token), caches[batch])
        for batch, context, widths in places
        for width in widths
    ]


def spread_rows(width: int, *, batch: int, context: int, token: int = 0) -> list[RowGroup]:
    """`width` rows behind `batch` requests of `context` tokens, spread over their slots as evenly as they go."""
    sizes = [width // batch + (slot < width % batch) for slot in range(batch)]
    return [RowGroup(slot=slot, prefix=context, tokens=[token] * size) for slot, size in enumerate(sizes)]


def rising(times: Iterable[float]) -> tuple[float, ...]:
    """The closest sequence that never falls (least squares; neighbours that fall share their mean)."""
    blocks: list[tuple[float, int]] = []  # mean, length
    for each in times:
        mean, length = each, 1
        while blocks and blocks[-1][0] > mean:
            before, count = blocks.pop()
            mean, length = (before * count + mean * length) / (count + length), count + length
        blocks.append((mean, length))
    return tuple(mean for mean, length in blocks for _ in range(length))


def cost_of(target: TargetModel) -> CostTable:
    """The table of this target on this machine: from the user's cache folder, else measured now and kept there."""
    try:
        return CostTable.from_dict(json.loads(cost_path(target).read_text()))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):  # none yet, or not one of ours
        cost = measure_table(target)
    save_cost(target, cost)
    return cost


def save_cost(target: TargetModel, cost: CostTable) -> bool:
    """Keep a measured table; returns whether it was. Not where other work keeps the cores busy, for then the times say
    too little about the machine; and a folder that cannot be written to only means measuring again next time."""
    load = load_average()
    if target.device.type == "cpu" and load is not None and load >= (os.cpu_count() or 1):
        return False
    path = cost_path(target)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(cost.to_dict()))
        partial.replace(path)
    except OSError:
        return False
    return True


def cost_path(target: TargetModel) -> Path:
    """Where the table of this target, dtype, device, thread count and way of computing is kept."""
    on_gpu = target.device.type == "cuda"
    device = torch.cuda.get_device_name(target.device) if on_gpu else cpu_name()
    computed = [target.forward_kind, str(target.quantization), str(target.dtype)]
    key = [TABLE_VERSION, target.fingerprint, *computed, device, torch.get_num_threads(), torch.__version__]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    return cache_folder() / "headstart" / "costs" / f"{digest[:24]}.json"
