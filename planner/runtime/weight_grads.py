"""Weight gradients computed later: what makes an input-gradient job only that.

A table with I and W jobs gains nothing if I computes both gradients. Nearly all work of a
weight gradient is in products of an activation with a weight, so those products alone are
run by a function of ours: in I its backward makes the input gradient and puts (activation,
output gradient) aside; W multiplies them, straight into the weight's gradient. The other
parameters (norms, biases of convolutions, embeddings) get theirs in I; it is little work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Place = tuple[int, int]
"""(stage, microbatch)."""


@dataclass(frozen=True, slots=True)
class Pending:
    """One weight gradient to be made: of y = x @ w (or x @ w.T when `transposed`) + bias.

    `x` is [samples, in], `grad` [samples, out].
    """

    weight: Tensor
    bias: Tensor | None
    transposed: bool
    x: Tensor
    grad: Tensor

    def accumulate(self) -> None:
        """Add the gradient to the weight's, or pass it on to what the weight was made from."""
        left, right = (self.grad, self.x) if self.transposed else (self.x, self.grad)
        if self.weight.is_leaf and self.weight.grad is not None:
            self.weight.grad.addmm_(left.t(), right)
        else:
            _give(self.weight, left.t() @ right)
        if self.bias is not None and self.bias.requires_grad:
            _give(self.bias, self.grad.sum(0))


def _give(tensor: Tensor, grad: Tensor) -> None:
    if tensor.is_leaf and tensor.grad is not None:
        tensor.grad += grad
    else:  # through autograd, whose hooks may take a leaf's gradient elsewhere
        torch.autograd.backward(tensor, grad)


class WeightQueue:
    """Weight gradients put aside, by stage and microbatch. Mutable.

    Products record here only inside `collecting`; elsewhere they are ordinary products
    with ordinary gradients.
    """

    def __init__(self) -> None:
        self._pending: dict[Place, list[Pending]] = {}
        self.current: list[Pending] | None = None

    @contextmanager
    def collecting(self, place: Place) -> Iterator[None]:
        """Let products made (or made again) inside put their weight gradients aside."""
        self.current = self._pending.setdefault(place, [])
        try:
            yield
        finally:
            self.current = None

    @torch.no_grad()
    def flush(self, place: Place) -> None:
        """Make the weight gradients put aside at a place, and forget what they needed."""
        pending = self._pending.pop(place, [])
        while pending:
            pending.pop().accumulate()


class DeferrableProduct(nn.Module):
    """x @ w + bias, or with `transposed` x @ w.T + bias, whose weight gradient can wait."""

    def __init__(self, queue: WeightQueue, *, transposed: bool) -> None:
        super().__init__()
        self._queue, self._transposed = queue, transposed

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x` is [..., in], `weight` 2-d, `bias` [out]."""
        if self._queue.current is not None and torch.is_grad_enabled():
            # Hidden from autograd: in I the graph behind the weight must not be walked.
            held = _Held(weight, bias, self._transposed, self._queue.current)
            # With the weight hidden, an x from the batch would leave no graph at all.
            anchor = None if x.requires_grad else x.new_empty(0).requires_grad_()
            return _Product.apply(x, held, anchor)
        return _product(x, weight, bias, transposed=self._transposed)


@dataclass(frozen=True, slots=True)
class _Held:
    weight: Tensor
    bias: Tensor | None
    transposed: bool
    pending: list[Pending]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool) -> Tensor:
    if transposed:
        return torch.ops.aten.linear.default(x, weight, bias)
    if bias is None:
        return torch.ops.aten.matmul.default(x, weight)
    flat = torch.ops.aten.addmm.default(bias, x.reshape(-1, x.shape[-1]), weight)
    return flat.view(*x.shape[:-1], weight.shape[1])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, held: _Held, anchor: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.held = held
        return _product(x, held.weight, held.bias, transposed=held.transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        held: _Held = ctx.held
        flat_x, flat_grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        held.pending.append(Pending(held.weight, held.bias, held.transposed, flat_x, flat_grad))
        if not ctx.needs_input_grad[0]:
            return None, None, None
        weight = held.weight.detach()
        flat = flat_grad @ (weight if held.transposed else weight.t())
        return flat.view(x.shape), None, None
