"""The target's forward beside the head's training: a pass's features are computed while the pass before it trains.

On a GPU that happens on a stream of its own. An event says when the features are there, which the head's stream waits
for and the host does not; and since they were allocated on one stream and are read on another, the allocator is told.
Without streams the same is done in the same order. What is computed of a row depends on the row alone, so neither
changes a number.

Two passes' features are alive at most: those being trained on and those being made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from infer.chat import Rendered
from infer.target import TargetModel
from train.features.rows import FeatureSource, RowFeatures
from train.sharded import ShardedTarget


class Streams(Protocol):
    """The stream that features are made on, beside the one that is current."""

    def within(self) -> AbstractContextManager[Any]:
        """Inside, what is asked of the device goes to the features' stream."""

    def record(self) -> Any:
        """An event behind all that was asked of the features' stream so far."""

    def wait(self, event: Any) -> None:
        """The current stream goes on only when `event` has happened; the host goes on at once."""

    def lend(self, tensors: Iterable[torch.Tensor]) -> None:
        """The memory of these, made on the features' stream, is free only when the current stream is done with them."""

    def finish(self) -> None:
        """The host waits until all is done that was asked of the features' stream."""


class NoStreams:
    """One thing after another."""

    def within(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def record(self) -> None:
        return None

    def wait(self, event: Any) -> None:
        """It has happened."""

    def lend(self, tensors: Iterable[torch.Tensor]) -> None:
        """There is one owner."""

    def finish(self) -> None:
        """It is."""


class CudaStreams:
    """`Streams` of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))  # the target's weights are on their way there

    def within(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def record(self) -> torch.cuda.Event:
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def lend(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.device.type == "cuda":
                tensor.record_stream(torch.cuda.current_stream(self._device))

    def finish(self) -> None:
        self._stream.synchronize()


class FeaturesAhead:
    """Features of a `source`, of which those asked for next may be begun early."""

    def __init__(self, source: FeatureSource, streams: Streams) -> None:
        self._source, self._streams = source, streams
        self._rows: list[Rendered] = []
        self._features: list[RowFeatures] | None = None
        self._event: Any = None

    def get_many(self, rows: Sequence[Rendered]) -> list[RowFeatures]:
        """Of `rows`: those begun early if they are the same rows, else begun now."""
        if self._features is None or not _are_same(rows, self._rows):
            self.begin(rows)
        features, event = self._features, self._event
        self._rows, self._features, self._event = [], None, None
        assert features is not None
        self._streams.wait(event)
        self._streams.lend(tensor for one in features for tensor in one.tensors)
        return features

    def begin(self, rows: Sequence[Rendered]) -> None:
        """Ask for the features of `rows`, without waiting for them."""
        with self._streams.within():
            self._rows, self._features = list(rows), self._source.get_many(rows)
            self._event = self._streams.record()

    def settle(self) -> None:
        """Leave the device alone until the next call."""
        self._streams.finish()


def overlaps(asked: bool | None, target: Any) -> bool:
    """Whether passes' features are begun early: as `asked`, or by default where it saves time. ValueError where it
    cannot be."""
    is_whole = (
        isinstance(target, TargetModel)
        and not isinstance(target, ShardedTarget)
        and not getattr(target.model, "hf_device_map", None)
    )
    if asked and not is_whole:
        raise ValueError(
            "train.overlap is true, but the target is not whole on one device (target.features, target.sharded or "
            "target.device_map): set train.overlap=null"
        )
    return asked if asked is not None else is_whole and torch.device(target.device).type == "cuda"


def streams_for(device: torch.device | str) -> Streams:
    device = torch.device(device)
    return CudaStreams(device) if device.type == "cuda" else NoStreams()


def _are_same(rows: Sequence[Rendered], others: Sequence[Rendered]) -> bool:
    return len(rows) == len(others) and all(row is other for row, other in zip(rows, others, strict=True))
