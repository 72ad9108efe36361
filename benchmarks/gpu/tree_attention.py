"""The attention of static rounds against its references, on the device, over odd shapes.

Every column that no row sees holds NaN, and so does the memory that outputs are given.

Shapes: R packed rows, Hq query heads, K key/value heads, D head size, Dv of values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.session import Session
from benchmarks.gpu.sizes import Sizes
from infer.fixed import TAIL, split
from infer.graphs.trees import packed_bits
from infer.kernels.gpu import runs_triton
from infer.kernels.gpu.path_attention import (
    PathRows,
    path_attention,
    path_attention_blocks,
    path_attention_reference,
)
from infer.kernels.gpu.tree_attention import (
    TreeRows,
    tree_attention,
    tree_attention_reference,
    tree_attention_sdpa,
)
from infer.machine import dtype_name

TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 2e-5, torch.float16: 3e-3}
"""Norm of the difference over the reference's norm: the order of sums in float32; weights and outputs rounded in half
precision (2**-11 and 2**-8 each)."""
NUM_COLUMNS = 640
NUM_SLOTS = 5
DEEPEST = 8

Attention = Callable[..., torch.Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class TreeCase:
    """Requests in some slots, each with a prefix and a tree: `parents` of its nodes as rows, so node 1 is row 1 and a
    parent of 0 is the root. num_spare: packed rows that are nobody's."""

    slots: tuple[int, ...]
    prefixes: tuple[int, ...]
    parents: tuple[tuple[int, ...], ...]
    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    window: int | None
    softcap: float | None
    num_spare: int
    dtype: torch.dtype

    def describe(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.key_size}/{self.value_size}"
        nodes = [len(parents) for parents in self.parents]
        return f"{heads}, window {self.window}, softcap {self.softcap}, nodes {nodes}, prefixes {self.prefixes}"

    def paths(self) -> Iterator[tuple[int, int, list[int]]]:
        """(request, row, rows from the root to it) of all rows, in packed order."""
        for request, parents in enumerate(self.parents):
            paths = [[0]]
            for row, parent in enumerate(parents, start=1):
                paths.append([*paths[parent], row])
            yield from ((request, row, path) for row, path in enumerate(paths))


@dataclass(frozen=True, kw_only=True, eq=False)
class Storage:
    """keys [K, slots * columns, D], values [K, slots * columns, Dv], and a query [Hq, R, D] for every packed row."""

    keys: torch.Tensor
    values: torch.Tensor
    query: torch.Tensor


def check_tree_attention(session: Session) -> None:
    """Each kernel, and where Triton runs each fallback too."""
    attentions: dict[str, tuple[Attention, Attention]] = {
        "tree attention": (tree_attention, tree_attention_reference),
        "path attention": (path_attention, path_attention_reference),
    }
    if runs_triton(session.device):
        attentions["tree attention, fallback"] = (tree_attention_sdpa, tree_attention_reference)
        attentions["path attention, fallback"] = (path_attention_blocks, path_attention_reference)
    errors: dict[tuple[str, torch.dtype], dict[TreeCase, float]] = {
        (name, dtype): {} for name in attentions for dtype in TOLERANCE
    }
    same: dict[torch.dtype, list[bool]] = {dtype: [] for dtype in TOLERANCE}
    generator = torch.Generator().manual_seed(0)
    for num_done, case in enumerate(tree_cases(session.sizes)):
        if session.is_late("kernels"):
            session.skip("kernels", f"out of time after {num_done} of {session.sizes.kernel_cases} cases of attention")
            break
        storage = random_storage(case, session.device, generator)
        for name, (kernel, reference) in attentions.items():
            errors[name, case.dtype][case] = kernel_error(case, storage, kernel, reference)
        same[case.dtype].append(is_same_alone(case, storage))
    for (name, dtype), found in errors.items():
        session.check_errors(f"{name}, {dtype_name(dtype)}", found, TOLERANCE[dtype])
    for dtype, equal in same.items():
        if equal:
            session.check(
                f"path attention, {dtype_name(dtype)}: to the bit wherever a path lies",
                all(equal),
                f"{sum(equal)}/{len(equal)} cases, rows in a tree among others against rows alone",
            )


def tree_cases(sizes: Sizes, seed: int = 0) -> Iterator[TreeCase]:
    """Cycles of coprime length pair every layout of heads with every dtype, window and softcap."""
    generator = np.random.default_rng(seed)
    windows = (None, None, 5, 64)
    for index in range(sizes.kernel_cases):
        num_heads, num_kv_heads, key_size, value_size = sizes.kernel_layouts[index % len(sizes.kernel_layouts)]
        slots = tuple(generator.permutation(NUM_SLOTS)[: 1 + index % 3].tolist())
        yield TreeCase(
            slots=slots,
            prefixes=tuple(int(generator.choice(sizes.prefixes)) for _ in slots),
            parents=tuple(random_parents(generator, int(generator.choice((0, 1, 6, 32, 45)))) for _ in slots),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            key_size=key_size,
            value_size=value_size,
            window=windows[index % len(windows)],
            softcap=20.0 if index % 7 == 6 else None,
            num_spare=index % 2 * 3,
            dtype=list(TOLERANCE)[index % len(TOLERANCE)],
        )


def random_parents(generator: np.random.Generator, num_nodes: int) -> tuple[int, ...]:
    """Rows below which the nodes of a tree hang, at most `DEEPEST` deep."""
    parents: list[int] = []
    depths = [0]
    for row in range(1, num_nodes + 1):
        parent = int(generator.integers(0, row))
        parent = parent if depths[parent] < DEEPEST else 0
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return tuple(parents)


def tree_rows_of(case: TreeCase, device: torch.device) -> TreeRows:
    """The rows' metadata, from the definition of a case alone."""
    num_columns = max(len(parents) for parents in case.parents) + 1
    num_rows = sum(len(parents) + 1 for parents in case.parents) + case.num_spare
    sees = torch.zeros((num_rows, num_columns), dtype=torch.bool)
    positions = torch.zeros(num_rows, dtype=torch.int32)
    column_positions = torch.zeros((len(case.slots), num_columns), dtype=torch.int32)
    for place, (request, row, path) in enumerate(case.paths()):
        sees[place, path] = True
        positions[place] = column_positions[request, row] = case.prefixes[request] + len(path) - 1
    return TreeRows(
        row_starts=_row_starts(case, device),
        bases=_bases(case, device),
        prefixes=torch.tensor(case.prefixes, dtype=torch.int32, device=device),
        positions=positions.to(device),
        ancestors=packed_bits(sees).to(device),
        column_positions=column_positions.to(device),
        max_rows=num_columns,
        max_prefix=max(case.prefixes) + 3,  # a bound need not be reached
        num_tree_columns=num_columns,
    )


def path_rows_of(case: TreeCase, device: torch.device) -> PathRows:
    num_rows = sum(len(parents) + 1 for parents in case.parents) + case.num_spare
    positions, splits = torch.zeros((2, num_rows), dtype=torch.int32)
    tails = torch.zeros((num_rows, TAIL), dtype=torch.int32)
    for place, (request, _, path) in enumerate(case.paths()):
        columns = _path_columns(case, request, path)
        positions[place] = len(columns) - 1
        splits[place] = split(len(columns) - 1)
        tail = columns[int(splits[place]) :]
        tails[place, : len(tail)] = torch.tensor(tail, dtype=torch.int32)
    return PathRows(
        row_starts=_row_starts(case, device),
        bases=_bases(case, device),
        positions=positions.to(device),
        splits=splits.to(device),
        tails=tails.to(device),
        max_rows=max(len(parents) for parents in case.parents) + 1,
        max_prefix=max(case.prefixes) + 3,
    )


def _path_columns(case: TreeCase, request: int, path: Sequence[int]) -> list[int]:
    """Columns, in the slot, of positions 0 and on of a row's path."""
    prefix = case.prefixes[request]
    return [*range(prefix), *(prefix + row for row in path)]


def _row_starts(case: TreeCase, device: torch.device) -> torch.Tensor:
    starts = np.cumsum([0, *(len(parents) + 1 for parents in case.parents)])
    return torch.tensor(starts.tolist(), dtype=torch.int32, device=device)


def _bases(case: TreeCase, device: torch.device) -> torch.Tensor:
    return torch.tensor([slot * NUM_COLUMNS for slot in case.slots], dtype=torch.int64, device=device)


def random_storage(case: TreeCase, device: torch.device, generator: torch.Generator) -> Storage:
    """Random values in the columns of prefixes and trees, NaN everywhere else."""
    storages = []
    for size in (case.key_size, case.value_size):
        storage = torch.full((case.num_kv_heads, NUM_SLOTS * NUM_COLUMNS, size), math.nan)
        for slot, prefix, parents in zip(case.slots, case.prefixes, case.parents, strict=True):
            used = storage[:, slot * NUM_COLUMNS : slot * NUM_COLUMNS + prefix + 1 + len(parents)]
            used.copy_(torch.randn(used.shape, generator=generator))
        storages.append(storage.to(device, case.dtype))
    num_rows = sum(len(parents) + 1 for parents in case.parents) + case.num_spare
    query = 2 * torch.randn((case.num_heads, num_rows, case.key_size), generator=generator)
    return Storage(keys=storages[0], values=storages[1], query=query.to(device, case.dtype))


def kernel_error(case: TreeCase, storage: Storage, kernel: Attention, reference: Attention) -> float:
    """Norm of the difference from the reference over the reference's norm; NaN where anything unseen leaked in."""
    device = storage.query.device
    rows = tree_rows_of(case, device) if reference is tree_attention_reference else path_rows_of(case, device)
    settings: dict[str, Any] = {"scaling": None, "window": case.window, "softcap": case.softcap}
    tensors = (storage.query, storage.keys, storage.values)
    expected = reference(*tensors, rows, **settings).double()
    # An allocator hands freed memory out again, so an output that is not written everywhere shows as NaN.
    poison = [torch.full_like(expected.to(storage.query.dtype), math.nan) for _ in range(4)]
    del poison
    output = kernel(*tensors, rows, **settings).double()
    return float(torch.linalg.vector_norm(output - expected) / torch.linalg.vector_norm(expected))


def is_same_alone(case: TreeCase, storage: Storage) -> bool:
    """Whether the deepest rows of a case come out the same, to the bit, alone in a forward of one row, their path in
    place at the beginning of the storage and another bound on prefixes."""
    settings: dict[str, Any] = {"scaling": None, "window": case.window, "softcap": case.softcap}
    device = storage.query.device
    together = path_attention(storage.query, storage.keys, storage.values, path_rows_of(case, device), **settings)
    places = sorted(enumerate(case.paths()), key=lambda each: -len(each[1][2]))[:3]
    for place, (request, _, path) in places:
        base = case.slots[request] * NUM_COLUMNS
        columns = torch.tensor([base + column for column in _path_columns(case, request, path)], device=device)
        keys, values = (each[:, columns].contiguous() for each in (storage.keys, storage.values))
        query = storage.query[:, place : place + 1].contiguous()
        alone = path_attention(query, keys, values, _chain_row(len(columns) - 1, device), **settings)
        if not torch.equal(alone[0], together[place]):
            return False
    return True


def _chain_row(position: int, device: torch.device) -> PathRows:
    """The row of a text's last position, all of it in place."""
    first = split(position)
    tail = [*range(first, position + 1), *[position] * (TAIL - (position + 1 - first))]
    return PathRows(
        row_starts=torch.tensor([0, 1], dtype=torch.int32, device=device),
        bases=torch.zeros(1, dtype=torch.int64, device=device),
        positions=torch.tensor([position], dtype=torch.int32, device=device),
        splits=torch.tensor([first], dtype=torch.int32, device=device),
        tails=torch.tensor([tail], dtype=torch.int32, device=device),
        max_rows=1,
        max_prefix=position + 1,
    )
