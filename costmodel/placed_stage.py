"""A stage of a plan as its byte walk needs it: placed blocks, and what comes and goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from costmodel.cache import CostCache
from costmodel.communication import MASTER_FACTOR
from costmodel.rank_walk import Message, StageJobs
from costmodel.stage_bytes import PlacedBlock, StageWalk
from planner.placement import Shard
from planner.plan import Plan, Recompute
from planner.runtime.wiring import Edge, Placements, block_placements
from planner.units import DTYPE_BYTES


def stage_jobs(
    plan: Plan, costs: CostCache, stage_index: int, edges: Sequence[Edge], *, accumulates: bool
) -> StageJobs:
    """Return the jobs of a stage; `accumulates` tells that gradients always have their place."""
    stage = plan.stages[stage_index]
    walk = _walk(plan, costs, stage_index, edges, stage.recompute)
    last = walk
    is_waited_for = any(
        edge.requires_grad and plan.stages[edge.producer].pp_rank != stage.pp_rank
        for edge in edges
        if edge.consumer == stage_index
    )
    if not stage.recompute_last and stage.recompute != "none":
        last = _walk(plan, costs, stage_index, edges, "none")
    return StageJobs(
        walk=walk,
        last=last,
        incoming=tuple(
            _message(plan, edge, edge.producer) for edge in edges if edge.consumer == stage_index
        ),
        outgoing=tuple(
            _message(plan, edge, edge.consumer) for edge in edges if edge.producer == stage_index
        ),
        accumulates=accumulates,
        sends_first=is_waited_for and stage.recompute == "none",
        on_host=stage.activations_on_host,
        loss_bytes=DTYPE_BYTES[costs.graph.tensor[costs.graph.loss].dtype]
        if costs.graph.producer[costs.graph.loss] in stage.blocks
        else 0,
    )


def _message(plan: Plan, edge: Edge, other: int) -> Message:
    return Message(
        name=edge.tensor,
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
    for placement, parts in ((placed.tp, plan.stage_tp(stage)), (placed.cp, plan.cp)):
        numel //= parts if isinstance(placement, Shard) else 1
    return numel * DTYPE_BYTES[edge.dtype]


def _walk(
    plan: Plan, costs: CostCache, stage_index: int, edges: Sequence[Edge], recompute: Recompute
) -> StageWalk:
    graph, stage = costs.graph, plan.stages[stage_index]
    tp, size = plan.stage_tp(stage_index), plan.stage_microbatch_size(stage_index)
    recomputed = {choice.class_index: choice.ops for choice in plan.recomputed}
    incoming = [edge for edge in edges if edge.consumer == stage_index]
    leaving = [edge for edge in edges if edge.producer == stage_index]
    lies = {edge.tensor: edge.taken for edge in incoming}
    blocks, side = [], {}
    for index in stage.blocks:
        block = graph.blocks[index]
        takes, _, makes = block_placements(graph, plan, index)
        found = costs.block_bytes(
            block.class_index, tp, size,
            plan.layout(block.class_index, axis="tp", tp=tp),
            cp=plan.cp,
            cp_layout=plan.layout(block.class_index, axis="cp", tp=tp),
            recompute=recompute,
            recomputed=recomputed.get(block.class_index),
        )  # fmt: skip
        copies = []
        for name, edge, taken in zip(block.inputs, found.inputs, takes, strict=True):
            moved = _moved(lies.get(name, Placements()), taken, tp=tp, cp=plan.cp)
            copies.append(edge.num_bytes if moved else 0)
            if name in graph.preamble.outputs and graph.preamble.only((name,)).inputs:
                side[name] = graph.tensor[name].bytes_at(size)
        lies |= dict(zip(block.outputs, makes, strict=True))
        blocks.append(
            PlacedBlock(
                bytes=found,
                inputs=block.inputs,
                outputs=block.outputs,
                copies=tuple(copies),
                params={
                    local: name
                    for local, name in zip(
                        graph.classes[block.class_index].params, block.params, strict=True
                    )
                    if local in found.params
                },
            )
        )
    return StageWalk(
        blocks=tuple(blocks),
        arriving={edge.tensor: _edge_bytes(plan, edge, "taken") for edge in incoming},
        side=side,
        leaving=frozenset(edge.tensor for edge in leaving),
        sent_copies={
            edge.tensor: _edge_bytes(plan, edge, "sent")
            for edge in leaving
            if _moved(lies[edge.tensor], edge.sent, tp=tp, cp=plan.cp)
        },
        wide=MASTER_FACTOR if plan.precision == "bf16" else 1,
    )


def _moved(lies: Placements, taken: Placements, *, tp: int, cp: int) -> bool:
    """Whether a value must be brought to another placement on an axis that there is."""
    return (tp > 1 and lies.tp != taken.tp) or (cp > 1 and lies.cp != taken.cp)
