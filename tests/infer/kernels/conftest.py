"""Triton's interpreter, which runs kernels on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from tests.infer.kernels.gpu_scenes import another_triton, nan_memory


@pytest.fixture
def interpreter() -> Iterator[None]:
    """Kernels imported within a test are interpreted."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    with another_triton(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        _repair(patch)
        yield


def _repair(patch: pytest.MonkeyPatch) -> None:
    """What the interpreter of Triton 3.6 cannot do: loop bounds under numpy 2.4; bfloat16, which it takes for whole
    numbers; and products in which an element's bits depend on its own row and column alone."""
    from triton.runtime import interpreter

    patch_tensor, convert = interpreter._patch_lang_tensor, interpreter._convert_float

    def with_index(tensor, scope) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def rounded(data, source, target, rounding_mode):
        if (source.name, target.name) == ("fp32", "bf16"):
            whole = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
            return whole.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        if (source.name, target.name) == ("bf16", "fp32"):
            return (data.astype(np.uint32) << 16).view(np.float32)
        return convert(data, source, target, rounding_mode)

    def dot(self, a, b, d, *_):
        a, b = (self.cast_impl(x, interpreter.tl.float32).data for x in (a, b))
        total = np.zeros_like(d.data)
        for k in range(a.shape[1]):
            total += a[:, k, None] * b[None, k]
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    patch.setattr(interpreter, "_patch_lang_tensor", with_index)
    patch.setattr(interpreter, "_convert_float", rounded)
    patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@pytest.fixture
def nan_filled() -> Iterator[None]:
    """A number that nobody writes is seen."""
    with nan_memory():
        yield
