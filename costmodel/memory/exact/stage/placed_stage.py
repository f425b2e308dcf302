"""A stage of a plan as its walk takes it: placed blocks, and what comes and goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from costmodel.cache import CostCache
from costmodel.memory.exact.stage.fsdp_units import sharded_stage
from costmodel.memory.exact.stage.jobs import Message, StageJobs
from costmodel.memory.exact.stage.placed_block import BlockKind, PlacedBlock
from costmodel.memory.exact.stage.walk import StageWalk
from costmodel.memory.ops.saved import HELD_ANYWAY
from costmodel.memory.ops.storage import Storage
from costmodel.time.copies import copy_between
from costmodel.topology import replica_mesh
from planner.layout.axes import lowered_axes, split_axes
from planner.layout.placements import WHOLE, Placements
from planner.plan import Plan, Recompute
from planner.plan.replication import gradient_factor
from planner.runtime.step.wiring import Edge, block_placements
from planner.units import DTYPE_BYTES


class PlacedStages:
    """The stages of a plan as a rank's walk takes them; those of one kind share their walks.

    Stages are of one kind where nothing but names tells them apart: what follows from blocks,
    layouts and options is then the same. `costs` remembers the kinds of all plans.
    """

    def __init__(self, plan: Plan, costs: CostCache, edges: Sequence[Edge]) -> None:
        self._plan, self._costs = plan, costs
        self._incoming: dict[int, list[Edge]] = {}
        self._outgoing: dict[int, list[Edge]] = {}
        for edge in edges:
            self._incoming.setdefault(edge.consumer, []).append(edge)
            self._outgoing.setdefault(edge.producer, []).append(edge)
        options = (
            replica_mesh(plan.degrees),
            plan.zero_stage,
            plan.precision,
            plan.optimizer_on_host,
            plan.recomputed,
            plan.layouts,
        )
        self._known = costs.stage_jobs.setdefault(options, {})

    def kind(self, stage_index: int) -> tuple:
        """Return what tells a stage from others of such plans, but for names."""
        plan, links, stage = self._plan, self._costs.links, self._plan.stages[stage_index]
        first, producer = stage.first_block, self._costs.graph.producer
        ends = tuple(
            (
                links.makers[edge.tensor][0] - first,
                links.makers[edge.tensor][1],
                plan.stages[other].pp_rank != stage.pp_rank,
                placed,
                edge.requires_grad,
            )
            for edges, is_taken in ((self._incoming, True), (self._outgoing, False))
            for edge in edges.get(stage_index, ())
            for other, placed in (
                ((edge.producer, edge.taken) if is_taken else (edge.consumer, edge.sent)),
            )
        )
        return (
            links.signatures[first : stage.last_block + 1],
            producer[self._costs.graph.loss] in stage.blocks,
            ends,
            plan.stage_degrees(stage_index),
            plan.stage_microbatch_size(stage_index),
            stage.recompute,
            stage.recompute_last,
            stage.activations_on_host,
        )

    def jobs(self, stage_index: int) -> StageJobs:
        """Return the jobs of a stage."""
        kind = self.kind(stage_index)
        incoming, outgoing = (
            edges.get(stage_index, []) for edges in (self._incoming, self._outgoing)
        )
        if kind not in self._known:
            self._known[kind] = _stage_jobs(
                self._plan, self._costs, stage_index, incoming, outgoing
            )
        like = self._known[kind]
        return replace(
            like,
            incoming=[
                _message(self._plan, edge, edge.producer, name=message.name)
                for edge, message in zip(incoming, like.incoming, strict=True)
            ],
            outgoing=[
                _message(self._plan, edge, edge.consumer, name=message.name)
                for edge, message in zip(outgoing, like.outgoing, strict=True)
            ],
        )


def _stage_jobs(
    plan: Plan,
    costs: CostCache,
    stage_index: int,
    incoming: Sequence[Edge],
    outgoing: Sequence[Edge],
) -> StageJobs:
    stage = plan.stages[stage_index]
    replicas = plan.stage_degrees(stage_index).along("data")
    sharded = plan.zero_stage > 0 and replicas > 1
    walk = _walk(plan, costs, stage_index, incoming, outgoing, stage.recompute)
    last = walk
    is_waited_for = any(
        edge.requires_grad and plan.stages[edge.producer].pp_rank != stage.pp_rank
        for edge in incoming
    )
    if not stage.recompute_last and stage.recompute != "none":
        last = _walk(plan, costs, stage_index, incoming, outgoing, "none")
    return StageJobs(
        walk=walk,
        last=last,
        first_deferred=_deferred(walk, 1),
        all_deferred=_deferred(walk, len(walk.blocks)),
        incoming=[_message(plan, edge, edge.producer, name=edge.tensor) for edge in incoming],
        outgoing=[_message(plan, edge, edge.consumer, name=edge.tensor) for edge in outgoing],
        # Without ZeRO, replicas sum gradients in buckets, which are there from the start.
        accumulates=replicas > 1 and not sharded,
        sends_first=is_waited_for and stage.recompute == "none" and not sharded,
        on_host=stage.activations_on_host,
        loss_bytes=DTYPE_BYTES[costs.graph.tensor[costs.graph.loss].dtype]
        if costs.graph.producer[costs.graph.loss] in stage.blocks
        else 0,
        sharded=sharded_stage(walk, replicas, plan, costs.profile.cluster.device_type)
        if sharded
        else None,
    )


def _deferred(walk: StageWalk, num_blocks: int) -> StageWalk:
    """Return a stage whose first blocks put their weight gradients deferred."""
    first = walk.blocks[:num_blocks]
    kinds = {block.kind: block.kind.bytes.deferred for block in first}
    if not any(kinds.values()):
        return walk
    deferred_names = {
        kind: replace(kind, bytes=deferred or kind.bytes) for kind, deferred in kinds.items()
    }
    put = [replace(block, kind=deferred_names[block.kind]) for block in first]
    return replace(walk, blocks=(*put, *walk.blocks[num_blocks:]))


def _message(plan: Plan, edge: Edge, other: int, *, name: str) -> Message:
    return Message(
        name=name,
        tensor=edge.tensor,
        taken_bytes=_edge_bytes(plan, edge, "taken"),
        sent_bytes=_edge_bytes(plan, edge, "sent"),
        other_stage=other,
        requires_grad=edge.requires_grad,
    )


def _edge_bytes(plan: Plan, edge: Edge, end: Literal["taken", "sent"]) -> int:
    """Bytes of a value on one rank of the stage that takes it, or of the one that sends it."""
    placed, stage = (edge.taken, edge.consumer) if end == "taken" else (edge.sent, edge.producer)
    samples = plan.stage_microbatch_size(stage)
    numel = 1
    for size in edge.shape:
        numel *= size if isinstance(size, int) else size.at(samples)
    numel //= placed.parts(plan.stage_degrees(stage))
    return numel * DTYPE_BYTES[edge.dtype]


def _walk(
    plan: Plan,
    costs: CostCache,
    stage_index: int,
    incoming: Sequence[Edge],
    leaving: Sequence[Edge],
    recompute: Recompute,
) -> StageWalk:
    graph, stage = costs.graph, plan.stages[stage_index]
    degrees, size = plan.stage_degrees(stage_index), plan.stage_microbatch_size(stage_index)
    recomputed = {choice.class_index: choice.ops for choice in plan.recomputed}
    lies = {edge.tensor: edge.taken for edge in incoming}
    side_values = costs.side_values(size)
    blocks, side = [], {}
    counted: set[Storage] = set()
    kinds: dict[tuple[int, tuple[Placements, ...]], tuple[BlockKind, tuple[Placements, ...]]] = {}
    for index in stage.blocks:
        block = graph.blocks[index]
        for name in block.inputs:
            storage = side_values.storage.get(name)
            if storage is not None and name not in side and name not in side_values.fixed:
                is_new = storage not in counted and storage.kind not in HELD_ANYWAY
                side[name] = storage.num_bytes if is_new else 0
                counted.add(storage)
        lying = tuple(lies.get(name, WHOLE) for name in block.inputs)
        key = block.class_index, lying
        if key not in kinds:
            takes, _, makes = block_placements(graph, plan, index, stage_index)
            found = costs.block_bytes(
                block.class_index,
                size,
                degrees,
                tuple(
                    layout
                    for axis in lowered_axes()
                    if (layout := plan.layout(block.class_index, axis=axis.name, degrees=degrees))
                ),
                recompute=recompute,
                recomputed=recomputed.get(block.class_index),
            )  # fmt: skip
            copies = tuple(
                copy_between(
                    lie, take, edge.num_bytes, graph.tensor[n].shape_at(size), degrees=degrees
                )
                for n, lie, take, edge in zip(block.inputs, lying, takes, found.inputs, strict=True)
            )
            kinds[key] = BlockKind(bytes=found, copies=copies), makes
        kind, makes = kinds[key]
        lies |= dict(zip(block.outputs, makes, strict=True))
        own_names = graph.classes[block.class_index].params
        blocks.append(
            PlacedBlock(
                kind=kind,
                inputs=block.inputs,
                outputs=block.outputs,
                params={
                    local: name
                    for local, name in zip(own_names, block.params, strict=True)
                    if local in kind.bytes.params
                },
            )
        )
    sent = {
        edge.tensor: copy_between(
            lies[edge.tensor],
            edge.sent,
            _edge_bytes(plan, edge, "sent"),
            graph.tensor[edge.tensor].shape_at(size),
            degrees=degrees,
        )
        for edge in leaving
    }
    return StageWalk(
        blocks=tuple(blocks),
        arriving={edge.tensor: _edge_bytes(plan, edge, "taken") for edge in incoming},
        side=side,
        leaving=frozenset(edge.tensor for edge in leaving),
        sent_copies={name: copy for name, copy in sent.items() if copy is not None},
        gradient_factor=gradient_factor(plan.precision),
        params_are_dtensors=plan.zero_stage > 0
        and any(degrees[axis.name] > 1 for axis in split_axes()),
    )
