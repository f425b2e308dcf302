"""Resharding: the cheapest way from one layout of a tensor to another, on any meshes.

On one mesh the way is a chain of steps, each a collective (or local work) along one axis.
The cheapest chain is a shortest path over the placements in between, its length the bytes
a rank receives. Where two axes cut one tensor dim only the finer cut may be undone or
added, since pieces must stay contiguous; the path goes around that where needed.

Between meshes (other ranks, another shape) every rank of the target receives exactly the
parts it needs and does not hold already, from the rank nearest to it that has them.
Sums are taken before a tensor leaves its mesh.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from math import prod
from typing import Literal

from planner.language.layout.layout import Box, Layout, Shape, box_numel, intersection
from planner.language.layout.placement import Partial, Placement, Replicate, Shard
from planner.language.layout.redistribution.redistribute import CollectiveKind, collectives

StepKind = CollectiveKind | Literal["slice", "pad", "keep_first"]

# Local steps are free but for this many bytes' worth, so the shortest of equal chains wins.
_STEP_PENALTY = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardStep:
    """One step along one axis, from one placement to another.

    Attributes:
        axis: the mesh axis.
        src: the placement before.
        dst: the placement after.
        kind: the collective, or the local work.
        payload_bytes: of the tensor before a scatter or after a gather, as it lies on the other
            axes.
        num_bytes: that each rank receives, of n: (n-1)/n of the payload, twice that for an
            all-reduce (ring), an n-th of it for an all-to-all; 0 for local work.
    """

    axis: str
    src: Placement
    dst: Placement
    kind: StepKind
    payload_bytes: int
    num_bytes: float

    def __str__(self) -> str:
        return f"{self.kind}@{self.axis} {self.src}->{self.dst} {self.num_bytes:.0f} B"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A part of the tensor sent from one rank to another (or kept, when they are the same)."""

    src_rank: int
    dst_rank: int
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshard:
    """A way from `src` to `dst`: steps on the source mesh, transfers, steps on the target.

    On one mesh there are no transfers, and `before` is the whole way.

    Attributes:
        shape: of the whole tensor.
        itemsize: bytes of an element.
        src: where the tensor is.
        dst: where it goes.
        departure: the layout on the source mesh from which transfers lead.
        arrival: the layout on the target mesh to which they lead.
        before: steps on the source mesh, from `src` to `departure`.
        transfers: from rank to rank, or kept.
        after: steps on the target mesh, from `arrival` to `dst`.
    """

    shape: Shape
    itemsize: int
    src: Layout
    dst: Layout
    departure: Layout
    arrival: Layout
    before: tuple[ReshardStep, ...]
    transfers: tuple[Transfer, ...] = ()
    after: tuple[ReshardStep, ...] = ()

    @property
    def is_on_one_mesh(self) -> bool:
        """Whether no tensor leaves its mesh."""
        return self.src.mesh == self.dst.mesh

    def backward(self) -> Reshard:
        """Return the way of the gradient, which lies where the value does (see `Layout`)."""
        return plan_reshard(self.shape, self.itemsize, self.dst.gradient(), self.src.gradient())

    def bytes_received(self, rank: int) -> float:
        """Return the bytes one rank receives over all steps and transfers."""
        received = float(
            sum(
                box_numel(t.box) * self.itemsize
                for t in self.transfers
                if t.dst_rank == rank and t.src_rank != rank
            )
        )
        if rank in self.src.mesh.ranks:
            received += sum(step.num_bytes for step in self.before)
        if rank in self.dst.mesh.ranks:
            received += sum(step.num_bytes for step in self.after)
        return received


def plan_reshard(shape: Shape, itemsize: int, src: Layout, dst: Layout) -> Reshard:
    """Return the cheapest way from `src` to `dst` for a tensor of this shape.

    `itemsize` is in bytes. Raises LayoutError when a size does not divide.
    """
    src.local_shape(shape)
    dst.local_shape(shape)
    if src.mesh == dst.mesh:
        steps = _cheapest_chain(shape, itemsize, src, dst)
        return Reshard(
            shape=shape,
            itemsize=itemsize,
            src=src,
            dst=dst,
            departure=dst,
            arrival=dst,
            before=steps,
        )
    # A sum is taken where its terms are, and made into terms only where it arrives.
    summed = _cheapest_sum(shape, itemsize, src)
    arrival = dst.gradient()
    return Reshard(
        shape=shape,
        itemsize=itemsize,
        src=src,
        dst=dst,
        departure=summed,
        arrival=arrival,
        before=_cheapest_chain(shape, itemsize, src, summed),
        transfers=tuple(box_transfers(_boxes(shape, summed), _boxes(shape, arrival))),
        after=_cheapest_chain(shape, itemsize, arrival, dst),
    )


def _cheapest_chain(
    shape: Shape, itemsize: int, src: Layout, dst: Layout
) -> tuple[ReshardStep, ...]:
    """Dijkstra over placements; a node is one placement for each axis."""
    # Numbers break ties of cost: layouts have no order.
    order = count()
    queue: list[tuple[float, int, Layout]] = [(0.0, next(order), src)]
    best = {src.placements: 0.0}
    came: dict[tuple[Placement, ...], tuple[tuple[Placement, ...], ReshardStep]] = {}
    while queue:
        cost, _, layout = heapq.heappop(queue)
        if layout.placements == dst.placements:
            break
        # A stale entry: a cheaper way there was found after it was queued.
        if cost > best[layout.placements]:
            continue
        for step, following in _steps_from(shape, itemsize, layout):
            total = cost + step.num_bytes + _STEP_PENALTY
            if total < best.get(following.placements, float("inf")):
                best[following.placements] = total
                came[following.placements] = (layout.placements, step)
                heapq.heappush(queue, (total, next(order), following))
    # Every layout can be reached by way of whole tensors, so `came` leads back from `dst`.
    steps = []
    at = dst.placements
    while at != src.placements:
        at, step = came[at]
        steps.append(step)
    return tuple(reversed(steps))


def _cheapest_sum(shape: Shape, itemsize: int, src: Layout) -> Layout:
    """Return `src` with its sums taken: scattered where that divides, else all-reduced."""
    layout = src
    for axis, placement in enumerate(src.placements):
        if not isinstance(placement, Partial):
            continue
        # The sums of several axes are taken one after the other: a scatter leaves less for the
        # next.
        options = [
            step
            for step in _steps_from(shape, itemsize, layout)
            if step[0].axis == layout.mesh.axes[axis] and not isinstance(step[0].dst, Partial)
        ]
        layout = min(options, key=lambda option: option[0].num_bytes)[1]
    return layout


def _steps_from(
    shape: Shape, itemsize: int, layout: Layout
) -> Iterator[tuple[ReshardStep, Layout]]:
    """Yield every step that can be taken from a layout, and where it leads."""
    # No segments: on the way pieces are contiguous.
    targets: list[Placement] = [Replicate(), Partial(), *(Shard(d) for d in range(len(shape)))]
    local_numel = prod(layout.local_shape(shape))
    for axis, (name, size) in enumerate(zip(layout.mesh.axes, layout.mesh.shape, strict=True)):
        src = layout.placements[axis]
        # Undoing a coarse cut would leave each rank with pieces that are not contiguous.
        if isinstance(src, Shard) and not _is_finest(layout, axis, src.dim):
            continue
        for dst in targets:
            # From a sum to itself or back into terms: never needed on the way.
            if dst == src or (isinstance(src, Partial) and isinstance(dst, Partial)):
                continue
            if isinstance(dst, Shard) and not _can_cut(shape, layout, axis, dst.dim):
                continue
            # The tensor as it lies on the other axes: the group of this axis sees no more of it.
            whole = local_numel * (size if isinstance(src, Shard) else 1) * itemsize
            kind, wire = _cost(src, dst, size)
            placements = (*layout.placements[:axis], dst, *layout.placements[axis + 1 :])
            step = ReshardStep(
                axis=name,
                src=src,
                dst=dst,
                kind=kind,
                payload_bytes=whole,
                num_bytes=whole * wire,
            )
            yield step, Layout(mesh=layout.mesh, placements=placements)


def _is_finest(layout: Layout, axis: int, dim: int) -> bool:
    """Whether no later axis cuts the pieces this axis makes of a dim."""
    return layout.shards_of(dim)[-1] == axis


def _can_cut(shape: Shape, layout: Layout, axis: int, dim: int) -> bool:
    """Whether an axis can start to cut a dim: finer than all there, and even."""
    others = [a for a in layout.shards_of(dim) if a != axis]
    parts = prod(layout.mesh.shape[a] for a in (*others, axis))
    return all(a < axis for a in others) and shape[dim] % parts == 0


def _cost(src: Placement, dst: Placement, size: int) -> tuple[StepKind, float]:
    """Return the step's kind and the bytes received per payload byte."""
    kind, _ = collectives(src, dst)
    # Of a ring: each rank gets all parts but its own.
    share = (size - 1) / size
    if kind == "all_reduce":
        # A reduce-scatter, then an all-gather.
        return kind, 2 * share
    if kind == "all_to_all":  # each rank keeps one part of its own shard
        return kind, share / size
    if kind is not None:
        return kind, share
    if isinstance(dst, Partial):
        return ("pad" if isinstance(src, Shard) else "keep_first"), 0.0
    return "slice", 0.0


def box_transfers(src: Mapping[int, Box], dst: Mapping[int, Box]) -> Iterator[Transfer]:
    """Yield what each target rank receives: every element once, from a rank that has it.

    `src` and `dst` give each rank's part. Of several ranks that hold the same part the
    receiver itself comes first, then they take turns, so that no one replica serves
    everybody.
    """
    holders: dict[Box, list[int]] = {}
    for rank, box in src.items():
        holders.setdefault(box, []).append(rank)
    # Boxes of a layout are equal or disjoint, so parts from different boxes have no element in
    # common.
    turns = dict.fromkeys(holders, 0)
    for rank, needed in dst.items():
        for held, ranks in holders.items():
            part = intersection(held, needed)
            if part is None:
                continue
            if src.get(rank) == held:
                yield Transfer(src_rank=rank, dst_rank=rank, box=part)
                continue
            sender = ranks[turns[held] % len(ranks)]
            turns[held] += 1
            yield Transfer(src_rank=sender, dst_rank=rank, box=part)


def _boxes(shape: Shape, layout: Layout) -> dict[int, Box]:
    return {rank: layout.box(shape, rank) for rank in layout.mesh.ranks}
