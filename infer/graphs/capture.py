"""Capturing a computation as a CUDA graph, and refusing what cannot be captured.

A graph replays kernels on fixed addresses: whatever the host looked at while it was captured is frozen. So a
computation that brings a number to the host (a *sync*) is refused before it is captured, with the operation and the
module that asked for it. That check needs no GPU: on a CPU the same operations are seen.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

Pool = Any
"""Memory that graphs share (`torch.cuda.graph_pool_handle`)."""

_TORCH = os.path.dirname(torch.__file__)
_WARM_UPS = 2
"""Runs before a capture, in which libraries allocate their workspaces."""
_ONE_CAPTURE = threading.Lock()
"""Engines of several threads capture on the same stream."""

_ACROSS = "copies a tensor between host and device"
_DATA_DEPENDENT = "makes a tensor whose size depends on values"
_SYNCING = {
    "aten::_local_scalar_dense": "reads a number",
    "aten::item": "reads a number",
    "aten::is_nonzero": "reads a number",
    "aten::equal": "compares whole tensors",
    "aten::allclose": "compares whole tensors",
    "aten::nonzero": _DATA_DEPENDENT,
    "aten::masked_select": _DATA_DEPENDENT,
    "aten::_unique2": _DATA_DEPENDENT,
    "aten::unique_dim": _DATA_DEPENDENT,
    "aten::unique_consecutive": _DATA_DEPENDENT,
    "aten::bincount": _DATA_DEPENDENT,
}


class SyncError(ValueError):
    """A computation waits for the device in its middle, so no graph can replay it."""


class NoSync(TorchDispatchMode):
    """Raises SyncError at the first operation that would make the host wait for `device` (None: for any)."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, OpOverload):  # in inference mode operations come as they were called, made of others
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        why = _sync_of(func, args, kwargs, self._device)
        if why is not None:
            raise SyncError(
                f"{_asking_module()} {why} in the middle of a forward ({func}): that stops the device, and no CUDA "
                "graph can replay it, so this model decodes in ordinary rounds only (graphs=False)"
            )
        return func(*args, **kwargs)


def _sync_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device | None) -> str | None:
    """What an operation does that needs the host; None if nothing."""
    name = func.name().split(".")[0] if hasattr(func, "name") else str(func)
    if name in ("aten::_to_copy", "aten::copy_"):
        return _copy_across(name, args, kwargs)
    if name == "aten::lift_fresh":  # the end of torch.tensor(numbers, device=...), which nothing else shows
        return None if args[0].device.type == "cpu" else "makes a tensor of the host's numbers"
    source = args[0] if args and isinstance(args[0], torch.Tensor) else None
    if device is not None and source is not None and source.device.type != device.type:
        return None  # the host looks at what it has
    if name in _SYNCING:
        return _SYNCING[name]
    if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        indices = [each for each in args[1] if each is not None]
        if any(each.device.type != args[0].device.type for each in indices):
            return _ACROSS
        return _DATA_DEPENDENT if any(each.dtype in (torch.bool, torch.uint8) for each in indices) else None
    if name == "aten::repeat_interleave":  # of a tensor of repeats: the other forms are made of other operations
        return None if kwargs.get("output_size") else _DATA_DEPENDENT
    return None


def _copy_across(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    source, device = (args[1], args[0].device) if name == "aten::copy_" else (args[0], kwargs.get("device"))
    if device is None or torch.device(device).type == source.device.type:
        return None
    return _ACROSS


def _asking_module() -> str:
    """The innermost module whose forward is running, by its class; else the function that asked."""
    frame: FrameType | None = sys._getframe(2)
    function = ""
    while frame is not None:
        code = frame.f_code
        owner = frame.f_locals.get("self")
        is_ours = not code.co_filename.startswith(_TORCH)
        if isinstance(owner, nn.Module) and is_ours:
            return type(owner).__name__
        if not function and is_ours and code.co_name not in ("__torch_dispatch__", "_asking_module"):
            function = code.co_name
        frame = frame.f_back
    return f"{function}()" if function else "something"


def captured(compute: Callable[[], None], device: torch.device, *, pool: Pool | None = None) -> Callable[[], None]:
    """`compute`, which works on fixed tensors, as something to call again and again: on CUDA the replay of its graph
    (in the memory `pool`, if one is given), elsewhere itself.

    It is run a few times on the way, so it must not matter how often it is. Raises SyncError where it cannot be
    captured.
    """
    compute()  # what is made once and kept, like a table of frequencies, may come from the host
    with NoSync(device):
        compute()
    if device.type != "cuda":
        return compute
    with _ONE_CAPTURE, _refused_where_it_fails():
        return _graph_of(compute, device, pool).replay


def _graph_of(compute: Callable[[], None], device: torch.device, pool: Pool | None) -> torch.cuda.CUDAGraph:
    stream, current = _stream_on(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            compute()
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    graphing = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
    with torch.cuda.stream(current), graphing:  # a capture that fails would leave its own stream the current one
        compute()
    return graph


@cache
def _stream_on(device: torch.device) -> torch.cuda.Stream:
    """One for all captures: a library keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream(device)


@contextmanager
def _refused_where_it_fails() -> Iterator[None]:
    """What no check foresees, such as a library that waits by itself, is a refusal too; lack of memory is not."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise SyncError(
            f"no CUDA graph can hold this model's forward ({error}), so it decodes in ordinary rounds only "
            "(graphs=False)"
        ) from error
