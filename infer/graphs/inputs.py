"""What the host says of a round's requests: one table of whole numbers, filled place by place, one copy to the device.

Shapes: B requests, N nodes, P rows that a head has not read yet.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infer.graphs.shapes import RoundShape

_SCALARS = ("slot", "num_cached", "token", "stream", "temperature", "num_read", "num_pending")


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceInputs:
    """The table's columns on the device, each [B] int64, but temperatures in float32.

    slots: of the cache. num_cached: committed columns. tokens: the last emitted token, not yet in the cache. streams:
    of the request's noise (`infer.noise.position_stream`). temperatures: 0 is greedy. num_read: rows that the head has
    read, num_pending: states that wait for it, beside the tokens after them, pending_tokens [B, P]. tree_tokens,
    tree_parents [B, N]: a tree of the host's, parents as rows (0 is the root; -1 a place without a node).
    """

    slots: torch.Tensor
    num_cached: torch.Tensor
    tokens: torch.Tensor
    streams: torch.Tensor
    temperatures: torch.Tensor
    num_read: torch.Tensor
    num_pending: torch.Tensor
    pending_tokens: torch.Tensor
    tree_tokens: torch.Tensor
    tree_parents: torch.Tensor


class RoundInputs:
    """The table on both sides. Places that no request fills repeat the first."""

    def __init__(self, shape: RoundShape, *, max_pending: int, device: torch.device) -> None:
        self._num_nodes, self._max_pending = shape.nodes, max_pending
        num_columns = len(_SCALARS) + max_pending + 2 * shape.nodes
        self._host = torch.zeros((shape.batch, num_columns), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._table = torch.zeros((shape.batch, num_columns), dtype=torch.int64, device=device)
        self._num_placed = 0

    def clear(self) -> None:
        self._num_placed = 0

    def place(
        self,
        place: int,
        *,
        slot: int,
        num_cached: int,
        token: int,
        stream: int = 0,
        temperature: float = 0.0,
        num_read: int = 0,
        pending_tokens: Sequence[int] = (),
        tree: tuple[Sequence[int], Sequence[int]] = ((), ()),
    ) -> None:
        """Say what request `place` is; those before it are placed already. `tree`: tokens, and parents as node numbers
        (`infer.tree.ROOT` for the root's children)."""
        assert place == self._num_placed, "places are filled in order"
        self._num_placed += 1
        tokens, parents = tree
        assert len(tokens) <= self._num_nodes, f"{len(tokens)} nodes do not fit into {self._num_nodes}"
        assert len(pending_tokens) <= self._max_pending, f"{len(pending_tokens)} rows wait, {self._max_pending} fit"
        self._host[place] = torch.tensor(
            [
                *(slot, num_cached, token, stream, _bits(temperature), num_read, len(pending_tokens)),
                *_filled(pending_tokens, self._max_pending, 0),
                *_filled(tokens, self._num_nodes, 0),
                *_filled([parent + 1 for parent in parents], self._num_nodes, -1),
            ]
        )

    def upload(self) -> None:
        """Bring the table to the device; nothing waits for it."""
        assert self._num_placed, "a round has at least one request"
        self._host[self._num_placed :] = self._host[0]
        self._table.copy_(self._host, non_blocking=True)

    def on_device(self) -> DeviceInputs:
        """The same tensors whenever it is asked."""
        scalars = dict(zip(_SCALARS, self._table.unbind(1), strict=False))
        rest = self._table[:, len(_SCALARS) :]
        pending, tokens, parents = rest.split([self._max_pending, self._num_nodes, self._num_nodes], dim=1)
        return DeviceInputs(
            slots=scalars["slot"],
            num_cached=scalars["num_cached"],
            tokens=scalars["token"],
            streams=scalars["stream"],
            temperatures=scalars["temperature"].to(torch.int32).view(torch.float32),
            num_read=scalars["num_read"],
            num_pending=scalars["num_pending"],
            pending_tokens=pending,
            tree_tokens=tokens,
            tree_parents=parents,
        )


def _filled(values: Sequence[int], size: int, filler: int) -> list[int]:
    return [*values, *[filler] * (size - len(values))]


def _bits(temperature: float) -> int:
    """A float32 as the whole number with the same bits."""
    return int(struct.unpack("<i", struct.pack("<f", temperature))[0])
