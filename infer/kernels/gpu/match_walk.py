"""The match walk over draft trees (`infer.verify.match_walk`) on the device: after every row the token that plain
decoding would emit there, and the path of the tree that these tokens follow.

Shapes: B requests, N1 rows of each (row 0 the root), V vocabulary, P = depth + 1 places of a path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from infer.kernels.gpu import launching_on, runs_triton
from infer.noise import gumbel_rows
from infer.sampling import GREEDY_BELOW


@dataclass(frozen=True, kw_only=True, eq=False)
class Walk:
    """What a walk found.

    paths [B, depth + 1] int32: the rows of the accepted path, the root first; places beyond it repeat its last row.
    counts [B] int32: accepted nodes, 0 .. depth.
    tokens [B] int64: the target's own token after the path.
    sound [B] bool: False where a row of the path lets no token be drawn (NaN, infinity, or nothing above -infinity);
    the walk ends there, and its token means nothing.
    """

    paths: Tensor
    counts: Tensor
    tokens: Tensor
    sound: Tensor


def match_walk(
    logits: Tensor, tokens: Tensor, parents: Tensor, keys: Tensor, temperatures: Tensor, *, depth: int
) -> Walk:
    """Draw after each row, and walk.

    logits [B * N1, V]. tokens, parents [B, N1]: the token of each row, and the row above it, which has a smaller
    number; -1 for the root and for places without a node. keys [B * N1] int64: the noise key of the token that follows
    each row (`infer.noise.position_keys`). temperatures [B] float32; 0 is greedy. depth: most nodes of a path.

    A draw is the argmax of logits / temperature plus noise, the lowest token on ties: what `infer.sampling.pick` gives
    for a request without other processors.
    """
    assert logits.shape[0] == tokens.numel() == keys.numel(), f"{logits.shape[0]} rows, {tokens.numel()} tokens"
    assert tokens.shape == parents.shape, f"tokens {tuple(tokens.shape)}, parents {tuple(parents.shape)}"
    assert temperatures.shape == tokens.shape[:1], f"{tuple(temperatures.shape)} temperatures"
    if runs_triton(logits.device):
        from infer.kernels.gpu.match_walk_triton import match_walk_triton

        with launching_on(logits.device):
            return match_walk_triton(logits, tokens, parents, keys, temperatures, depth=depth)
    return match_walk_reference(logits, tokens, parents, keys, temperatures, depth=depth)


def match_walk_reference(
    logits: Tensor, tokens: Tensor, parents: Tensor, keys: Tensor, temperatures: Tensor, *, depth: int
) -> Walk:
    """What `match_walk` does, in PyTorch alone: the fallback as well."""
    drawn, is_sound = draw(logits, keys.view(tokens.shape), temperatures)
    return walk(drawn, is_sound, tokens, parents, depth=depth)


def draw(logits: Tensor, keys: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """The token after each row [B, N1] int64, and whether it could be drawn.

    A request at a time: the noise of a vocabulary takes eight bytes a token.
    """
    num_requests, num_rows = keys.shape
    by_request = logits.view(num_requests, num_rows, -1)
    token_ids = torch.arange(logits.shape[-1], device=logits.device)
    drawn, best = [], []
    for request in range(num_requests):
        scores = by_request[request].float()
        temperature = temperatures[request]
        is_greedy = temperature < GREEDY_BELOW
        noisy = scores / torch.where(is_greedy, 1.0, temperature) + gumbel_rows(keys[request], token_ids)
        total = torch.where(is_greedy, scores, noisy)
        token = total.argmax(dim=-1)  # the first maximum, or the first NaN
        drawn.append(token)
        best.append(total.gather(1, token[:, None])[:, 0])
    return torch.stack(drawn), torch.isfinite(torch.stack(best))


def walk(drawn: Tensor, is_sound: Tensor, tokens: Tensor, parents: Tensor, *, depth: int) -> Walk:
    """Follow the tokens `drawn` [B, N1] from the root while the tree has them."""
    num_rows = tokens.shape[1]
    places = torch.arange(num_rows, device=tokens.device)
    row = torch.zeros(tokens.shape[0], dtype=torch.int64, device=tokens.device)
    goes_on = torch.ones_like(row, dtype=torch.bool)
    path, count = [row], torch.zeros_like(row)
    for _ in range(depth):
        token = drawn.gather(1, row[:, None])
        matches = (parents == row[:, None]) & (tokens == token)  # [B, N1]
        child = torch.where(matches, places, num_rows).amin(dim=1)
        goes_on = goes_on & (child < num_rows) & is_sound.gather(1, row[:, None])[:, 0]
        row = torch.where(goes_on, child, row)
        count = count + goes_on
        path.append(row)
    last = row[:, None]
    return Walk(
        paths=torch.stack(path, dim=1).to(torch.int32),
        counts=count.to(torch.int32),
        tokens=drawn.gather(1, last)[:, 0],
        sound=is_sound.gather(1, last)[:, 0],
    )
