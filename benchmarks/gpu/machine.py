"""What this machine is, clocks, and its memory bandwidth."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.gpu.session import Session


def describe_machine(device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "device": str(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "triton": _version("triton"),
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "float32_matmul": torch.get_float32_matmul_precision(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        facts |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gb": round(total_bytes / 1e9, 1),
            "free_gb": round(free_bytes / 1e9, 1),
            "cuda": torch.version.cuda,
        }
    return facts


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_ms(action: Callable[[], object], device: torch.device, *, repeats: int, calls: int = 1) -> float:
    """Median milliseconds of a call, after three untimed ones; `calls` in a row hide the cost of starting them."""
    for _ in range(3):
        action()
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            action()
        synchronize(device)
        times.append((time.perf_counter() - start) / calls)
    return 1e3 * statistics.median(times)


def busy_ms(action: Callable[[], object], device: torch.device) -> float | None:
    """Milliseconds of a call during which the device's kernels run; the rest of its time the device waits for Python.
    None where no profiler answers."""
    if device.type != "cuda":
        return None
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            action()
            synchronize(device)
        on_device = [
            event for event in profile.events() or () if event.device_type != torch._C._autograd.DeviceType.CPU
        ]
        return sum(float(event.time_range.elapsed_us()) for event in on_device) / 1e3 or None
    except (RuntimeError, AssertionError, AttributeError) as error:  # what it says depends on the build
        print(f"  no profiler: {error}", file=sys.stderr)
        return None


def measure_bandwidth(session: Session) -> None:
    """Bytes moved a second by a large copy (read and written) and by a large matrix-vector product (read)."""
    device, num_bytes = session.device, session.sizes.copy_bytes
    source = torch.ones(num_bytes // 2, dtype=torch.bfloat16, device=device)
    destination = torch.empty_like(source)
    copy_ms = median_ms(lambda: destination.copy_(source), device, repeats=session.sizes.repeats, calls=5)
    num_columns = 4096
    matrix = source[: source.numel() // num_columns * num_columns].view(-1, num_columns)
    vector = torch.ones(1, num_columns, dtype=torch.bfloat16, device=device)
    product_ms = median_ms(
        lambda: torch.nn.functional.linear(vector, matrix), device, repeats=session.sizes.repeats, calls=5
    )
    copied, read = 2 * num_bytes / copy_ms / 1e6, num_bytes / product_ms / 1e6
    session.machine["bandwidth_gb_s"] = round(max(copied, read), 1)
    session.time("memory bandwidth, copy", copied, "GB/s", detail=f"{num_bytes / 1e9:.2f} GB, read and written")
    session.time("memory bandwidth, matrix-vector product", read, "GB/s", detail=f"bfloat16, {num_bytes / 1e9:.2f} GB")
