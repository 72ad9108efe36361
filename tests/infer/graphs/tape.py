"""A CUDA graph for the CPU: operations recorded once, then run again on the very tensors of the recording.

Whatever Python looked at while it was recorded is frozen, shapes and addresses too, as in a real graph. So decoding
that replays a tape shows what a graph would do, but for memory that a graph uses twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from infer.graphs.capture import Pool


class Tape(TorchDispatchMode):
    """Records every operation while it is the mode."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Sequence[Any], Mapping[str, Any], Any]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._operations.append((func, args, kwargs or {}, result))
        return result

    @torch.inference_mode()
    def replay(self) -> None:
        for func, args, kwargs, recorded in self._operations:
            again = func(*args, **kwargs)
            for new, old in zip(tree_leaves(again), tree_leaves(recorded), strict=True):
                if isinstance(new, torch.Tensor) and new.data_ptr() != old.data_ptr():  # else a view, or in place
                    old.copy_(new)


def taped(compute: Callable[[], None], device: torch.device, *, pool: Pool | None = None) -> Callable[[], None]:
    """In the place of `infer.graphs.capture.captured`."""
    tape = Tape()
    with tape:
        compute()
    return tape.replay
