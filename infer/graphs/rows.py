"""Metadata of a forward of static shape, as tensors: nothing of it is known to the host.

Shapes: B requests, N rows of each, R = B * N rows (or more, where a forward's width is fixed), T tree columns, Hq query
heads, D head size.
"""

from __future__ import annotations

from typing import Unpack

import torch

from infer import fixed
from infer.cache import SlotCache
from infer.graphs.trees import packed_bits
from infer.kernels.gpu.path_attention import PathRows, path_attention
from infer.kernels.gpu.tree_attention import TreeRows, tree_attention
from infer.rows import AttentionSettings, Rows


class StaticRows(Rows):
    """Rows that lie in tensors, and what each of them sees."""

    def __init__(
        self,
        cache: SlotCache,
        *,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        columns: torch.Tensor,
        seen: TreeRows | PathRows,
    ) -> None:
        self.cache = cache
        self.token_ids, self.positions, self.columns = token_ids, positions, columns
        self._seen = seen

    def attend(self, query: torch.Tensor, layer: int, **settings: Unpack[AttentionSettings]) -> torch.Tensor:
        keys, values = self.cache.layer(layer)
        scaling, window, softcap = settings.get("scaling"), settings.get("sliding_window"), settings.get("softcap")
        if isinstance(self._seen, PathRows):
            return path_attention(query, keys, values, self._seen, scaling=scaling, window=window, softcap=softcap)
        return tree_attention(query, keys, values, self._seen, scaling=scaling, window=window, softcap=softcap)


def tree_rows(
    cache: SlotCache,
    *,
    slots: torch.Tensor,
    prefixes: torch.Tensor,
    token_ids: torch.Tensor,
    depths: torch.Tensor,
    sees: torch.Tensor,
    max_prefix: int,
    offset: int = 0,
    has_windows: bool = False,
) -> StaticRows:
    """Rows [B, N] at positions `prefixes` [B] + `depths` [B, N], stored in the columns from `prefixes` + `offset` on,
    which see their slot's prefix and, of the columns behind it, those in `sees` [B, N, offset + N]."""
    num_requests, num_rows = token_ids.shape
    bases = slots * cache.num_columns
    places = torch.arange(num_rows, device=slots.device) + offset
    positions = prefixes[:, None] + depths
    assert not (has_windows and offset), "windows need the position of every column"
    seen = TreeRows(
        row_starts=_row_starts(num_requests, num_rows, slots.device),
        bases=bases,
        prefixes=prefixes.to(torch.int32),
        positions=positions.flatten().to(torch.int32),
        ancestors=packed_bits(sees.flatten(0, 1)),
        column_positions=positions.to(torch.int32) if has_windows else None,
        max_rows=num_rows,
        max_prefix=max_prefix,
        num_tree_columns=offset + num_rows,
    )
    return StaticRows(
        cache,
        token_ids=token_ids.flatten(),
        positions=positions.flatten(),
        columns=((bases + prefixes)[:, None] + places).flatten(),
        seen=seen,
    )


def path_rows(
    cache: SlotCache,
    *,
    slots: torch.Tensor,
    prefixes: torch.Tensor,
    token_ids: torch.Tensor,
    depths: torch.Tensor,
    sees: torch.Tensor,
    max_prefix: int,
    row_width: int,
) -> StaticRows:
    """The same rows, in a forward of exactly `row_width`, whose attention is the same to the bit wherever a row's path
    lies (`infer.fixed`). Rows that fill it up are the last request's, and repeat its first."""
    num_requests, num_rows = token_ids.shape
    bases = slots * cache.num_columns
    places = torch.arange(num_rows, device=slots.device)
    positions = prefixes[:, None] + depths
    splits = fixed.splits(positions)
    tails = path_columns(prefixes, depths, sees, splits)
    filler = row_width - num_requests * num_rows
    assert filler >= 0, f"{num_requests} x {num_rows} rows do not fit into {row_width}"
    order = torch.arange(row_width, device=slots.device)
    order = torch.where(order < num_requests * num_rows, order, (num_requests - 1) * num_rows)
    columns = ((bases + prefixes)[:, None] + places).flatten()

    def filled(rows: torch.Tensor) -> torch.Tensor:
        return rows.flatten(0, 1)[order]

    starts = _row_starts(num_requests, num_rows, slots.device)
    is_last = torch.arange(num_requests + 1, device=slots.device) == num_requests
    seen = PathRows(
        row_starts=starts + is_last.to(torch.int32) * filler,
        bases=bases,
        positions=filled(positions).to(torch.int32),
        splits=filled(splits).to(torch.int32),
        tails=filled(tails).to(torch.int32),
        max_rows=num_rows + filler,
        max_prefix=max_prefix,
    )
    return StaticRows(
        cache,
        token_ids=filled(token_ids),
        positions=filled(positions),
        columns=columns[order],
        seen=seen,
    )


def path_columns(
    prefixes: torch.Tensor, depths: torch.Tensor, sees: torch.Tensor, splits: torch.Tensor
) -> torch.Tensor:
    """Columns, in the slot, of the positions from `splits` [B, N] to each row's own [B, N, TAIL]; beyond, a row's own
    column."""
    num_rows = depths.shape[1]
    rows = torch.arange(num_rows, device=depths.device)
    # The row of a path at each depth: exactly one of those that a row sees has it, up to the row's own.
    steps = torch.arange(fixed.TAIL, device=depths.device)
    at_depth = sees[..., None] & (depths[:, None, :, None] == steps)  # [B, N, N, TAIL]
    on_path = (at_depth * rows[:, None]).sum(dim=2)  # [B, N, TAIL]
    positions = splits[..., None] + steps
    depth = positions - prefixes[:, None, None]  # of each position of the tail; negative in the prefix
    in_tree = on_path.gather(2, depth.clamp(0, fixed.TAIL - 1))
    columns = torch.where(depth < 0, positions, prefixes[:, None, None] + in_tree)
    own = prefixes[:, None] + rows
    beyond = depth > depths[..., None]
    return torch.where(beyond, own[..., None], columns)


def _row_starts(num_requests: int, num_rows: int, device: torch.device) -> torch.Tensor:
    return torch.arange(num_requests + 1, dtype=torch.int32, device=device) * num_rows
