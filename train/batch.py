"""Conversations with their features, packed into one batch without padding, and the precision it is computed in."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from heads.transfer import sent
from heads.unroll import Batch
from infer.chat import Rendered
from train.features import RowFeatures


def pack_batch(
    rows: Sequence[Rendered], features: Sequence[RowFeatures], *, device: str | torch.device, dtype: torch.dtype
) -> Batch:
    """One row after another; states in `dtype`, which is what the head computes in. The host waits for the device in
    float16 alone."""
    normalizers = [sent(one.log_normalizer, device) for one in features if one.log_normalizer is not None]
    taps = torch.cat([sent(one.taps, device, dtype) for one in features])  # kept ones are in CPU memory, new ones not
    if dtype is torch.float16 and not bool(torch.isfinite(taps).all()):
        raise ValueError(
            "the target's states go beyond the range of float16 (65,504): set train.dtype=bfloat16 or float32"
        )
    return Batch(
        token_ids=sent(torch.tensor([token for row in rows for token in row.token_ids]), device),
        loss_mask=sent(torch.tensor([mask for row in rows for mask in row.loss_mask]), device),
        lengths=tuple(len(row.token_ids) for row in rows),
        taps=taps,
        last=torch.cat([sent(one.last, device, dtype) for one in features]),
        log_normalizer=torch.cat(normalizers) if len(normalizers) == len(features) else None,
    )


def computing_in(dtype: torch.dtype, device: torch.device) -> torch.autocast:
    """A head's matrix products in `dtype`; float32 as they are."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)
