"""Tensors that stand for those of a GPU in tests on a CPU: whatever is made of them is one of them, and each time the
host asks for their values, for which it would wait, that is written down."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from train import updater

READS = {
    *("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__array__", "__contains__"),
    *("equal", "allclose", "is_nonzero", "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive"),
    *("bincount", "_unique2"),
}
"""Functions that bring values to the host, or make a tensor whose size depends on values."""

_TREE = Path(__file__).resolve().parent.parent.parent


class Reads:
    """Where values were asked for: `file:function name`."""

    def __init__(self) -> None:
        self.places: list[str] = []

    def of(self, folder: str) -> list[str]:
        return [place for place in self.places if place.startswith(folder)]


_reads: list[Reads] = []


class OnDevice(torch.Tensor):
    """See the module."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if _reads and (name in READS or (name in ("__getitem__", "__setitem__") and _is_mask(args[1]))):
            _reads[-1].places.append(f"{_place()} {name}")
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return result.as_subclass(torch.Tensor) if name in ("cpu", "numpy") else result


def on_device(tensor: torch.Tensor, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Stands for `heads.transfer.sent`."""
    return (tensor if dtype is None else tensor.to(dtype)).as_subclass(OnDevice)


def move_to_device(module: nn.Module) -> None:
    """A module's parameters and buffers."""
    for one in module.modules():
        for name, parameter in one._parameters.items():
            if parameter is not None:
                one._parameters[name] = nn.Parameter(parameter.data.as_subclass(OnDevice))
        for name, buffer in one._buffers.items():
            if buffer is not None:
                one._buffers[name] = buffer.as_subclass(OnDevice)


@contextmanager
def reads_written_down(patch: pytest.MonkeyPatch) -> Iterator[Reads]:
    """Within, all that training sends to its device is one of these tensors."""
    for module in ("heads.base", "heads.unroll", "train.batch", "train.unroll", "train.losses", "train.features.rows"):
        patch.setattr(f"{module}.sent", on_device)
    gradient_of = updater.gradient_of
    patch.setattr(updater, "gradient_of", lambda parameter: on_device(gradient_of(parameter)))  # autograd's are plain
    _reads.append(Reads())
    try:
        yield _reads[-1]
    finally:
        _reads.pop()
        patch.undo()


def _is_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype is torch.bool for part in parts)


def _place() -> str:
    """The innermost frame of this project's packages."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_TREE) and not path.is_relative_to(_TREE / "tests"):
            return f"{path.relative_to(_TREE)}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "tests"
