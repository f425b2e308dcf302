"""A library that defines an op when it is imported; models import it where they use it."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("planner_tests::halved", mutates_args=())
def halved(x: Tensor) -> Tensor:
    """Half of a tensor."""
    return x * 0.5


@halved.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


halved.register_autograd(lambda ctx, grad: grad * 0.5)
