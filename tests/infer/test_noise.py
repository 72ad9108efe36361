"""Noise: keys, exact reproducibility, and the statistics that losslessness rests on.

Every statistical test uses fixed keys, so it cannot fail at random; the bounds are those of a fresh draw at
about 1e-6 or rarer, so that another hash would pass as well.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from infer.noise import (
    _gumbel_from_bits,
    gumbel,
    gumbel_rows,
    noise_key,
    position_key,
    position_keys,
    position_stream,
    random_seed,
    uniform,
)
from infer.proof.statistics import chi_square_tail

NUM_TOKENS = 200_000
EULER = 0.5772156649015329


def keys(count: int, *parts: int) -> list[int]:
    return [noise_key(*parts, index) for index in range(count)]


def gumbel_cdf(values: torch.Tensor) -> torch.Tensor:
    return torch.exp(-torch.exp(-values.double()))


def test_golden_values() -> None:
    """Outputs for a given seed never change between releases (the last bit of a logarithm may, with the
    machine).
    """
    assert noise_key() == 11400714819323198485
    assert noise_key(0) == 14804455941960215590
    assert noise_key(1, 2) == 11024380141386319771
    assert noise_key(-1) == 8985272196865472873
    assert position_key(1234, 0, 0, 7) == 3019743263564515801
    assert uniform(0) == 0.7339332520166385
    ids = torch.tensor([0, 1, 49151])
    golden = {
        0: [0.3665129244327545, 0.04195898398756981, -0.5727899670600891],
        1: [1.7342169284820557, -0.9968112707138062, -0.290845662355423],
        position_key(1234, 0, 0, 7): [1.6087597608566284, 0.9955770373344421, -0.3592134416103363],
    }
    for key, expected in golden.items():
        torch.testing.assert_close(gumbel(key, ids), torch.tensor(expected), rtol=2e-7, atol=1e-7)


def test_distinct_parts_give_distinct_keys() -> None:
    """Order, number, sign and every bit of the parts matter."""
    values = (-(2**63), -2, -1, 0, 1, 2, 3, 2**32, 2**63 - 1, 2**64 - 1, 2**64 - 2)
    parts = [
        (),
        *((a,) for a in values),
        *itertools.product(values, repeat=2),
        *itertools.product(values, repeat=3),
    ]
    assert len({noise_key(*item) for item in parts}) == len(parts)
    positions = itertools.product((0, 1, 2**62), range(4), range(4), range(64))
    assert len({position_key(*item) for item in positions}) == 3 * 4 * 4 * 64


def test_position_keys_stay_apart_from_other_keys() -> None:
    """The noise of a position may be shown to drafters, so no other draw may share its key."""
    assert position_key(1, 2, 3, 4) != noise_key(1, 2, 3, 4)


def test_keys_have_64_bits() -> None:
    assert all(0 <= key < 2**64 for key in keys(1000))
    with pytest.raises(AssertionError, match="64 bits"):
        noise_key(2**64)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8, 9, 31, 33, 100, 1000, 4099])
def test_subsets_see_the_same_values(size: int) -> None:
    """Bitwise: a draft vocabulary, a shard, a permutation or padding must not change the noise of a token."""
    key = position_key(42, 0, 0, size)
    full = gumbel(key, 49152)
    ids = torch.randperm(49152, generator=torch.Generator().manual_seed(size))[:size]
    assert torch.equal(gumbel(key, ids), full[ids])
    assert torch.equal(gumbel(key, size), full[:size])
    assert torch.equal(gumbel(key, ids.view(1, -1, 1)).flatten(), full[ids])


def test_repeated_calls_agree_and_leave_the_ids_alone() -> None:
    ids = torch.arange(1000)
    first = gumbel(7, ids)
    assert torch.equal(ids, torch.arange(1000))
    assert torch.equal(first, gumbel(7, ids))
    assert torch.equal(gumbel(7, 1000), gumbel(7, 1000))


@pytest.mark.parametrize("key", [0, 1, 2**64 - 1, noise_key(5), noise_key(6)])
def test_gumbel_moments_and_shape(key: int) -> None:
    """Mean, variance and the Kolmogorov-Smirnov distance of 200,000 values; bounds at 5 standard errors."""
    noise = gumbel(key, NUM_TOKENS)
    assert noise.dtype == torch.float32
    assert bool(torch.isfinite(noise).all())
    values = noise.double()
    variance = math.pi**2 / 6
    assert abs(values.mean().item() - EULER) < 5 * math.sqrt(variance / NUM_TOKENS)
    # The kurtosis of a Gumbel variable is 5.4, so its sample variance has standard error var * sqrt(4.4 / n).
    assert abs(values.var().item() - variance) < 5 * variance * math.sqrt(4.4 / NUM_TOKENS)
    cdf = gumbel_cdf(values).sort().values
    grid = torch.arange(1, NUM_TOKENS + 1, dtype=torch.float64) / NUM_TOKENS
    distance = torch.maximum((cdf - grid).abs(), (cdf - grid + 1 / NUM_TOKENS).abs()).max().item()
    assert distance < 2.7 / math.sqrt(NUM_TOKENS)


@pytest.mark.parametrize("distance", [1, 2, 3, 64, 2**32])
def test_neighbours_are_independent(distance: int) -> None:
    """Values at neighbouring raw keys, positions and token ids are uncorrelated, tails included."""
    uniforms = gumbel_cdf(gumbel(123, NUM_TOKENS))
    others = [
        gumbel_cdf(gumbel(123 + distance, NUM_TOKENS)),
        gumbel_cdf(gumbel(position_key(1, 0, 0, distance), NUM_TOKENS)),
        uniforms.roll(distance % 1000),
    ]
    # Neighbouring positions of one token, rather than neighbouring tokens at one position.
    along = torch.stack([gumbel_cdf(gumbel(position_key(9, 0, 0, i), 64)) for i in range(2000)])
    pairs = [(uniforms, other) for other in others] + [(along[:-1].flatten(), along[1:].flatten())]
    for left, right in pairs:
        count = left.numel()
        correlation = torch.corrcoef(torch.stack([left, right]))[0, 1].item()
        assert abs(correlation) < 5 / math.sqrt(count)
        both_high = ((left > 0.9) & (right > 0.9)).double().mean().item()
        assert abs(both_high - 0.01) < 5 * math.sqrt(0.01 * 0.99 / count)


def test_uniform_statistics() -> None:
    """20,000 values: inside [0, 1), and alike in 100 equal bins (chi-square)."""
    values = torch.tensor([uniform(key) for key in keys(20_000, 3)], dtype=torch.float64)
    assert float(values.min()) >= 0.0
    assert float(values.max()) < 1.0
    counts = torch.histc(values, bins=100, min=0, max=1)
    assert chi_square_tail(((counts - 200) ** 2 / 200).sum().item(), 99) > 1e-6


def test_uniform_is_independent_of_the_gumbel_noise_of_its_key() -> None:
    pairs = torch.tensor([[uniform(key), gumbel(key, 1).item()] for key in keys(5000, 4)], dtype=torch.float64)
    correlation = torch.corrcoef(torch.stack([pairs[:, 0], gumbel_cdf(pairs[:, 1])]))[0, 1].item()
    assert abs(correlation) < 5 / math.sqrt(5000)


def test_argmax_follows_the_distribution() -> None:
    """argmax(log p + G) over 30,000 positions has law p (chi-square)."""
    token_probs = torch.tensor([0.30, 0.22, 0.16, 0.11, 0.08, 0.06, 0.04, 0.03], dtype=torch.float64)
    scores = token_probs.log().float()
    count = 30_000
    noise = torch.stack([gumbel(position_key(11, 0, 0, i), 8) for i in range(count)])
    counts = torch.bincount((scores + noise).argmax(dim=-1), minlength=8).double()
    assert chi_square_tail(((counts - count * token_probs) ** 2 / (count * token_probs)).sum().item(), 7) > 1e-6


def test_rare_events_are_as_frequent_as_they_should_be() -> None:
    """v < 2^-k, i.e. G > -log(-log1p(-2^-k)), for k up to 20 over 40 million draws; bounds at 5 standard
    errors.

    Noise from 24-bit uniforms would be right here too; the next test looks further down.
    """
    total = 0
    counts = dict.fromkeys((4, 8, 12, 16, 20), 0)
    ids = torch.arange(1_000_000)
    for key in keys(40, 12):
        noise = gumbel(key, ids)
        total += noise.numel()
        for bits in counts:
            counts[bits] += int((noise > -math.log(-math.log1p(-(2.0**-bits)))).sum())
    for bits, found in counts.items():
        expected = total * 2.0**-bits
        assert abs(found - expected) < 5 * math.sqrt(expected), f"v < 2^-{bits}: {found} of {expected:.0f}"


def test_tails_below_2_to_the_minus_30_are_resolved() -> None:
    """Tokens of probability 1e-12 can win: 24-bit uniforms starve all tokens below 3e-8.

    Such events cannot be waited for, so the map from bits to noise is driven directly: the 2^34 patterns of
    the smallest v must give the v < 2^-30 part of the law, which is v uniform on (0, 2^-30).
    """
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 2**34, (100_000,), generator=generator)
    # v falls as the bits, read as a signed number, grow: the largest integers are the smallest v.
    noise = _gumbel_from_bits((2**63 - 1) - bits)
    v = -torch.expm1(-torch.exp(-noise.double())) * 2.0**30
    assert float(v.max()) <= 1.0 + 1e-6
    assert float(v.min()) > 0.0
    counts = torch.histc(v, bins=100, min=0, max=1)
    assert chi_square_tail(((counts - 1000) ** 2 / 1000).sum().item(), 99) > 1e-6
    assert noise.unique().numel() > 90_000


def test_extreme_bits_stay_finite() -> None:
    """Uniforms lie strictly inside (0, 1): no bit pattern gives infinite noise."""
    extremes = torch.tensor([-(2**63), -(2**63) + 1, -1, 0, 1, 2**63 - 2, 2**63 - 1])
    noise = _gumbel_from_bits(extremes)
    assert bool(torch.isfinite(noise).all())
    assert noise.min().item() == pytest.approx(-math.log(52 * math.log(2)), rel=1e-6)
    assert noise.max().item() == pytest.approx(52 * math.log(2), rel=1e-6)


def test_position_keys() -> None:
    """Of every position, in any order and shape: `position_key`, as a signed number."""
    streams = torch.tensor([position_stream(*parts) for parts in ((0, 0, 0), (2**63 - 1, 3, 1), (-5, 0, 7))])
    positions = torch.tensor([0, 1, 77, 2**40, 2**63 - 1, -1, -(2**63)])
    found = position_keys(streams[:, None], positions)
    for row, parts in enumerate(((0, 0, 0), (2**63 - 1, 3, 1), (-5, 0, 7))):
        for column, position in enumerate(positions.tolist()):
            assert int(found[row, column]) % 2**64 == position_key(*parts, position)


def test_noise_of_many_keys() -> None:
    """To the bit what each key gives alone, for tokens in any order."""
    keys = [noise_key(7, index) for index in range(6)]
    ids = torch.randperm(5000, generator=torch.Generator().manual_seed(0))[:1003]
    signed = torch.tensor([key - 2**64 if key >= 2**63 else key for key in keys])
    found = gumbel_rows(signed, ids)
    assert found.dtype is torch.float32
    assert torch.equal(found, torch.stack([gumbel(key, ids) for key in keys]))


def test_random_seeds() -> None:
    seeds = {random_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)
