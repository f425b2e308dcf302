"""What is spread over the ranks, brought together on rank 0's CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from planner.language.graph import ModelGraph, TensorMeta
from planner.language.layout.placement import Shard
from planner.language.layout.placements import Placements
from planner.language.layout.sharing import holds, shard_dim
from planner.language.lowering.wiring import param_placements, stage_params
from planner.language.ops.call import local_shape
from planner.language.plan import Plan
from planner.runtime.process.collectives import run_step
from planner.runtime.process.groups.mesh import Mesh
from planner.runtime.state.masters import rest_dtype


def gather(
    graph: ModelGraph,
    plan: Plan,
    mesh: Mesh,
    wanted: Iterable[TensorMeta],
    piece: Callable[[TensorMeta], tuple[Tensor, Placements]],
) -> dict[str, Tensor]:
    """Return whole tensors by the user's names on rank 0, {} elsewhere; all ranks call it.

    `piece` gives this rank's local piece of a tensor it holds (a DTensor speaks for
    itself) and its placements. Tensors go one at a time, from the first pp rank that
    holds them; a tied parameter is returned under each of its names.
    """
    result: dict[str, Tensor] = {}
    stages = stage_params(graph, plan)
    placements = cache(partial(param_placements, graph, plan))
    for meta in wanted:
        holders = [plan.stages[s].pp_rank for s, names in enumerate(stages) if meta.name in names]
        if not holders:
            continue
        home = holders[0]
        ranks = mesh.meshes[home].ranks
        if plan.degrees["ep"] > 1:
            lies = placements(home)[meta.name]
            ranks = tuple(rank for rank in ranks if holds(lies, mesh.meshes[home], rank))
        found = whole(*piece(meta), mesh) if mesh.global_rank in ranks else None
        dtype = rest_dtype(meta, plan.precision)
        received = _to_rank_0(found, meta, dtype, ranks[0], mesh)
        if received is not None:
            result |= dict.fromkeys((meta.fqn, *meta.aliases), received)
    return result


def whole(tensor: Tensor, placements: Placements, mesh: Mesh) -> Tensor:
    """Return all of a tensor from the pieces of the ranks that share it, which call it together."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = _over_data(tensor, placements, mesh)
    for axis, placement in reversed(placements.pairs):  # fine cuts first
        group = mesh.group(axis)
        if group is not None and isinstance(placement, Shard):
            # From the host, if that holds it: groups are of devices. What is whole there stays.
            tensor = tensor.to(mesh.device)
            tensor = run_step(tensor, group.group_name, ("all_gather", placement, 0))
    return tensor


def _over_data(tensor: DTensor, placements: Placements, mesh: Mesh) -> Tensor:
    """Gather what FSDP2 cut along one dim, as torch.chunk does: the last pieces may be short.

    DTensor's own way gathers over the axes of pieces first, which for a dim cut twice is the
    wrong order, and warns about it.
    """
    shape = tuple(tensor.shape)
    for axis, placement in placements.pairs:
        if axis != "ep":  # of which DTensors have their own part alone
            shape = local_shape(shape, placement, mesh.size(axis))
    group = mesh.group(placements.shards)
    assert group is not None, "FSDP2 is used only with replicas"
    # Pieces are filled up to one length for the gather. Only the last ones are shorter, so the
    # filling lies behind the end of the whole and is cut off there.
    parts = mesh.size(placements.shards)
    dim = shard_dim(shape, parts)
    local = tensor.to_local().to(mesh.device)
    padded = local.new_zeros((*shape[:dim], -(-shape[dim] // parts), *shape[dim + 1 :]))
    padded.narrow(dim, 0, local.shape[dim]).copy_(local)
    found = run_step(padded, group.group_name, ("all_gather", dim, 0))
    return found.narrow(dim, 0, shape[dim])


def _to_rank_0(
    whole: Tensor | None, meta: TensorMeta, dtype: torch.dtype, source: int, mesh: Mesh
) -> Tensor | None:
    """Move a whole tensor from global rank `source` to rank 0."""
    here = dist.get_rank()
    if here == source:
        assert whole is not None
        if source == 0:
            return whole.cpu().clone()
        dist.send(whole.cpu().contiguous(), 0, group=mesh.control)
    elif here == 0:
        buffer = torch.empty(meta.shape_at(1), dtype=dtype)
        dist.recv(buffer, source, group=mesh.control)
        return buffer
    return None
