"""What both kinds of attention share: whose the packed rows are, the checks of inputs, and one row's attention as a
reference.

Shapes: B requests, R packed rows, Hq query heads, K key/value heads, D head size of keys, Dv of values, L columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestRows:
    """Rows of some requests, side by side. Tensors lie on the device of the keys.

    row_starts [B + 1] int32: rows row_starts[b] .. row_starts[b + 1] - 1 are request b's; the first is 0. Rows beyond
    the last are nobody's, and get zeros.
    bases [B] int64: the flat column at which the request's slot begins.
    positions [R] int32: text position of each row.
    max_rows: most rows of a request. max_prefix: as the kind of rows says. What is launched depends on such bounds, and
    on nothing that the tensors hold.
    """

    row_starts: Tensor
    bases: Tensor
    positions: Tensor
    max_rows: int
    max_prefix: int

    @property
    def num_requests(self) -> int:
        return self.bases.shape[0]

    @property
    def num_rows(self) -> int:
        return self.positions.shape[0]

    def requests(self) -> Tensor:
        """The request of each row [R] int64; the last one for rows that are nobody's."""
        ends = self.row_starts[1:]
        return (self._numbers()[:, None] >= ends).sum(dim=1).clamp(max=self.num_requests - 1)

    def are_somebodys(self) -> Tensor:
        """[R] bool."""
        return self._numbers() < self.row_starts[-1]

    def _numbers(self) -> Tensor:
        return torch.arange(self.num_rows, device=self.positions.device)


def check_attention(query: Tensor, keys: Tensor, values: Tensor, rows: RequestRows) -> None:
    """Whether shapes and dtypes go together: a bug of ours if not."""
    assert query.shape[1] == rows.num_rows, f"{query.shape[1]} queries, {rows.num_rows} rows"
    assert query.shape[2] == keys.shape[2], f"queries of {query.shape[2]} numbers, keys of {keys.shape[2]}"
    assert keys.shape[:2] == values.shape[:2], f"keys {tuple(keys.shape)}, values {tuple(values.shape)}"
    assert query.shape[0] % keys.shape[0] == 0, f"{query.shape[0]} query heads on {keys.shape[0]} of keys"
    assert query.dtype == keys.dtype == values.dtype, f"{query.dtype}, {keys.dtype} and {values.dtype}"


def scale_of(query: Tensor, scaling: float | None) -> float:
    return float(query.shape[-1] ** -0.5 if scaling is None else scaling)


def gather_columns(storage: Tensor, columns: Tensor) -> Tensor:
    """Flat `columns` [n, L] of [K, all columns, D]: [n, K, L, D]. Columns past the end repeat the last."""
    flat = columns.flatten().clamp(max=storage.shape[1] - 1)
    return storage.index_select(1, flat).view(storage.shape[0], *columns.shape, -1).transpose(0, 1)


def attend_row(
    query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scaling: float | None, softcap: float | None
) -> Tensor:
    """One row's `query` [Hq, D] over `keys` [K, L, D], `values` [K, L, Dv] where `seen` [L]: [Hq, Dv] float64."""
    num_groups = query.shape[0] // keys.shape[0]
    wide_keys = torch.where(seen[:, None], keys.double(), 0.0).repeat_interleave(num_groups, dim=0)
    wide_values = torch.where(seen[:, None], values.double(), 0.0).repeat_interleave(num_groups, dim=0)
    scores = torch.einsum("hd,hld->hl", query.double(), wide_keys) * scale_of(query, scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
    return torch.einsum("hl,hld->hd", torch.where(seen, weights, 0.0), wide_values)
