"""Kernels for GPUs, in Triton, each beside the PyTorch reference that it equals and a fallback that computes the same
in static shapes and without asking the device for a number, so that a CUDA graph can hold either.

    tree_attention   rows of draft trees over their request's prefix and their own ancestors
    path_attention   the same to the bit wherever a row's path lies, and whatever is beside it
    attention_rows   what these two share
    match_walk       the target's own token after every row, and the path of a tree that they accept
    elementwise      norms, gates and rotations, in few launches
    modules          a stock model's modules on these
    *_triton         the kernels themselves; imported where Triton runs and nowhere else

Where there is no Triton, or no GPU that it knows, the fallbacks run. Triton's interpreter runs the kernels on CPUs, for
tests: TRITON_INTERPRET=1, set before they are imported.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec

import torch


def runs_triton(device: torch.device) -> bool:
    """Whether kernels run on `device`: Triton is there and it is a GPU with tensor cores for bfloat16, or it is the CPU
    and Triton interprets."""
    if device.type == "cuda":
        return _has_triton() and not _interprets() and _has_tensor_cores(device)
    return device.type == "cpu" and _interprets() and _has_triton()


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Within it kernels start on `device`: Triton takes the current one, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def _has_tensor_cores(device: torch.device) -> bool:
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)
