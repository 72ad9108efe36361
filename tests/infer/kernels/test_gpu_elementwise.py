"""The fused operations of decoder layers against PyTorch's own, in Triton's interpreter, and compiled for a GPU."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch

from heads.rope import rotary_table
from infer.drafters.fused import _FusedRotary
from infer.kernels.gpu import elementwise
from infer.kernels.gpu.elementwise import (
    HeadNorms,
    NormForm,
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
    rotate_and_store,
    rotate_and_store_reference,
    silu_mul,
    silu_mul_reference,
)
from tests.infer.kernels.gpu_scenes import another_triton, random_tensor

pytestmark = pytest.mark.usefixtures("interpreter", "nan_filled")

DTYPES = list(elementwise.DTYPES)
ULPS = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""One unit in the last place: a float32 that rounds to one side or the other by its last bit."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", NormForm)
@pytest.mark.parametrize("shape", [(1, 32), (3, 5, 7), (2, 129), (1, 1, 1030)])
def test_norms(shape: tuple[int, ...], form: NormForm, dtype: torch.dtype) -> None:
    """To the last bit but where a sum of squares in another order falls on the other side of a rounding: rare, and one
    unit. A tiny row tells what is added to the mean square."""
    hidden, weight = random_tensor(*shape, dtype=dtype), random_tensor(shape[-1], dtype=dtype, seed=1)
    hidden[..., :1, :] *= 1e-3
    found = rms_norm(hidden, weight, epsilon=1e-5, form=form)
    expected = rms_norm_reference(hidden, weight, epsilon=1e-5, form=form)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=2 * ULPS[dtype], atol=1e-7)
    if dtype is not torch.float32:
        assert (found != expected).float().mean() < 0.02
    residual = random_tensor(*shape, dtype=dtype, seed=2)
    summed, normed = add_rms_norm(hidden, residual, weight, epsilon=1e-5, form=form)
    expected_sum, expected = add_rms_norm_reference(hidden, residual, weight, epsilon=1e-5, form=form)
    assert torch.equal(summed, expected_sum)
    torch.testing.assert_close(normed, expected, rtol=2 * ULPS[dtype], atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 2 * 37), (1, 2, 2 * 1025)])
def test_gates(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    both = random_tensor(*shape, dtype=dtype, scale=4.0)
    found, expected = silu_mul(both), silu_mul_reference(both)
    torch.testing.assert_close(found, expected, rtol=2 * ULPS[dtype], atol=1e-7)
    if dtype is not torch.float32:
        assert (found != expected).float().mean() < 0.02


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [None, *NormForm])
@pytest.mark.parametrize(("num_query_heads", "num_key_heads", "size"), [(1, 1, 2), (4, 2, 8), (9, 3, 6), (7, 1, 80)])
def test_rotation_and_the_cache(
    num_query_heads: int, num_key_heads: int, size: int, form: NormForm | None, dtype: torch.dtype
) -> None:
    """To the bit without norms, from rows of a wider tensor, into columns in any order; others stay as they are."""
    num_rows, num_columns = 5, 11
    width = (num_query_heads + 2 * num_key_heads) * size
    projected = random_tensor(num_rows, width + 3, dtype=dtype)[:, :width]
    angles = 6 * torch.rand((num_rows, size), generator=torch.Generator().manual_seed(1))
    columns = torch.tensor([7, 0, 10, 3, 4])
    weights = (random_tensor(size, dtype=dtype, seed=seed) for seed in (2, 3))
    norms = None if form is None else HeadNorms(query=next(weights), key=next(weights), epsilon=1e-5, form=form)
    error = {"rtol": 0.0, "atol": 0.0} if form is None else {"rtol": 4 * ULPS[dtype], "atol": 4 * ULPS[dtype]}
    results = []
    for rotate in (rotate_and_store, rotate_and_store_reference):
        cache = torch.full((2, 3, num_key_heads, num_columns, size), torch.nan, dtype=dtype)
        tables = angles.cos().to(dtype), angles.sin().to(dtype)
        query = rotate(projected, *tables, cache[0, 1], cache[1, 1], columns, norms)
        results.append((query, cache))
    (query, cache), (expected, expected_cache) = results
    assert query.shape == (num_query_heads, num_rows, size)
    torch.testing.assert_close(query, expected, **error)
    torch.testing.assert_close(cache, expected_cache, equal_nan=True, **error)
    torch.testing.assert_close(cache[1], expected_cache[1], rtol=0, atol=0, equal_nan=True)
    assert cache.isnan().float().mean() > 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 10, 128])
def test_rotary_tables(size: int, dtype: torch.dtype) -> None:
    """As the heads' own tables give them, scaled ones too. Positions are every second of some, as a slice has them."""
    positions = torch.tensor([0, 9, 3, 9, 1001, 9, 70000])[::2]
    for scaling in (None, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}):
        table = rotary_table(size, 10000.0, scaling)
        for found, expected in zip(_FusedRotary(table)(positions, dtype), table(positions, dtype), strict=True):
            assert found.shape == expected.shape
            torch.testing.assert_close(found, expected, rtol=2 * ULPS[dtype], atol=1e-6)


# Arguments of each kernel at the sizes of an 8B model: types of those that are not fixed, in order, and the fixed ones.
NORM = {"SIZE": 4096, "BLOCK": 4096, "HAS_RESIDUAL": True, "ROUNDED_FIRST": True, "ONE_MORE": False}
COMPILED = {
    "_rms_norm": (["*", "*", "*", "*", "*", "fp32"], NORM, 8),
    "_silu_mul": (["*", "*", "i32"], {"TILE": 1024}, 4),
    "_rotate_and_store": (
        [*["*", "i32"] * 3, "*i64", "i32", "*", "i32", *["*", "i32", "i32"] * 2, "i32", "i32", "*", "*", "fp32"],
        {"SIZE": 128, "HALF": 64, "HEADS": 8, "HAS_NORMS": True, "ROUNDED_FIRST": True, "ONE_MORE": False},
        4,
    ),
    "_rotary_tables": (
        ["*i64", "i32", "*fp32", "*", "*", "fp32"],
        {"SIZE": 64, "BLOCK": 64},
        1,
    ),
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_kernels_compile_for_a_gpu(dtype: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For sm_90, without one: within the registers of a thread, and with products and sums as two roundings."""
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with another_triton():
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        kernels = import_module("infer.kernels.gpu.elementwise_triton")
        for name, (types, fixed, num_warps) in COMPILED.items():
            kernel = getattr(kernels, name)
            names = [parameter.name for parameter in kernel.params]
            given = iter(f"*{dtype}" if each == "*" else each for each in types)
            compiled = triton.compile(
                ASTSource(
                    fn=kernel,
                    signature={each: "constexpr" if each in fixed else next(given) for each in names},
                    constexprs={(names.index(each),): value for each, value in fixed.items()},
                ),
                target=GPUTarget("cuda", 90, 32),
                options={"num_warps": num_warps, "enable_fp_fusion": False},
            )
            assert next(given, None) is None
            assert compiled.asm["cubin"]
            if name != "_rotary_tables":  # whose cosines are polynomials
                assert "fma.rn.f32" not in compiled.asm["ptx"]
            assert ".local" not in compiled.asm["ptx"] or name == "_rotary_tables"
