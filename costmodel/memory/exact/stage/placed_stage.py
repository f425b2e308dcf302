"""The stages of a plan as a rank's walk takes them: placed blocks, and what comes and goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from costmodel.cache import CostCache
from costmodel.memory.block.copies import copy_between
from costmodel.memory.block.placed_block import BlockKind, PlacedBlock
from costmodel.memory.exact.stage.fsdp_units import sharded_stage
from costmodel.memory.exact.stage.jobs import Message, StageJobs
from costmodel.memory.exact.stage.stage_walk import StageWalk
from costmodel.memory.parts import keeps_sums
from costmodel.memory.saved import HELD_ANYWAY, Storage
from costmodel.topology import replica_mesh
from planner.language.graph import size_at
from planner.language.layout.axes import split_axes
from planner.language.layout.placements import WHOLE, Placements
from planner.language.lowering.wiring import Edge, block_placements
from planner.language.plan import Plan, Recompute
from planner.language.plan.replication import Replication
from planner.units import DTYPE_BYTES


class PlacedStages:
    """The stages of a plan as a rank's walk takes them; those of one kind share their walks.

    Stages are of one kind where nothing but names tells them apart: what follows from blocks,
    layouts and options is then the same. `costs` remembers the kinds of all plans.
    """

    def __init__(self, plan: Plan, costs: CostCache, edges: Sequence[Edge]) -> None:
        self._plan, self._costs = plan, costs
        self._incoming: dict[int, list[Edge]] = {s: [] for s in range(len(plan.stages))}
        self._outgoing: dict[int, list[Edge]] = {s: [] for s in range(len(plan.stages))}
        for edge in edges:
            self._incoming[edge.consumer].append(edge)
            self._outgoing[edge.producer].append(edge)
        # Walks are shared among the plans of a search that agree in all that a stage's bytes depend
        # on.
        options = (
            replica_mesh(plan.degrees),
            plan.zero_stage,
            plan.precision,
            plan.optimizer_on_host,
            plan.recomputed,
            plan.layouts,
            plan.overlap,
            plan.logit_rows,
        )
        self.known = costs.once(options, dict[tuple, StageJobs])

    def kind(self, stage_index: int) -> tuple:
        """Return what tells a stage from others of such plans, but for names."""
        plan, links, stage = self._plan, self._costs.links, self._plan.stages[stage_index]
        first = stage.first_block
        incoming = [(edge, edge.producer, edge.taken) for edge in self._incoming[stage_index]]
        outgoing = [(edge, edge.consumer, edge.sent) for edge in self._outgoing[stage_index]]
        ends = tuple(
            (
                # The maker's place relative to the stage, so that equal stages further on are
                # alike.
                links.makers[edge.tensor][0] - first,
                links.makers[edge.tensor][1],
                # What stays on the rank is handed over in place, without a message.
                plan.stages[other].pp_rank != stage.pp_rank,
                placed,
                edge.requires_grad,
            )
            for edge, other, placed in (*incoming, *outgoing)
        )
        return (
            links.signatures[first : stage.last_block + 1],
            self._has_loss(stage_index),
            ends,
            plan.stage_degrees(stage_index),
            plan.stage_microbatch_size(stage_index),
            stage.recompute_by_block,
            stage.recompute_last,
            stage.activations_on_host,
        )

    def jobs(self, stage_index: int) -> StageJobs:
        """Return the jobs of a stage."""
        kind = self.kind(stage_index)
        if kind not in self.known:
            self.known[kind] = self._stage_jobs(stage_index)
        like = self.known[kind]
        # Walks have the names of the first stage of the kind; edges are each stage's own.
        incoming = zip(like.incoming, self._incoming[stage_index], strict=True)
        outgoing = zip(like.outgoing, self._outgoing[stage_index], strict=True)
        return replace(
            like,
            incoming=[m._replace(edge=e.index, other_stage=e.producer) for m, e in incoming],
            outgoing=[m._replace(edge=e.index, other_stage=e.consumer) for m, e in outgoing],
        )

    def _has_loss(self, stage_index: int) -> bool:
        graph = self._costs.graph
        return graph.producer[graph.loss] in self._plan.stages[stage_index].blocks

    def _stage_jobs(self, stage_index: int) -> StageJobs:
        plan, costs, stage = self._plan, self._costs, self._plan.stages[stage_index]
        incoming = self._incoming[stage_index]
        replication = Replication.of(plan, stage_index)
        is_sharded, execution = replication.is_sharded, costs.execution
        # The step's last microbatch may skip recomputation: its backward comes next.
        choices = stage.recompute_by_block
        walk = last = self._walk(stage_index, choices, is_sharded=is_sharded)
        if not stage.recompute_last and stage.is_recomputed:
            last = self._walk(stage_index, ["none"] * len(choices), is_sharded=is_sharded)
        # Only a rank that waits for the gradient gains by having it early.
        is_waited_for = any(
            edge.requires_grad and plan.stages[edge.producer].pp_rank != stage.pp_rank
            for edge in incoming
        )
        sharded = None
        if is_sharded:
            sharded = sharded_stage(
                walk.blocks,
                walk.shared,
                replication,
                gradient_factor=walk.gradient_factor,
                device_type=costs.profile.cluster.device_type,
                sums_stay=keeps_sums(replication, sums_stay=execution.sums_stay),
                adds_late=execution.adds_late,
                shards_tensors=execution.shards_tensors,
            )
        loss = costs.graph.tensor[costs.graph.loss]
        return StageJobs(
            walk=walk,
            last=last,
            first_deferred=_deferred(walk, 1),
            all_deferred=_deferred(walk, len(walk.blocks)),
            incoming=[
                Message(e.index, e.tensor, self._taken_bytes(e), e.producer, e.requires_grad)
                for e in incoming
            ],
            outgoing=[
                Message(e.index, e.tensor, self._sent_bytes(e), e.consumer, e.requires_grad)
                for e in self._outgoing[stage_index]
            ],
            # Without ZeRO, replicas sum gradients in buckets, which are there from the start.
            accumulates=not is_sharded
            and (
                replication.replicas > 1 or keeps_sums(replication, sums_stay=execution.sums_stay)
            ),
            sends_first=is_waited_for
            and execution.sends_ahead
            and not stage.is_recomputed
            and not is_sharded,
            on_host=stage.activations_on_host,
            loss_bytes=DTYPE_BYTES[loss.dtype] if self._has_loss(stage_index) else 0,
            sharded=sharded,
        )

    def _taken_bytes(self, edge: Edge) -> int:
        """Bytes of a value on one rank of the stage that takes it."""
        return self._bytes_at(edge, edge.consumer, edge.taken)

    def _sent_bytes(self, edge: Edge) -> int:
        """Bytes of a value on one rank of the stage that sends it."""
        return self._bytes_at(edge, edge.producer, edge.sent)

    def _bytes_at(self, edge: Edge, stage_index: int, placed: Placements) -> int:
        samples = self._plan.stage_microbatch_size(stage_index)
        numel = prod([size_at(size, samples) for size in edge.shape])
        parts = placed.parts(self._plan.stage_degrees(stage_index))
        return numel // parts * DTYPE_BYTES[edge.dtype]

    def _side_bytes(self, stage_index: int) -> dict[str, int]:
        """Return bytes of the values that the preamble makes of the batch for every microbatch;
        a storage that several values lie in counts with the first.
        """
        size = self._plan.stage_microbatch_size(stage_index)
        side_values = self._costs.side_values(size)
        side: dict[str, int] = {}
        counted: set[Storage] = set()
        for index in self._plan.stages[stage_index].blocks:
            for name in self._costs.graph.blocks[index].inputs:
                storage = side_values.storage.get(name)
                if storage is not None and name not in side and name not in side_values.fixed:
                    is_new = storage not in counted and storage.kind not in HELD_ANYWAY
                    side[name] = storage.num_bytes if is_new else 0
                    counted.add(storage)
        return side

    def _walk(
        self, stage_index: int, recompute: Sequence[Recompute], *, is_sharded: bool
    ) -> StageWalk:
        """Return a stage whose blocks recompute this."""
        plan, graph, stage = self._plan, self._costs.graph, self._plan.stages[stage_index]
        incoming, outgoing = self._incoming[stage_index], self._outgoing[stage_index]
        degrees, size = plan.stage_degrees(stage_index), plan.stage_microbatch_size(stage_index)
        recomputed = {choice.class_index: choice.ops for choice in plan.recomputed}
        lies = {edge.tensor: edge.taken for edge in incoming}
        blocks = []
        # Block 0 is the embedding.
        away = range(1, 1 + self._costs.execution.layers_on_host)
        kinds: dict[
            tuple[int, Recompute, bool, tuple[Placements, ...]],
            tuple[BlockKind, tuple[Placements, ...]],
        ] = {}
        for index, choice in zip(stage.blocks, recompute, strict=True):
            block = graph.blocks[index]
            lying = tuple(lies.get(name, WHOLE) for name in block.inputs)
            # Blocks of a class that recompute alike and find their inputs alike hold the same.
            key = block.class_index, choice, index in away, lying
            if key not in kinds:
                takes, _, makes = block_placements(graph, plan, index, stage_index)
                found = self._costs.block_bytes(
                    block.class_index,
                    size,
                    degrees,
                    plan.layouts_of(block.class_index, degrees=degrees),
                    recompute=choice,
                    recomputed=recomputed.get(block.class_index),
                    beside=plan.makes_beside,
                    logit_rows=plan.logit_rows,
                )
                if index in away:
                    found = found.on_host()
                shapes = (graph.tensor[name].shape_at(size) for name in block.inputs)
                copies = tuple(
                    copy_between(lie, take, edge.num_bytes, shape, degrees=degrees)
                    for lie, take, edge, shape in zip(
                        lying, takes, found.inputs, shapes, strict=True
                    )
                )
                kinds[key] = BlockKind(bytes=found, copies=copies), makes
            kind, makes = kinds[key]
            # A later block copies a value only where it takes another placement than its maker
            # left.
            lies |= dict(zip(block.outputs, makes, strict=True))
            own_names = graph.classes[block.class_index].params
            names = tuple(zip(own_names, block.params, strict=True))
            blocks.append(
                PlacedBlock(
                    kind=kind,
                    inputs=block.inputs,
                    outputs=block.outputs,
                    params={local: name for local, name in names if local in kind.bytes.params},
                    frozen={local: name for local, name in names if local in kind.bytes.frozen},
                )
            )
        sent_copies = {}
        for edge in outgoing:
            made, shape = lies[edge.tensor], graph.tensor[edge.tensor].shape_at(size)
            copy = copy_between(made, edge.sent, self._sent_bytes(edge), shape, degrees=degrees)
            if copy is not None:
                sent_copies[edge.tensor] = copy
        return StageWalk(
            blocks=tuple(blocks),
            arriving={edge.tensor: self._taken_bytes(edge) for edge in incoming},
            side=self._side_bytes(stage_index),
            leaving=frozenset(edge.tensor for edge in outgoing),
            sent_copies=sent_copies,
            gradient_factor=self._costs.execution.sum_factor(plan.precision),
            is_sharded=is_sharded,
            adds_late=self._costs.execution.adds_late and not is_sharded,
            params_are_dtensors=is_sharded and any(degrees[axis.name] > 1 for axis in split_axes()),
        )


def _deferred(walk: StageWalk, num_blocks: int) -> StageWalk:
    """Return a stage whose first blocks have their weight gradients deferred."""
    kinds: dict[BlockKind, BlockKind] = {}
    for block in walk.blocks[:num_blocks]:
        found = block.kind.bytes.deferred()
        if found is not None and block.kind not in kinds:
            kinds[block.kind] = replace(block.kind, bytes=found)
    if not kinds:
        return walk
    first = (
        replace(block, kind=kinds.get(block.kind, block.kind)) for block in walk.blocks[:num_blocks]
    )
    return replace(walk, blocks=(*first, *walk.blocks[num_blocks:]))
