"""What a run takes of the machine: memory at its peak, and the parts that the time of a step goes to."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

GIGABYTE = 1e9


def memory_peaks(device: torch.device | str) -> dict[str, float]:
    """Peaks of this process so far, in GB (1e9 bytes): of main memory, and of the GPU where there is one."""
    peaks = {}
    try:
        import resource  # not on Windows

        unit = 1 if sys.platform == "darwin" else 1024
        peaks["peak_rss_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIGABYTE
    except ImportError:
        pass
    device = torch.device(device)
    if device.type == "cuda":
        peaks["peak_gpu_gb"] = torch.cuda.max_memory_allocated(device) / GIGABYTE
    return peaks


class Clock(Protocol):
    """Tells moments, and how far apart two of them are."""

    def mark(self) -> Any: ...

    def seconds(self, first: Any, last: Any) -> float: ...


class HostClock:
    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, first: float, last: float) -> float:
        return last - first


class CudaClock:
    """Moments at which a GPU's current stream gets so far, which the host does not wait for until it asks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        last.synchronize()
        milliseconds: float = first.elapsed_time(last)
        return milliseconds / 1e3


def clock_for(device: torch.device | str) -> Clock:
    device = torch.device(device)
    return CudaClock(device) if device.type == "cuda" else HostClock()


class Laps:
    """A time cut into parts one after another, by a clock whose moments are looked at in the end only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last = clock.mark()
        self._laps: list[tuple[str, Any, Any]] = []

    def lap(self, part: str) -> None:
        """`part` is what lies between the last call, or the beginning, and now."""
        now = self._clock.mark()
        self._laps.append((part, self._last, now))
        self._last = now

    def seconds(self) -> dict[str, float]:
        """By part, in the order in which they first came."""
        total: dict[str, float] = {}
        for part, first, last in self._laps:
            total[part] = total.get(part, 0.0) + self._clock.seconds(first, last)
        return total


class Stopwatch:
    """Seconds by part: `with watch("features"): ...`. Parts must not lie in each other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start
