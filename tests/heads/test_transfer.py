"""Copies to a device and clocks of its streams, by stand-ins that write down what they are asked."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from heads.transfer import sent
from train.reports.machine_use import HostClock, Laps, clock_for


class Asked:
    """A tensor that stands on `device`, and what was done to it."""

    def __init__(self, device: str, log: list[str]) -> None:
        self.device, self.log = torch.device(device), log

    def pin_memory(self) -> Asked:
        self.log.append("pin")
        return self

    def to(self, device: Any, dtype: Any = None, *, non_blocking: bool = False) -> Asked:
        self.log.append(f"to {device} {dtype} {'on its way' if non_blocking else 'waiting'}")
        return Asked(str(device), self.log)


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        ("cpu", "cuda", ["pin", "to cuda None on its way", "to cuda torch.bfloat16 waiting"]),
        ("cuda", "cuda", ["to cuda torch.bfloat16 waiting"]),
        ("cuda", "cpu", ["to cpu torch.bfloat16 waiting"]),
        ("cpu", "cpu", ["to cpu torch.bfloat16 waiting"]),
    ],
)
def test_only_what_goes_to_a_gpu_is_not_waited_for(start: str, end: str, expected: list[str]) -> None:
    """A copy to the host that nobody waits for would be read before it is there. The dtype changes on the GPU: from the
    host it would go by an unpinned copy."""
    log: list[str] = []
    sent(cast(torch.Tensor, Asked(start, log)), end, torch.bfloat16)
    assert log == expected


def test_what_is_there_already_is_itself() -> None:
    tensor = torch.ones(3)
    assert sent(tensor, "cpu") is tensor
    assert sent(tensor, "cpu", torch.float32) is tensor
    assert sent(tensor, "cpu", torch.bfloat16).dtype is torch.bfloat16


class CountingClock:
    """Whose moments come one second apart; differences are asked for in the end only."""

    def __init__(self) -> None:
        self.now, self.is_over = 0.0, False

    def mark(self) -> float:
        assert not self.is_over
        self.now += 1.0
        return self.now

    def seconds(self, first: float, last: float) -> float:
        self.is_over = True
        return last - first


def test_laps_are_added_up_by_part() -> None:
    laps = Laps(CountingClock())
    for part in ("features", "head", "features", "update"):
        laps.lap(part)
    assert laps.seconds() == {"features": 2.0, "head": 1.0, "update": 1.0}
    assert list(laps.seconds()) == ["features", "head", "update"]
    assert isinstance(clock_for("cpu"), HostClock)
