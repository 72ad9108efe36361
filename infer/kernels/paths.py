"""Attention of rows over their own paths (`attend` in `cpu.cpp`): `infer.attention.attend` to rounding, with rows that
do not depend on each other.

A row at position t sees the keys and values of positions 0 .. t (or the last `window` of them), in order of position:
those of its request's committed prefix lie in place, those of its own branch of a tree wherever its ancestors were
put. Sums run in order of position, so a node of a tree gets the bits of the same token decoded alone.

Shapes: R rows, Hq query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from infer.cache import SlotCache
from infer.kernels.build import has_kernels, kernel
from infer.rows import PackedRows

_HEAD_SIZES = (32, 64, 96, 128, 256)
_MAX_GROUP = 16


class _Group(ctypes.Structure):
    """`GroupOfRows` of `cpu.cpp`."""

    _fields_ = (
        ("base", ctypes.c_int64),
        ("mask", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("prefix", "offset", "rows", "width")),
    )


class AttentionCall(ctypes.Structure):
    """`AttentionCall` of `cpu.cpp`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "cosines", "sines")),
        *((name, ctypes.c_void_p) for name in ("cached_keys", "cached_values", "output", "groups")),
        *((name, ctypes.c_int64) for name in ("query_head", "query_row", "key_head", "key_row")),
        *((name, ctypes.c_int64) for name in ("value_head", "value_row", "cache_head")),
        *((name, ctypes.c_int32) for name in ("num_groups", "rows", "window", "query_heads", "key_heads")),
        *((name, ctypes.c_int32) for name in ("head_size", "threads")),
        ("scale", ctypes.c_float),
    )


def has_kernel(cache: SlotCache, num_heads: int) -> bool:
    """Whether attention of `num_heads` query heads over this cache runs on the kernel here."""
    num_kv_heads, head_size = cache.keys.shape[1], cache.keys.shape[-1]
    return (
        cache.keys.device.type == "cpu"
        and has_kernels(cache.keys.dtype)
        and head_size in _HEAD_SIZES
        and cache.values.shape[-1] == head_size
        and num_heads % num_kv_heads == 0
        and num_heads // num_kv_heads <= _MAX_GROUP
    )


class RowPaths:
    """Which columns each row of a forward sees, as the kernel reads it; made once for all layers."""

    def __init__(self, rows: PackedRows) -> None:
        self._cache = cache = rows.cache
        self._groups = (_Group * len(rows.groups))()
        self._masks: list[np.ndarray] = []  # held while the kernel may read them
        for group, place in zip(self._groups, rows.groups, strict=True):
            group.base = place.slot * cache.num_columns
            group.prefix, group.offset, group.rows = place.prefix, place.offset, len(place.tokens)
            if place.ancestors is not None:
                mask = np.ascontiguousarray(place.ancestors)
                self._masks.append(mask)
                group.mask, group.width = mask.ctypes.data, mask.shape[1]
        _, num_kv_heads, num_columns, head_size = cache.keys.shape
        self._shared = AttentionCall(
            groups=ctypes.addressof(self._groups),
            num_groups=len(self._groups),
            rows=rows.num_rows,
            key_heads=num_kv_heads,
            cache_head=num_columns * head_size,
            head_size=head_size,
            threads=torch.get_num_threads(),
        )

    def call(
        self,
        layer: int,
        *,
        num_heads: int,
        scaling: float | None,
        window: int | None,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> AttentionCall:
        """The arguments of one layer's attention, but for its queries, keys, values and output.

        `rotary`: cosines and sines [R, D], contiguous, which the caller holds while the kernel may read them.
        """
        call = AttentionCall.from_buffer_copy(self._shared)
        call.cached_keys, call.cached_values = self._cache.keys[layer].data_ptr(), self._cache.values[layer].data_ptr()
        call.query_heads, call.window = num_heads, window or 0
        call.scale = call.head_size**-0.5 if scaling is None else scaling
        if rotary is not None:
            call.cosines, call.sines = rotary[0].data_ptr(), rotary[1].data_ptr()
        return call


def attend_paths(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    rows: PackedRows,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Store `key`, `value` [K, R, D] in the cache, then attend with `query` [Hq, R, D]; returns [R, Hq, D].

    `rotary`: cosines and sines [R, D] to turn queries and keys by (by halves, as Llama does), if they are not yet.
    """
    rotary = None if rotary is None else (rotary[0].contiguous(), rotary[1].contiguous())
    query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
    num_heads, num_rows, head_size = query.shape
    output = torch.empty((num_rows, num_heads, head_size), dtype=query.dtype)
    call = rows.paths.call(layer, num_heads=num_heads, scaling=scaling, window=sliding_window, rotary=rotary)
    call.query, call.key, call.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
    call.output = output.data_ptr()
    call.query_head, call.query_row, _ = query.stride()
    call.key_head, call.key_row, _ = key.stride()
    call.value_head, call.value_row, _ = value.stride()
    refused = kernel("attend", query.dtype, ctypes.c_void_p, returns=ctypes.c_int)(ctypes.byref(call))
    assert not refused, "ask has_kernel first"
    return output
