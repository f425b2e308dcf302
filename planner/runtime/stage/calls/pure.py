"""ATen operators that write into what autograd saves of them, in a form that does not.

Autograd saves such a tensor before the operator fills it. What is recomputed ends with the last
tensor that is saved, and what goes to the host is copied when it is saved: both would have the
memory as it was before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def rrelu(
    x: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return what `aten.rrelu` does, bit for bit: x times its slopes, drawn where x is negative."""
    if not training:
        return torch.ops.aten.rrelu.default(x, lower, upper, False)
    slopes = torch.empty_like(x, requires_grad=False)
    torch.ops.aten.rrelu_with_noise.default(x.detach(), slopes, lower, upper, True, generator)
    return x * slopes


PURE: dict[str, Callable[..., Any]] = {"aten.rrelu.default": rrelu}
"""Their pure forms by target."""
