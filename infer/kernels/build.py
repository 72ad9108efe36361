"""Compiling and loading the kernels' sources: once a machine and version of each, into the user's cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch

from infer.machine import cache_folder, cpu_flags, cpu_info

_BASE = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16")
_NEEDED = {"cpu": _BASE, "rounded": (*_BASE, "avx512_vnni")}
"""What the processor must be able to do for each source file beside this one."""
OFF = "HEADSTART_KERNELS"
"""Set to 0 in the environment, it keeps everything on torch's operations."""
SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "f32"}
"""What the kernels' names end in, by the numbers that they take."""
_FLAGS = ("-O3", "-std=c++17", "-march=native", "-fopenmp", "-fPIC", "-fvisibility=hidden", "-w")
_SECONDS = 120


class KernelsUnavailable(UserWarning):
    """The processor could run the kernels, but they could not be compiled."""


@cache
def library(name: str = "cpu") -> ctypes.CDLL | None:
    """The compiled kernels of `name`.cpp; None where they cannot run (another processor, no compiler, no GNU OpenMP in
    torch)."""
    if os.environ.get(OFF) == "0" or not cpu_flags().issuperset(_NEEDED[name]):
        return None
    compiler, openmp = _compiler(), torch_openmp()
    if compiler is None or openmp is None:
        return None
    try:
        return _loaded(_source(name), compiler, openmp)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        warnings.warn(
            f"headstart's CPU kernels could not be compiled with {compiler}, so torch's operations are used, which are "
            f"slower: {str(said).strip()[-300:]}",
            KernelsUnavailable,
            stacklevel=2,
        )
        return None


def has_kernels(dtype: torch.dtype, name: str = "cpu") -> bool:
    """Whether the kernels of `name`.cpp run here, for numbers of this dtype."""
    return dtype in SUFFIXES and library(name) is not None


@cache
def kernel(function: str, dtype: torch.dtype, *arguments: Any, returns: Any = None, name: str = "cpu") -> Any:
    """A kernel of `name`.cpp for numbers of `dtype`; `arguments` and what it `returns` are types of C."""
    kernels = library(name)
    assert kernels is not None, "ask has_kernels first"
    found = getattr(kernels, f"{function}_{SUFFIXES[dtype]}")
    found.argtypes, found.restype = arguments, returns
    return found


def _compiler() -> str | None:
    """The C++ compiler: the one in CXX, else g++."""
    return shutil.which(os.environ.get("CXX") or "g++")


def torch_openmp() -> Path | None:
    """torch's own OpenMP library. Linked to it, the kernels run on torch's threads instead of a second set."""
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return found[0] if found else None


def _source(name: str) -> Path:
    return Path(__file__).with_name(f"{name}.cpp")


def _loaded(source: Path, compiler: str, openmp: Path) -> ctypes.CDLL:
    path = _compiled(source, compiler, openmp)
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # no library, whatever became of it: once anew
        path.unlink(missing_ok=True)
        return ctypes.CDLL(str(_compiled(source, compiler, openmp)))


def _compiled(source: Path, compiler: str, openmp: Path) -> Path:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=_SECONDS, check=True)
    text = [source.read_text(), *(header.read_text() for header in sorted(source.parent.glob("*.h")))]
    facts = [*text, version.stdout, str(openmp), " ".join(_FLAGS), _processor()]
    digest = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:24]
    try:
        return _compile(cache_folder() / "headstart" / "kernels" / f"{digest}.so", source, compiler, openmp)
    except OSError:  # a cache folder that cannot be written to
        folder = Path(tempfile.mkdtemp(prefix="headstart-"))
        return _compile(folder / f"{digest}.so", source, compiler, openmp)


def _compile(path: Path, source: Path, compiler: str, openmp: Path) -> Path:
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made, linked = Path(folder) / "kernels.o", Path(folder) / "kernels.so"
        for command in (
            [compiler, *_FLAGS, "-c", str(source), "-o", str(made)],
            [compiler, "-shared", str(made), "-o", str(linked), str(openmp)],  # without -fopenmp: one OpenMP, torch's
        ):
            subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
        linked.replace(path)
    return path


def _processor() -> str:
    """What -march=native depends on."""
    facts = cpu_info()
    return "\n".join(facts.get(name, "") for name in ("vendor_id", "cpu family", "model", "model name", "flags"))
