"""Rows sent to the ranks of their experts, and back: as many as a step has, none dropped.

A rank's rows lie in runs, one an expert, and ranks have experts in order, so what goes to each rank
is one stretch of them. Of the rank r, for each of its experts e, runs come from all ranks:

    sent      e0 from r0 | e1 from r0 | e0 from r1 | e1 from r1
    in order  e0 from r0 | e0 from r1 | e1 from r0 | e1 from r1

The host waits once for the numbers of rows (`deal_runs`), by which both exchanges of a forward and
both of its backward are sized.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from planner.runtime.process import collectives


def deal_runs(ends: Tensor, group: str, parts: int) -> tuple[Tensor, Tensor]:
    """Return how many rows this rank sends and gets, and where runs of its own experts end.

    `ends` is [experts], the places where each expert's run of this rank's rows ends. The first
    result is [2, parts, experts / parts] on the host: rows for each expert of each rank, and rows
    from each rank for each of this rank's experts. The second is [experts / parts].
    """
    counts = ends.diff(prepend=ends.new_zeros(1)).long()
    got = collectives.all_to_all_parts(counts, group, parts).view(parts, -1)
    own = got.sum(0).cumsum(0).to(ends.dtype)
    dealt = torch.stack([counts.view(parts, -1), got])
    return dealt if isinstance(dealt, FakeTensor) else dealt.cpu(), own


def exchange_rows(rows: Tensor, dealt: Tensor, group: str, back: bool) -> Tensor:
    """Send rows [r, …] to the ranks of their experts, in the order of these, or `back`.

    `dealt` is as `deal_runs` gives it. The gradient goes the other way.
    """
    return _ExchangeRows.apply(rows, dealt, group, back)


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, dealt: Tensor, group: str, back: bool) -> Tensor:
        ctx.dealt, ctx.group, ctx.back = dealt, group, back
        return _exchanged(rows, dealt, group, back, is_forward=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grad, ctx.dealt, ctx.group, not ctx.back), None, None, None


def _exchanged(
    rows: Tensor, dealt: Tensor, group: str, back: bool, *, is_forward: bool = False
) -> Tensor:
    if isinstance(rows, FakeTensor):
        # In a dry run as if all experts were picked as often: rows in another order, and those that
        # came.
        moved = rows.new_empty(rows.shape)
        arrived = rows.new_empty(rows.shape)
        del moved
        return arrived
    sent, got = dealt.sum(2).tolist()
    if back:
        # From the order of experts to that of the ranks where rows came from.
        rows = rows.new_empty(rows.shape).index_copy_(0, _places(dealt[1], rows.device), rows)
        return collectives.all_to_all_rows(rows, group, got, sent)
    rows = rows.contiguous()
    arrived = collectives.all_to_all_rows(rows, group, sent, got, to_experts=is_forward)
    return arrived.index_select(0, _places(dealt[1], rows.device))


def _places(got: Tensor, device: torch.device) -> Tensor:
    """Return where each row of the order of experts lies among the rows as they came.

    `got` is [ranks, experts]: the rows that came from each rank for each expert.
    """
    starts = (got.flatten().cumsum(0) - got.flatten()).view_as(got).t().flatten()
    lengths = got.t().flatten()
    # Of each run: where it lies as it came, less where it lies in order.
    moved = starts - (lengths.cumsum(0) - lengths)
    total = int(lengths.sum())
    offsets = moved.to(device).repeat_interleave(lengths.to(device), output_size=total)
    return offsets + torch.arange(total, device=device)
