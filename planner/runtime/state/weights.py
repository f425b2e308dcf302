"""A user's weights cut for one stage: each rank keeps its own piece of what its blocks use."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Set

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.errors import LayoutError, ModelError
from planner.graph import ModelGraph, TensorMeta
from planner.layout.placement import Shard
from planner.layout.placements import Placements
from planner.plan import Precision
from planner.runtime.start.mesh import Mesh
from planner.runtime.state.masters import rest_dtype

BROADCAST_BYTES = 64 * 2**20


def own_piece(whole: Tensor, placements: Placements, mesh: Mesh, fqn: str) -> Tensor:
    """Return a copy of this rank's piece of a parameter. Raises LayoutError if uneven."""
    piece = whole
    for axis, placement in placements.pairs:  # coarse cuts first
        if isinstance(placement, Shard):
            piece = local_piece(piece, placement, axis, mesh.size(axis), mesh.rank(axis), fqn)
    if piece is whole:
        return whole.clone()
    return piece.clone(memory_format=torch.contiguous_format)


def local_piece(
    whole: Tensor, placement: Shard, axis: str, parts: int, rank: int, fqn: str
) -> Tensor:
    """Return what one rank of an axis has of a parameter. Raises LayoutError if uneven."""
    length = whole.shape[placement.dim]
    if length % (parts * placement.segments):
        raise LayoutError(
            f"{axis}={parts} does not divide dim {placement.dim} of {fqn} (size {length}); "
            f"search again with another {axis}"
        )
    by_segment = whole.unflatten(placement.dim, (placement.segments, -1))
    return by_segment.chunk(parts, placement.dim + 1)[rank].flatten(
        placement.dim, placement.dim + 1
    )


def module_tensor(module: nn.Module, meta: TensorMeta, *, may_be_empty: bool = False) -> Tensor:
    """Return the user's tensor a graph tensor stands for."""
    if meta.data is not None:
        shape = [size for size in meta.shape if isinstance(size, int)]
        return torch.tensor(meta.data, dtype=getattr(torch, meta.dtype)).reshape(shape)
    try:
        found = operator.attrgetter(meta.fqn)(module)
    except AttributeError:
        raise ModelError(
            f"the model has no {meta.kind} {meta.fqn!r}; "
            "apply the plan to the model it was made for"
        ) from None
    if found.is_meta and not may_be_empty:
        raise ModelError(
            f"{meta.kind} {meta.fqn!r} is on the meta device and has no values; "
            "build the model on the CPU before applying a plan, or give `weights` to take them from"
        )
    return found.detach()


def empty_tensors(module: nn.Module) -> frozenset[str]:
    """Return the names of parameters and buffers on the meta device, tied ones by each name."""
    named = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    return frozenset(name for name, tensor in named if tensor.is_meta)


def materialized(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor, or memory for what has no values yet."""
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor


def synced_tensors(
    graph: ModelGraph,
    module: nn.Module,
    mesh: Mesh,
    wanted: Iterable[str],
    *,
    precision: Precision = "model",
    empty: Set[str] = frozenset(),
) -> Mapping[str, Tensor]:
    """Return the `wanted` tensors of the model with rank 0's values, on the mesh's device.

    They are in the dtype they rest in, so that fp32 copies of bf16 parameters start from the
    model's own values.

    Every rank takes part in the broadcast of every tensor, so that replicas start equal
    however the script seeded its processes; what a rank does not want is dropped. Of those that
    are `empty` (by the user's names) there are no values: they stay on the meta device.
    """
    keep = frozenset(wanted)
    metas = [t for t in graph.tensors if t.kind in ("param", "buffer", "constant")]
    kept: dict[str, Tensor] = {
        meta.name: module_tensor(module, meta, may_be_empty=True).to(rest_dtype(meta, precision))
        for meta in metas
        if meta.fqn in empty and meta.name in keep
    }
    metas = [meta for meta in metas if meta.fqn not in empty]
    for bucket in _buckets(metas, precision):
        tensors = [
            module_tensor(module, meta).to(mesh.device, rest_dtype(meta, precision))
            for meta in bucket
        ]
        if dist.get_world_size() > 1:
            # One message for many tensors: a broadcast each would cost a latency each.
            flat = torch.cat([t.reshape(-1) for t in tensors])
            dist.broadcast(flat, src=0)
            tensors = [
                piece.view(t.shape)
                for piece, t in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True)
            ]
        kept |= {m.name: t.clone() for m, t in zip(bucket, tensors, strict=True) if m.name in keep}
    return kept


def _buckets(metas: list[TensorMeta], precision: Precision) -> Iterator[list[TensorMeta]]:
    """Group tensors of one dtype up to the broadcast size."""
    by_dtype: dict[torch.dtype, list[TensorMeta]] = {}
    for meta in metas:
        by_dtype.setdefault(rest_dtype(meta, precision), []).append(meta)
    for group in by_dtype.values():
        bucket: list[TensorMeta] = []
        filled = 0
        for meta in group:
            if bucket and filled + meta.bytes_at(1) > BROADCAST_BYTES:
                yield bucket
                bucket, filled = [], 0
            bucket.append(meta)
            filled += meta.bytes_at(1)
        yield bucket
