"""What tests of the GPU kernels share: requests with trees (prefixes and paths in a cache whose every other column is
NaN), memory that starts as NaN, planted faults, and Triton loaded anew."""

from __future__ import annotations

import contextlib
import importlib.util
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from infer.fixed import TAIL, split
from infer.graphs.trees import packed_bits
from infer.kernels import gpu
from infer.kernels.gpu.path_attention import PathRows
from infer.kernels.gpu.tree_attention import TreeRows


@dataclass(frozen=True)
class Scene:
    """paths: of each row, the rows of its request on the way to it, itself the last. prefixes, bases: of each row's
    request."""

    keys: torch.Tensor
    values: torch.Tensor
    query: torch.Tensor
    tree: TreeRows
    path: PathRows
    paths: list[list[int]]
    prefixes: list[int]
    bases: list[int]


def some_paths(rng: random.Random, num_rows: int, most: int = 16) -> list[list[int]]:
    """A random tree: row 0 is the root, and no path is longer than `most`."""
    paths = [[0]]
    for row in range(1, num_rows):
        paths.append([*rng.choice([path for path in paths if len(path) < most]), row])
    return paths


def scene(
    requests: Sequence[tuple[int, int, int]],
    *,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    max_prefix: int | None = None,
    num_columns: int = 640,
    nobodys: int = 1,
    seed: int = 0,
) -> Scene:
    """requests: slot, prefix and rows of each. heads: of queries and of keys. sizes: of keys and of values. `nobodys`
    rows at the end belong to no request."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    num_slots = max(slot for slot, _, _ in requests) + 1
    keys, values = (torch.full((num_kv_heads, num_slots * num_columns, size), torch.nan, dtype=dtype) for size in sizes)
    num_rows = sum(rows for _, _, rows in requests) + nobodys
    max_rows = max(rows for _, _, rows in requests)
    sees = torch.zeros((num_rows, max_rows), dtype=torch.bool)
    column_positions = torch.zeros((len(requests), max_rows), dtype=torch.int32)
    starts, paths, prefixes, bases, positions, tails = [0], [], [], [], [], []
    for request, (slot, prefix, rows) in enumerate(requests):
        base = slot * num_columns
        for storage in (keys, values):
            numbers = torch.randn((num_kv_heads, prefix + rows, storage.shape[2]), generator=generator)
            storage[:, base : base + prefix + rows] = numbers.to(dtype)
        for row, path in enumerate(some_paths(rng, rows)):
            sees[starts[-1] + row, path] = True
            position = prefix + len(path) - 1
            column_positions[request, row] = position
            columns = [*range(prefix), *(prefix + step for step in path)]
            tails.append(filled(columns[split(position) :]))
            positions.append(position)
            paths.append(path)
            prefixes.append(prefix)
            bases.append(base)
        starts.append(starts[-1] + rows)
    most = max(prefix for _, prefix, _ in requests) if max_prefix is None else max_prefix
    positions += [0] * nobodys
    tails += [[0] * TAIL] * nobodys
    shared = {
        "row_starts": torch.tensor(starts, dtype=torch.int32),
        "bases": torch.tensor([slot * num_columns for slot, _, _ in requests]),
        "positions": torch.tensor(positions, dtype=torch.int32),
        "max_rows": max_rows,
        "max_prefix": most,
    }
    tree = TreeRows(
        **shared,
        prefixes=torch.tensor([prefix for _, prefix, _ in requests], dtype=torch.int32),
        ancestors=packed_bits(sees),
        column_positions=column_positions,
        num_tree_columns=max_rows,
    )
    path = PathRows(
        **shared,
        splits=torch.tensor([split(position) for position in positions], dtype=torch.int32),
        tails=torch.tensor(tails, dtype=torch.int32),
    )
    # As a model hands them over: heads of a row side by side.
    query = torch.randn((num_rows, num_heads, sizes[0]), generator=generator).to(dtype).transpose(0, 1)
    return Scene(keys, values, query, tree, path, paths, prefixes, bases)


def filled(tail: list[int]) -> list[int]:
    return [*tail, *[tail[-1]] * (TAIL - len(tail))]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Sums are taken in float32 in another order; in half precision weights are rounded too, as everywhere."""
    assert found.dtype == expected.dtype
    tolerance = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}[found.dtype]
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * max(1.0, float(expected.abs().max())))


def random_tensor(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


@contextlib.contextmanager
def nan_memory() -> Iterator[None]:
    """New memory holds what would be noticed: NaN, or numbers beyond any token, row or column."""

    def poisoned(new: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            memory = new(*args, **kwargs)
            if memory.dtype is torch.bool:
                return memory.fill_(True)
            return memory.fill_(torch.nan if memory.is_floating_point() else 2**30)

        return make

    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like"):
            patch.setattr(torch, name, poisoned(getattr(torch, name)))
        yield


@contextlib.contextmanager
def another_triton() -> Iterator[None]:
    """Inside, Triton and our kernels are loaded anew: whether it compiles or interprets is settled as it is loaded, and
    transformers may have loaded it."""
    kept = _forget_triton()
    try:
        yield
    finally:
        _forget_triton()
        sys.modules.update(kept)


def _forget_triton() -> dict[str, ModuleType]:
    """What was loaded. Our package forgets its kernels too: `from package import module` would find them there."""
    loaded = {name: module for name, module in sys.modules.items() if _is_triton(name)}
    for name in loaded:
        del sys.modules[name]
        if name.startswith(gpu.__name__):
            vars(gpu).pop(name.rpartition(".")[2], None)
    return loaded


def _is_triton(name: str) -> bool:
    """But for its library, which cannot be loaded twice."""
    is_kernel = name.startswith("infer.kernels.gpu.") and name.endswith("_triton")
    return is_kernel or (name.split(".")[0] == "triton" and not name.startswith("triton._C"))


def with_fault(name: str, old: str, new: str, folder: Path) -> ModuleType:
    """A module of kernels with a fault planted: `new` wherever its source says `old`."""
    spec = importlib.util.find_spec(f"infer.kernels.gpu.{name}")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    assert old in source, f"{name} does not say {old!r}"
    path = folder / f"{name}_faulty.py"
    path.write_text(source.replace(old, new), encoding="utf-8")
    faulty = importlib.util.spec_from_file_location(path.stem, path)
    assert faulty is not None
    assert faulty.loader is not None
    module = importlib.util.module_from_spec(faulty)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, path.stem, module)  # where dataclasses look for it
        faulty.loader.exec_module(module)
    return module
