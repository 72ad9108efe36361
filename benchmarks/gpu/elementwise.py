"""What a decoder layer does between its products: the fused operations against torch's own, on the device.

Shapes: R rows, H hidden, I intermediate, Hq query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch

from benchmarks.gpu.session import Session
from infer.kernels.gpu import elementwise
from infer.kernels.gpu.elementwise import NormForm
from infer.machine import dtype_name

ELEMENTWISE_TOLERANCE = {torch.bfloat16: 2e-3, torch.float32: 2e-6, torch.float16: 3e-4}
"""Norm of the difference over the reference's norm: roundings are torch's own, but for the last bit of a float32 on the
way, which a rounding to half precision makes a whole step now and then."""
EPSILON = 1e-5

Outputs = Sequence[torch.Tensor]
Run = Callable[[], Outputs]


def check_elementwise(session: Session) -> None:
    for dtype, tolerance in ELEMENTWISE_TOLERANCE.items():
        errors: dict[str, list[float]] = {}
        for name, run, reference in _cases(session, dtype):
            if session.is_late("kernels"):
                session.skip("kernels", f"out of time before {name}, {dtype_name(dtype)}")
                break
            errors.setdefault(name, []).append(_error(run, reference))
        for name, found in errors.items():
            passed = all(error <= tolerance for error in found)  # NaN is no pass
            worst = max(found, key=lambda error: math.inf if math.isnan(error) else error)
            detail = f"{len(found)} shapes, largest relative error {worst:.1e} (tolerance {tolerance:.0e})"
            session.check(f"{name}, {dtype_name(dtype)}", passed, detail)


def _cases(session: Session, dtype: torch.dtype) -> Iterator[tuple[str, Run, Run]]:
    """(operation, the kernel's run, the reference's)."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(session.device, dtype)

    for num_rows, hidden in product((1, 3, 33), session.sizes.elementwise_widths):
        states, residual, weight = random(num_rows, hidden), random(num_rows, hidden), random(hidden)
        for form in NormForm:
            yield "norm", *_norms(states, weight, form)
        yield "sum and norm", *_sums(states, residual, weight)
        yield "gate", *_gates(random(num_rows, 2 * hidden))
    for num_rows, (num_heads, num_kv_heads, size) in product((1, 3, 33), ((9, 3, 64), (4, 4, 80), (8, 1, 128))):
        projected = random(num_rows, (num_heads + 2 * num_kv_heads) * size)
        yield "rotation into the cache", *_rotations(projected, random(2, num_rows, size), num_kv_heads)


def _norms(states: torch.Tensor, weight: torch.Tensor, form: NormForm) -> tuple[Run, Run]:
    return (
        lambda: [elementwise.rms_norm(states, weight, epsilon=EPSILON, form=form)],
        lambda: [elementwise.rms_norm_reference(states, weight, epsilon=EPSILON, form=form)],
    )


def _sums(states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[Run, Run]:
    return (
        lambda: elementwise.add_rms_norm(states, residual, weight, epsilon=EPSILON),
        lambda: elementwise.add_rms_norm_reference(states, residual, weight, epsilon=EPSILON),
    )


def _gates(gate_and_up: torch.Tensor) -> tuple[Run, Run]:
    return (
        lambda: [elementwise.silu_mul(gate_and_up)],
        lambda: [elementwise.silu_mul_reference(gate_and_up)],
    )


def _rotations(projected: torch.Tensor, turns: torch.Tensor, num_kv_heads: int) -> tuple[Run, Run]:
    """Rows go to columns in reverse order; the columns between them stay as they are."""
    num_rows, size = turns.shape[1:]
    columns = torch.arange(2 * num_rows - 1, -1, -2, device=projected.device)

    def run(operation: Callable[..., torch.Tensor]) -> Outputs:
        keys, values = torch.full((2, num_kv_heads, 2 * num_rows, size), 7.0).to(projected)
        return [operation(projected, turns[0], turns[1], keys, values, columns), keys, values]

    return lambda: run(elementwise.rotate_and_store), lambda: run(elementwise.rotate_and_store_reference)


def _error(run: Run, reference: Run) -> float:
    """The largest of the outputs' relative errors; NaN where one is not written everywhere."""
    expected = list(reference())
    poison = [torch.full_like(each, math.nan) for each in expected for _ in range(3)]
    del poison
    found = list(run())
    errors = [
        float(torch.linalg.vector_norm(one.double() - other.double()) / torch.linalg.vector_norm(other.double()))
        for one, other in zip(found, expected, strict=True)
    ]
    return math.nan if any(map(math.isnan, errors)) else max(errors)
