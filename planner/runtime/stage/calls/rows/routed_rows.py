"""Rows in the order of their experts, and back (`planner.language.ops.families.entries.routing`).

Kernels are those that libraries call (a sort, rows by number), so results have the same bits.
Functions of our own save less than these together: the order once, and no numbers made of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
        return rows[_row_of(order, ctx.copies)], order, ends

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None]:
        (order,) = ctx.saved_tensors
        return _summed(grad, _row_of(order, ctx.copies), ctx.shape), None, None, None


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
            of_biases = _summed(grad.to(dtype), _run_of(len(grad), ends), shape)
        return grad.to(of_rows), of_biases, None


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
            back = _times(back, weights.reshape(len(back), copies, 1))
        return back.sum(1) if copies > 1 else back.squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        order, rows, weights = ctx.saved_tensors
        of_copies = grad[_row_of(order, ctx.copies)]
        of_weights = None
        if rows is not None:
            sums = (of_copies * rows).sum(1).to(ctx.dtypes[1])
            of_weights = torch.empty_like(sums)
            of_weights[order] = sums
            of_weights = of_weights.view(-1, ctx.copies)
        if not ctx.needs_input_grad[0]:
            return None, None, of_weights, None
        if weights is not None:
            of_copies = _times(of_copies, weights.reshape(-1)[order].unsqueeze(1))
        return of_copies.to(ctx.dtypes[0]), None, of_weights, None


def _row_of(order: Tensor, copies: int) -> Tensor:
    return order if copies == 1 else order // copies


def _places(order: Tensor) -> Tensor:
    """Return where each copy is now, of where it was."""
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places


def _times(rows: Tensor, weights: Tensor) -> Tensor:
    """Return rows times weights, in the memory of the rows where they have the product's dtype."""
    if torch.result_type(rows, weights) == rows.dtype:
        return rows.mul_(weights)
    return rows * weights


def _run_of(number: int, ends: Tensor) -> Tensor:
    """Return the run that each of so many rows is in."""
    return torch.searchsorted(
        ends, torch.arange(number, dtype=ends.dtype, device=ends.device), right=True
    )


def _summed(grad: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    """Return rows added where they belong, as the gradient of rows taken by number is made."""
    return grad.new_zeros(shape).index_put_((places,), grad, accumulate=True)
