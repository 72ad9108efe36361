"""The match walk and its noise as Triton kernels.

The vocabulary is cut into splits, so that few rows still fill a GPU: a program takes a split of a row, adds the noise
where it stands, and leaves its best score and token. A second kernel, a program a request, walks: it looks only at the
splits of rows that the walk visits. Nothing of the size of the logits is written.

Both are exact but for two logarithms, in float64 as in `infer.noise`: what a device's last bit of them makes of a
float32 differs about once in 1e8 values.
"""

# Parameters of kernels are Triton's own.
# mypy: disable-error-code="import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infer.kernels.gpu.match_walk import Walk
from infer.noise import MIXING
from infer.sampling import GREEDY_BELOW

_SPLIT = 4096
"""Tokens a program: 128,000 of them make 32 programs a row, whose results one warp then reads at once."""
_TILE = 1024
"""Tokens at a time: eight a thread, whose noise takes two 64-bit registers each."""

_NONE = tl.constexpr(2**31 - 1)
_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)
_STEP = tl.constexpr(MIXING.step)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = (tl.constexpr(shift) for shift in MIXING.shifts)
_MULTIPLIER_1, _MULTIPLIER_2 = (tl.constexpr(multiplier) for multiplier in MIXING.multipliers)
_UNIT_EXPONENT = tl.constexpr(MIXING.unit_exponent)


def match_walk_triton(
    logits: Tensor, tokens: Tensor, parents: Tensor, keys: Tensor, temperatures: Tensor, *, depth: int
) -> Walk:
    """As `infer.kernels.gpu.match_walk.match_walk`."""
    num_rows, vocab_size = logits.shape
    num_requests, rows_per_request = tokens.shape
    num_splits = triton.cdiv(vocab_size, _SPLIT)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    device = logits.device
    scores = torch.empty((num_rows, num_splits), dtype=torch.float32, device=device)
    drawn = torch.empty((num_rows, num_splits), dtype=torch.int32, device=device)
    _draw[(num_rows, num_splits)](
        logits,
        logits.stride(0),
        keys.contiguous(),
        temperatures.contiguous(),
        scores,
        drawn,
        vocab_size,
        rows_per_request,
        num_splits,
        SPLIT=_SPLIT,
        TILE=_TILE,
    )
    walk = Walk(
        paths=torch.empty((num_requests, depth + 1), dtype=torch.int32, device=device),
        counts=torch.empty(num_requests, dtype=torch.int32, device=device),
        tokens=torch.empty(num_requests, dtype=torch.int64, device=device),
        sound=torch.empty(num_requests, dtype=torch.bool, device=device),
    )
    _walk[(num_requests,)](
        scores,
        drawn,
        tokens.contiguous(),
        parents.contiguous(),
        walk.paths,
        walk.counts,
        walk.tokens,
        walk.sound,
        rows_per_request,
        num_splits,
        DEPTH=depth,
        ROWS=triton.next_power_of_2(rows_per_request),
        SPLITS=triton.next_power_of_2(num_splits),
        num_warps=1,  # reductions within a warp wait for nobody
    )
    return walk


def gumbel_rows_triton(keys: Tensor, token_ids: Tensor) -> Tensor:
    """As `infer.noise.gumbel_rows`."""
    noise = torch.empty((keys.shape[0], token_ids.shape[0]), dtype=torch.float32, device=keys.device)
    if noise.numel():
        grid = (keys.shape[0], triton.cdiv(token_ids.shape[0], _TILE))
        _gumbel_rows[grid](keys.contiguous(), token_ids.contiguous(), noise, token_ids.shape[0], TILE=_TILE)
    return noise


@triton.jit
def _gumbel(key, token_ids):
    """`infer.noise.gumbel` of int64 `token_ids` [n]: float32 [n]."""
    # The products wrap; shifts of unsigned numbers bring in zeros.
    hashes = (token_ids * _STEP + key).to(tl.uint64, bitcast=True)
    hashes = (hashes ^ (hashes >> _SHIFT_1)) * _MULTIPLIER_1
    hashes = (hashes ^ (hashes >> _SHIFT_2)) * _MULTIPLIER_2
    hashes = hashes ^ (hashes >> _SHIFT_3)
    # A float64 in [1, 2), that is 2 - v; v is an odd multiple of 2^-52, so that 1 - v is exact.
    bits = ((hashes.to(tl.int64, bitcast=True) >> 12) + _UNIT_EXPONENT) | 1
    exponential = -tl.log(bits.to(tl.float64, bitcast=True) - 1.0)
    return -(tl.log(exponential).to(tl.float32))


@triton.jit(do_not_specialize=["num_ids"])
def _gumbel_rows(keys, token_ids, noise, num_ids, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * TILE + tl.arange(0, TILE)
    ids = tl.load(token_ids + places, mask=places < num_ids, other=0)
    tl.store(noise + row * num_ids + places, _gumbel(tl.load(keys + row), ids), mask=places < num_ids)


@triton.jit(do_not_specialize=["vocab_size", "rows_per_request", "num_splits"])
def _draw(
    logits,
    row_stride,
    keys,
    temperatures,
    scores,
    drawn,
    vocab_size,
    rows_per_request,
    num_splits,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
):
    """The best score [R, splits] and its token, of each split of each row."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    temperature = tl.load(temperatures + row // rows_per_request)
    key = tl.load(keys + row)
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_ids = tl.full([TILE], _NONE, tl.int32)
    for offset in range(0, SPLIT, TILE):
        ids = split * SPLIT + offset + tl.arange(0, TILE)
        score = tl.load(logits + row * row_stride + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        if temperature >= _GREEDY_BELOW:
            score = tl.div_rn(score, temperature) + _gumbel(key, ids.to(tl.int64))
        score = tl.where(score == score, score, float("inf"))  # NaN wins, and is found out
        is_better = score > best
        best = tl.where(is_better, score, best)
        best_ids = tl.where(is_better, ids, best_ids)
    top = tl.max(best, axis=0)
    tl.store(scores + row * num_splits + split, top)
    tl.store(drawn + row * num_splits + split, tl.min(tl.where(best == top, best_ids, _NONE), axis=0))


@triton.jit(do_not_specialize=["rows_per_request", "num_splits"])
def _walk(
    scores,
    drawn,
    tokens,
    parents,
    paths,
    counts,
    last_tokens,
    sound,
    rows_per_request,
    num_splits,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """A request: from its root down, as far as rows hold the tokens drawn."""
    request = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, ROWS)
    splits = tl.arange(0, SPLITS)
    is_row = rows < rows_per_request
    row_tokens = tl.load(tokens + request * rows_per_request + rows, mask=is_row, other=-1)
    row_parents = tl.load(parents + request * rows_per_request + rows, mask=is_row, other=-1).to(tl.int32)
    row = tl.full([], 0, tl.int32)
    count = tl.full([], 0, tl.int32)
    for step in range(DEPTH + 1):
        tl.store(paths + request * (DEPTH + 1) + step, row)
        place = (request * rows_per_request + row) * num_splits + splits
        score = tl.load(scores + place, mask=splits < num_splits, other=float("-inf"))
        top = tl.max(score, axis=0)
        ids = tl.load(drawn + place, mask=splits < num_splits, other=_NONE)
        token = tl.min(tl.where(score == top, ids, _NONE), axis=0)
        is_sound = (top > float("-inf")) & (top < float("inf"))
        token = tl.where(is_sound, token, 0)
        child = tl.min(tl.where((row_parents == row) & (row_tokens == token), rows, _NONE), axis=0)
        goes_on = is_sound & (child < _NONE) & (step < DEPTH)
        count += goes_on.to(tl.int32)
        row = tl.where(goes_on, child, row)
        tl.store(last_tokens + request, token.to(tl.int64))
        tl.store(sound + request, is_sound)
    tl.store(counts + request, count)
