"""Draft trees as tensors: the same fields as `infer.tree.DraftTree`, for a batch, with the root as row 0.

Shapes: B requests, N nodes, N1 = 1 + N rows of a request, M candidates, W words of 32 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceTrees:
    """tokens [B, N1] and parents [B, N1] (rows; the root's is -1, and so is that of a place without a node, which is
    nobody's child) int64. depths [B, N1] int64: the root's is 0. sees [B, N1, N1] bool: ancestors and the row itself.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    sees: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidates:
    """Nodes that may be kept: tokens, values and parents [B, M], depth by depth. A parent is a candidate's number, or
    -1, and stands before its children; no value is above its parent's."""

    tokens: torch.Tensor
    values: torch.Tensor
    parents: torch.Tensor


def trees_of(root_tokens: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, *, depth: int) -> DeviceTrees:
    """Trees of at most `depth`, from their roots' tokens [B] and nodes' `tokens`, `parents` [B, N] (as rows)."""
    tokens = torch.cat([root_tokens[:, None], tokens], dim=1)
    parents = torch.cat([torch.full_like(root_tokens, -1)[:, None], parents], dim=1)
    places = torch.arange(tokens.shape[1], device=tokens.device)
    sees = (places[:, None] == places).expand(len(tokens), -1, -1)
    depths = torch.zeros_like(parents)
    above = parents
    for _ in range(depth):
        there = above >= 0
        row = above.clamp_min(0)
        sees = sees | ((row[..., None] == places) & there[..., None])
        depths = depths + there
        above = torch.where(there, parents.gather(1, row), above)
    return DeviceTrees(tokens=tokens, parents=parents, depths=depths, sees=sees)


def best_nodes(candidates: Candidates, num_nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and parents (as rows) [B, N] of the `num_nodes` candidates of largest value, in their order.

    Whoever is kept, its ancestors are: they have no smaller value, and stand before it, which decides between equals.
    """
    # A head that has gone wrong must not make more nodes than there is room for: nothing is larger than NaN.
    values, parents = candidates.values.nan_to_num(nan=-1.0), candidates.parents
    places = torch.arange(values.shape[1], device=values.device)
    this, other = values[:, :, None], values[:, None, :]
    is_before = (other > this) | ((other == this) & (places < places[:, None]))  # [B, M, M]
    is_kept = is_before.sum(dim=2) < num_nodes
    rows = torch.where(is_kept, is_kept.cumsum(dim=1), 0)  # from 1 on; 0 is the root's, and where leftovers go
    above = torch.where(parents < 0, 0, rows.gather(1, parents.clamp_min(0)))
    found = torch.zeros((2, len(values), 1 + num_nodes), dtype=torch.int64, device=values.device)
    found.scatter_(2, rows.expand(2, -1, -1), torch.stack([candidates.tokens, above]))
    tokens, parent_rows = found[:, :, 1:]
    return tokens, parent_rows


def packed_bits(sees: torch.Tensor) -> torch.Tensor:
    """Bits [..., T] bool as words [..., W] int32: bit j % 32 of word j // 32."""
    num_bits = sees.shape[-1]
    padded = torch.nn.functional.pad(sees, (0, -num_bits % 32)).unflatten(-1, (-1, 32))
    places = torch.arange(32, device=sees.device)
    words = (padded.to(torch.int64) << places).sum(dim=-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
