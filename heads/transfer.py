"""Tensors on their way to where a run computes, without the host waiting for the device.

A plain copy from the host's memory to a GPU waits until all that was asked of the GPU before is done. One from pinned
memory does not.
"""

from __future__ import annotations

import torch


def sent(tensor: torch.Tensor, device: torch.device | str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`tensor` on `device`, in `dtype` if one is given; itself if it is both already."""
    device = torch.device(device)
    if tensor.device.type == "cpu" and device.type == "cuda":
        tensor = tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device, dtype)
