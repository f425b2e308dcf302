"""Rows in the order of their experts, and back (`planner.language.ops.families.entries.routing`).

Kernels are those that libraries call (a sort, rows by number), so results have the same bits.
Functions of our own save less than these together: the order once, and no numbers made of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from planner.runtime.stage.calls.opaque_modules import noted


def sort_rows(
    rows: Tensor, experts: Tensor, number: int, stable: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a copy of a row for each of its experts, by expert; their order; ends of runs.

    `rows` is [r, h], `experts` [r, k], or [r] where each row has one: numbers below `number`, e.
    The copies are [r k, h]; the order [r k] says which copy each was (copy i of row j is j k + i);
    the ends [e], int32, behind which row each expert's run ends. Experts that are e or more come
    last, and are in no run. With `stable` copies of an expert stay in the order they had.
    """
    return _SortRows.apply(rows, experts, number, stable)


class _SortRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, experts: Tensor, number: int, stable: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.copies = 1 if experts.dim() == 1 else experts.shape[1]
        ctx.shape = rows.shape
        ordered, order = torch.sort(experts.reshape(-1), stable=stable)
        runs = torch.arange(number, dtype=ordered.dtype, device=ordered.device)
        ends = torch.searchsorted(ordered, runs, right=True, out_int32=True)
        ctx.save_for_backward(order)
        ctx.mark_non_differentiable(order, ends)
        return rows[row_of(order, ctx.copies)], order, ends

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None]:
        (order,) = ctx.saved_tensors
        return summed(grad, row_of(order, ctx.copies), ctx.shape), None, None, None


def bias_of_runs(rows: Tensor, biases: Tensor, ends: Tensor) -> Tensor:
    """Return rows [n, m], each plus the bias of its run: `biases` is [e, m], `ends` [e]."""
    return _BiasOfRuns.apply(rows, biases, ends)


class _BiasOfRuns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, biases: Tensor, ends: Tensor) -> Tensor:
        ctx.like = biases.shape, biases.dtype, rows.dtype
        ctx.save_for_backward(*((ends,) if ctx.needs_input_grad[1] else ()))
        picked = biases[_run_of(len(rows), ends)]
        return picked.add_(rows) if picked.dtype == rows.dtype else rows + picked

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        shape, dtype, of_rows = ctx.like
        of_biases = None
        if ctx.needs_input_grad[1]:
            (ends,) = ctx.saved_tensors
            of_biases = summed(grad.to(dtype), _run_of(len(grad), ends), shape)
        return grad.to(of_rows), of_biases, None


def product_of_runs(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return each run of rows [n, k] times its own matrix: `matrices` is [e, k, m], `ends` [e].

    A call of the usual product for each run, as a loop over experts makes it, in any dtype; the
    host waits for the ends of runs. Rows behind the last run are zeros.
    """
    return _ProductOfRuns.apply(rows, matrices, ends)


class _ProductOfRuns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        # (In a dry run, which has no values, all experts are picked as often.)
        ctx.runs = None if isinstance(rows, FakeTensor) else _runs(ends)
        of_rows, of_matrices, _ = ctx.needs_input_grad
        ctx.save_for_backward(rows if of_matrices else None, matrices if of_rows else None)
        ctx.shapes = rows.shape, matrices.shape
        made = rows.new_empty((len(rows), matrices.shape[2]))
        if ctx.runs is None:
            return made
        for (start, end), matrix in zip(ctx.runs, matrices, strict=True):
            torch.mm(rows[start:end], matrix, out=made[start:end])
        made[ctx.runs[-1][1] :].zero_()
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, matrices = ctx.saved_tensors
        of_rows = None if matrices is None else grad.new_empty(ctx.shapes[0])
        of_matrices = None if rows is None else grad.new_empty(ctx.shapes[1])
        for at, (start, end) in enumerate(ctx.runs or ()):
            part = grad[start:end]
            if of_rows is not None:
                torch.mm(part, matrices[at].t(), out=of_rows[start:end])
            if of_matrices is not None:
                torch.mm(rows[start:end].t(), part, out=of_matrices[at])
        if of_rows is not None and ctx.runs:
            of_rows[ctx.runs[-1][1] :].zero_()
        return of_rows, of_matrices, None


def _runs(ends: Tensor) -> list[tuple[int, int]]:
    """Return where each run begins and ends."""
    found = ends.tolist()
    return [*zip([0, *found[:-1]], found, strict=True)]


def stack_of_runs(
    ends: Tensor, weights: Sequence[Tensor], own_names: Sequence[str | None] = ()
) -> Tensor:
    """Return one tensor [e, ...] of the weights of each expert; `ends` is [e].

    A loop that passes over experts without rows leaves their weights without a gradient: those of
    runs that are not empty are noted by their names (`noting_reached`).
    """
    return _StackOfRuns.apply(ends, noted(), tuple(own_names), *weights)


class _StackOfRuns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ends: Tensor,
        reached: set[str] | None,
        names: tuple[str | None, ...],
        *each: Tensor,
    ) -> Tensor:
        ctx.reached, ctx.names = reached, names
        ctx.save_for_backward(ends)
        return torch.stack(each)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (ends,) = ctx.saved_tensors
        if ctx.reached is not None and not isinstance(ends, FakeTensor):
            for (start, end), name in zip(_runs(ends), ctx.names, strict=True):
                ctx.reached.update((name,) if end > start and name is not None else ())
        return None, None, None, *grad.unbind()


def unsort_rows(rows: Tensor, order: Tensor, weights: Tensor | None, copies: int) -> Tensor:
    """Return the sums of rows' copies, each times its weight, in the order before `sort_rows`.

    `rows` is [r k, h], `order` [r k] as `sort_rows` gave it, `weights` [r, k] or none, `copies` k;
    the sums are [r, h].
    """
    return _UnsortRows.apply(rows, order, weights, copies)


class _UnsortRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, order: Tensor, weights: Tensor | None, copies: int
    ) -> Tensor:
        of_weights = weights is not None and ctx.needs_input_grad[2]
        ctx.copies, ctx.dtypes = (
            copies,
            (rows.dtype, weights.dtype if weights is not None else None),
        )
        ctx.save_for_backward(
            order,
            rows if of_weights else None,
            weights if ctx.needs_input_grad[0] else None,
        )
        back = rows[_places(order)].view(len(order) // copies, copies, rows.shape[1])
        if weights is not None:
            back = times(back, weights.reshape(len(back), copies, 1))
        return back.sum(1) if copies > 1 else back.squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        order, rows, weights = ctx.saved_tensors
        of_copies = grad[row_of(order, ctx.copies)]
        of_weights = None
        if rows is not None:
            sums = (of_copies * rows).sum(1).to(ctx.dtypes[1])
            of_weights = torch.empty_like(sums)
            of_weights[order] = sums
            of_weights = of_weights.view(-1, ctx.copies)
        if not ctx.needs_input_grad[0]:
            return None, None, of_weights, None
        if weights is not None:
            of_copies = times(of_copies, weights.reshape(-1)[order].unsqueeze(1))
        return of_copies.to(ctx.dtypes[0]), None, of_weights, None


def row_of(order: Tensor, copies: int) -> Tensor:
    """Return which row each copy is of."""
    return order if copies == 1 else order // copies


def _places(order: Tensor) -> Tensor:
    """Return where each copy is now, of where it was."""
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places


def times(rows: Tensor, weights: Tensor) -> Tensor:
    """Return rows times weights, in the memory of the rows where they have the product's dtype."""
    if torch.result_type(rows, weights) == rows.dtype:
        return rows.mul_(weights)
    return rows * weights


def _run_of(number: int, ends: Tensor) -> Tensor:
    """Return the run that each of so many rows is in."""
    return torch.searchsorted(
        ends, torch.arange(number, dtype=ends.dtype, device=ends.device), right=True
    )


def summed(grad: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    """Return rows added where they belong, as the gradient of rows taken by number is made."""
    return grad.new_zeros(shape).index_put_((places,), grad, accumulate=True)
