"""A forward that converts one of its parts to the dtype and the device that it has already.

``self.router = self.router.to(torch.float32)`` changes nothing in a model of that dtype, but
PyTorch puts new parameters into the part's places, and a capture would lose those that it had.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn


@contextmanager
def same_parts() -> Iterator[None]:
    """Inside, `nn.Module.to` returns a module as it is where no dtype changes: a model that is
    captured has its tensors on one device.
    """
    given = nn.Module.to

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        _, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        held = chain(self.parameters(), self.buffers())
        if memory_format is None and all(_stays(tensor, dtype) for tensor in held):
            return self
        return given(self, *args, **kwargs)

    nn.Module.to = to  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.to = given  # type: ignore[method-assign]


def _stays(tensor: torch.Tensor, dtype: torch.dtype | None) -> bool:
    is_converted = tensor.is_floating_point() or tensor.is_complex()
    return dtype is None or not is_converted or tensor.dtype == dtype
