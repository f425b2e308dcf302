"""What a module draws while it is tried: fixed numbers, so that two forwards can be compared.

With the same number everywhere, a draw that makes samples change places (``rand(n).argsort()``)
would not show. So uniform and normal numbers differ by a little from sample to sample: too little
for a probability or a result to tell, enough for an order. Where an op gives whole numbers, which
may be places, samples are taken as not apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from planner.capture.checks.functions import draws
from planner.capture.modes.fixed_draws import FixedDraws

_OF_EACH_ENTRY = frozenset({"bernoulli", "dropout", "native_dropout", "rrelu_with_noise"})
"""What decides about an entry alone."""
_SPREAD = frozenset(
    {"rand", "rand_like", "uniform", "randn", "randn_like", "normal", "exponential"}
)
_STEP = 1e-6
"""By how much the draws of the next along the first dim are less, relatively; fp32 tells them."""


class TrialDraws(FixedDraws):
    """Fixed numbers for a trial. Mutable: how many calls drew, and whether samples stay apart."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self.are_apart = 0, True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an op, or answer it."""
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if not draws(func, args, kwargs):
            return made
        self.number += 1
        packet = func._schema.name.split("::")[1].removesuffix("_")
        is_told = isinstance(made, Tensor) and made.dtype in (torch.float32, torch.float64)
        if packet in _SPREAD and is_told:
            if made.dim():
                steps = torch.arange(len(made), dtype=made.dtype, device=made.device)
                made.mul_(1 - _STEP * steps.view(-1, *[1] * (made.dim() - 1)))
        elif packet not in _OF_EACH_ENTRY:
            self.are_apart = False
        return made
