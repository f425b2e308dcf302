"""Tensors on their way through the host, and which of them NCCL takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from planner.runtime.process.groups.sent_types import SENT


def check(tensor: Tensor, what: str, *, takes_complex: bool = False) -> None:
    """Refuse what NCCL has no type for, or what does not lie in one piece.

    Raises TypeError and ValueError, as torch does.
    """
    if tensor.dtype not in SENT and not (takes_complex and tensor.is_complex()):
        raise TypeError(f"{what} of {shown(tensor)}: NCCL has no such type")
    if not tensor.is_contiguous():
        raise ValueError(f"{what} of {shown(tensor)} is not contiguous, and NCCL takes no other")


def shown(tensor: Tensor) -> str:
    """Return a tensor's shape and dtype in words."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def real(tensor: Tensor) -> Tensor:
    """Return complex numbers as pairs of real ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class Host:
    """Copies of tensors on the host and back. Mutable: a stream of its own for each device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def ready(self, tensor: Tensor) -> Any:
        """Return the event after all that the tensor's stream has been given; None on a CPU."""
        if tensor.device.type == "cpu":
            return None
        return torch.get_device_module(tensor.device).current_stream(tensor.device).record_event()

    def copy_of(self, tensor: Tensor, ready: Any) -> Tensor:
        """Return a tensor on the host, as it is once `ready`: on a CPU, itself."""
        tensor = tensor.detach()
        if ready is None:
            return tensor
        ready.synchronize()
        with self._beside(tensor.device):
            return tensor.cpu()

    def put_back(self, host: Tensor, tensor: Tensor, ready: Any) -> None:
        """Write what is on the host into a tensor, unless it is that."""
        tensor = tensor.detach()
        if ready is None:
            if host.data_ptr() != tensor.data_ptr():
                tensor.copy_(host)
            return
        # What was given to the stream before may still use the memory.
        ready.synchronize()
        with self._beside(tensor.device):
            tensor.copy_(host)

    @contextmanager
    def _beside(self, device: torch.device) -> Iterator[None]:
        """Inside, copies are on a stream of their own; at the end they are done."""
        module = torch.get_device_module(device)
        if device not in self._streams:
            self._streams[device] = module.Stream(device)
        with module.device(device), module.stream(self._streams[device]):
            yield
            self._streams[device].synchronize()
