"""What machine this is: named beside every figure, and part of the key of what was measured on it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch

NOISY_LOAD = 1.0
"""Above this load average, somebody else's work is in the figures."""


def machine_facts() -> dict[str, Any]:
    """What a reader needs to know to compare the times with those of another machine."""
    import transformers

    flags = cpu_flags()
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "avx512_bf16": "avx512_bf16" in flags,
        "amx_bf16": "amx_bf16" in flags,
        "load": load_average(),
    }


def headstart_version() -> str | None:
    """None where headstart runs from a source tree that was not installed."""
    try:
        return importlib.metadata.version("headstart")
    except importlib.metadata.PackageNotFoundError:
        return None


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as files and reports spell it: `bfloat16`, not `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def load_average() -> float | None:
    """Processes that wanted a core over the last minute; None where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def available_bytes(device: torch.device | None = None) -> int | None:
    """Memory that programs could still take, of the machine or of a GPU; None where the system does not say."""
    if device is not None and device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(sizes[0]) << 10 if sizes else None


def cpu_name() -> str:
    """The processor's own name where the system tells it, else its architecture."""
    return cpu_info().get("model name") or platform.processor() or platform.machine()


def cache_folder() -> Path:
    """Where the user's cached files go."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user id without a home folder, as in some containers
        return Path(tempfile.gettempdir())


def cpu_flags() -> frozenset[str]:
    """What an x86 processor can do, in Linux's words; empty where the system does not say."""
    return frozenset(cpu_info().get("flags", "").split())


def cpu_info() -> dict[str, str]:
    """The first processor's fields in /proc/cpuinfo, or nothing on systems without it."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
