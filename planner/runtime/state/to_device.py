"""Copies to a rank's device that the host does not wait for.

A copy from memory that is not pinned, or with a change of dtype on the way, holds the host until
the device has done all it was given before. So such a tensor is first copied, and cast, into
pinned memory. PyTorch's pinned allocator gives a piece away again only after the copy that reads
it, so none is kept here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from planner.runtime.process import device as devices


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor on a device, in a dtype (None: its own)."""
    dtype = dtype or tensor.dtype
    if tensor.device.type == "cpu" and devices.is_accelerator(device):
        is_ready = tensor.dtype == dtype and tensor.is_contiguous() and tensor.is_pinned()
        if not is_ready:
            pinned = torch.empty(tensor.shape, dtype=dtype, pin_memory=True)
            tensor = pinned.copy_(tensor)
    return tensor.to(device, dtype, non_blocking=True)
