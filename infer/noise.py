"""Counter-based noise: every random number is a pure function of a key, whatever the order of calls.

The target's draw at a position uses Gumbel noise keyed by (seed, sample, attempt, position, token id) alone.
Plain and speculative decoding therefore draw the same token, in any batch and under any tree; a drafter may
look at the same noise, and a subset, permutation or padding of the vocabulary sees the same value for the
same token.

Values are fixed for good (golden values in the tests): changing one would change every seeded output. The
hash is exact on every device; the two logarithms are taken in float64 and rounded to float32, so that devices
whose logarithms differ in the last bit still agree except about once in 1e8 values. The generator is not
cryptographic.
"""

from __future__ import annotations

import secrets
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_NEGATIVE = 0xD1B54A32D192ED03
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)

_POSITION = 0x706F736974696F6E
"""Tag ("position") that keeps the target's own draws apart from every other use of `noise_key`."""
_UNIFORM = 0x756E69666F726D00
"""Tag ("uniform") that keeps `uniform(key)` independent of `gumbel(key, ...)` under the same key."""

_UNIT_EXPONENT = (0x3FF << 52) + (1 << 51)
"""Turns a signed 52-bit integer into the bits of a float64 in [1, 2)."""


class Mixing(NamedTuple):
    """The numbers that make the noise, for code that makes it elsewhere; `step` as a signed number."""

    step: int
    multipliers: tuple[int, int]
    shifts: tuple[int, int, int]
    unit_exponent: int


MIXING = Mixing(_STEP - (1 << 64), _MULTIPLIERS, _SHIFTS, _UNIT_EXPONENT)


def noise_key(*parts: int) -> int:
    """A 64-bit key that depends on every part and on their order; parts lie in [-2**63, 2**64)."""
    key = _STEP
    for part in parts:
        assert -(1 << 63) <= part <= _MASK, f"a part of a noise key must fit in 64 bits: {part}"
        domain = _STEP if part >= 0 else _NEGATIVE
        key = _mix(_mix(key + domain) ^ (part & _MASK))
    return key


def position_key(seed: int, sample: int, attempt: int, position: int) -> int:
    """Key of the target's draw for output token `position` (an index in the request's own tokens)."""
    return noise_key(_POSITION, seed, sample, attempt, position)


def position_stream(seed: int, sample: int, attempt: int) -> int:
    """What `position_keys` takes to make the keys of a request, as a signed 64-bit number."""
    return _signed(noise_key(_POSITION, seed, sample, attempt))


def position_keys(streams: Tensor, positions: Tensor) -> Tensor:
    """`position_key` of many positions at once, on their device: [n] int64, the keys' bits as signed numbers.

    streams [n] int64: `position_stream` of each request. positions [n] int64. The two may broadcast.
    """
    domains = torch.where(positions >= 0, _signed(_STEP), _signed(_NEGATIVE))
    return _mix_tensor(_mix_tensor(streams + domains).bitwise_xor_(positions))


def uniform(key: int) -> float:
    """One uniform number in [0, 1) with 53 bits."""
    return (_mix(key ^ _UNIFORM) >> 11) * 2.0**-53


def gumbel(key: int, token_ids: Tensor | int, device: torch.device | str = "cpu") -> Tensor:
    """Standard Gumbel noise, float32: one value per id of `token_ids` (int64, any shape), or for ids 0..V-1
    if given V.

    With a tensor the result lies on the tensor's device and `device` is not read.
    """
    if isinstance(token_ids, int):
        hashes = _counters(token_ids, torch.device(device)) + _signed(key)
    else:
        assert token_ids.dtype == torch.int64, f"token ids must be int64, got {token_ids.dtype}"
        hashes = (token_ids * _signed(_STEP)).add_(_signed(key))
    return _gumbel_from_bits(_mix_tensor(hashes))


def gumbel_rows(keys: Tensor, token_ids: Tensor) -> Tensor:
    """`gumbel` under many keys: [n, C] float32, for `keys` [n] int64 (signed) and `token_ids` [C] int64, on their
    device."""
    assert keys.dtype == token_ids.dtype == torch.int64, f"keys {keys.dtype}, token ids {token_ids.dtype}"
    if keys.is_cuda:
        from infer.kernels.gpu import launching_on, runs_triton

        if runs_triton(keys.device):
            from infer.kernels.gpu.match_walk_triton import gumbel_rows_triton

            with launching_on(keys.device):
                return gumbel_rows_triton(keys, token_ids)
    return _gumbel_from_bits(_mix_tensor(token_ids * _signed(_STEP) + keys[:, None]))


def random_seed() -> int:
    """A fresh seed for requests that give none, of 53 bits: whatever reads it back from JSON keeps it whole."""
    return secrets.randbits(53)


def _gumbel_from_bits(hashes: Tensor) -> Tensor:
    """Map uniform 64-bit integers (overwritten) to Gumbel noise.

    v is an odd multiple of 2^-52, so strictly inside (0, 1) with its finest relative steps next to 0, where
    the large values of G come from: a token of probability 1e-12 still wins as often as it should.
    """
    bits = hashes.bitwise_right_shift_(12).add_(_UNIT_EXPONENT).bitwise_or_(1)
    minus_v = bits.view(torch.float64).sub_(2.0)
    exponential = minus_v.log1p_().neg_()
    return exponential.log_().to(torch.float32).neg_()


def _mix_tensor(hashes: Tensor) -> Tensor:
    """`_mix` of int64 `hashes`, which are overwritten."""
    scratch = torch.empty_like(hashes)
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, None), strict=True):
        # `>>` is arithmetic: without the mask the sign would spread and the hash would lose bits.
        torch.bitwise_right_shift(hashes, shift, out=scratch)
        hashes.bitwise_xor_(scratch.bitwise_and_((1 << (64 - shift)) - 1))
        if multiplier is not None:
            hashes.mul_(_signed(multiplier))
    return hashes


@lru_cache(maxsize=8)
def _counters(vocab_size: int, device: torch.device) -> Tensor:
    """The constant token id * step for a whole vocabulary; callers must not write to it."""
    return torch.arange(vocab_size, dtype=torch.int64, device=device) * _signed(_STEP)


def _mix(value: int) -> int:
    """The finaliser of splitmix64, a bijection on 64 bits."""
    value &= _MASK
    value = ((value ^ (value >> _SHIFTS[0])) * _MULTIPLIERS[0]) & _MASK
    value = ((value ^ (value >> _SHIFTS[1])) * _MULTIPLIERS[1]) & _MASK
    return value ^ (value >> _SHIFTS[2])


def _signed(value: int) -> int:
    """The int64 with the same bits as the unsigned `value`."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value
