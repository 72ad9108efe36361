"""Key/value storage: one preallocated block of columns a request, shared by all layers.

A *slot* is a request's place in the cache; a *column* is one token's place within a slot. Committed tokens fill a
slot's columns from 0 in text order, so column = position; rows of an unverified tree lie in the columns after them
until `commit` moves an accepted path down. Knows nothing about requests, trees or models.

Shapes: Y layers, K key/value heads, B slots, S columns a slot, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class SlotCache:
    """Keys [Y, K, B*S, D] and values [Y, K, B*S, Dv] of `num_slots` requests of at most `num_columns` tokens."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_heads: int,
        key_size: int,
        value_size: int,
        num_slots: int,
        num_columns: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.num_slots = num_slots
        self.num_columns = num_columns
        shape = (num_layers, num_heads, num_slots * num_columns)
        # Zeros, not empty: masked columns are multiplied by a weight of zero, and 0 * NaN is NaN.
        self.keys = torch.zeros((*shape, key_size), dtype=dtype, device=device)
        self.values = torch.zeros((*shape, value_size), dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def write(self, layer: int, columns: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the rows `keys` [K, R, D] and `values` [K, R, Dv] at the flat `columns` [R] (slot * S + column)."""
        self.keys[layer].index_copy_(1, columns, keys)
        self.values[layer].index_copy_(1, columns, values)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of one layer's keys [K, B*S, D] and values [K, B*S, Dv]."""
        return self.keys[layer], self.values[layer]

    def read(self, layer: int, first_slot: int, last_slot: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the first `length` columns of a range of slots: [B, K, length, D] and [B, K, length, Dv]."""
        return self.read_range(layer, first_slot, last_slot, 0, length)

    def read_range(
        self, layer: int, first_slot: int, last_slot: int, start: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the columns from `start` to before `end` of a range of slots."""
        return (
            self._slots(self.keys[layer], first_slot, last_slot)[:, :, start:end],
            self._slots(self.values[layer], first_slot, last_slot)[:, :, start:end],
        )

    def _slots(self, rows: torch.Tensor, first_slot: int, last_slot: int) -> torch.Tensor:
        num_heads, _, size = rows.shape
        by_slot = rows.view(num_heads, self.num_slots, self.num_columns, size)
        return by_slot[:, first_slot : last_slot + 1].transpose(0, 1)

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the rows of the first `num_tokens` columns of slot `source` to those of slot `target`."""
        first, last = source * self.num_columns, target * self.num_columns
        for storage in (self.keys, self.values):
            storage[:, :, last : last + num_tokens] = storage[:, :, first : first + num_tokens]

    def commit(self, slot: int, num_committed: int, columns: Sequence[int]) -> None:
        """Move the rows at `columns` of a slot, an accepted path in order, to the columns right after the committed.

        Columns ascend, so those that must move are the last ones, and the rows are gathered before any is written.
        """
        num_in_place = 0
        while num_in_place < len(columns) and columns[num_in_place] == num_committed + num_in_place:
            num_in_place += 1
        moved = columns[num_in_place:]
        if not moved:
            return
        base = slot * self.num_columns
        sources = torch.tensor([base + column for column in moved], device=self.keys.device)
        first = base + num_committed + num_in_place
        for storage in (self.keys, self.values):
            storage[:, :, first : first + len(moved)] = storage.index_select(2, sources)
