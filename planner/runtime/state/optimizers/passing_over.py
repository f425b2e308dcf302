"""Steps of an optimizer that do nothing where a flag says that something is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def can_pass_over(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether an optimizer that is told `found_inf` leaves all it has as it was.

    The fused kernels of Adam return before they write (torch 2.11 to 2.13,
    aten/src/ATen/native/cuda/fused_adam_utils.cuh and cpu/FusedAdamKernel.cpp), and its step takes
    the count back. (SGD's first step would leave momenta without values.)
    """
    if optimizer is None:
        return True
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and all(
        group.get("fused") for group in optimizer.param_groups
    )


@contextmanager
def passing_over(optimizer: torch.optim.Optimizer | None, flag: Tensor) -> Iterator[None]:
    """Inside, a step of the optimizer does nothing where the flag is 1."""
    if optimizer is None:
        yield
        return
    # (The names by which torch's own gradient scaler tells it.)
    optimizer.grad_scale, optimizer.found_inf = None, flag  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
