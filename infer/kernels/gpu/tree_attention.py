"""Attention of packed rows of draft trees: each sees its request's committed prefix, and of the columns behind it those
that its own bits name.

Shapes: B requests, R packed rows, Hq query heads, K key/value heads, G = Hq / K, D head size of keys, Dv of values, N
rows of a request at most, T tree columns (those behind the prefix), W = ceil(T / 32) words, L columns that a request
may see.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from infer.kernels.gpu import launching_on, runs_triton
from infer.kernels.gpu.attention_rows import RequestRows, attend_row, check_attention, gather_columns, scale_of


@dataclass(frozen=True, kw_only=True, eq=False)
class TreeRows(RequestRows):
    """Which columns each row sees.

    prefixes [B] int32: committed columns, seen by all of a request's rows (but for windows). Column = text position
    there. None is above max_prefix.
    ancestors [R, W] int32: bit j % 32 of word j // 32 says whether the row sees column prefix + j of its slot.
    column_positions [B, T] int32: text position of each tree column; None where no window is asked for.
    num_tree_columns: T.
    """

    prefixes: Tensor
    ancestors: Tensor
    column_positions: Tensor | None
    num_tree_columns: int


def tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: TreeRows,
    *,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of `query` [Hq, R, D] over `keys` [K, columns, D] and `values` [K, columns, Dv]; returns [R, Hq, Dv].

    scaling: of scores, None for D ** -0.5. window: a row at position t sees positions above t - window alone. softcap:
    scores are squashed into (-softcap, softcap), as in Gemma-2. A row that sees nothing gets zeros. Columns that no row
    of a request sees may hold anything.
    """
    check_attention(query, keys, values, rows)
    assert window is None or rows.column_positions is not None, "windows need the position of every tree column"
    assert rows.ancestors.shape == (rows.num_rows, -(-rows.num_tree_columns // 32)), rows.ancestors.shape
    if runs_triton(query.device):
        from infer.kernels.gpu.tree_attention_triton import tree_attention_triton

        with launching_on(query.device):
            return tree_attention_triton(query, keys, values, rows, scaling=scaling, window=window, softcap=softcap)
    return tree_attention_sdpa(query, keys, values, rows, scaling=scaling, window=window, softcap=softcap)


def tree_attention_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: TreeRows,
    *,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """What `tree_attention` computes, in float64, a row at a time."""
    visible, columns = _visible(rows, window)
    places = _places(rows)
    outputs = []
    for row in range(rows.num_rows):
        place = places[row]
        seen, where = visible.flatten(0, 1)[place], columns[place // rows.max_rows]
        where = where.clamp(max=keys.shape[1] - 1)
        outputs.append(attend_row(query[:, row], keys[:, where], values[:, where], seen, scaling, softcap))
    output = torch.stack(outputs)
    return torch.where(rows.are_somebodys()[:, None, None], output, 0.0).to(query.dtype)


def tree_attention_sdpa(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: TreeRows,
    *,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The fallback: `scaled_dot_product_attention` over a copy of each request's columns, with a mask."""
    num_heads, _, size = query.shape
    visible, columns = _visible(rows, window)  # [B, N, L], [B, L]
    num_requests, max_rows, length = visible.shape
    # Whatever lies in columns that nobody sees would otherwise be multiplied by a weight of zero: NaN stays NaN.
    seen = visible.any(dim=1)[:, None, :, None]  # [B, 1, L, 1]
    is_blind = ~visible.any(dim=2)  # [B, N]
    own_keys, own_values = (gather_columns(storage, columns).masked_fill(~seen, 0.0) for storage in (keys, values))
    visible = visible | is_blind[..., None]  # a softmax over nothing is NaN
    bias = torch.zeros(visible.shape, dtype=query.dtype, device=query.device).masked_fill(~visible, -torch.inf)

    num_kv_heads = keys.shape[0]
    num_groups = num_heads // num_kv_heads
    folded = query[:, _padded(rows)].transpose(0, 1)  # [B, Hq, N, D]
    folded = folded.reshape(num_requests, num_kv_heads, num_groups * max_rows, size)
    bias = bias[:, None].expand(-1, num_groups, -1, -1).reshape(num_requests, 1, num_groups * max_rows, length)
    output = _attend(folded, own_keys, own_values, bias, scale_of(query, scaling), softcap)
    output = output.reshape(num_requests, num_heads, max_rows, -1).transpose(1, 2)  # [B, N, Hq, Dv]
    output = output.masked_fill(is_blind[..., None, None], 0.0).flatten(0, 1)[_places(rows)]
    return output.masked_fill(~rows.are_somebodys()[:, None, None], 0.0)


def _attend(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scaling: float, softcap: float | None) -> Tensor:
    if softcap is None:
        return torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scaling)
    scores = query.float() @ keys.float().transpose(-1, -2) * scaling
    weights = torch.softmax(torch.tanh(scores / softcap) * softcap + bias, dim=-1)
    return (weights @ values.float()).to(query.dtype)


def _visible(rows: TreeRows, window: int | None) -> tuple[Tensor, Tensor]:
    """What the rows of each request see of its columns [B, N, L] bool, and the flat columns [B, L]; L is the longest
    prefix that may be and all tree columns. Places without a row see nothing."""
    device = rows.positions.device
    length = rows.max_prefix + rows.num_tree_columns
    columns = torch.arange(length, device=device)
    in_prefix = columns < rows.prefixes[:, None]  # [B, L]
    place = (columns - rows.prefixes[:, None]).clamp(0, rows.num_tree_columns - 1)  # among tree columns
    in_tree = ~in_prefix & (columns < rows.prefixes[:, None] + rows.num_tree_columns)
    padded = _padded(rows)
    words = rows.ancestors[padded].gather(2, (place // 32)[:, None].expand(-1, rows.max_rows, -1))  # [B, N, L]
    bits = (words >> (place % 32)[:, None].to(torch.int32)) & 1
    visible = in_prefix[:, None] | (in_tree[:, None] & (bits != 0))
    if window is not None:
        assert rows.column_positions is not None
        positions = torch.where(in_prefix, columns, rows.column_positions.gather(1, place))  # [B, L]
        visible = visible & (positions[:, None] > rows.positions[padded][..., None] - window)
    num_rows = rows.row_starts[1:] - rows.row_starts[:-1]
    is_row = torch.arange(rows.max_rows, device=device) < num_rows[:, None]
    return visible & is_row[..., None], rows.bases[:, None] + columns


def _padded(rows: TreeRows) -> Tensor:
    """The packed row at each place [B, N] of each request; places without one repeat some other."""
    places = torch.arange(rows.max_rows, device=rows.positions.device)
    return (rows.row_starts[:-1, None] + places).clamp(max=rows.num_rows - 1).long()


def _places(rows: TreeRows) -> Tensor:
    """Where each packed row [R] is found among the places [B * N]; anywhere for those that are nobody's."""
    request = rows.requests()
    index = torch.arange(rows.num_rows, device=rows.positions.device) - rows.row_starts[request]
    return (request * rows.max_rows + index).clamp(max=rows.num_requests * rows.max_rows - 1)
