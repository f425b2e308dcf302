"""Runs a `Reshard`: its collectives and transfers on real tensors, with the right gradient.

The gradient of a value lies where the value does (whole where the value is a sum), so the
backward pass is itself a resharding, from the target's gradient layout to the source's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from planner.errors import LayoutError
from planner.language.layout.layout import Box, ProcessMesh, sizes, slices
from planner.language.layout.placement import Shard
from planner.language.layout.redistribution.reshard import Reshard, ReshardStep
from planner.runtime.process import collectives
from planner.runtime.process.groups.exchange import exchange
from planner.runtime.process.groups.process_group import group_timeout

Groups = Mapping[str, str]
"""Name of this rank's process group along each axis of a mesh."""


def open_groups(mesh: ProcessMesh) -> dict[str, str]:
    """Make the process groups of a mesh; every rank of the world must call this.

    Returns the names of those this rank is in: none for a rank outside the mesh.
    """
    found = {}
    for axis in mesh.axes:
        for ranks in mesh.groups(axis):
            group = dist.new_group(list(ranks), timeout=group_timeout(), sort_ranks=False)
            if dist.get_rank() in ranks:
                found[axis] = group.group_name
    return found


def reshard(x: Tensor, way: Reshard, groups: Groups) -> Tensor:
    """Bring this rank's part of a tensor from `way.src` to `way.dst` on one mesh.

    Differentiable. Raises LayoutError for a way between meshes, where autograd can't follow:
    use `run_reshard` with the way and, for the gradient, with `way.backward()`.
    """
    if not way.is_on_one_mesh:
        raise LayoutError(
            f"from ranks {list(way.src.mesh.ranks)} to {list(way.dst.mesh.ranks)} a tensor "
            "leaves its mesh; use run_reshard, and way.backward() for its gradient"
        )
    return _Reshard.apply(x, way, groups)


class _Reshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, way: Reshard, groups: Groups) -> Tensor:
        ctx.way, ctx.groups = way, groups
        return _follow(x, way.before, groups) if way.before else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _follow(grad, ctx.way.backward().before, ctx.groups), None, None


def run_reshard(
    x: Tensor | None,
    way: Reshard,
    *,
    src_groups: Groups,
    dst_groups: Groups,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor | None:
    """Bring a tensor from one mesh to another, without autograd.

    Every rank of either mesh calls this: a rank outside the source mesh with None, a rank
    outside the target mesh gets None.
    """
    if x is not None:
        x = _follow(x, way.before, src_groups)
    if way.is_on_one_mesh:
        return x
    x = _transfer(x, way, dtype, device)
    return None if x is None else _follow(x, way.after, dst_groups)


def _follow(x: Tensor, steps: tuple[ReshardStep, ...], groups: Groups) -> Tensor:
    for step in steps:
        src = step.src.dim if isinstance(step.src, Shard) else 0
        dst = step.dst.dim if isinstance(step.dst, Shard) else 0
        # `run_step` takes the dim that is cut or gathered; of an all-to-all where it gathers, then
        # where it splits.
        dim = dst if step.kind in ("slice", "reduce_scatter") else src
        x = collectives.run_step(x, groups[step.axis], (step.kind, dim, dst))
    return x


def _transfer(
    x: Tensor | None, way: Reshard, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Send this rank's parts to the ranks that need them, and put together what it needs."""
    rank = dist.get_rank()
    # In coordinates of the whole tensor, as the transfers' boxes are.
    own = way.departure.box(way.shape, rank) if x is not None else ()
    received: list[tuple[Box, Tensor]] = []
    jobs = []
    for transfer in way.transfers:
        if x is not None and transfer.src_rank == rank:
            part = x[slices(transfer.box, own)].contiguous()
            if transfer.dst_rank == rank:
                received.append((transfer.box, part))
            else:
                jobs.append(dist.P2POp(dist.isend, part, transfer.dst_rank))
        elif transfer.dst_rank == rank:
            part = torch.empty(sizes(transfer.box), dtype=dtype, device=device)
            received.append((transfer.box, part))
            jobs.append(dist.P2POp(dist.irecv, part, transfer.src_rank))
    exchange(jobs)
    if rank not in way.dst.mesh.ranks:
        return None
    needed = way.arrival.box(way.shape, rank)
    whole = torch.empty(sizes(needed), dtype=dtype, device=device)
    for box, part in received:
        whole[slices(box, needed)] = part
    return whole
