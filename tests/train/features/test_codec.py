"""The forms in which states are kept: exact ones give back the bits, lossy ones little less, of any of their taps."""

from __future__ import annotations

import itertools
import types

import pytest
import torch

from train.features.codec import Codec

SIZE, FINAL = 128, 9


def codec(stored: str, taps: tuple[int, ...], dtype: torch.dtype = torch.float32, size: int = SIZE) -> Codec:
    return Codec(dtype=dtype, stored_dtype=stored, hidden_size=size, taps=taps, final=FINAL)


def states(taps: tuple[int, ...], *, tokens: int = 7, dtype: torch.dtype = torch.float32) -> dict[int, torch.Tensor]:
    """By tap; a few channels are a hundred times the others, as in real targets."""
    generator = torch.Generator().manual_seed(0)
    drawn = {tap: torch.randn(tokens, SIZE, generator=generator) for tap in {*taps, FINAL}}
    for one in drawn.values():
        one[:, [3, 50]] *= 100
    return {tap: one.to(dtype) for tap, one in drawn.items()}


def side_by_side(given: dict[int, torch.Tensor], taps: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([given[tap] for tap in taps], dim=-1) if taps else given[FINAL][:, :0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("taps", [(1, 4, 6), (1, 4, FINAL), (FINAL,), (2,)])
def test_target_form_gives_back_the_bits(taps: tuple[int, ...], dtype: torch.dtype) -> None:
    """Of every choice of taps among those kept; a tap of the final state is not kept a second time."""
    given = states(taps, dtype=dtype)
    kind = codec(str(dtype).removeprefix("torch."), taps, dtype)
    kept = kind.encode(side_by_side(given, taps), given[FINAL])
    assert kept["states"].shape == (7, (len(set(taps) - {FINAL}) + 1) * SIZE)
    assert kind.bytes_per_token == kept["states"].nbytes // 7
    for count in range(len(taps) + 1):
        for wanted in itertools.combinations(taps, count):
            found, last = kind.decode(kept, wanted)
            assert torch.equal(found, side_by_side(given, wanted))
            assert torch.equal(last, given[FINAL])
    assert not kind.is_lossy


def test_neighbouring_taps_are_a_view() -> None:
    """What a head reads of a store made for it is not copied."""
    given = states((1, 4, FINAL))
    kind = codec("float32", (1, 4, FINAL))
    kept = kind.encode(side_by_side(given, (1, 4, FINAL)), given[FINAL])
    for wanted in ((1, 4, FINAL), (1, 4), (4, FINAL), (4,)):
        assert kind.decode(kept, wanted)[0].untyped_storage().data_ptr() == kept["states"].untyped_storage().data_ptr()


def test_bfloat16_rounds_each_number() -> None:
    given = states((1, 4))
    kind = codec("bfloat16", (1, 4))
    kept = kind.encode(side_by_side(given, (1, 4)), given[FINAL])
    assert kept["states"].dtype == torch.bfloat16
    found, last = kind.decode(kept, (1, 4))
    assert torch.equal(found, side_by_side(given, (1, 4)).bfloat16())
    assert torch.equal(last, given[FINAL].bfloat16())
    assert kind.is_lossy


def test_int8_is_off_by_half_a_step_of_its_group() -> None:
    """The scale of 64 numbers is their largest over 127, so none is off by more than half of that; the final state
    stays at bfloat16. Numbers that share no group with a huge one keep their precision."""
    given = states((1, FINAL))
    kind = codec("int8", (1, FINAL))
    kept = kind.encode(side_by_side(given, (1, FINAL)), given[FINAL])
    assert {name: (one.dtype, one.shape[1]) for name, one in kept.items()} == kind.layout
    found, last = kind.decode(kept, (1, FINAL))
    tap, final = found.split(SIZE, dim=-1)
    step = given[1].unflatten(-1, (-1, 64)).abs().amax(-1, keepdim=True) / 127
    error = (tap - given[1]).unflatten(-1, (-1, 64)).abs()
    assert bool((error <= step / 2 * 1.001).all())
    assert float(error[:, 1].mean()) < float(error[:, 0].mean()) / 20  # the huge ones are in the first group
    assert torch.equal(last, given[FINAL].bfloat16())
    assert torch.equal(final, last.float())
    assert torch.equal(kind.decode(kept, (FINAL,))[0], final)
    assert torch.equal(kind.decode(kept, (1,))[0], tap)


def test_int8_of_nothing_and_of_odd_sizes() -> None:
    """States that are all zero stay so; a size without a fitting divisor shares one scale."""
    kind = codec("int8", (1,), size=37)
    assert kind.group_size == 37
    zeros = torch.zeros(3, 37)
    found, _ = kind.decode(kind.encode(zeros, zeros), (1,))
    assert torch.equal(found, zeros)
    assert codec("int8", (1,), size=576).group_size == 64
    assert codec("int8", (1,), size=32).group_size == 32


def test_what_a_recipe_asks_for() -> None:
    """A bfloat16 target's states are not rounded by bfloat16, so both are one store; the final state is kept at least
    so."""
    full = types.SimpleNamespace(dtype=torch.float32, hidden_size=SIZE, num_layers=FINAL - 1)
    half = types.SimpleNamespace(dtype=torch.bfloat16, hidden_size=SIZE, num_layers=FINAL - 1)
    assert Codec.of(half, (1,), "bfloat16") == Codec.of(half, (1,), "target")
    assert not Codec.of(half, (1,), "bfloat16").is_lossy
    assert Codec.of(full, (1,), "bfloat16").stored_dtype == "bfloat16"
    assert Codec.of(full, (1,), "int8").layout["last"] == (torch.bfloat16, SIZE)
    assert "codes" not in Codec.of(full, (FINAL,), "int8").layout
    assert Codec.of(full, (FINAL,), "int8").is_lossy
    assert not Codec.of(half, (FINAL,), "int8").is_lossy
