"""Packed rows: how tokens of many requests, and all nodes of their trees, travel through one forward as one row.

A `RowGroup` is one request's share: a run of rows that see the request's committed prefix and their own ancestors.
`PackedRows` lays the groups side by side and tells the attention function where each row's keys and values go and
which columns each row sees. It is handed to a stock model as a forward keyword argument.

Shapes: R packed rows, B slots in the range used, N rows a slot after padding, L columns that any row sees, Hq query
heads, K key/value heads, D head size of keys, Dv of values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypedDict, Unpack

import numpy as np
import torch

from heads.block_unroll import Asking
from heads.transfer import sent
from infer.attention import attend
from infer.cache import SlotCache

if TYPE_CHECKING:
    from infer.kernels.paths import RowPaths

LONG_TEXT = 64
"""Rows of a prompt that are worth an attention of their own."""
PACKED_ROWS = "packed_rows"
"""Name of the forward keyword argument under which the metadata reaches the attention function."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowGroup:
    """Rows of one request.

    Row `i` is stored in column `prefix + offset + i`. It sees columns `0 .. prefix-1` and, of the columns from
    `prefix` on, those that `ancestors[i]` [N, offset + N] marks (itself included). `ancestors=None` with offset 0
    means a chain: row `i` sees rows `0 .. i`. `depths[i]` is the row's position minus `prefix`, and `offset_depths`
    [offset] the same of the rows that lie in the columns between.
    """

    slot: int
    prefix: int
    tokens: Sequence[int]
    depths: Sequence[int] | None = None
    ancestors: np.ndarray | None = None
    offset: int = 0
    offset_depths: Sequence[int] = ()

    def __post_init__(self) -> None:
        assert self.tokens, "a row group has at least one row"
        assert self.ancestors is not None or (self.offset == 0 and self.depths is None)
        assert self.ancestors is None or self.ancestors.shape == (
            len(self.tokens),
            self.offset + len(self.tokens),
        )

    @property
    def num_columns(self) -> int:
        return self.prefix + self.offset + len(self.tokens)


def tree_group(slot: int, prefix: int, chain: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> RowGroup:
    """The rows of tokens not yet in the cache (`chain`, the last of which is the tree's root) and of a tree below."""
    if not tokens:
        return RowGroup(slot=slot, prefix=prefix, tokens=chain)
    num_chain, num_nodes = len(chain), len(tokens)
    num_rows = num_chain + num_nodes
    ancestors = np.zeros((num_rows, num_rows), dtype=bool)
    ancestors[:num_chain, :num_chain] = np.tri(num_chain, dtype=bool)
    depths = list(range(num_chain))
    for node, parent in enumerate(parents):
        row, parent_row = num_chain + node, num_chain + parent  # parent -1 is the chain's last row
        ancestors[row] = ancestors[parent_row]
        ancestors[row, row] = True
        depths.append(depths[parent_row] + 1)
    return RowGroup(slot=slot, prefix=prefix, tokens=[*chain, *tokens], depths=depths, ancestors=ancestors)


class GrowingRows:
    """The rows of a tree that grows depth by depth: each depth's rows lie in the slot's columns behind the last's.

    `prefix` rows of the slot hold text. A node's rows see those, its ancestors' rows and its own.
    """

    def __init__(self, *, slot: int, prefix: int) -> None:
        self.slot = slot
        self.prefix = prefix
        self._row_of_node: dict[int, int] = {}
        self._masks: list[np.ndarray] = []
        self._depths: list[int] = []

    def add(self, nodes: Sequence[int], parents: Sequence[int], tokens: Sequence[int], depth: int) -> RowGroup:
        """The rows of `nodes`, all at `depth` (a child of the tree's root is at depth 1, position `prefix`)."""
        offset_depths = tuple(self._depths)
        offset = len(offset_depths)
        ancestors = np.zeros((len(nodes), offset + len(nodes)), dtype=bool)
        for i, (node, parent) in enumerate(zip(nodes, parents, strict=True)):
            if depth > 1:
                parent_mask = self._masks[self._row_of_node[parent]]
                ancestors[i, : len(parent_mask)] = parent_mask
            ancestors[i, offset + i] = True
            self._row_of_node[node] = offset + i
            self._masks.append(ancestors[i])
            self._depths.append(depth - 1)
        return RowGroup(
            slot=self.slot,
            prefix=self.prefix,
            offset=offset,
            offset_depths=offset_depths,
            tokens=tokens,
            depths=[depth - 1] * len(nodes),
            ancestors=ancestors,
        )


def check_room(groups: Sequence[RowGroup], cache: SlotCache) -> None:
    """Refuse rows that lie beyond the columns of a slot."""
    for group in groups:
        if group.num_columns > cache.num_columns:
            raise ValueError(
                f"a request needs {group.num_columns} columns of the cache, but a slot has {cache.num_columns}: "
                "raise max_length, or shorten the prompt"
            )


def _positions(group: RowGroup) -> Sequence[int]:
    """The position of each row of a group."""
    if group.depths is None:
        return range(group.prefix, group.prefix + len(group.tokens))
    return [group.prefix + depth for depth in group.depths]


class AttentionSettings(TypedDict, total=False):
    """What a layer hands to its attention. scaling: of scores, None for D ** -0.5. sliding_window: a row at position t
    sees positions above t - window alone. softcap: scores are squashed into (-softcap, softcap), as in Gemma-2."""

    scaling: float | None
    sliding_window: int | None
    softcap: float | None


class Rows(ABC):
    """Rows of one forward, as the attention function is told of them.

    token_ids, positions [R]. columns [R]: where each row's keys and values go, over all slots of `cache`.
    """

    cache: SlotCache
    token_ids: torch.Tensor
    positions: torch.Tensor
    columns: torch.Tensor

    @abstractmethod
    def attend(self, query: torch.Tensor, layer: int, **settings: Unpack[AttentionSettings]) -> torch.Tensor:
        """Attention of `query` [Hq, R, D] over the columns that each row sees, once all rows are stored; returns
        [R, Hq, Dv]."""

    def store_and_attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        **settings: Unpack[AttentionSettings],
    ) -> torch.Tensor:
        """The same, after the rows' `key` [K, R, D] and `value` [K, R, Dv] are stored."""
        self.cache.write(layer, self.columns, key, value)
        return self.attend(query, layer, **settings)


class RowsAttend:
    """The attention of a head's rows over its cache, of one layer: a `heads.layers.Attend`."""

    def __init__(self, rows: Rows, layer: int = 0) -> None:
        self.rows = rows
        self.layer = layer

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query [R, Hq, D], key [R, K, D], value [R, K, Dv]; returns [R, Hq, Dv]."""
        query, key, value = (states.transpose(0, 1) for states in (query, key, value))
        return self.rows.store_and_attend(query, key, value, self.layer)


class BlockAttend:
    """The attention of rows of text and of places over a head's cache of several layers: a `heads.block.LayerAttend`.

    rows: all rows, as they are where all ask. places: those of them that are places, and what they see where they
    alone ask; places_among [M]: which of the rows they are.
    """

    def __init__(self, rows: Rows, places: Rows | None = None, places_among: torch.Tensor | None = None) -> None:
        self.rows = rows
        self.places = places
        self.places_among = places_among

    def of_layer(self, layer: int) -> RowsAttend:
        """Where all rows ask."""
        return RowsAttend(self.rows, layer)

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asking: Asking
    ) -> torch.Tensor:
        """query [Q, Hq, D] of all rows, of places or of none, key [N, K, D], value [N, K, Dv]; returns [Q, Hq, Dv]."""
        if asking == "all":
            return self.of_layer(layer)(query, key, value)
        self.rows.cache.write(layer, self.rows.columns, key.transpose(0, 1), value.transpose(0, 1))
        if not len(query):
            return query
        assert asking == "places", "rows that ask are all, or the places"
        assert self.places is not None
        assert self.places_among is not None
        if isinstance(self.places, PackedRows) and self.places.use_kernel:  # which stores what it reads itself
            return RowsAttend(self.places, layer)(query, key[self.places_among], value[self.places_among])
        return self.places.attend(query.transpose(0, 1), layer)


class PackedRows(Rows):
    """Metadata of one forward over `groups`, at most one a slot.

    use_kernel: whether attention runs on headstart's kernel (`infer.kernels.paths`), which must have one for the cache.
    """

    def __init__(self, groups: Sequence[RowGroup], cache: SlotCache, *, use_kernel: bool = False) -> None:
        device = cache.keys.device
        check_room(groups, cache)
        self.groups = list(groups)
        self.cache = cache
        self.use_kernel = use_kernel
        self.first_slot = min(group.slot for group in groups)
        self.last_slot = max(group.slot for group in groups)
        self.length = max(group.num_columns for group in groups)
        self.num_rows = sum(len(group.tokens) for group in groups)
        self.num_slots = self.last_slot - self.first_slot + 1
        self.rows_per_slot = max(len(group.tokens) for group in groups)

        tokens = [token for group in groups for token in group.tokens]
        positions = [position for group in groups for position in _positions(group)]
        self.token_ids = sent(torch.tensor(tokens), device)  # [R]
        self.positions = sent(torch.tensor(positions), device)  # [R]
        self._biases: dict[tuple[int | None, torch.dtype, int], torch.Tensor | None] = {}

    @cached_property
    def paths(self) -> RowPaths:
        """What each row sees, as the kernel reads it."""
        from infer.kernels.paths import RowPaths

        return RowPaths(self)

    def attend(self, query: torch.Tensor, layer: int, **settings: Unpack[AttentionSettings]) -> torch.Tensor:
        return attend(query, layer, self, **settings)

    def store_and_attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        **settings: Unpack[AttentionSettings],
    ) -> torch.Tensor:
        if self.use_kernel and settings.get("softcap") is None:
            from infer.kernels.paths import attend_paths

            scaling, window = settings.get("scaling"), settings.get("sliding_window")
            return attend_paths(query, key, value, layer, self, scaling=scaling, sliding_window=window)
        return super().store_and_attend(query, key, value, layer, **settings)

    def is_long_text(self, window: int | None) -> bool:
        """Whether the rows are long runs of text, all of which lies in every row's window."""
        is_text = all(group.ancestors is None for group in self.groups)
        longest = max(len(group.tokens) for group in self.groups)
        return is_text and longest >= LONG_TEXT and (window is None or self.length <= window)

    @cached_property
    def columns(self) -> torch.Tensor:  # type: ignore[override]
        """Where each row's keys and values go [R], over all slots."""
        starts = [group.slot * self.cache.num_columns + group.prefix + group.offset for group in self.groups]
        columns = [
            start + row for start, group in zip(starts, self.groups, strict=True) for row in range(len(group.tokens))
        ]
        return sent(torch.tensor(columns), self.token_ids.device)

    @cached_property
    def _padding(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """For each padded row the row that fills it [B * N], and each row's place among them [R]; None where nothing
        is padded."""
        size = self.num_slots * self.rows_per_slot
        starts = [(group.slot - self.first_slot) * self.rows_per_slot for group in self.groups]
        unpad = np.concatenate(
            [start + np.arange(len(group.tokens)) for start, group in zip(starts, self.groups, strict=True)]
        )
        if np.array_equal(unpad, np.arange(size)):
            return None
        pad = np.zeros(size, dtype=np.int64)
        pad[unpad] = np.arange(self.num_rows)
        device = self.token_ids.device
        return sent(torch.from_numpy(pad), device), sent(torch.from_numpy(unpad), device)

    def pad(self, rows: torch.Tensor) -> torch.Tensor:
        """[heads, R, D] -> [heads, B, N, D]; rows that pad a slot repeat row 0 and are dropped by `unpad`."""
        num_heads, _, size = rows.shape
        if self._padding is not None:
            rows = rows.index_select(1, self._padding[0])
        return rows.reshape(num_heads, self.num_slots, self.rows_per_slot, size)

    def unpad(self, rows: torch.Tensor) -> torch.Tensor:
        """[B, N, ...] -> [R, ...]."""
        flat = rows.reshape(self.num_slots * self.rows_per_slot, *rows.shape[2:])
        return flat if self._padding is None else flat.index_select(0, self._padding[1])

    def bias(self, window: int | None, dtype: torch.dtype, repeats: int = 1) -> torch.Tensor | None:
        """What to add to attention scores: 0 where a row sees a column, -inf elsewhere; [B, 1, repeats * N, L].

        None where every row sees every column. Made once for all layers of a kind. `window`: a row at position t
        sees only positions above t - window.
        """
        key = (window, dtype, repeats)
        if key not in self._biases:
            visible = self._visible(window)
            bias = None
            if not visible.all():
                blocked = sent(torch.from_numpy(~visible), self.token_ids.device)
                bias = torch.zeros(blocked.shape, dtype=dtype, device=blocked.device).masked_fill_(blocked, -torch.inf)
                bias = bias[:, None].repeat(1, 1, repeats, 1)
            self._biases[key] = bias
        return self._biases[key]

    def _visible(self, window: int | None) -> np.ndarray:
        """[B, N, L] bool. Padding rows see everything, so that no row is empty (its softmax would be NaN)."""
        visible = np.ones((self.num_slots, self.rows_per_slot, self.length), dtype=bool)
        for group in self.groups:
            num_rows = len(group.tokens)
            rows = visible[group.slot - self.first_slot, :num_rows]
            rows[:, group.num_columns :] = False
            ancestors = np.tri(num_rows, dtype=bool) if group.ancestors is None else group.ancestors
            rows[:, group.prefix : group.num_columns] = ancestors
            if window is not None:
                self._apply_window(rows, group, window)
        return visible

    @staticmethod
    def _apply_window(rows: np.ndarray, group: RowGroup, window: int) -> None:
        depths = np.arange(len(group.tokens)) if group.depths is None else np.asarray(group.depths)
        if group.prefix + int(depths.max()) < window:
            return
        assert len(group.offset_depths) == group.offset, "windows need the position of every column"
        positions = group.prefix + depths
        tree_positions = group.prefix + np.asarray([*group.offset_depths, *depths])
        column_positions = np.concatenate([np.arange(group.prefix), tree_positions])
        rows[:, : group.num_columns] &= column_positions[None, :] > positions[:, None] - window
