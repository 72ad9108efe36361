"""What this machine has free: memory, GPUs and disk."""

from __future__ import annotations

import importlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU, in bytes."""

    name: str
    free: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Resources:
    """memory, disk: free bytes; None where the system does not tell."""

    memory: int | None
    gpus: tuple[Gpu, ...]
    disk: int
    cores: int

    @classmethod
    def here(cls, runs_folder: Path) -> Resources:
        """As they are now; the disk is the one that runs are written to."""
        existing = next(place for place in (runs_folder.absolute(), *runs_folder.absolute().parents) if place.exists())
        return cls(
            memory=_free_memory(),
            gpus=tuple(_gpu(index) for index in range(torch.cuda.device_count())) if torch.cuda.is_available() else (),
            disk=shutil.disk_usage(existing).free,
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        )

    def describe(self) -> str:
        memory = "unknown memory" if self.memory is None else f"{self.memory / GB:.1f} GB of memory"
        gpus = "".join(f", {gpu.name} with {gpu.free / GB:.1f} GB" for gpu in self.gpus)
        return f"{memory} and {self.disk / GB:.1f} GB of disk free, {self.cores} cores{gpus}"


def _gpu(index: int) -> Gpu:
    free, total = torch.cuda.mem_get_info(index)
    return Gpu(name=torch.cuda.get_device_name(index), free=free, total=total)


def _free_memory() -> int | None:
    """What is available to this process: of the machine, within the limit of its container."""
    limits = [limit for limit in (_machine_memory(), _container_memory()) if limit is not None]
    return min(limits, default=None)


def _machine_memory() -> int | None:
    try:
        psutil: Any = importlib.import_module("psutil")
    except ImportError:
        return _from_meminfo()
    return int(psutil.virtual_memory().available)


def _from_meminfo() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    available = fields.get("MemAvailable", "").split()
    return int(available[0]) * 1024 if available else None


def _container_memory() -> int | None:
    """What is left of a control group's limit."""
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            most, now = Path(limit).read_text().strip(), Path(used).read_text().strip()
        except OSError:
            continue
        if most.isdecimal() and int(most) < 1 << 60:
            return max(0, int(most) - int(now))
    return None
