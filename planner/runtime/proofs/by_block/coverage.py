"""Whether ranks hold every parameter as planned, each element exactly once among its copies.

Weights are cut, and checkpoints are made, by one rule (`planner.language.layout.pieces`). It is
held here, for every rank of the plan, to the cuts that DTensor and FSDP2 make, done on the numbers
of elements and not on values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from math import prod

import torch

from planner.language.graph import ModelGraph, TensorMeta
from planner.language.layout.axes import members
from planner.language.layout.pieces import Piece, Runs
from planner.language.layout.placement import Shard
from planner.language.layout.placements import Placements
from planner.language.layout.process_mesh import ProcessMesh
from planner.language.layout.sharing import shard_dim
from planner.language.lowering.holdings import Holding
from planner.language.lowering.wiring import param_placements, stage_params
from planner.language.plan import Plan
from planner.language.plan.replication import Replication

Held = Callable[[int], Mapping[str, Holding]]
"""From a rank to what it holds, by names in the graph."""


def check_coverage(graph: ModelGraph, plan: Plan, held: Held) -> Iterator[str]:
    """Yield what is wrong with what ranks hold (`planner.language.lowering.holdings.Holdings`)."""
    used = stage_params(graph, plan)
    kinds = ("param", "buffer")
    wanted: dict[int, dict[str, None]] = defaultdict(dict)
    for stage, names in zip(plan.stages, used, strict=True):
        wanted[stage.pp_rank] |= {n: None for n in names if graph.tensor[n].kind in kinds}
    homes: dict[str, int] = {}
    for stage, names in zip(plan.stages, used, strict=True):
        for name in names:
            homes.setdefault(name, stage.pp_rank)
    for pp_rank in range(plan.pp):
        mesh = plan.mesh(pp_rank)
        placements = param_placements(graph, plan, pp_rank)
        found = {rank: held(rank) for rank in mesh.ranks}
        yield from _check_names(graph, set(wanted[pp_rank]), found)
        first = next(s for s, each in enumerate(plan.stages) if each.pp_rank == pp_rank)
        for name in wanted[pp_rank]:
            own = {rank: each[name] for rank, each in found.items() if name in each}
            if len(own) == len(mesh.ranks):
                meta = graph.tensor[name]
                shards = _shards(meta, plan, first)
                yield from _check_tensor(meta, mesh, placements[name], shards, own)
                if pp_rank == homes[name]:
                    yield from _check_writers(meta, own)


def _shards(meta: TensorMeta, plan: Plan, stage: int) -> int:
    """Into how many parts ZeRO cuts a tensor of a stage."""
    is_trained = meta.kind == "param" and (meta.requires_grad or plan.zero_stage == 3)
    return Replication.of(plan, stage).shards if is_trained and meta.shape else 1


def _check_names(
    graph: ModelGraph, wanted: set[str], found: Mapping[int, Mapping[str, Holding]]
) -> Iterator[str]:
    for rank, own in found.items():
        for name in sorted(wanted - own.keys()):
            yield f"rank {rank} lacks {graph.tensor[name].fqn}, which a block of its stages uses"
        for name in sorted(own.keys() - wanted):
            yield f"rank {rank} holds {graph.tensor[name].fqn}, which no block of its stages uses"


def _check_tensor(
    meta: TensorMeta,
    mesh: ProcessMesh,
    placements: Placements,
    shards: int,
    own: Mapping[int, Holding],
) -> Iterator[str]:
    """Each rank has the piece that cutting gives it, and all pieces cover the tensor evenly."""
    shape = meta.shape_at(1)
    what = "optimizer shard" if shards > 1 else "piece"
    holders: dict[Piece, list[int]] = defaultdict(list)
    for rank, holding in own.items():
        planned = _planned_piece(shape, mesh, placements, shards, rank)
        if holding.piece != planned:
            yield (
                f"rank {rank} holds the {what} {_where(holding.piece)} of {meta.fqn} "
                f"{list(shape)}; the plan cuts {_where(planned)} for it"
            )
        holders[holding.piece].append(rank)
    yield from (f"{meta.fqn}: {fault}" for fault in _check_partition(shape, list(holders), what))
    full = {piece: ranks for piece, ranks in holders.items() if prod(piece.local_shape)}
    cuts = prod(mesh.size(a) for a, p in placements.pairs if isinstance(p, Shard))
    copies = len(mesh.ranks) // (cuts * shards)
    for piece, ranks in full.items():
        if len(ranks) != copies:
            yield (
                f"{meta.fqn}: the {what} {_where(piece)} is on {len(ranks)} ranks ({ranks[:4]}); "
                f"the plan has {copies} copies"
            )


def _check_writers(meta: TensorMeta, own: Mapping[int, Holding]) -> Iterator[str]:
    """Of the ranks with one piece, each has a number of its own: a checkpoint has it once."""
    by_piece: dict[tuple[Piece, object], list[int | None]] = defaultdict(list)
    for holding in own.values():
        by_piece[holding.piece, holding.replica].append(holding.copy)
    for (piece, _), numbers in by_piece.items():
        if prod(piece.local_shape) and sorted(n for n in numbers if n is not None) != list(
            range(len(numbers))
        ):
            yield f"{meta.fqn}: copies of {_where(piece)} are numbered {numbers}; each once"


@lru_cache(maxsize=65536)
def _check_partition_of(runs: tuple[Runs, ...], size: int) -> str:
    """Return what is wrong with runs that should cover a dim exactly once; empty if nothing is."""
    at = 0
    for start, length in sorted(run for each in runs for run in each):
        if start != at:
            problem = "in no piece" if start > at else "in two pieces"
            return f"elements {min(at, start)} to {max(at, start) - 1} are {problem}"
        at += length
    return f"elements {at} to {size - 1} are in no piece" if at < size else ""


def _check_partition(shape: tuple[int, ...], pieces: list[Piece], what: str) -> Iterator[str]:
    """The distinct pieces are all combinations of distinct stretches, which cover each dim once."""
    # (An empty piece is that of a rank beyond the last chunk.)
    full = [piece for piece in pieces if prod(piece.local_shape)]
    # If each dim's different stretches cover it once, and all combinations of stretches occur, the
    # pieces cover the tensor once.
    combinations = 1
    for dim, size in enumerate(shape):
        runs = tuple(sorted({piece.runs[dim] for piece in full}))
        combinations *= len(runs)
        if problem := _check_partition_of(runs, size):
            yield f"of dim {dim} of size {size}, {problem} of {what}s"
    if len(full) != combinations:
        yield f"{len(full)} different {what}s were found of {combinations}"


@lru_cache(maxsize=65536)
def _planned_piece(
    shape: tuple[int, ...], mesh: ProcessMesh, placements: Placements, shards: int, rank: int
) -> Piece:
    """Return the piece that the runtime cuts, found by cutting the indices of each dim."""
    # The indices of each dim, cut as the runtime cuts weights: what is left tells which entries a
    # rank has.
    left = [torch.arange(size) for size in shape]
    for axis, placement in placements.pairs:
        if isinstance(placement, Shard):
            parts, number = mesh.size(axis), mesh.number(rank, axis)
            by_segment = left[placement.dim].chunk(placement.segments)
            left[placement.dim] = torch.cat(
                [
                    # (Mirrored, every second segment is dealt from its end.)
                    segment.chunk(parts)[-1 - number if placement.mirrored and at % 2 else number]
                    for at, segment in enumerate(by_segment)
                ]
            )
    if shards > 1:
        dim = shard_dim([len(indices) for indices in left], shards)
        chunks = left[dim].chunk(shards)
        number = mesh.number(rank, *members("shards"))
        left[dim] = chunks[number] if number < len(chunks) else left[dim][:0]
    return Piece(shape, tuple(map(_runs, left)))


def _runs(indices: torch.Tensor) -> Runs:
    """Return stretches of consecutive indices as (start, length)."""
    if not len(indices):
        return ()
    breaks = (indices.diff() != 1).nonzero().flatten().add(1).tolist()
    starts, stops = [0, *breaks], [*breaks, len(indices)]
    return tuple((int(indices[a]), b - a) for a, b in zip(starts, stops, strict=True))


def _where(piece: Piece) -> str:
    spans = (
        "+".join(f"{start}:{start + length}" for start, length in runs[:3]) or "nothing"
        for runs in piece.runs
    )
    return f"[{', '.join(spans)}]"
