"""Forwards of one fixed shape, in which a row's logits do not depend, to the last bit, on what lies around it.

In low precision the order in which sums are taken shows in the last bits, and it changes with the shape of a
forward: a token decoded alone and the same token verified among sixteen then differ, and near ties fall one way or
the other. Here every forward, of a prompt, of plain decoding or of a tree, has exactly W rows (the rest is padding),
so that each product with the weights has one shape. Attention is cut at fixed absolute positions:

- the *tail* of a row at position t, the positions from `split(t)` to t, is gathered along the row's own path, so that
  a path in the columns of a tree and the same tokens in place look alike;
- the *prefix*, its first `split(t)` positions, lies in place for every row, node or not, and is read there, in chunks
  of `CHUNK` columns.

Each part is a set of small problems of fixed shape, whose results meet by their log-sum-exps: tail first, then the
chunks in order. A chunk of which a row sees nothing leaves the row's result as it is, to the bit, so neighbours may
have longer texts. What a library kernel does with such a shape is measured, not known: `headstart audit` finds out on
the model and machine at hand.

Shapes: W rows, Hq query heads, K key/value heads, G = Hq / K, D head size, T tail, C chunk, R rows a prefix problem, N
prefix problems.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Unpack

import numpy as np
import torch
import torch.nn.functional as F

from infer.cache import SlotCache
from infer.kernels.gpu.path_attention import PathRows, path_attention
from infer.rows import AttentionSettings, RowGroup, Rows

DEFAULT_ROW_WIDTH = 16
GPU_ROW_WIDTH = 64
"""There a forward of so many rows takes about as long as one of a single row: the time to read the weights."""
ROW_GRAIN = 8
MAX_TREE_DEPTH = 16
"""Tree nodes lie out of place, so the tail must reach above the deepest path."""
CHUNK = 256
TAIL_GRAIN = 32
TAIL = MAX_TREE_DEPTH + TAIL_GRAIN
_ROWS_PER_PROBLEM = 8
"""R * G is then a multiple of 8, and the scratch rows of every thread begin at whole cache lines (with 3 queries a
problem the kernel was seen to round one element in 10^8 another way, by the thread it ran on)."""
_VECTOR = 64
"""Elements that vectorised loops take whole; a remainder may be computed by another function."""


def checked_row_width(
    row_width: int | None, exactness: str | None, *, max_depth: int, device: torch.device | None = None
) -> int | None:
    """The rows of every forward of an engine, None unless its exactness is bitwise; ValueError for what cannot be."""
    if exactness != "bitwise":
        if row_width is not None:
            raise ValueError(f"row_width is {row_width}, but only exactness 'bitwise' fixes it: leave it out")
        return None
    if max_depth > MAX_TREE_DEPTH:
        raise ValueError(f"exactness 'bitwise' takes trees at most {MAX_TREE_DEPTH} deep, got max_depth {max_depth}")
    if row_width is None:
        row_width = GPU_ROW_WIDTH if device is not None and device.type == "cuda" else DEFAULT_ROW_WIDTH
    if not isinstance(row_width, int) or row_width < 1 or row_width % ROW_GRAIN:
        raise ValueError(f"row_width must be a multiple of {ROW_GRAIN}, got {row_width!r}")
    return row_width


def split(position: int) -> int:
    """Where the tail of a row at `position` begins: a function of the position alone."""
    return max(0, (position + 1 - MAX_TREE_DEPTH) // TAIL_GRAIN * TAIL_GRAIN)


def splits(positions: torch.Tensor) -> torch.Tensor:
    """`split` of every position."""
    return ((positions + 1 - MAX_TREE_DEPTH) // TAIL_GRAIN * TAIL_GRAIN).clamp_min(0)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Row:
    """One row of a request: its token, place and path. `tail`: columns, within the slot, of positions split(t)..t."""

    slot: int
    token: int
    position: int
    column: int
    tail: Sequence[int]


class Mask(NamedTuple):
    """`bias` [N, 1, R * G, C]: 0 where a row sees a column, -inf elsewhere; `mass` [W, 1] float32: -inf for rows that
    see no column, else 0."""

    bias: torch.Tensor
    mass: torch.Tensor


class FixedRows(Rows):
    """Metadata of one forward of W rows."""

    def __init__(self, rows: Sequence[_Row], cache: SlotCache, row_width: int) -> None:
        assert 0 < len(rows) <= row_width
        self.num_real = len(rows)
        # Padding repeats the first row: it writes the same keys and values to the same column.
        rows = [*rows, *[rows[0]] * (row_width - len(rows))]
        self.cache = cache
        self.device = cache.keys.device
        slots = np.array([row.slot for row in rows])
        self._positions = np.array([row.position for row in rows])
        self._splits = np.array([split(row.position) for row in rows])
        bases = slots * cache.num_columns
        tails = np.zeros((row_width, TAIL), dtype=np.int64)
        for place, row in zip(tails, rows, strict=True):
            place[: len(row.tail)] = row.tail
            place[len(row.tail) :] = row.column  # masked, and never empty
        self.token_ids = self._tensor([row.token for row in rows])  # [W]
        self.positions = self._tensor(self._positions)  # [W]
        self.columns = self._tensor(bases + [row.column for row in rows])  # [W]
        self.tails = tails
        self.tail_columns = self._tensor((tails + bases[:, None]).ravel())  # [W * T]
        self.num_chunks = -(-int(self._splits.max()) // CHUNK)
        assert self.num_chunks * CHUNK <= cache.num_columns, "slots of fixed forwards hold whole chunks"
        self._lay_problems(slots)
        self._buffers: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._tail_masks: dict[int | None, torch.Tensor] = {}
        self._chunk_masks: dict[tuple[int, int | None, torch.dtype, int], Mask] = {}

    def _lay_problems(self, slots: np.ndarray) -> None:
        """Put the rows of each slot into prefix problems of R rows; `problem_rows` [N * R] and `row_places` [W]."""
        starts = [0, *(np.flatnonzero(np.diff(slots)) + 1).tolist(), len(slots)]
        self._slot_starts, self._slots = starts, slots[starts[:-1]]
        rows: list[int] = []
        problem_slots: list[int] = []
        places = np.zeros(len(slots), dtype=np.int64)
        for start, end in pairwise(starts):
            places[start:end] = len(rows) + np.arange(end - start)
            rows.extend(range(start, end))
            rows.extend([start] * (-len(rows) % _ROWS_PER_PROBLEM))
            problem_slots.extend([int(slots[start])] * (len(rows) // _ROWS_PER_PROBLEM - len(problem_slots)))
        self.runs = list(_runs(problem_slots))
        self._problem_rows = rows
        self.problem_rows = None if rows == list(range(len(slots))) else self._tensor(rows)
        self.row_places = None if self.problem_rows is None else self._tensor(places)

    @cached_property
    def paths(self) -> PathRows:
        """The same for the kernel of `infer.kernels.gpu.path_attention`: consecutive rows of a slot are a request's."""
        return PathRows(
            row_starts=self._tensor(self._slot_starts).to(torch.int32),
            bases=self._tensor(self._slots * self.cache.num_columns),
            positions=self.positions.to(torch.int32),
            splits=self._tensor(self._splits).to(torch.int32),
            tails=self._tensor(self.tails).to(torch.int32),
            max_rows=len(self._splits),
            max_prefix=self.num_chunks * CHUNK,
        )

    def attend(self, query: torch.Tensor, layer: int, **settings: Unpack[AttentionSettings]) -> torch.Tensor:
        scaling, window, softcap = settings.get("scaling"), settings.get("sliding_window"), settings.get("softcap")
        if query.device.type == "cuda":  # to the bit what static rounds compute there
            keys, values = self.cache.layer(layer)
            return path_attention(query, keys, values, self.paths, scaling=scaling, window=window, softcap=softcap)
        return _attend(query, layer, self, scaling, window, softcap)

    def gather_tails(self, what: str, storage: torch.Tensor) -> torch.Tensor:
        """The rows of every tail of `storage` [K, B*S, D] in float32: [K * W, T, D].

        The memory is a buffer that the next layer's `what` overwrites: made anew each time, it cost more than the copy.
        """
        shape = (storage.shape[0], len(self.tail_columns), storage.shape[-1])
        if what not in self._buffers:
            as_stored = torch.empty(shape, dtype=storage.dtype, device=self.device)
            self._buffers[what] = as_stored, torch.empty(shape, dtype=torch.float32, device=self.device)
        as_stored, whole = self._buffers[what]
        torch.index_select(storage, 1, self.tail_columns, out=as_stored)
        return whole.copy_(as_stored).view(-1, TAIL, shape[-1])

    def problems(self, rows: torch.Tensor) -> torch.Tensor:
        """[K, W, G, D] -> [N, K, R * G, D]; places without a row repeat one."""
        if self.problem_rows is not None:
            rows = rows.index_select(1, self.problem_rows)
        num_heads, _, num_groups, size = rows.shape
        return rows.view(num_heads, -1, _ROWS_PER_PROBLEM * num_groups, size).transpose(0, 1)

    def solved(self, problems: torch.Tensor) -> torch.Tensor:
        """[N, K, R * G, D] -> [K, W, G, D]."""
        num_problems, num_heads, num_queries, size = problems.shape
        num_groups = num_queries // _ROWS_PER_PROBLEM
        rows = problems.transpose(0, 1).reshape(num_heads, num_problems * _ROWS_PER_PROBLEM, num_groups, size)
        return rows if self.row_places is None else rows.index_select(1, self.row_places)

    def tail_mask(self, window: int | None) -> torch.Tensor:
        """[W, 1, T] float32: 0 where a row sees a position of its tail (its own always), -inf elsewhere."""
        if window not in self._tail_masks:
            positions = self._splits[:, None] + np.arange(TAIL)
            visible = (positions <= self._positions[:, None]) & self._in_window(positions, window)
            self._tail_masks[window] = self._bias(visible, torch.float32)[:, None]
        return self._tail_masks[window]

    def chunk_mask(self, chunk: int, window: int | None, dtype: torch.dtype, num_groups: int) -> Mask:
        """What the rows of prefix problems see of a chunk."""
        key = (chunk, window, dtype, num_groups)
        if key not in self._chunk_masks:
            columns = chunk * CHUNK + np.arange(CHUNK)
            visible = (columns < self._splits[:, None]) & self._in_window(columns, window)
            blind = ~visible.any(axis=1)
            visible[blind] = True  # a softmax over nothing is NaN; what comes out has no mass
            in_problems = visible[self._problem_rows].repeat(num_groups, axis=0)
            bias = self._bias(in_problems, dtype).view(-1, 1, _ROWS_PER_PROBLEM * num_groups, CHUNK)
            self._chunk_masks[key] = Mask(bias=bias, mass=self._bias(~blind[:, None], torch.float32))
        return self._chunk_masks[key]

    def _in_window(self, columns: np.ndarray, window: int | None) -> np.ndarray:
        """[W, columns] or, where nothing is out of a window, [1, 1] bool."""
        return np.ones((1, 1), dtype=bool) if window is None else columns > self._positions[:, None] - window

    def _bias(self, visible: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        bias = torch.zeros(visible.shape, dtype=dtype, device=self.device)
        return bias.masked_fill_(self._tensor(~visible), -torch.inf)

    def _tensor(self, values: Sequence[int] | np.ndarray) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values), device=self.device)


def forwards(groups: Sequence[RowGroup], cache: SlotCache, row_width: int) -> Iterator[FixedRows]:
    """The rows of `groups`, in order, W at a time."""
    rows = [row for group in groups for row in _rows_of(group)]
    for start in range(0, len(rows), row_width):
        yield FixedRows(rows[start : start + row_width], cache, row_width)


def _attend(
    query: torch.Tensor,
    layer: int,
    rows: FixedRows,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of `query` [Hq, W, D] over each row's tail and prefix; returns [W, Hq, Dv]."""
    num_heads, width, size = query.shape
    num_kv_heads = rows.cache.keys.shape[1]
    scaling = size**-0.5 if scaling is None else scaling
    folded = query.view(num_kv_heads, -1, width, size).transpose(1, 2).contiguous()  # [K, W, G, D]
    output, mass = _attend_tail(folded, layer, rows, rows.tail_mask(sliding_window), scaling, softcap)
    problems = rows.problems(folded) if rows.num_chunks else folded
    for chunk in range(rows.num_chunks):
        mask = rows.chunk_mask(chunk, sliding_window, query.dtype, folded.shape[2])
        part, part_mass = _attend_chunk(problems, chunk, layer, rows, mask.bias, scaling, softcap)
        part_mass = part_mass + mask.mass
        # A part of mass -inf changes nothing, to the bit.
        share = _whole_vectors(torch.sigmoid, part_mass - mass)
        output = torch.lerp(output, part, share[..., None])
        if chunk + 1 < rows.num_chunks:
            mass = _whole_vectors(torch.logaddexp, mass, part_mass)
    return output.to(query.dtype).transpose(0, 1).reshape(width, num_heads, -1)


def _attend_tail(
    query: torch.Tensor, layer: int, rows: FixedRows, bias: torch.Tensor, scaling: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Over each row's own T columns, in float32: output [K, W, G, Dv] and log-sum-exp [K, W, G]."""
    num_kv_heads, width, num_groups, size = query.shape
    keys = rows.gather_tails("keys", rows.cache.keys[layer]).transpose(1, 2)
    values = rows.gather_tails("values", rows.cache.values[layer])
    queries = query.float().view(-1, num_groups, size)
    bias = bias.expand(num_kv_heads, -1, num_groups, -1).reshape(-1, num_groups, TAIL)  # [K * W, G, T]
    if softcap is None:
        scores = torch.baddbmm(bias, queries, keys, alpha=scaling)
    else:
        scores = torch.tanh(torch.bmm(queries, keys) * (scaling / softcap)) * softcap + bias
    weights = torch.softmax(scores, dim=-1)
    output = torch.bmm(weights, values).view(num_kv_heads, width, num_groups, -1)
    mass = scores.amax(dim=-1) - _whole_vectors(torch.log, weights.amax(dim=-1))
    return output, mass.view(num_kv_heads, width, num_groups)


def _attend_chunk(
    problems: torch.Tensor,
    chunk: int,
    layer: int,
    rows: FixedRows,
    bias: torch.Tensor,
    scaling: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Over one chunk of the prefix, for `problems` [N, K, R * G, D]: output [K, W, G, Dv], log-sum-exp [K, W, G]."""
    parts = []
    for start, end, first_slot, last_slot in rows.runs:
        keys, values = rows.cache.read_range(layer, first_slot, last_slot, chunk * CHUNK, (chunk + 1) * CHUNK)
        shape = (end - start, -1, -1, -1)  # one slot for all problems of the run, or a slot each
        queries = problems[start:end]
        parts.append(
            _attend_columns(queries, keys.expand(shape), values.expand(shape), bias[start:end], scaling, softcap)
        )
    output, mass = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    return rows.solved(output).float(), rows.solved(mass[..., None])[..., 0]


def _attend_columns(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor,
    scaling: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [N, K, M, Dv] over given columns, and the log-sum-exp [N, K, M] of its scores, float32."""
    if softcap is None and query.device.type == "cpu" and keys.shape[-1] == values.shape[-1]:
        output, mass = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, attn_mask=bias, scale=scaling
        )
        return output, mass
    scores = (query.float() * scaling) @ keys.float().transpose(-1, -2)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + bias.float()
    mass = torch.logsumexp(scores, dim=-1)
    return torch.exp(scores - mass[..., None]) @ values.float(), mass


def _whole_vectors(function: Callable[..., torch.Tensor], *values: torch.Tensor) -> torch.Tensor:
    """An elementwise function, in whole vectors whatever the size."""
    num = values[0].numel()
    padded = [F.pad(value.flatten(), (0, -num % _VECTOR)) for value in values]
    return function(*padded)[:num].view_as(values[0])


def _rows_of(group: RowGroup) -> Iterator[_Row]:
    """A group's rows, each with the columns of its own path (chain rows lie where their positions say)."""
    assert group.offset == 0, "rows behind an offset are a draft head's, whose forwards are not fixed"
    for index, token in enumerate(group.tokens):
        position = group.prefix + (index if group.depths is None else group.depths[index])
        start = split(position)
        if group.ancestors is None:
            tail: Sequence[int] = range(start, position + 1)
        else:
            path = (group.prefix + group.ancestors[index].nonzero()[0]).tolist()
            tail = [*range(start, group.prefix), *path[max(0, start - group.prefix) :]]
        assert len(tail) == position + 1 - start, f"row {index} at position {position} has a tail of {len(tail)}"
        yield _Row(slot=group.slot, token=token, position=position, column=group.prefix + index, tail=tail)


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """(start, end, first slot, last slot) of runs of problems that share a slot, or that have a slot each, in order:
    the runs whose keys are a view of the cache."""
    start = 0
    while start < len(slots):
        end = start + 1
        step = slots[end] - slots[start] if end < len(slots) else 0
        if step in (0, 1):
            while end < len(slots) and slots[end] - slots[end - 1] == step:
                end += 1
        yield start, end, slots[start], slots[end - 1]
        start = end
