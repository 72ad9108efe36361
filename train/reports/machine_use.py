"""What a run takes of the machine: memory at its peak, and the parts that the time of a step goes to."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

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
