"""What cannot be captured is refused by name, on a CPU as on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from infer.graphs import capture
from infer.graphs.capture import NoSync, SyncError, captured

X = torch.arange(6.0)
ELSEWHERE = X.to("meta")
"""On a device that is not the host."""

SYNCS: dict[str, Callable[[], object]] = {
    "item": lambda: X.sum().item(),
    "float": lambda: float(X[0]),
    "bool": lambda: bool(X.any()),
    "nonzero": lambda: X.nonzero(),
    "where with one argument": lambda: torch.where(X > 2),
    "boolean index": lambda: X[X > 2],
    "boolean assignment": lambda: X.clone().__setitem__(X > 2, torch.tensor([1.0, 1.0, 1.0])),
    "masked_select": lambda: X.masked_select(X > 2),
    "unique": lambda: torch.unique(X),
    "equal": lambda: torch.equal(X, X),
    "allclose": lambda: torch.allclose(X, X),
    "bincount": lambda: torch.bincount(X.long()),
    "repeats that are a tensor": lambda: X.repeat_interleave(X.long()),
    "a copy to another device": lambda: X.to("meta"),
    "a copy into another device's tensor": lambda: ELSEWHERE.copy_(X),
    "an index of the host's": lambda: ELSEWHERE[torch.tensor([1, 2])],
    "what torch.tensor ends with on a GPU": lambda: torch.ops.aten.lift_fresh(ELSEWHERE),
}
INFERENCE = pytest.mark.parametrize("is_inference", [False, True], ids=["no_grad", "inference"])


@INFERENCE
@pytest.mark.parametrize("name", SYNCS)
def test_whatever_waits_for_the_device_is_refused(name: str, is_inference: bool) -> None:
    """In inference mode too, where operations that are made of others come whole."""
    with torch.no_grad(), torch.inference_mode(is_inference), NoSync(), pytest.raises(SyncError):
        SYNCS[name]()


@INFERENCE
def test_what_stays_on_the_device_passes(is_inference: bool) -> None:
    with torch.no_grad(), torch.inference_mode(is_inference), NoSync():
        index = X.topk(2).indices
        rows = X[index].index_select(0, torch.zeros(1, dtype=torch.int64))
        torch.where(X > 2, X, 0.0).masked_fill(X < 1, 2.0).sort(stable=True)
        X.clone()[index] = rows
        X.repeat_interleave(2)
        torch.cat([rows, X]).softmax(dim=0).to(torch.bfloat16).cumsum(0)


def test_the_host_may_look_at_what_it_has() -> None:
    with NoSync(torch.device("meta")):
        assert float(X.sum()) == 15
        assert len(X.nonzero()) == 5
    with NoSync(torch.device("meta")), pytest.raises(SyncError):
        ELSEWHERE.nonzero()


def test_what_is_made_once_may_come_from_the_host() -> None:
    """A table that the first run brings to the device is no reason to refuse; one that every run brings is."""
    known: dict[str, torch.Tensor] = {}
    captured(lambda: known.setdefault("table", known["table"] if known else X.to("meta")).add_(1), X.device)
    with pytest.raises(SyncError, match="copies a tensor between host and device"):
        captured(lambda: X.to("meta").add_(1), X.device)


def test_a_capture_that_fails_is_a_refusal() -> None:
    """What no check foresees, as a library that waits by itself; but for lack of memory."""
    message = "not permitted when stream is capturing"
    with pytest.raises(SyncError, match=message), capture._refused_where_it_fails():
        raise RuntimeError(message)
    with pytest.raises(torch.OutOfMemoryError), capture._refused_where_it_fails():
        raise torch.OutOfMemoryError("CUDA out of memory")


class Router(nn.Module):
    """As a mixture of experts picks its tokens."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        chosen = (states > 0).nonzero()
        return states[chosen[:, 0]]


def test_the_module_that_waits_is_named() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Router())
    with pytest.raises(SyncError, match=r"Router makes a tensor whose size depends on values .*aten\.nonzero"):
        captured(lambda: model(X[None]), torch.device("cpu"))


def test_on_a_cpu_the_computation_is_its_own_replay() -> None:
    total = torch.zeros(1)

    def compute() -> None:
        total.add_(1)

    replay = captured(compute, torch.device("cpu"))
    before = float(total)
    replay()
    replay()
    assert float(total) == before + 2
