"""Looking up rows of a table that is cut over ranks, each rank for its own samples.

A rank sends each row's number, once, to the rank that holds the row, and gets the row back:

    numbers   ->  all-to-all  ->  rows of the own range  ->  all-to-all  ->  rows asked for

Both exchanges give each pair of ranks as many places as the fullest pair needs: the rank with the
most rows to send is waited for anyway, and equal parts need no lists of sizes. The backward sends
the gradients of rows, summed over the samples of a rank that share one, the same way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from planner.runtime.process import collectives


def exchanged_embedding(
    weight: Tensor, indices: Tensor, padding_idx: int, group: str, parts: int
) -> Tensor:
    """Return rows of a table of which each rank of a group of `parts` holds an equal range.

    `weight` is [rows / parts, width], in rank order; `indices` are this rank's own and count over
    the whole table; the result is [*indices, width]. Raises IndexError for a number beyond it.
    """
    return _ExchangedEmbedding.apply(weight, indices, padding_idx, group, parts)


class _ExchangedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, indices: Tensor, padding_idx: int, group: str, parts: int
    ) -> Tensor:
        flat = indices.reshape(-1)
        ctx.group, ctx.parts, ctx.rows, ctx.width = group, parts, len(weight), weight.shape[1]
        ctx.padding_idx = padding_idx
        if isinstance(weight, FakeTensor):
            # In a dry run, as if all numbers differed and ranks held equally many of them.
            slots, inverse, wanted = (torch.empty_like(flat) for _ in range(3))
            scratch = weight.new_empty((2 * len(flat), weight.shape[1]))
            made = weight.new_empty((*indices.shape, weight.shape[1]))
            del scratch
            ctx.save_for_backward(slots, inverse, wanted)
            return made
        ids, inverse, counts, places = _numbers_by_owner(flat, len(weight), group, parts)
        owners = ids // len(weight)
        starts = counts.cumsum(0) - counts
        # Number i is the (i - starts[owner])-th that its owner is sent: numbers are sorted, so by
        # owner.
        slots = owners * places + torch.arange(len(ids), device=ids.device) - starts[owners]
        first_rows = torch.arange(parts, device=ids.device) * len(weight)
        asked = first_rows.repeat_interleave(places)  # any row of its owner in an empty place
        asked[slots] = ids
        # Rows of this rank that the ranks look up, as numbers in its own range.
        wanted = _swapped(asked, group, parts) - collectives.rank(group) * len(weight)
        back = _swapped(weight.detach()[wanted], group, parts)
        ctx.save_for_backward(slots, inverse, wanted)
        # From places to the sorted numbers, and from those to each index of the sample.
        return back[slots][inverse].view(*indices.shape, weight.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        slots, inverse, wanted = ctx.saved_tensors
        shape = ctx.rows, ctx.width
        rows = grad.reshape(-1, ctx.width)
        if isinstance(grad, FakeTensor):
            scratch = grad.new_empty((2 * len(rows), ctx.width))
            made = grad.new_empty(shape)
            del scratch
            return made, None, None, None, None
        # Summed before it is sent: a row that many samples of this rank looked up goes once.
        sent = rows.new_zeros((len(wanted), ctx.width)).index_add_(0, slots[inverse], rows)
        arrived = _swapped(sent, ctx.group, ctx.parts)
        # And over ranks. (An empty place brings zeros.)
        made = rows.new_zeros(shape).index_add_(0, wanted, arrived)
        own = ctx.padding_idx - collectives.rank(ctx.group) * ctx.rows
        if ctx.padding_idx >= 0 and 0 <= own < ctx.rows:
            made[own] = 0
        return made, None, None, None, None


def _numbers_by_owner(
    flat: Tensor, rows: int, group: str, parts: int
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return the numbers that occur, in order; which of them each index is; how many a rank owns;
    and the most that any rank asks another for.

    The host waits once, for the numbers by which sizes and errors are decided. All ranks get the
    same, so that a number beyond the table ends the step on each of them.
    """
    in_order, order = flat.sort()
    is_first = torch.ones_like(in_order, dtype=torch.bool)
    is_first[1:] = in_order[1:] != in_order[:-1]
    place = is_first.cumsum(0) - 1  # of each index's number among those that occur
    ends = torch.arange(1, parts + 1, device=flat.device) * rows
    before = torch.cat([place.new_zeros(1), is_first.cumsum(0)])
    until = before[torch.searchsorted(in_order, ends)]
    counts = until.diff(prepend=until.new_zeros(1))
    own = before[-1:]
    lowest, highest = (in_order[:1], in_order[-1:]) if len(flat) else (own, own)
    said = torch.stack([counts.max(), highest.max(), -lowest.min()])
    places, highest_anywhere, lowest_negated, num = torch.cat([_largest(said, group), own]).tolist()
    if lowest_negated > 0 or highest_anywhere >= parts * rows:
        wrong = -lowest_negated if lowest_negated > 0 else highest_anywhere
        raise IndexError(
            f"an index of an embedding is {wrong}, and it has rows 0 to {parts * rows - 1}"
        )
    ids = in_order.new_empty(num)
    ids[place] = in_order
    inverse = torch.empty_like(place)
    inverse[order] = place
    return ids, inverse, counts, places


def _swapped(x: Tensor, group: str, parts: int) -> Tensor:
    """Give part r of dim 0 to rank r; return what ranks gave this one, in their order."""
    if not group:
        return x
    return collectives.all_to_all_parts(x, group, parts)


def _largest(values: Tensor, group: str) -> Tensor:
    return collectives.all_reduce_max(values, group) if group else values
