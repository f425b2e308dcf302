"""Who sends what to whom between stages, by pp ranks and by ranks; torch-free.

Between meshes of one shape every rank sends what it holds to the rank at its own place of
the other pp rank. Between meshes of different shapes each rank receives exactly the part
it needs, from the ranks that hold pieces of it; every element once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from planner.language.graph import Affine, size_at
from planner.language.graph.batch_split import part_bounds
from planner.language.layout.axes import members
from planner.language.layout.boxes import Box, box_transfers
from planner.language.layout.pieces import piece_of
from planner.language.layout.process_mesh import ProcessMesh
from planner.language.lowering.wiring import Edge
from planner.language.plan import Plan

Direction = tuple[int, int]
"""The pp rank that sends, and the one that receives."""


def directions(edges: Iterable[Edge], home: Sequence[int]) -> list[Direction]:
    """Return the directions in which tensors ever go, in an order that is equal on all ranks.

    `home` gives the pp rank of each stage. Stages of one pp rank hand tensors over in place.
    """
    found = set()
    for edge in edges:
        a, b = home[edge.producer], home[edge.consumer]
        if a != b:
            found |= {(a, b), (b, a)} if edge.requires_grad else {(a, b)}
    return sorted(found)


def in_rounds(directed: Iterable[Direction]) -> list[list[Direction]]:
    """Return directions in rounds of which none has a pp rank twice.

    The groups of a round have no rank in common, so a communicator is split into all of
    them in one call.
    """
    rounds: list[list[Direction]] = []
    for direction in directed:
        for others in rounds:
            if not any(set(direction) & set(other) for other in others):
                others.append(direction)
                break
        else:
            rounds.append([direction])
    return rounds


def rank_pairs(source: ProcessMesh, target: ProcessMesh) -> list[tuple[int, int]]:
    """Return the ranks that may ever send to each other, from one mesh to another.

    Between meshes of one shape they are those at one place. Between others, who sends to whom
    depends on how the batch is cut, which is another with a short batch: all pairs are told.
    """
    if source.shape == target.shape:
        return list(zip(source.ranks, target.ranks, strict=True))
    return [(a, b) for a in source.ranks for b in target.ranks]


class Part(NamedTuple):
    """What one global rank sends to another: a box of the whole microbatch's tensor."""

    source: int
    target: int
    box: Box


@dataclass(frozen=True, kw_only=True)
class Routes:
    """The parts of every message, worked out once for each way a microbatch is cut.

    `cut` is everywhere the sizes of the finest parts of a microbatch (`BatchSplit.sizes`).
    """

    plan: Plan
    _known: dict[tuple[int, tuple[int, ...], bool], tuple[Part, ...]] = field(default_factory=dict)

    def parts(self, edge: Edge, cut: tuple[int, ...], *, is_grad: bool) -> tuple[Part, ...]:
        """Return who sends what of a microbatch."""
        key = (edge.index, cut, is_grad)
        if key not in self._known:
            self._known[key] = tuple(self._find(edge, cut, is_grad=is_grad))
        return self._known[key]

    def _find(self, edge: Edge, cut: tuple[int, ...], *, is_grad: bool) -> list[Part]:
        source, target = self._mesh(edge.producer), self._mesh(edge.consumer)
        if is_grad:
            source, target = target, source
        held, needed = (
            {rank: self.box(edge, cut, rank) for rank in mesh.ranks} for mesh in (source, target)
        )
        if source.shape == target.shape:
            # Both ends lie alike (`Edge.taken` is `sent`), so each rank's peer is at its own place.
            pairs = zip(source.ranks, target.ranks, strict=True)
            return [Part(a, b, held[a]) for a, b in pairs]
        return [Part(t.src_rank, t.dst_rank, t.box) for t in box_transfers(held, needed)]

    def box(self, edge: Edge, cut: tuple[int, ...], rank: int) -> Box:
        """Return the part of the whole microbatch that a rank of either end has or needs.

        Of a piece of segments only the sizes mean something.
        """
        # Ranks are numbered pp-major: each pp rank has as many ranks as every other.
        pp_rank = rank // self.plan.degrees.num_ranks
        at_producer = pp_rank == self.plan.stages[edge.producer].pp_rank
        mesh = self._mesh(edge.producer if at_producer else edge.consumer)
        placements = edge.sent if at_producer else edge.taken
        batch = members("batch")
        # Samples of the microbatch on this rank: the axes that cut the batch come before all
        # others.
        first, last = part_bounds(cut, mesh.size(*batch), mesh.number(rank, *batch))
        name = f"{edge.tensor}, from stage {edge.producer} to {edge.consumer},"
        shape = [size_at(size, last - first) for size in edge.shape]
        box = list(piece_of(shape, placements, mesh, rank, name=name).span)
        if edge.batch_dim is not None:
            size = edge.shape[edge.batch_dim]
            assert isinstance(size, Affine)
            # (Entries that are there for any number of samples go with every part.)
            start, stop = box[edge.batch_dim]
            box[edge.batch_dim] = (start + size.per_sample * first, stop + size.per_sample * first)
        return tuple(box)

    def _mesh(self, stage_index: int) -> ProcessMesh:
        return self.plan.mesh(self.plan.stages[stage_index].pp_rank)
