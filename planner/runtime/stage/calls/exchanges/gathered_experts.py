"""Tokens of all ranks brought to each rank of ep, which picks those of its own experts.

    gather    tokens of all ranks -> a copy of a token for each of this rank's experts that it chose
    scatter   what the experts made, weighted and summed by token -> sums of a rank's own tokens

A token goes to every rank once, where `planner.runtime.stage.calls.exchanges.experts` sends a row
for each of its experts: the fewer bytes, the more experts a token has for each rank. Both ways are
an all-gather and a reduce-scatter, and each is the other one's gradient. The host waits once, for
the numbers of tokens of each rank and of copies here. Ranks with fewer tokens than another fill
theirs up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from planner.runtime.process import collectives
from planner.runtime.stage.calls.rows.routed_rows import row_of, summed, times


def gather_rows(
    rows: Tensor, experts: Tensor, group: str, parts: int, number: int, stable: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return copies of the rows of all ranks for this rank's experts, by expert; their order; where
    runs of these experts end; and how many rows each rank has.

    `rows` is [r, h], `experts` [r, k], or [r] where each row has one: of `number`, dealt to `parts`
    ranks. The copies are [n, h]; the order [n] says which copy each was, of those of all ranks,
    each filled up to the most rows m: copy i of row j of rank q is (q m + j) k + i. The ends are
    [number / parts], int32; the numbers of rows [parts], on the host.
    """
    return _GatherRows.apply(rows, experts, group, parts, number, stable)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, experts: Tensor, group: str, parts: int, number: int, stable: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.copies = 1 if experts.dim() == 1 else experts.shape[1]
        ctx.group, ctx.shape, each = group, rows.shape, number // parts
        tokens, count = _counted(experts, len(rows), group, parts, number)
        ctx.longest = max(tokens.tolist()) if not isinstance(tokens, FakeTensor) else len(rows)
        chosen = _filled(experts.reshape(len(rows), ctx.copies), ctx.longest, number)
        chosen = collectives.all_gather_rows(chosen, group).flatten()
        # (Other ranks' experts come last, behind all copies of this rank.)
        chosen = chosen - each * collectives.rank(group)
        chosen = chosen.where((chosen >= 0) & (chosen < each), each)
        ordered, order = torch.sort(chosen, stable=stable)
        order = order[:count].clone()
        runs = torch.arange(each, dtype=ordered.dtype, device=ordered.device)
        ends = torch.searchsorted(ordered[:count].contiguous(), runs, right=True, out_int32=True)
        del chosen, ordered
        every = collectives.all_gather_rows(_filled(rows, ctx.longest), group, to_experts=count)
        ctx.save_for_backward(order)
        ctx.mark_non_differentiable(order, ends, tokens)
        return every[row_of(order, ctx.copies)], order, ends, tokens

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        total = torch.Size((ctx.longest * collectives.size(ctx.group), *ctx.shape[1:]))
        sums = summed(grad, row_of(order, ctx.copies), total)
        return _scattered(sums, ctx.group, ctx.shape[0]), None, None, None, None, None


def scatter_rows(
    rows: Tensor, order: Tensor, weights: Tensor | None, tokens: Tensor, copies: int, group: str
) -> Tensor:
    """Return the sums of the copies of this rank's rows, each times its weight, over all ranks.

    `rows` is [n, h], `order` [n] and `tokens` [ranks] as `gather_rows` gave them, `weights` [r, k]
    of this rank's own rows or none, `copies` k; the sums are [r, h].
    """
    return _ScatterRows.apply(rows, order, weights, tokens, copies, group)


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        order: Tensor,
        weights: Tensor | None,
        tokens: Tensor,
        copies: int,
        group: str,
    ) -> Tensor:
        ranks, at = collectives.size(group), collectives.rank(group)
        is_fake = isinstance(tokens, FakeTensor)
        # (In a dry run all ranks have as many, and all experts are picked as often.)
        own = len(rows) // copies if is_fake else int(tokens[at])
        ctx.longest = own if is_fake else max(tokens.tolist())
        ctx.copies, ctx.group = copies, group
        of_weights = weights is not None and ctx.needs_input_grad[2]
        picked, made = None, rows
        if weights is not None:
            ctx.weights = weights.shape, weights.dtype
            every = collectives.all_gather_rows(
                _filled(weights.reshape(own, copies), ctx.longest), group
            )
            picked = every.flatten()[order]
            made = rows * picked.unsqueeze(1)
        ctx.dtype = rows.dtype
        ctx.save_for_backward(
            order,
            rows if of_weights else None,
            picked if ctx.needs_input_grad[0] else None,
        )
        total = torch.Size((ctx.longest * ranks, *rows.shape[1:]))
        sums = summed(made, row_of(order, copies), total)
        return _scattered(sums, group, own)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        order, rows, picked = ctx.saved_tensors
        every = collectives.all_gather_rows(_filled(grad, ctx.longest), ctx.group)
        number, of_weights = len(every), None
        of_copies = every[row_of(order, ctx.copies)]
        del every
        if rows is not None:
            shape, dtype = ctx.weights
            sums = grad.new_zeros(number * ctx.copies, dtype=dtype)
            sums[order] = (of_copies * rows).sum(1).to(dtype)
            of_weights = _scattered(sums.view(-1, ctx.copies), ctx.group, len(grad)).view(shape)
        if not ctx.needs_input_grad[0]:
            return None, None, of_weights, None, None, None
        if picked is not None:
            of_copies = times(of_copies, picked.unsqueeze(1))
        return of_copies.to(ctx.dtype), None, of_weights, None, None, None


def _counted(experts: Tensor, rows: int, group: str, parts: int, number: int) -> tuple[Tensor, int]:
    """Return how many rows each rank has, on the host, and how many copies this rank's experts
    take of all of them.
    """
    counts = experts.new_zeros(number + 2, dtype=torch.int64)
    # (Behind the last: rows of no expert, and all rows.)
    flat = experts.flatten().clamp(max=number).long()
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    counts[-1] = rows
    told = collectives.all_gather_rows(counts, group).view(parts, -1)
    tokens, each = told[:, -1].contiguous(), number // parts
    if isinstance(told, FakeTensor):
        return tokens, experts.numel()
    told = told.cpu()
    first = each * collectives.rank(group)
    return told[:, -1].contiguous(), int(told[:, first : first + each].sum())


def _filled(rows: Tensor, longest: int, value: float = 0) -> Tensor:
    """Return rows, filled up to the most that a rank has."""
    if len(rows) == longest:
        return rows
    return torch.cat([rows, rows.new_full((longest - len(rows), *rows.shape[1:]), value)])


def _scattered(sums: Tensor, group: str, own: int) -> Tensor:
    """Return the sums of this rank's own rows."""
    return collectives.run_step(sums, group, ("reduce_scatter", 0, 0))[:own]
