"""Building what a rank holds: its stages, what they run, and what is read beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.errors import PlanError
from planner.language.across.cut.moved_once import moved_once
from planner.language.across.cut.whole_batch import graph_under
from planner.language.graph import ModelGraph, TensorMeta
from planner.language.graph.batch_split import BatchSplit
from planner.language.graph.tables import with_table_lookups
from planner.language.lowering.wiring import Edge, param_placements, stage_params
from planner.language.ops.record import is_random
from planner.language.plan import Plan
from planner.language.plan.replication import Replication
from planner.language.schedule import Schedule
from planner.runtime.batches.inputs.feed import Preamble
from planner.runtime.batches.inputs.whole_batch import WholeBatchValues
from planner.runtime.process.groups.mesh import Mesh
from planner.runtime.stage.beside_collectives import BesideCollectives
from planner.runtime.stage.calls.opaque_modules import keep_modules
from planner.runtime.stage.host import Host
from planner.runtime.stage.host_activations import ActivationsOnHost
from planner.runtime.stage.programs import Programs
from planner.runtime.stage.randomness import RandomStream, unused_seed
from planner.runtime.stage.recompute import Keeper
from planner.runtime.stage.stage import StageModule
from planner.runtime.stage.weight_grads import WeightQueue
from planner.runtime.state.rank_state import RankState, Reader
from planner.runtime.state.trained import TrainedParams
from planner.runtime.state.users_module.outside import OutsideTensors
from planner.runtime.state.weights import constant, materialized, shape_of
from planner.runtime.step.stages import build_stages


class BlockPrograms:
    """Lowers the blocks of this rank's stages. Mutable: all programs take the shape of a batch.

    Attributes:
        keeper: what recomputes of all programs.
        weight_queue: their weight gradients that wait for a W job; None where FSDP2 reduces a
            gradient when its block's backward ends: a later one would be lost.
        beside: those that wait for a collective of their block's backward; None where the plan has
            them made at once.
    """

    def __init__(self, plan: Plan, mesh: Mesh, *, zero_stage: int) -> None:
        self._plan, self._mesh = plan, mesh
        self.keeper = Keeper()
        self.weight_queue = None if zero_stage else WeightQueue()
        self.beside = BesideCollectives() if plan.makes_beside else None
        self._made: list[Programs] = []

    def of(self, graphs: Sequence[ModelGraph]) -> Programs:
        """Return the programs of blocks, by graphs of the plan's shapes."""
        made = Programs(
            [with_table_lookups(graph, self._plan.tables_on_host) for graph in graphs],
            self._plan,
            self._mesh,
            keeper=self.keeper,
            weight_queue=self.weight_queue,
            beside=self.beside,
        )
        self._made.append(made)
        return made

    def take_shape(self, bucket: int, split: BatchSplit, parts: tuple[int, ...]) -> None:
        """Run for batches of a shape of the plan that are split so, of which replicas have so many
        samples each. Raises LayoutError, on all ranks, where a block can't run on a microbatch.
        """
        for programs in self._made:
            programs.bucket, programs.parts = bucket, parts
            programs.check_sizes(split)


def zero_stage_of(plan: Plan, schedule: Schedule, mesh: Mesh) -> int:
    """Return a plan's ZeRO stage on this rank: with one replica there is nothing to shard over."""
    first = schedule.stages_of(mesh.rank("pp"))[0]
    return plan.zero_stage if Replication.of(plan, first).is_sharded else 0


def check_tables(graph: ModelGraph, plan: Plan) -> None:
    """Raise PlanError where the optimizer is on the host and a table's gradient on the device."""
    tables = [meta.fqn for meta in graph.params if meta.table == "device"]
    if tables and plan.optimizer_on_host:
        raise PlanError(
            f"{tables[0]} has a sparse gradient, and the plan has the optimizer on the host and "
            "not this table; search again, or name it in tables_on_host of the plan"
        )


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a rank holds, and what makes the values that its stages read beside each other's.

    Attributes:
        state: what it holds.
        preambles: by shape of the plan, of each of the rank's stages.
        wholes: what parts take of the whole batch, by shape of the plan.
    """

    state: RankState
    preambles: Sequence[Mapping[int, Preamble]]
    wholes: Sequence[WholeBatchValues]


def build_rank_state(
    plan: Plan,
    graphs: tuple[ModelGraph, ...],
    captured: tuple[ModelGraph, ...],
    model: nn.Module,
    mesh: Mesh,
    *,
    schedule: Schedule,
    edges: tuple[Edge, ...],
    programs: Programs,
    lowered: BlockPrograms,
    zero_stage: int,
    host: Host,
    away: ActivationsOnHost | None,
    pad: Mapping[str, float],
    may_be_empty: bool,
    makes_buffers: bool,
) -> Held:
    """Return what this rank holds of a model, in memory without values yet; all ranks call it.

    `graphs` are what stages run of `captured`, which has the largest shape of batches first, and
    `zero_stage` is that of this rank (`zero_stage_of`). A
    model that `may_be_empty` has tensors on the meta device; where the start `makes_buffers`, those
    on the meta device get values, too. `pad` fills batches up to the next shape.
    """
    graph = graphs[0]
    for each in graphs:
        keep_modules(each, model)
    wholes = [
        WholeBatchValues(each, graph_under(each, plan), pad, partial(_on_host, model))
        for each in captured
    ]
    # Tensors of the state dict that no stage holds (unused, or read by the preamble and what is
    # made of whole batches alone) are kept apart, so that checkpoints still have them.
    by_stage = stage_params(graph, plan)
    used = {name for names in by_stage for name in names}
    with host.holding():
        outside = OutsideTensors.of(
            model,
            held={n for t in graph.tensors if t.name in used for n in (t.fqn, *t.aliases)},
            read={
                each.tensor[name].fqn
                for each, whole in zip(captured, wholes, strict=True)
                for name in (*each.preamble.params, *whole.tensors)
            },
            may_be_empty=may_be_empty,
            makes_buffers=makes_buffers,
        )
    placements = param_placements(graph, plan, mesh.rank("pp"))
    stages, owners = build_stages(
        schedule.stages_of(mesh.rank("pp")),
        model,
        graph,
        plan,
        mesh,
        edges=edges,
        placements=placements,
        zero_stage=zero_stage,
        programs=programs,
        keeper=lowered.keeper,
        host=host,
        away=away,
        moved_once=moved_once(captured[0]),
    )
    preambles = [_preambles(model, each, stages, mesh) for each in graphs]
    trained = TrainedParams(
        graph, plan, mesh, stages, owners, placements, sharded=zero_stage > 0, host=host
    )
    readers: list[tuple[ModelGraph, Reader]] = [
        (each, own) for each, made in zip(captured, preambles, strict=True) for own in made.values()
    ]
    readers += zip(captured, wholes, strict=True)
    # Read off the graph of the whole model, so all ranks agree whether to take part in the
    # broadcast of the seed.
    draws = any(is_random(op) for program in graph.classes for op in program.ops)
    state = RankState(
        plan=plan,
        mesh=mesh,
        graph=graph,
        captured=captured,
        modules={name: type(part) for name, part in model.named_modules() if name},
        stages=stages,
        placements=placements,
        zero_stage=zero_stage,
        trained=trained,
        outside=outside,
        readers=tuple(readers),
        random=RandomStream(_shared_seed(mesh), mesh) if draws else None,
    )
    return Held(state=state, preambles=preambles, wholes=wholes)


def _preambles(
    model: nn.Module, graph: ModelGraph, stages: Mapping[int, StageModule], mesh: Mesh
) -> dict[int, Preamble]:
    metas = [graph.tensor[name] for name in graph.preamble.params]
    tensors = {
        meta.name: shape_of(model, meta) if meta.data is None else constant(meta) for meta in metas
    }
    tensors = {
        name: materialized(t, mesh.device) if t.is_meta else t.to(mesh.device)
        for name, t in tensors.items()
    }
    return {
        index: Preamble(graph, stage.wiring.side_inputs, tensors, mesh.device)
        for index, stage in stages.items()
    }


def _shared_seed(mesh: Mesh) -> int:
    """Rank 0's seed, or for a second engine beside others another that follows from it; the same
    on every rank.
    """
    seed = [unused_seed(torch.initial_seed())]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(seed, src=0, group=mesh.control)
    return seed[0]


def _on_host(model: nn.Module, meta: TensorMeta) -> Tensor:
    """Return memory for what a rank reads of a model on the host, or the values the graph has."""
    if meta.data is not None:
        return constant(meta)
    return materialized(shape_of(model, meta), torch.device("cpu"))
