"""Which part of each tensor a rank holds, as boxes of the whole tensor; torch-free.

A rank's local tensor is a box in the simplest case. Segments (the q, k and v of a fused
projection) and two axes on one dim make it several, so a dim is described by *runs*: the
stretches of the whole dim that the local dim consists of, in local order.

    whole dim 0..11, S(0)x3 over tp 2:   rank 0 holds runs (0, 2) (4, 2) (8, 2)

A checkpoint stores boxes of whole tensors, and nothing of the plan that cut them: that is why it
can be loaded under another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from zlib import crc32

from planner.language.across.cut.moved_once import moved_once
from planner.language.graph import ModelGraph, TensorMeta, written_buffers
from planner.language.graph.tables import with_table_lookups
from planner.language.layout.axes import data_axes, lowered_axes, members
from planner.language.layout.layout import Box, ProcessMesh, Shape
from planner.language.layout.placement import Shard
from planner.language.layout.placements import Placements
from planner.language.lowering.wiring import param_placements, stage_params
from planner.language.ops.record import mutates
from planner.language.plan import Plan
from planner.language.plan.replication import Replication, has_shards

CHUNK_BYTES = 64 * 2**20
"""Most bytes stored as one chunk (if a row has no more): what a reader of a slice reads at most
beside it, and what replicas deal among each other when they share the writing.
"""

Runs = tuple[tuple[int, int], ...]
"""(start, length) of stretches of a dim, in local order; none for an empty piece."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of the whole tensor, and where it lies in the local one."""

    box: Box
    local: Box


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor of a `shape`: the runs of each of its dims."""

    shape: Shape
    runs: tuple[Runs, ...]

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Piece:
        """Return all of a tensor."""
        shape = tuple(shape)
        return cls(shape, tuple(((0, size),) if size else () for size in shape))

    @property
    def local_shape(self) -> Shape:
        """The shape of the local tensor."""
        return tuple(sum(length for _, length in runs) for runs in self.runs)

    def cut(self, placement: Shard, parts: int, number: int) -> Piece:
        """Return part `number` of it, as `planner.runtime.state.weights.local_piece` cuts."""
        length = self.local_shape[placement.dim] // placement.segments
        each = length // parts
        # The rank's stretch of every segment, in the coordinates of what is left so far.
        spans = [(s * length + number * each, each) for s in range(placement.segments)]
        return self._taking(placement.dim, spans)

    def chunk(self, parts: int, number: int) -> Piece:
        """Return part `number` along dim 0 as `torch.chunk` cuts: the last may be short or none."""
        size = self.local_shape[0]
        each = -(-size // parts)
        start = min(size, number * each)
        return self._taking(0, [(start, min(each, size - start))])

    def _taking(self, dim: int, spans: Iterable[tuple[int, int]]) -> Piece:
        runs = tuple(_merged(run for span in spans for run in _select(self.runs[dim], *span)))
        return replace(self, runs=(*self.runs[:dim], runs, *self.runs[dim + 1 :]))

    def chunks(self, element_bytes: int, most_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
        """Yield boxes that together are the piece, each of whole rows and about `most_bytes`.

        A tensor without elements is one box, which says that it is there.
        """
        if 0 in self.shape:
            everything = tuple((0, size) for size in self.shape)
            yield Chunk(everything, everything)
            return
        # A run of each dim makes a box; only dim 0 is cut further, so that a chunk has whole rows.
        located = [list(_located(runs)) for runs in self.runs]
        for place in product(*located):
            lengths = [length for _, _, length in place]
            row = prod(lengths[1:]) * element_bytes
            step = max(1, most_bytes // max(1, row))
            # (A number has no dims, and is one chunk.)
            for first in range(0, lengths[0], step) if place else (0,):
                box, local = [], []
                for dim, (start, at, length) in enumerate(place):
                    offset, size = (first, min(step, length - first)) if dim == 0 else (0, length)
                    box.append((start + offset, start + offset + size))
                    local.append((at + offset, at + offset + size))
                yield Chunk(tuple(box), tuple(local))


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What a rank holds of a tensor, and its part in writing it.

    Attributes:
        meta: the tensor.
        piece: the part of it.
        copies: ranks that hold this same part, on the first pp rank that has the tensor.
        copy: this rank's number among them; None on other pp ranks, which write nothing of it.
        replica: (number, count) of a buffer that each data-parallel replica writes for itself.
    """

    meta: TensorMeta
    piece: Piece
    copies: int
    copy: int | None
    replica: tuple[int, int] | None = None

    @property
    def key(self) -> str:
        """Its name in a checkpoint."""
        return model_key(self.meta.fqn)

    def writes(self, key: str, index: int) -> bool:
        """Whether this rank is the one that writes chunk `index` of the piece, stored as `key`.

        Ranks that hold the same deal the chunks; the name decides where the deal begins, so that
        small tensors, of one chunk each, spread as well.
        """
        return self.copy is not None and (crc32(key.encode()) + index) % self.copies == self.copy


def model_key(fqn: str) -> str:
    """Return the name in a checkpoint of a parameter or buffer."""
    return f"model.{fqn}"


class Holdings:
    """What the ranks of a plan hold: what they have in common is found once for all of them."""

    def __init__(self, graph: ModelGraph, plan: Plan) -> None:
        graph = with_table_lookups(graph, plan.tables_on_host)
        self._graph, self._plan = graph, plan
        self._used = [set(names) for names in stage_params(graph, plan)]
        self._written = _written(graph)
        self._pp_rank = {r: at for at in range(plan.pp) for r in plan.mesh(at).ranks}
        self._placements: dict[int, dict[str, Placements]] = {}

    def of(self, rank: int) -> dict[str, Holding]:
        """Return what a global rank holds of parameters and buffers, by names in the graph."""
        plan, pp_rank = self._plan, self._pp_rank[rank]
        if pp_rank not in self._placements:
            self._placements[pp_rank] = param_placements(self._graph, plan, pp_rank)
        mesh, found = plan.mesh(pp_rank), {}
        for name, placements in self._placements[pp_rank].items():
            meta = self._graph.tensor[name]
            if meta.kind not in ("param", "buffer"):
                continue
            home = next(plan.stages[s].pp_rank for s, own in enumerate(self._used) if name in own)
            is_written = name in self._written
            found[name] = _holding(meta, placements, plan, mesh, pp_rank, rank, home, is_written)
        return found


def _holding(
    meta: TensorMeta,
    placements: Placements,
    plan: Plan,
    mesh: ProcessMesh,
    pp_rank: int,
    rank: int,
    home: int,
    is_written: bool,
) -> Holding:
    piece = Piece.whole(meta.shape_at(1))
    data = members("data")
    cut = set()
    for axis, placement in placements.pairs:  # coarse cuts first
        if isinstance(placement, Shard):
            piece = piece.cut(placement, mesh.size(axis), mesh.number(rank, axis))
            cut.add(axis)
    stage = next(s for s, each in enumerate(plan.stages) if each.pp_rank == pp_rank)
    if _is_sharded(meta, plan, stage):
        # FSDP2 cuts what is left after the other axes (`planner.runtime.state.zero`).
        shards = members("shards")
        piece = piece.chunk(mesh.size(*shards), mesh.number(rank, *shards))
        cut |= set(shards)
    replica = None
    if is_written and mesh.size(*data) > 1:
        # Each replica moves such a buffer by its own samples: they differ.
        replica = mesh.number(rank, *data), mesh.size(*data)
        cut |= set(data)
    # Ranks that differ along axes that do not cut the tensor hold copies of one piece.
    others = [a.name for a in (*lowered_axes(), *data_axes()) if a.name not in cut]
    # A tied parameter lies on several pp ranks; the first of them writes it.
    is_home = pp_rank == home
    return Holding(
        meta=meta,
        piece=piece,
        copies=mesh.size(*others),
        copy=mesh.number(rank, *others) if is_home else None,
        replica=replica,
    )


def _is_sharded(meta: TensorMeta, plan: Plan, stage: int) -> bool:
    if meta.table:  # with a gradient of rows: each replica has it whole
        return False
    if meta.kind != "param" or not has_shards(meta.shape, meta.dtype):
        return False
    if not Replication.of(plan, stage).is_sharded:
        return False
    return meta.requires_grad or plan.zero_stage == 3


def _written(graph: ModelGraph) -> set[str]:
    """Names of buffers that replicas may move apart: what an op that writes takes, but for what
    all move alike.
    """
    found = set()
    for block in graph.blocks:
        program = graph.classes[block.class_index]
        names = dict(zip(program.params, block.params, strict=True))
        taken = {name for op in program.ops if mutates(op) for name in op.inputs}
        found |= {names[name] for name in (*written_buffers(program), *taken) if name in names}
    return {name for name in found if graph.tensor[name].kind == "buffer"} - moved_once(graph)


def _select(runs: Runs, start: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of a stretch of the local dim."""
    at = 0
    for first, size in runs:
        # The run takes local places `at` to `at + size`: its part of the stretch, moved to the
        # whole dim.
        low, high = max(start, at), min(start + length, at + size)
        if low < high:
            yield first + low - at, high - low
        at += size


def _merged(runs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Join runs that follow each other."""
    last: tuple[int, int] | None = None
    for start, length in runs:
        if last is not None and last[0] + last[1] == start:
            last = last[0], last[1] + length
            continue
        if last is not None:
            yield last
        last = start, length
    if last is not None:
        yield last


def _located(runs: Runs) -> Iterator[tuple[int, int, int]]:
    """Yield (start in the whole dim, start in the local one, length) of each run."""
    at = 0
    for start, length in runs:
        yield start, at, length
        at += length
