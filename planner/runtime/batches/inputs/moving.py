"""Samples that change replicas: what a rank's replica is dealt of the parts that others loaded.

Ranks at one place of their replicas read the same tensors of a batch, so each exchanges with those
at its own place in others, over the host: token numbers and tables, a few bytes a token.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from planner.language.graph import Affine, TensorMeta, Unit
from planner.language.layout.axes import members
from planner.runtime.batches.inputs.feed import CutBatch, filled
from planner.runtime.process.groups.exchange import exchange
from planner.runtime.process.groups.mesh import Mesh


def with_samples_of_others(
    cut: CutBatch,
    order: Sequence[int],
    mesh: Mesh,
    *,
    reads: Collection[str],
    pad: Mapping[str, float],
) -> CutBatch:
    """Return the rank's own part with the samples that are dealt to it; ranks that read any call it
    together.

    `order` says by place in the split which sample is there. `reads` are the paths of what the rank
    reads, and `pad` fills tensors up, as replicas may have others of a shape.
    """
    paths = [
        path
        for path in sorted(reads)
        if path in cut.leaves and _dim_of(cut.metas[path]) is not None
    ]
    if not paths:
        return cut
    count, number = mesh.size("batch"), mesh.rank("batch")
    of_replica = [_places(cut, count, replica) for replica in range(count)]
    # By place in the split: the replica that has loaded the sample there, and its number in that.
    home = {p: (r, at) for r, places in enumerate(of_replica) for at, p in enumerate(places)}
    taken = [[home[order[place]] for place in places] for places in of_replica]
    rows = {path: _by_sample(cut, path, len(of_replica[number]), pad) for path in paths}
    in_bytes = [each.flatten(1).view(torch.uint8) for each in rows.values()]
    moved = _exchanged(torch.cat(in_bytes, 1), taken, mesh)
    widths = [each.shape[1] for each in in_bytes]
    leaves = {path: leaf for path, leaf in cut.leaves.items() if path not in rows}
    for (path, own), columns in zip(rows.items(), moved.split(widths, 1), strict=True):
        made = columns.contiguous().view(own.dtype).view(own.shape)
        leaf = _in_batch(made, cut.metas[path], cut.unit)
        leaves[path] = leaf.pin_memory() if cut.leaves[path].is_pinned() else leaf
    return replace(cut, leaves=leaves)


def can_move(metas: Mapping[str, TensorMeta]) -> bool:
    """Whether samples of these tensors can change replicas: each counts them in one dim at most."""
    sizes = [[size for size in meta.shape if isinstance(size, Affine)] for meta in metas.values()]
    return all(len(each) < 2 and not any(size.fixed for size in each) for each in sizes)


def _places(cut: CutBatch, count: int, replica: int) -> list[int]:
    split = cut.split
    return [p for m in range(split.num_microbatches) for p in split.part(m, count, replica)]


def _exchanged(mine: Tensor, taken: Sequence[Sequence[tuple[int, int]]], mesh: Mesh) -> Tensor:
    """Return the rows that this rank takes, [samples, bytes]; `taken` says by replica which sample
    of which replica's it has.
    """
    number = mesh.rank("batch")
    line = next(line for line in mesh.own.groups(*members("batch")) if mesh.global_rank in line)
    made = torch.empty_like(mine)
    operations, arriving = [], []
    for replica, peer in enumerate(line):
        here = [at for at, (home, _) in enumerate(taken[number]) if home == replica]
        if replica == number:
            made[here] = mine[[taken[number][at][1] for at in here]]
            continue
        gone = [at for home, at in taken[replica] if home == number]
        if gone:
            operations.append(dist.P2POp(dist.isend, mine[gone], peer, mesh.control))
        if here:
            rows = mine.new_empty(len(here), mine.shape[1])
            operations.append(dist.P2POp(dist.irecv, rows, peer, mesh.control))
            arriving.append((here, rows))
    exchange(operations)
    for here, rows in arriving:
        made[here] = rows
    return made


def _dim_of(meta: TensorMeta) -> int | None:
    return next((dim for dim, size in enumerate(meta.shape) if isinstance(size, Affine)), None)


def _by_sample(cut: CutBatch, path: str, samples: int, pad: Mapping[str, float]) -> Tensor:
    """Return a tensor of the shape and dtype that all replicas have it in, [samples, ...]."""
    meta = cut.metas[path]
    tensor = cut.leaves[path].to("cpu", getattr(torch, meta.dtype))
    tensor = filled(tensor, meta.shape_at(samples), pad.get(path, 0))
    dim, runs, each = _rows(meta, cut.unit)
    return tensor.unflatten(dim, (runs, -1, each)).movedim(dim + 1, 0).contiguous()


def _in_batch(by_sample: Tensor, meta: TensorMeta, unit: Unit) -> Tensor:
    dim, _, _ = _rows(meta, unit)
    return by_sample.movedim(0, dim + 1).flatten(dim, dim + 2).contiguous()


def _rows(meta: TensorMeta, unit: Unit) -> tuple[int, int, int]:
    """Return the dim that counts samples, in how many runs, and rows of each sample in a run."""
    dim = _dim_of(meta)
    assert dim is not None, "it counts samples"
    size = meta.shape[dim]
    assert isinstance(size, Affine), "it counts samples"
    runs = unit.runs_of(size.per_sample)
    return dim, runs, size.per_sample // runs
