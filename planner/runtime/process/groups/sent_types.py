"""Which types NCCL has, and how tensors of others are sent."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SENT = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.uint8, torch.int8, torch.bool, torch.int32, torch.int64,
)  # fmt: skip
"""What NCCL has types for, of what models have. Gloo sends any."""


def view_to_send(dtype: torch.dtype) -> Callable[[Tensor], Tensor] | None:
    """Return the view of a contiguous tensor that is sent, or received into, in its place; None
    where it is sent itself.
    """
    return None if dtype in SENT else _bytes_of


def _bytes_of(tensor: Tensor) -> Tensor:
    # (Complex numbers can't be viewed as bytes directly.)
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.reshape(-1).view(torch.uint8)
