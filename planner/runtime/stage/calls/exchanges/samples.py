"""Rows of all replicas put together, and a replica's own taken back: ops on the whole batch.

Both are inverse in their gradients: of a gathered row every replica has a term, which are summed
where the row came from; a replica's own rows leave a gradient of zero on all others. Replicas may
have samples in different numbers (`parts`); messages are then as long as the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from planner.runtime.process.collectives import rank, run

_funcol = torch.ops._c10d_functional


def gather_samples(x: Tensor, group: str, dim: int, segments: int, parts: Sequence[int]) -> Tensor:
    """Return the rows of all ranks of a group along `dim`, in the order of ranks in each segment.

    `parts` are the samples of each rank. An empty group is one replica, which has all.
    """
    if not group:
        return x
    # [..., segments * rows, ...] as [rows, ..., segments, ...]: one dim has what is gathered.
    rows = x.unflatten(dim, (segments, -1)).movedim(dim + 1, 0)
    gathered = _Gather.apply(rows, group, tuple(parts))
    return gathered.movedim(0, dim + 1).flatten(dim, dim + 1)


def own_samples(x: Tensor, group: str, dim: int, parts: Sequence[int]) -> Tensor:
    """Return this rank's own rows of what every rank has of all samples."""
    if not group:
        return x
    own, each = rank(group), x.shape[dim] // sum(parts)
    return x.narrow(dim, each * sum(parts[:own]), each * parts[own])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, parts: tuple[int, ...]) -> Tensor:
        each = len(x) // parts[rank(group)]
        ctx.group, ctx.sizes = group, [each * part for part in parts]
        return _gathered(x, group, ctx.sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _summed(grad, ctx.group, ctx.sizes), None, None


def _gathered(x: Tensor, group: str, sizes: Sequence[int]) -> Tensor:
    longest = max(sizes)
    # (No backend gathers truth values; bytes are as good.)
    sent = _as_long(x.view(torch.uint8) if x.dtype == torch.bool else x, longest).contiguous()
    made = run("all_gather", lambda: _funcol.all_gather_into_tensor(sent, len(sizes), group))
    if min(sizes) < longest:
        made = torch.cat(
            [piece[:size] for piece, size in zip(made.split(longest), sizes, strict=True)]
        )
    return made.view(torch.bool) if x.dtype == torch.bool else made


def _summed(grad: Tensor, group: str, sizes: Sequence[int]) -> Tensor:
    longest = max(sizes)
    if min(sizes) < longest:
        grad = torch.cat([_as_long(piece, longest) for piece in grad.split(list(sizes))])
    sent = grad.contiguous()
    own = run(
        "reduce_scatter",
        lambda: _funcol.reduce_scatter_tensor(sent, "sum", len(sizes), group),
    )
    return own[: sizes[rank(group)]]


def _as_long(x: Tensor, size: int) -> Tensor:
    """Fill rows up with zeros."""
    return F.pad(x, (*[0, 0] * (x.dim() - 1), 0, size - len(x))) if len(x) < size else x
