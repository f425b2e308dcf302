"""Weight gradients made while a collective of the backward is under way.

Ranks that share a product's weight sum their terms of its input gradient: the ops before wait for
that sum, and a rank would do nothing until it has come. The weight gradient, which nothing waits
for, is work for that time. So a product's backward makes its input gradient alone and leaves the
rest; the redistribution behind it starts its collective, makes the weight gradients that were left
since the collective before, and then waits:

    at once   dx3 dw3 | dx2 dw2 | all-reduce             | dx1 ...
    beside    dx3     | dx2     | all-reduce / dw2, dw3  | dx1 ...

Which products leave theirs for which redistribution follows from the program
(`planner.language.ops.weight_products.products_beside`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from planner.runtime.process.collectives import redistribute
from planner.runtime.stage.weight_grads import Pending


class BesideCollectives:
    """Weight gradients that wait for the next collective of the backward. Mutable."""

    def __init__(self) -> None:
        self.waiting: list[Pending] = []

    @torch.no_grad()
    def make(self) -> None:
        """Make all of them, and forget what they needed, the last one first."""
        while self.waiting:
            self.waiting.pop().accumulate()


class RedistributeBeside(nn.Module):
    """`redistribute`, whose backward makes the waiting weight gradients while it communicates."""

    def __init__(self, beside: BesideCollectives) -> None:
        super().__init__()
        self._beside = beside

    def __call__(
        self,
        x: Tensor,
        group: str,
        src: str,
        dst: str,
        grad_partial: bool,
        made: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Redistribute. Not `forward`, as in `WeightProduct`."""
        return redistribute(
            x, group, src, dst, grad_partial, meanwhile=self._beside.make, made=made
        )
