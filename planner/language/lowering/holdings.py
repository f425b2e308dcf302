"""What each rank of a plan holds of parameters and buffers, and who writes it; torch-free.

A checkpoint stores boxes of whole tensors, and nothing of the plan that cut them: that is why it
can be loaded under another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

from planner.language.across.cut.moved_once import moved_once
from planner.language.graph import ModelGraph, TensorMeta, written_buffers
from planner.language.graph.tables import with_table_lookups
from planner.language.layout.axes import members
from planner.language.layout.pieces import Piece, piece_of
from planner.language.layout.placements import Placements
from planner.language.layout.process_mesh import ProcessMesh
from planner.language.layout.sharing import Sharing, holds, sharing
from planner.language.lowering.wiring import param_placements, stage_params
from planner.language.ops.record import mutates
from planner.language.plan import Plan
from planner.language.plan.replication import Replication, has_shards


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
            if meta.kind not in ("param", "buffer") or not holds(placements, mesh, rank):
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
    data = members("data")
    shared = sharing_of(meta, placements, plan, pp_rank)
    piece = piece_of(meta.shape_at(1), placements, mesh, rank, shared.chunked, name=meta.fqn)
    alike = shared.alike
    replica = None
    if is_written and mesh.size(*data) > 1:
        # Each replica moves such a buffer by its own samples: they differ.
        replica = mesh.number(rank, *data), mesh.size(*data)
        alike = tuple(axis for axis in alike if axis not in data)
    # A tied parameter lies on several pp ranks; the first of them writes it.
    is_home = pp_rank == home
    return Holding(
        meta=meta,
        piece=piece,
        copies=mesh.size(*alike),
        copy=mesh.number(rank, *alike) if is_home else None,
        replica=replica,
    )


def sharing_of(meta: TensorMeta, placements: Placements, plan: Plan, pp_rank: int) -> Sharing:
    """Return which ranks of a pp rank share a parameter or a buffer."""
    stage = next(s for s, each in enumerate(plan.stages) if each.pp_rank == pp_rank)
    return sharing(placements, is_sharded=_is_sharded(meta, placements, plan, stage))


def _is_sharded(meta: TensorMeta, placements: Placements, plan: Plan, stage: int) -> bool:
    if meta.table:  # with a gradient of rows: each replica has it whole
        return False
    if meta.kind != "param" or not has_shards(meta.shape, meta.dtype):
        return False
    ranks = Replication.of(plan, stage)
    if not (ranks.of_experts if placements.are_of_experts else ranks).is_sharded:
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
