"""How states are kept: as the target gives them, rounded to bfloat16, or in int8.

    states   one tensor [T, (n + 1) * H]: the n kept taps side by side, then the final-normed state
    int8     codes [T, n * H], a scale for every group of at most 64 of them [T, n * groups] (its largest magnitude
             over 127), and last [T, H]

A tap of the final-normed state is that state, kept once. It teaches the head, so it is never kept in int8. What
training sees is always what would be read back, whether a row is kept or not: features do not depend on what a disk has
room for.

Why groups: a few channels hold more than half of a state's energy. One scale for a whole state rounds all others to
within 9 % of their size (SmolLM2-135M), a scale for each group to within 1 to 2 %, for 6 % more bytes.

Shapes: T tokens of a row, n kept taps, H hidden.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from configs.schema import FeatureDType
from heads.base import final_tap
from infer.machine import dtype_name

INT8 = "int8"
_LARGEST_CODE = 127
_GROUP_SIZES = (16, 64)
"""Least and most numbers that share a scale."""

Kept = Mapping[str, torch.Tensor]
"""Tensors of one row as they are kept, by name; the first dimension of each is the row's tokens."""


@dataclass(frozen=True, kw_only=True)
class Codec:
    """dtype: the target's. stored_dtype: `int8`, or the name of the dtype of `states`. final: the tap of the state
    after the final norm."""

    dtype: torch.dtype
    stored_dtype: str
    hidden_size: int
    taps: tuple[int, ...]
    final: int

    @classmethod
    def of(cls, target: Any, taps: Sequence[int], feature_dtype: FeatureDType = "target") -> Codec:
        """For what `target` gives; `feature_dtype` as in a recipe. One of two bytes is not rounded to another."""
        stored = {
            "target": dtype_name(target.dtype),
            "bfloat16": dtype_name(target.dtype if target.dtype.itemsize == 2 else torch.bfloat16),
            "int8": INT8,
        }[feature_dtype]
        return cls(
            dtype=target.dtype,
            stored_dtype=stored,
            hidden_size=target.hidden_size,
            taps=tuple(taps),
            final=final_tap(target.num_layers),
        )

    @property
    def is_lossy(self) -> bool:
        return self.stored_dtype != dtype_name(self.dtype) and bool(self.kept_taps or self._is_narrowed)

    @property
    def kept_taps(self) -> tuple[int, ...]:
        return tuple(tap for tap in self.taps if tap != self.final)

    @property
    def layout(self) -> dict[str, tuple[torch.dtype, int]]:
        """dtype and width of each tensor."""
        num, size = len(self.kept_taps), self.hidden_size
        if self.stored_dtype != INT8:
            return {"states": (self._state_dtype, (num + 1) * size)}
        last = {"last": (self._state_dtype, size)}
        codes = {"codes": (torch.int8, num * size), "scales": (torch.float32, num * size // self.group_size)}
        return {**codes, **last} if num else last

    @property
    def group_size(self) -> int:
        """Numbers that share a scale in int8: the whole state where its size has no divisor of a fitting size."""
        least, most = _GROUP_SIZES
        sizes = [size for size in range(least, most + 1) if self.hidden_size % size == 0]
        return max(sizes, default=self.hidden_size)

    @property
    def bytes_per_token(self) -> int:
        return sum(dtype.itemsize * width for dtype, width in self.layout.values())

    def encode(self, taps: torch.Tensor, last: torch.Tensor) -> dict[str, torch.Tensor]:
        """taps [T, taps * H] and last [T, H] of the target -> the row as it is kept."""
        columns = [self._block(taps, place) for place, tap in enumerate(self.taps) if tap != self.final]
        if self.stored_dtype != INT8:
            return {"states": torch.cat([*columns, last], dim=-1).to(self._state_dtype)}
        kept = {"last": last.to(self._state_dtype, copy=True)}
        if columns:
            encoded = [_to_int8(column, self.group_size) for column in columns]
            kept["codes"] = torch.cat([codes for codes, _ in encoded], dim=-1)
            kept["scales"] = torch.cat([scales for _, scales in encoded], dim=-1)
        return kept

    def decode(self, kept: Kept, taps: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The states at some of this codec's `taps` [T, taps * H], and the final-normed one [T, H]: views of `kept`
        where the taps lie side by side in it."""
        places = [self._place(tap) for tap in taps]
        if self.stored_dtype == INT8:
            return self._from_int8(kept, places), kept["last"]
        states, size = kept["states"], self.hidden_size
        last = states[:, -size:]
        if places and all(after == before + 1 for before, after in itertools.pairwise(places)):
            return states[:, places[0] * size : (places[-1] + 1) * size], last
        return torch.cat([self._block(states, place) for place in places] or [states[:, :0]], dim=-1), last

    def _from_int8(self, kept: Kept, places: Sequence[int]) -> torch.Tensor:
        last, size, group = kept["last"], self.hidden_size, self.group_size
        taps = torch.empty(len(last), len(places) * size, dtype=self.dtype, device=last.device)
        for number, place in enumerate(places):
            block = self._block(taps, number)
            if place == len(self.kept_taps):
                block.copy_(last)
            else:
                scales = kept["scales"].unflatten(-1, (-1, size // group))[:, place, :, None]  # [T, groups, 1]
                codes = self._block(kept["codes"], place).unflatten(-1, (-1, group))
                block.copy_((codes * scales).flatten(1))
        return taps

    def _block(self, states: torch.Tensor, place: int) -> torch.Tensor:
        return states[:, place * self.hidden_size : (place + 1) * self.hidden_size]

    def _place(self, tap: int) -> int:
        return len(self.kept_taps) if tap == self.final else self.kept_taps.index(tap)

    @property
    def _is_narrowed(self) -> bool:
        return self._state_dtype != self.dtype

    @property
    def _state_dtype(self) -> torch.dtype:
        if self.stored_dtype != INT8:
            return getattr(torch, self.stored_dtype)  # type: ignore[no-any-return]
        return self.dtype if self.dtype.itemsize == 2 else torch.bfloat16


def _to_int8(states: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One tap [T, H] -> codes [T, H] and scales [T, groups]."""
    grouped = states.float().unflatten(-1, (-1, group_size))
    scales = grouped.abs().amax(dim=-1, keepdim=True) / _LARGEST_CODE
    codes = (grouped / scales.clamp_min(torch.finfo(torch.float32).tiny)).round()
    return codes.clamp(-_LARGEST_CODE, _LARGEST_CODE).to(torch.int8).flatten(1), scales.squeeze(-1)
