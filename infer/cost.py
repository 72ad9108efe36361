"""What a round costs on this machine: the target's forward against its width.

The tree budget comes from this table, not from a constant. Measured once for a target, dtype, device and thread count,
kept in the user's cache folder. The table decides only how wide a tree is, never which tokens come out.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from infer.machine import cpu_name, load_average
from infer.rows import RowGroup

if TYPE_CHECKING:
    from infer.target import TargetModel

WIDTHS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
CONTEXT = 256


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

    def in_steps_of(self, row_width: int) -> CostModel:
        """The table of an engine whose forwards all have `row_width` rows: the time of as many as the rows fill."""
        return FixedWidthCost(widths=self.widths, milliseconds=self.milliseconds, row_width=row_width)

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
    """A cost table where every forward has `row_width` rows, filled or not."""

    row_width: int

    def target_milliseconds(self, width: int) -> float:
        return -(-width // self.row_width) * super().target_milliseconds(self.row_width)


def median_milliseconds(action: Callable[[], object], *, repeats: int) -> float:
    """Median time of `action` after one untimed call."""
    action()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def measure_target(
    target: TargetModel, *, widths: Sequence[int] = WIDTHS, context: int = CONTEXT, repeats: int = 7
) -> CostModel:
    """Time the target's forward over a tree-like group of each width behind `context` tokens.

    Times are made non-decreasing in width (isotonic running maximum of medians), since a dip is noise.
    """
    widths = [width for width in widths if width < target.max_length] or [1]
    context = max(0, min(context, target.max_length - max(widths)))
    cache = target.new_cache(num_slots=1, num_columns=context + max(widths))
    token = min(7, target.vocab_size - 1)
    milliseconds: list[float] = []
    for width in widths:
        group = RowGroup(slot=0, prefix=context, tokens=[token] * width)
        measured = median_milliseconds(lambda group=group: target.forward([group], cache), repeats=repeats)  # type: ignore[misc]
        milliseconds.append(max([measured, *milliseconds[-1:]]))
    return CostModel(widths=tuple(widths), milliseconds=tuple(milliseconds))


def cost_of(target: TargetModel) -> CostModel:
    """The table of this target on this machine: from the user's cache folder, else measured now and kept there,
    unless other work keeps the cores busy: then the times say too little about the machine to be kept."""
    path = cost_path(target)
    try:
        stored = json.loads(path.read_text())
        return CostModel(widths=tuple(stored["widths"]), milliseconds=tuple(stored["milliseconds"]))
    except (OSError, ValueError, KeyError, TypeError):  # no table yet, or not one of ours
        cost = measure_target(target)
    load = load_average()
    if target.device.type != "cpu" or load is None or load < (os.cpu_count() or 1):
        save_cost(target, cost)
    return cost


def save_cost(target: TargetModel, cost: CostModel) -> None:
    """Keep a measured table; a folder that cannot be written to only means measuring again next time."""
    path = cost_path(target)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps({"widths": cost.widths, "milliseconds": cost.milliseconds}))
        partial.replace(path)
    except OSError:
        return


def cost_path(target: TargetModel) -> Path:
    """Where the table of this target, dtype, device and thread count is kept."""
    on_gpu = target.device.type == "cuda"
    device = torch.cuda.get_device_name(target.device) if on_gpu else cpu_name()
    key = [target.fingerprint, str(target.dtype), device, torch.get_num_threads(), torch.__version__]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    return _cache_folder() / "headstart" / "costs" / f"{digest[:24]}.json"


def _cache_folder() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user id without a home folder, as in some containers
        return Path(tempfile.gettempdir())
