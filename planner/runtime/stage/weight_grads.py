"""Weight gradients made by products of ours: added to the sums in place, and deferred if need be.

Nearly all work of a weight gradient is in products of an activation with a weight, so those
products alone are run by functions of ours; other parameters (norms, convolutions, embeddings)
keep autograd's way, which is little work.

*Where they belong*: autograd makes a fresh gradient for each microbatch and adds it to the
sum. Here the product itself adds to the sum, once there is one: two passes over the weight's
memory less (on a CPU, 12% of a backward with weights of 1 to 4 MiB; for small ones a function
in Python costs more than that). Hooks on a weight are for gradients that autograd accumulates;
they are not called for those.

*Later*: a table with I and W jobs gains nothing if I computes both gradients. There the
backward makes the input gradient only and keeps (activation, output gradient); W multiplies
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from planner.language.ops.kernel import LARGE_BYTES
from planner.runtime.stage.calls import narrow

Place = tuple[int, int]
"""(stage, microbatch)."""

Given = tuple[Tensor] | None
"""A product's result, made elsewhere, where autograd does not see it; None: it is made here."""


class Pending(NamedTuple):
    """One weight gradient to be made: of y = x @ w (or x @ w.T when `transposed`) + bias.

    `x` is [samples, in], `grad` [samples, out].
    """

    weight: Tensor
    bias: Tensor | None
    transposed: bool
    x: Tensor
    grad: Tensor
    scaling: str = ""
    """Of a product in 8 bits (`planner.runtime.stage.calls.narrow`)."""

    def accumulate(self) -> None:
        """Add the gradient to the weight's, or pass it on to what the weight was made from."""
        weight, bias = self.weight, self.bias
        fresh = weight_gradient(
            weight, self.x, self.grad, transposed=self.transposed, scaling=self.scaling
        )
        if fresh is not None:
            _give(weight, fresh)
        if bias is not None and bias.requires_grad:
            _give(bias, self.grad.sum(0))


def _give(tensor: Tensor, grad: Tensor) -> None:
    if not tensor.is_leaf:
        torch.autograd.backward(tensor, grad)
        return
    if tensor.grad is None:
        tensor.grad = grad
    else:
        tensor.grad.add_(grad)
    # As autograd would call them (a copy takes the gradient over), without a turn of its engine for
    # each weight, which on a GPU goes through another thread.
    for hook in (tensor._post_accumulate_grad_hooks or {}).values():
        hook(tensor)


def weight_gradient(
    weight: Tensor | None, x: Tensor, grad: Tensor, *, transposed: bool, scaling: str = ""
) -> Tensor | None:
    """Add a weight's gradient to the sum so far and return None; return it if there is no sum, or
    no weight is given.
    """
    # The gradient by a factor of a product is the other factor's conjugate: of y = x @ w, x^H @ dy.
    # (Autograd's convention for complex tensors; `conj` of a real one is the tensor itself.)
    left, right = (grad, x.conj()) if transposed else (x.conj(), grad)
    if scaling:
        fresh = narrow.weight_gradient(grad, x, scaling)
        fresh = fresh if transposed else fresh.t()
        if weight is None or not weight.is_leaf or weight.grad is None:
            return fresh
        weight.grad.add_(fresh)
        return None
    if weight is not None and weight.is_leaf and weight.grad is not None:
        weight.grad.addmm_(left.t(), right)
        return None
    return torch.mm(left.t(), right)


class WeightQueue:
    """Deferred weight gradients, by stage and microbatch. Mutable.

    Products defer theirs only inside `collecting`; elsewhere their backward makes them.
    """

    def __init__(self) -> None:
        self._pending: dict[Place, list[Pending]] = {}
        self.current: list[Pending] | None = None

    @contextmanager
    def collecting(self, place: Place) -> Iterator[None]:
        """Let products that run (or are recomputed) inside defer their weight gradients."""
        # The forward of a microbatch, and its backward where products are recomputed, fill one
        # list.
        self.current = self._pending.setdefault(place, [])
        try:
            yield
        finally:
            self.current = None

    def stop(self) -> None:
        """Let products from here on make their weight gradients in their backward."""
        self.current = None

    @torch.no_grad()
    def flush(self, place: Place) -> None:
        """Make the deferred weight gradients of a place, and forget what they needed."""
        pending = self._pending.pop(place, [])
        # Popped, so that an activation and its output gradient are freed once their product is
        # made.
        while pending:
            pending.pop().accumulate()


class WeightProduct(nn.Module):
    """x @ w + bias, or with `transposed` x @ w.T + bias, for a weight that trains.

    `x` is [..., in], `weight` 2-d, `bias` [out]. With a `scaling` its factors are cast to 8 bits.
    """

    def __init__(
        self,
        queue: WeightQueue | None,
        *,
        transposed: bool,
        scaling: str = "",
        waiting: list[Pending] | None = None,
    ) -> None:
        """`waiting` takes each weight gradient in the backward, before any queue; None: the queue,
        while it collects.
        """
        super().__init__()
        self._queue, self._transposed, self._waiting = queue, transposed, waiting
        self._scaling = scaling
        self.anchor: Tensor | None = None
        """What a deferred product hangs on where its x has no gradient; None: made for each."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        made: Callable[[Tensor], Tensor | None] | None = None,
    ) -> Tensor:
        """Multiply, where `made` does not give the result. Not `forward`: looking for a module's
        hooks costs as much as the rest.
        """
        result = None if made is None else made(x)
        given = None if result is None else (result,)
        pending = self._waiting
        if pending is None and self._queue is not None:
            pending = self._queue.current
        how: dict[str, Any] = {"transposed": self._transposed, "scaling": self._scaling}
        if not torch.is_grad_enabled():
            return multiplied(x, weight, bias, **how) if given is None else given[0]
        # (Without a queue ZeRO takes gradients elsewhere.)
        adds = self._queue is not None and weight.nbytes >= LARGE_BYTES
        if pending is None and not (adds or self._scaling or given):
            return multiplied(x, weight, bias, **how)
        if pending is None:
            return _Product.apply(x, weight, bias, how, adds, given)
        # Hidden from autograd: in I the graph behind the weight must not be walked.
        held = (weight, bias, how, pending)
        # With the weight hidden, an x from the batch would leave no graph at all.
        anchor = self.anchor
        if anchor is None and not x.requires_grad:
            anchor = x.new_empty(0).requires_grad_()
        return _DeferredProduct.apply(x, held, anchor, given)


def narrow_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    transposed: bool,
    scaling: str,
    adds: bool = False,
) -> Tensor:
    """Multiply in 8 bits; with `adds` the backward adds the weight's gradient to its sum itself."""
    how: dict[str, Any] = {"transposed": transposed, "scaling": scaling}
    if not torch.is_grad_enabled():
        return multiplied(x, weight, bias, **how)
    made: Tensor = _Product.apply(x, weight, bias, how, adds, None)
    return made


def multiplied(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool, scaling: str
) -> Tensor:
    """Return x [..., in] times a weight [out, in] where `transposed`, else [in, out], plus a bias;
    as autograd sees it where nothing is scaled.
    """
    if scaling:
        rows = narrow.product(_rows(x), weight if transposed else weight.t(), scaling)
        made = rows.view(*x.shape[:-1], rows.shape[-1])
        return made if bias is None else made.add_(bias)
    if transposed:
        return torch._C._nn.linear(x, weight, bias)
    if bias is None:
        return torch.matmul(x, weight)
    flat = torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight)
    return flat.view(*x.shape[:-1], weight.shape[1])


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _input_gradient(
    grad: Tensor, weight: Tensor, shape: torch.Size, *, transposed: bool, scaling: str
) -> Tensor:
    if scaling:
        by_output = weight if transposed else weight.t()
        return narrow.input_gradient(grad, by_output, scaling).view(shape)
    factor = weight.conj()
    return torch.mm(grad, factor if transposed else factor.t()).view(shape)


class _Product(torch.autograd.Function):
    """The product whose backward makes both gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        how: dict[str, Any],
        adds: bool,
        given: Given,
    ) -> Tensor:
        ctx.shape = x.shape
        ctx.save_for_backward(*((x,) if ctx.needs_input_grad[1] else ()))
        # As an attribute: what is saved may come back detached from where its gradient is.
        ctx.weight, ctx.how, ctx.adds = weight, how, adds
        return multiplied(x, weight, bias, **how) if given is None else given[0]

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        saved = ctx.saved_tensors  # at first: what is recomputed is made before any gradient
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        weight, how, rows = ctx.weight, ctx.how, _rows(grad)
        ctx.weight = None  # nodes outlive what they saved: to the end of their stage's backward
        return (
            _input_gradient(rows, weight, ctx.shape, **how) if needs_x else None,
            weight_gradient(weight if ctx.adds else None, _rows(*saved), rows, **how)
            if needs_weight
            else None,
            rows.sum(0) if needs_bias else None,
            None,
            None,
            None,
        )


class _DeferredProduct(torch.autograd.Function):
    """The product whose backward makes the input gradient and defers the rest."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        held: tuple[Tensor, Tensor | None, dict[str, Any], list[Pending]],
        anchor: Tensor | None,
        given: Given,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.held = held
        weight, bias, how, _ = held
        return multiplied(x, weight, bias, **how) if given is None else given[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,) = ctx.saved_tensors
        weight, bias, how, pending = ctx.held
        ctx.held = None  # nodes outlive what they saved: to the end of their stage's backward
        rows = _rows(grad)
        # Detached: with its past, x would keep alive all of the stage that was before it.
        pending.append(Pending(weight, bias, x=_rows(x.detach()), grad=rows, **how))
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        return _input_gradient(rows, weight, x.shape, **how), None, None, None
