"""What the target's forwards cost by width, context and batch, beside their floors; and forwards of fixed shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from infer.cost import CONTEXT, WIDTHS, Place, measure_target, medians_milliseconds, spread_rows
from infer.fixed import CHUNK
from infer.profile.floors import Floor, ForwardWork, Speeds
from infer.rows import RowGroup
from infer.target import TargetModel

_FIXED_WIDTHS = (16, 32)


@dataclass(frozen=True, kw_only=True)
class ForwardCost:
    """A forward of `width` rows over `batch` requests of `context` tokens."""

    batch: int
    context: int
    width: int
    milliseconds: float
    floor: Floor

    @property
    def times_floor(self) -> float:
        return self.milliseconds / self.floor.milliseconds


@dataclass(frozen=True, kw_only=True)
class FixedCost:
    """A forward over a tree of `row_width` rows: ordinary, and of fixed shape."""

    row_width: int
    ordinary_milliseconds: float
    fixed_milliseconds: float

    @property
    def ratio(self) -> float:
        return self.fixed_milliseconds / self.ordinary_milliseconds


def measure_forwards(
    target: TargetModel,
    speeds: Speeds,
    *,
    widths: Sequence[int] = WIDTHS,
    contexts: Sequence[int] = (CONTEXT,),
    batches: Sequence[int] = (1,),
    repeats: int = 7,
) -> tuple[ForwardCost, ...]:
    """Every width at every batch and context that the target's positions hold, by batch, context and width."""
    work = ForwardWork(target)
    costs: dict[tuple[int, int, int], ForwardCost] = {}
    for batch in batches:
        for context in contexts:
            place = Place(batch, context, tuple(widths)).within(target)
            cost = measure_target(target, widths=place.widths, context=place.context, batch=batch, repeats=repeats)
            for width, milliseconds in zip(cost.widths, cost.milliseconds, strict=True):
                groups = spread_rows(width, batch=batch, context=place.context)
                costs[batch, place.context, width] = ForwardCost(
                    batch=batch,
                    context=place.context,
                    width=width,
                    milliseconds=milliseconds,
                    floor=work.of(groups).floor(speeds),
                )
    return tuple(costs.values())


def measure_fixed(target: TargetModel, *, context: int = CONTEXT, repeats: int = 7) -> tuple[FixedCost, ...]:
    """Ordinary forwards and forwards of fixed shape over the same rows, in turn."""
    context = max(0, min(context, target.max_length - max(_FIXED_WIDTHS)))
    num_columns = -(-(context + max(_FIXED_WIDTHS)) // CHUNK) * CHUNK
    cache = target.new_cache(num_slots=1, num_columns=num_columns)
    costs = []
    for width in _FIXED_WIDTHS:
        group = RowGroup(slot=0, prefix=context, tokens=[min(7, target.vocab_size - 1)] * width)
        actions = [partial(target.forward, [group], cache, row_width=row_width) for row_width in (None, width)]
        ordinary, fixed = medians_milliseconds(actions, repeats=repeats)
        costs.append(FixedCost(row_width=width, ordinary_milliseconds=ordinary, fixed_milliseconds=fixed))
    return tuple(costs)
