"""Writes into a part of a complex tensor, as pairs of real numbers.

A capture makes ``x[:, :3] = y`` a `slice_scatter`, so that nothing is written in place. One process
differentiates the write; of the pure form autograd has no derivative for complex numbers. A pair of
real numbers is the same memory, and its derivative is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _by_pairs(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def written(x: Tensor, part: Tensor, dim: int = 0, *where: Any) -> Tensor:
        # (The pair is a dim more at the end: those from the end are counted from the front.)
        pairs = map(torch.view_as_real, (x.resolve_conj(), part.to(x.dtype).resolve_conj()))
        return torch.view_as_complex(operator(*pairs, dim % x.dim(), *where))

    return written


COMPLEX_WRITES: dict[str, Callable[..., Any]] = {
    "aten.slice_scatter.default": _by_pairs(torch.ops.aten.slice_scatter.default),
    "aten.select_scatter.default": _by_pairs(torch.ops.aten.select_scatter.default),
}
"""By target what runs where the tensor written into is complex."""
