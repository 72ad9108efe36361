"""Attention of packed rows over their own paths, the same to the last bit wherever a path lies and whatever is beside
it.

A row at position t sees positions 0 .. t of its text, within its window. As in `infer.fixed`, the first `split(t)` lie
in place for every row, in a tree or not; the rest, the row's *tail*, is found through the row's own list of columns.
Everything is cut by absolute position: tails are one block, and the prefix is reduced in chunks whose bounds depend on
nothing; what the chunks give is merged in order, tail first. A chunk of which a row sees nothing leaves it as it is, to
the bit. So a row's result is a function of its query and of the keys and values of its path.

Shapes: B requests, R packed rows, Hq query heads, K key/value heads, G = Hq / K, D head size of keys, Dv of values, N
rows of a request at most, TAIL places of a tail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from infer.kernels.gpu import launching_on, runs_triton
from infer.kernels.gpu.attention_rows import RequestRows, attend_row, check_attention, gather_columns, scale_of

_BLOCK = 64
"""Positions that the fallback reduces at once."""
_VECTOR = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class PathRows(RequestRows):
    """Where each row's path lies.

    splits [R] int32: `infer.fixed.split` of the position. Positions below it lie in the columns of their number. None
    is above max_prefix + 1 (a tree's root lies in the column behind the prefix).
    tails [R, TAIL] int32: columns, in the slot, of positions split .. position; beyond, any column.
    """

    splits: Tensor
    tails: Tensor


def path_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: PathRows,
    *,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of `query` [Hq, R, D] over `keys` [K, columns, D] and `values` [K, columns, Dv]; returns [R, Hq, Dv].

    scaling, window, softcap: as in `infer.kernels.gpu.tree_attention.tree_attention`. Rows that are nobody's get zeros.
    """
    check_attention(query, keys, values, rows)
    if runs_triton(query.device):
        from infer.kernels.gpu.path_attention_triton import path_attention_triton

        with launching_on(query.device):
            return path_attention_triton(query, keys, values, rows, scaling=scaling, window=window, softcap=softcap)
    return path_attention_blocks(query, keys, values, rows, scaling=scaling, window=window, softcap=softcap)


def path_attention_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: PathRows,
    *,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """What `path_attention` computes, in float64, a row at a time."""
    bases = rows.bases[rows.requests()]
    prefix = torch.arange(rows.max_prefix + 1, device=query.device)
    steps = torch.arange(rows.tails.shape[1], device=query.device)
    outputs = []
    for row in range(rows.num_rows):
        split, position = rows.splits[row], rows.positions[row]
        columns = torch.cat([prefix, rows.tails[row].long()])
        positions = torch.cat([prefix, split + steps])
        seen = torch.cat([prefix < split, split + steps <= position])
        if window is not None:
            seen = seen & (positions > position - window)
        where = (bases[row] + columns).clamp(max=keys.shape[1] - 1)
        outputs.append(attend_row(query[:, row], keys[:, where], values[:, where], seen, scaling, softcap))
    return torch.where(rows.are_somebodys()[:, None, None], torch.stack(outputs), 0.0).to(query.dtype)


def path_attention_blocks(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: PathRows,
    *,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The fallback: float64, elementwise products and sums by halves, so that no library chooses an order."""
    num_heads, num_rows, size = query.shape
    device = query.device
    folded = query.double().view(keys.shape[0], -1, num_rows, size).permute(2, 0, 1, 3)  # [R, K, G, D]
    bases = rows.bases[rows.requests()][:, None]
    positions, splits = rows.positions[:, None], rows.splits[:, None]
    lowest = positions - (1 << 30 if window is None else window)  # positions above it are seen

    def block(columns: Tensor, at: Tensor, is_path: Tensor) -> tuple[Tensor, Tensor]:
        """Over `columns` [R, n] in the slot, which hold the positions `at`."""
        seen = is_path & (at > lowest)
        flat = (bases + columns).clamp_min(0)
        mask = seen[:, None, :, None]
        own_keys, own_values = (
            torch.where(mask, gather_columns(storage, flat).double(), 0.0) for storage in (keys, values)
        )
        return _attend_block(folded, own_keys, own_values, seen[:, None, None], scale_of(query, scaling), softcap)

    steps = torch.arange(_BLOCK, device=device)
    tails = torch.nn.functional.pad(rows.tails, (0, _BLOCK - rows.tails.shape[1]))
    at = splits + steps
    output, mass = block(tails, at, (at <= positions) & (steps < rows.tails.shape[1]))
    for start in range(0, rows.max_prefix + 1, _BLOCK):
        at = (start + steps).expand(num_rows, -1)
        output, mass = _merged(output, mass, *block(at, at, at < splits))
    output = output.masked_fill(~rows.are_somebodys()[:, None, None, None], 0.0)
    return output.reshape(num_rows, num_heads, -1).to(query.dtype)


def _attend_block(
    query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """`query` [R, K, G, D] over `keys` [R, K, n, D], `values` [R, K, n, Dv] where `seen` [R, 1, 1, n]: output
    [R, K, G, Dv] and the log-sum-exp of the scores [R, K, G, 1] (-inf where nothing is seen)."""
    scores = _sum_last(query[..., None, :] * keys[:, :, None]) * scaling
    if softcap is not None:
        scores = _whole_vectors(torch.tanh, scores / softcap) * softcap
    scores = scores.masked_fill(~seen, -torch.inf)
    top = scores.amax(dim=-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0.0, top)
    weights = _whole_vectors(torch.exp, scores - top)
    total = _sum_last(weights)[..., None]
    output = _sum_last(weights[..., None, :] * values.transpose(-1, -2)[:, :, None])
    return output / torch.where(total == 0, 1.0, total), top + _whole_vectors(torch.log, total)


def _merged(output: Tensor, mass: Tensor, part: Tensor, part_mass: Tensor) -> tuple[Tensor, Tensor]:
    """Both results as one; where `part` has no mass, `output` and `mass` as they are."""
    top = torch.maximum(mass, part_mass)
    top = torch.where(top == -torch.inf, 0.0, top)
    share, part_share = (_whole_vectors(torch.exp, value - top) for value in (mass, part_mass))
    total = share + part_share
    merged = (output * share + part * part_share) / torch.where(total == 0, 1.0, total)
    has_part = part_mass > -torch.inf
    return torch.where(has_part, merged, output), torch.where(has_part, top + _whole_vectors(torch.log, total), mass)


def _sum_last(values: Tensor) -> Tensor:
    """The sum over the last dimension, halves upon halves: one order, whatever the other dimensions are."""
    size = values.shape[-1]
    values = torch.nn.functional.pad(values, (0, (1 << (size - 1).bit_length()) - size))
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def _whole_vectors(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """An elementwise function, in whole vectors whatever the size: a remainder may be computed by another function."""
    num = values.numel()
    padded = torch.nn.functional.pad(values.flatten(), (0, -num % _VECTOR))
    return function(padded)[:num].view_as(values)
