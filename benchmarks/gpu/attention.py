"""The attention of ordinary rounds against a float64 reference, over ragged groups.

Shapes: R packed rows, Hq query heads, K key/value heads, D head size, S cache columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.gpu.session import Session
from benchmarks.gpu.sizes import Sizes
from infer.cache import SlotCache
from infer.machine import dtype_name
from infer.rows import PackedRows, RowGroup, tree_group
from infer.tree import ROOT

# Attention is compared by relative error, norm over norm. In float32 only the order of sums differs from the reference,
# and any leaked column is far above it. In bfloat16 a kernel rounds weights and outputs (2**-9 each); softcapped scores
# of up to 20 are themselves rounded, as in the stock forward, so their weights are off by a few per cent.
ATTENTION_TOLERANCE = {
    (torch.float32, False): 2e-5,
    (torch.float32, True): 2e-5,
    (torch.bfloat16, False): 1e-2,
    (torch.bfloat16, True): 3e-2,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionCase:
    groups: tuple[RowGroup, ...]
    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None
    softcap: float | None

    def describe(self) -> str:
        return (
            f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_size}, "
            f"window {self.window}, softcap {self.softcap}, rows {[len(group.tokens) for group in self.groups]}, "
            f"prefixes {[group.prefix for group in self.groups]}"
        )


def attention_cases(sizes: Sizes, seed: int = 0) -> Iterator[AttentionCase]:
    """Ragged groups in a random subset of slots. Cycles of coprime length pair every head shape, size and window."""
    generator = np.random.default_rng(seed)
    head_sizes, windows = (64, 128, 16, 80, 17), (None, 4, 64)
    for index in range(sizes.attention_cases):
        num_heads, num_kv_heads = sizes.head_shapes[index % len(sizes.head_shapes)]
        window = windows[index % len(windows)]
        slots = generator.permutation(6)[: generator.integers(1, 5)].tolist()
        yield AttentionCase(
            groups=tuple(random_group(generator, slot, sizes.prefixes) for slot in slots),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_sizes[index % len(head_sizes)],
            window=window,
            softcap=20.0 if index % 7 == 6 else None,
        )


def random_group(generator: np.random.Generator, slot: int, prefixes: Sequence[int]) -> RowGroup:
    """A chain, a tree behind a chain, or the second level of a tree whose first is in the cache already."""
    prefix = int(generator.choice(prefixes))
    kind = generator.integers(0, 4)
    if kind == 0:
        return RowGroup(slot=slot, prefix=prefix, tokens=[7] * int(generator.choice((1, 2, 7, 33))))
    num_nodes = int(generator.choice((1, 5, 16, 31)))
    if kind == 3:
        offset = int(generator.integers(1, 9))
        ancestors = np.zeros((num_nodes, offset + num_nodes), dtype=bool)
        ancestors[np.arange(num_nodes), generator.integers(0, offset, num_nodes)] = True
        ancestors[np.arange(num_nodes), offset + np.arange(num_nodes)] = True
        return RowGroup(
            slot=slot,
            prefix=prefix,
            offset=offset,
            offset_depths=[0] * offset,
            tokens=[7] * num_nodes,
            depths=[1] * num_nodes,
            ancestors=ancestors,
        )
    parents = [int(generator.integers(ROOT, node)) for node in range(num_nodes)]
    return tree_group(slot, prefix, [7] * int(generator.integers(1, 4)), [7] * num_nodes, parents)


def visible_columns(group: RowGroup, row: int, window: int | None) -> list[int]:
    """Columns of its slot that a row sees, from the definition of a group alone."""
    tail = range(row + 1) if group.ancestors is None else np.flatnonzero(group.ancestors[row]).tolist()
    columns = [*range(group.prefix), *(group.prefix + column for column in tail)]
    if window is None:
        return columns

    own_depths = range(len(group.tokens)) if group.depths is None else group.depths
    positions = [*range(group.prefix), *(group.prefix + depth for depth in (*group.offset_depths, *own_depths))]
    own = positions[group.prefix + group.offset + row]
    return [column for column in columns if positions[column] > own - window]


def fill_cache(cache: SlotCache, rows: PackedRows, generator: torch.Generator) -> None:
    """Random values where rows look; large but finite ones in columns that a kernel reads and no row of the slot sees;
    NaN in everything that must never be read."""
    for storage in (cache.keys, cache.values):
        by_slot = storage.view(storage.shape[0], storage.shape[1], cache.num_slots, cache.num_columns, -1)
        by_slot.fill_(math.nan)
        inside = by_slot[:, :, rows.first_slot : rows.last_slot + 1, : rows.length]
        inside.fill_(1e3)
        for group in rows.groups:
            used = by_slot[:, :, group.slot, : group.num_columns]
            used.copy_(torch.randn(used.shape, generator=generator))


def reference_attention(query: torch.Tensor, cache: SlotCache, case: AttentionCase) -> torch.Tensor:
    """One row at a time in float64 on the CPU, over the gathered visible columns: [R, Hq, D]."""
    keys, values = (
        storage[0].view(case.num_kv_heads, cache.num_slots, cache.num_columns, -1).cpu().double()
        for storage in (cache.keys, cache.values)
    )
    by_head = query.cpu().double().unflatten(0, (case.num_kv_heads, -1))  # [K, Hq/K, R, D]
    outputs: list[torch.Tensor] = []
    for group in case.groups:
        for row in range(len(group.tokens)):
            columns = visible_columns(group, row, case.window)
            scores = torch.einsum("kgd,ksd->kgs", by_head[:, :, len(outputs)], keys[:, group.slot, columns])
            scores = scores / math.sqrt(case.head_size)
            if case.softcap is not None:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            outputs.append(torch.softmax(scores, dim=-1) @ values[:, group.slot, columns])
    return torch.stack(outputs).flatten(1, 2)


def attention_error(case: AttentionCase, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> float:
    """Norm of attend's difference from the reference, over the reference's norm; NaN if anything unseen leaked in."""
    cache = SlotCache(
        num_layers=1,
        num_heads=case.num_kv_heads,
        key_size=case.head_size,
        value_size=case.head_size,
        num_slots=6,
        num_columns=640,
        dtype=dtype,
        device=device,
    )
    rows = PackedRows(case.groups, cache)
    fill_cache(cache, rows, generator)
    query = 2 * torch.randn(case.num_heads, rows.num_rows, case.head_size, generator=generator)
    query = query.to(device, dtype)
    expected = reference_attention(query, cache, case)
    # An allocator hands freed memory out again, so an output that is not written everywhere shows as NaN.
    poison = [torch.full_like(query, math.nan) for _ in range(4)]
    del poison
    output = rows.attend(query, 0, sliding_window=case.window, softcap=case.softcap)
    error = torch.linalg.vector_norm(output.cpu().double() - expected) / torch.linalg.vector_norm(expected)
    return float(error)


def check_attention(session: Session) -> None:
    for (dtype, softcapped), tolerance in ATTENTION_TOLERANCE.items():
        generator = torch.Generator().manual_seed(0)
        errors: dict[AttentionCase, float] = {}
        for case in attention_cases(session.sizes):
            if (case.softcap is not None) != softcapped:
                continue
            if session.is_late("attention"):
                session.skip("attention", f"out of time after {len(errors)} cases in {dtype_name(dtype)}")
                break
            errors[case] = attention_error(case, dtype, session.device, generator)
        name = f"attention, {dtype_name(dtype)}{', softcapped' if softcapped else ''}"
        session.check_errors(name, errors, tolerance)
