"""A term of a loss times its share (`planner.language.across.whole.PART_OF`)."""

from __future__ import annotations

import torch
from torch import Tensor


def part_of(term: Tensor, share: Tensor) -> Tensor:
    """Return `term` times `share`, a 0-d tensor; zeros, whatever the term is, where that is zero.

    A mean over nothing is no number, and counts for nothing.
    """
    return torch.where(share == 0, share.to(term.dtype), term * share)
