"""Running ops for their values while a forward is captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def outside_modes() -> Iterator[None]:
    """Run ops as they are: neither faked, nor traced, nor on the meta device, with gradients."""
    with (
        _disable_current_modes(),
        unset_fake_temporarily(),
        torch._C.DisableTorchFunction(),
        torch.enable_grad(),
    ):
        yield
