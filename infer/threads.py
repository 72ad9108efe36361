"""How many threads decoding should use here: by measurement, for more are not always faster.

A forward of few rows is bound by memory, which one or a few cores can saturate, and beside other work every further
thread is one more to wait for at each of hundreds of small steps.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import partial

import torch

from infer.cost import medians_milliseconds
from infer.kernels.build import torch_openmp
from infer.rows import RowGroup
from infer.target import TargetModel

_WIDTH = 8
_CONTEXT = 64
_OMP_PAUSE_HARD = 2
_NEAR = 1.03
"""A count that is slower than the fastest by less than this is as good, and the smallest such one is taken."""


def candidate_threads() -> list[int]:
    """1, 2, 4 ... and all processors that this process may use."""
    most = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return sorted({most, *(1 << power for power in range(most.bit_length()) if 1 << power <= most)})


def measure_threads(target: TargetModel, counts: Sequence[int] | None = None, *, repeats: int = 9) -> dict[int, float]:
    """Milliseconds of a verification-sized forward by number of threads, measured in turn; torch's own setting is put
    back."""
    counts = candidate_threads() if counts is None else counts
    context = max(0, min(_CONTEXT, target.max_length - _WIDTH))
    cache = target.new_cache(num_slots=1, num_columns=context + _WIDTH)
    group = RowGroup(slot=0, prefix=context, tokens=[min(7, target.vocab_size - 1)] * _WIDTH)
    before = torch.get_num_threads()

    def forward_on(count: int) -> None:
        torch.set_num_threads(count)
        target.forward([group], cache)

    try:
        times = medians_milliseconds([partial(forward_on, count) for count in counts], repeats=repeats)
    finally:
        torch.set_num_threads(before)
    return dict(zip(counts, times, strict=True))


def choose_threads(target: TargetModel) -> dict[int, float]:
    """Measure, set torch to the best count, and return what was measured. On a GPU nothing is changed."""
    if target.device.type != "cpu":
        return {}
    times = measure_threads(target)
    torch.set_num_threads(best_of(times))
    return times


def release_workers() -> None:
    """End the OpenMP workers of the calling thread; they come back when it next computes in parallel.

    GNU's OpenMP keeps a team of workers for every thread that has ever computed in parallel. While all teams together
    have more threads than there are processors, idle workers sleep at once instead of waiting a little for more, and
    every small step of the thread that does compute begins by waking them: a step of 8 ms took 12.
    """
    path = torch_openmp()
    if path is None:
        return
    pause = getattr(ctypes.CDLL(str(path)), "omp_pause_resource_all", None)
    if pause is not None:
        pause(_OMP_PAUSE_HARD)


def best_of(times: dict[int, float]) -> int:
    fastest = min(times.values())
    return min(count for count, milliseconds in times.items() if milliseconds <= _NEAR * fastest)
