"""What each stage of a plan takes: loads, what reaches it, what it exchanges with replicas.

Stages may have meshes of their own (tp), so all is asked stage by stage: with the stage's
tp and dp, its share of a microbatch, and the layouts made for that tp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from costmodel.cache import CostCache
from costmodel.time.boundary import Arrivals, Layouts, block_entry_seconds, stage_arrivals
from costmodel.time.communication import (
    MASTER_FACTOR,
    DataParallelSeconds,
    boundary_seconds,
    data_parallel_seconds,
)
from costmodel.time.program import ProgramCost
from costmodel.time.simulate import JobSeconds
from costmodel.time.stage import StageLoad, again_seconds, block_load, join
from costmodel.time.tied import tied_seconds
from costmodel.topology import axis_group, hop_group, split_axes
from planner.graph import ModelGraph
from planner.plan import Plan


@dataclass(frozen=True, kw_only=True)
class PlanPrice:
    """Prices of a plan's stages, in stage order; `blocks[stage]` of its blocks one by one.
    `tied_s[pp_rank]` is what sums of tied parameters' gradients take.
    """

    plan: Plan
    loads: tuple[StageLoad, ...]
    blocks: tuple[tuple[StageLoad, ...], ...]
    arrivals: tuple[Arrivals, ...]
    syncs: tuple[DataParallelSeconds, ...]
    job_seconds: JobSeconds
    tied_s: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class StageLayouts:
    """How the blocks of one stage are split: layouts by class on tp and cp, and what of each
    class runs again under selective recomputation (no entry: the default choice).
    """

    tp: int = 1
    cp: int = 1
    on_tp: Layouts = field(default_factory=dict)
    on_cp: Layouts = field(default_factory=dict)
    recomputed: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


def price_plan(plan: Plan, costs: CostCache) -> PlanPrice:
    """Return the prices of a plan's stages."""
    layouts = _layouts_by_tp(plan)
    loads, blocks, arrivals, syncs = [], [], [], []
    for s, stage in enumerate(plan.stages):
        split, size = layouts[plan.stage_tp(s)], plan.stage_microbatch_size(s)
        load, of_blocks = _stage_load(costs, stage.blocks, split, microbatch_size=size)
        loads.append(load)
        blocks.append(of_blocks)
        syncs.append(_sync(plan, costs, s, load))
        arrivals.append(
            stage_arrivals(
                costs.graph, stage.blocks, split.on_tp, tp=split.tp, microbatch_size=size,
                cp=split.cp, cp_layouts=split.on_cp,
            )
        )  # fmt: skip
    return PlanPrice(
        plan=plan,
        loads=tuple(loads),
        blocks=tuple(blocks),
        arrivals=tuple(arrivals),
        syncs=tuple(syncs),
        job_seconds=_job_seconds(plan, costs, loads, blocks, arrivals, syncs),
        tied_s=tied_seconds(plan, costs.graph, costs.profile),
    )


def _layouts_by_tp(plan: Plan) -> dict[int, StageLayouts]:
    recomputed = {choice.class_index: choice.ops for choice in plan.recomputed}
    return {
        tp: StageLayouts(
            tp=tp,
            cp=plan.cp,
            on_tp=_layouts_on(plan, "tp", tp) if tp > 1 else {},
            on_cp=_layouts_on(plan, "cp", tp) if plan.cp > 1 else {},
            recomputed=recomputed,
        )
        for tp in {plan.stage_tp(s) for s in range(len(plan.stages))}
    }


def _layouts_on(plan: Plan, axis: str, tp: int) -> Layouts:
    return {
        layout.class_index: layout
        for layout in plan.layouts
        if layout.axis == axis and plan.degrees.with_own(layout.own_sizes)["tp"] == tp
    }


def stage_load(
    costs: CostCache, blocks: Sequence[int], split: StageLayouts, *, microbatch_size: int
) -> StageLoad:
    """Return the load of a stage of these blocks: tied parameters once, entries included."""
    return _stage_load(costs, blocks, split, microbatch_size=microbatch_size)[0]


def _stage_load(
    costs: CostCache, blocks: Sequence[int], split: StageLayouts, *, microbatch_size: int
) -> tuple[StageLoad, tuple[StageLoad, ...]]:
    """The load of a stage and those of its blocks."""
    graph = costs.graph
    axes = split_axes(costs.profile.cluster, tp=split.tp, cp=split.cp)
    loads = []
    held: set[str] = set()
    side: set[str] = set()
    of_class: dict[int, tuple[ProgramCost, StageLoad]] = {}
    for index in blocks:
        block = graph.blocks[index]
        layout = split.on_tp.get(block.class_index)
        if block.class_index not in of_class:
            cost = costs.block(
                block.class_index, split.tp, microbatch_size, layout,
                cp=split.cp, cp_layout=split.on_cp.get(block.class_index),
                recomputed=split.recomputed.get(block.class_index),
            )  # fmt: skip
            of_class[block.class_index] = cost, block_load(cost)
        cost, load = of_class[block.class_index]
        side.update(block.inputs[position] for position in cost.side_positions)
        there, back = block_entry_seconds(
            graph, index, split.on_tp, costs.profile, group=axes["tp"].group,
            microbatch_size=microbatch_size, other_layouts=split.on_cp, other_size=split.cp,
        )  # fmt: skip
        cp_there, cp_back = block_entry_seconds(
            graph, index, split.on_cp, costs.profile, group=axes["cp"].group,
            microbatch_size=microbatch_size, other_layouts=split.on_tp, other_size=split.tp,
        )  # fmt: skip
        again = [name for name in block.params if name in held]
        if again or there or back or cp_there or cp_back:
            load = replace(
                load,
                comm_forward_s=load.comm_forward_s + there + cp_there,
                comm_backward_s=load.comm_backward_s + back + cp_back,
                param_bytes=load.param_bytes
                - _trained_bytes(costs, index, layout, split.tp, again),
                num_params=load.num_params - sum(_is_trained(graph, name) for name in again),
            )
        held.update(block.params)
        loads.append(load)
    total = join(loads)
    each, once = costs.side_bytes(frozenset(side), microbatch_size)
    total = replace(total, side_bytes=each, frozen_bytes=total.frozen_bytes + once)
    return total, tuple(loads)


def _trained_bytes(
    costs: CostCache, block_index: int, layout: Any, tp: int, names: Sequence[str]
) -> int:
    """Local bytes of those of a block's trainable parameters that are named."""
    block = costs.graph.blocks[block_index]
    total = 0
    for position, name in enumerate(block.params):
        meta = costs.graph.tensor[name]
        if name in names and _is_trained(costs.graph, name):
            sharded = layout is not None and layout.params[position].startswith("S")
            total += meta.bytes_at(1) // (tp if sharded else 1)
    return total


def _is_trained(graph: ModelGraph, name: str) -> bool:
    meta = graph.tensor[name]
    return meta.kind == "param" and meta.requires_grad


def _sync(plan: Plan, costs: CostCache, stage: int, load: StageLoad) -> DataParallelSeconds:
    tp = plan.stage_tp(stage)
    replicas = plan.stage_dp(stage) * plan.cp
    param_bytes = float(load.param_bytes)
    raw = data_parallel_seconds(
        costs.profile,
        axis_group(costs.profile.cluster, size=replicas, stride=tp),
        zero_stage=plan.zero_stage,
        param_bytes=param_bytes,
        num_blocks=int(load.num_blocks),
        num_tensors=int(load.num_params),
        gradient_bytes=param_bytes * (MASTER_FACTOR if plan.precision == "bf16" else 1),
        on_host=plan.optimizer_on_host,
    )
    return raw.hidden_behind(
        costs.profile,
        forward_s=float(load.forward_s + load.comm_forward_s),
        backward_s=float(load.backward_s + load.comm_backward_s),
        num_blocks=int(load.num_blocks),
    )


def _job_seconds(
    plan: Plan,
    costs: CostCache,
    loads: Sequence[StageLoad],
    blocks: Sequence[Sequence[StageLoad]],
    arrivals: Sequence[Arrivals],
    syncs: Sequence[DataParallelSeconds],
) -> JobSeconds:
    """Seconds of each stage's jobs; a W takes the weight gradients' part of a backward, unless ZeRO
    reduces them: then they are made with the input's gradient.

    A full backward sends its input's gradient before the weight gradients that the runtime puts
    aside (`planner.runtime.step.executor`): those of its stage's first block, in the stage's last
    backward all of them.
    """
    profile = costs.profile
    forward, inputs, last_inputs, weights = [], [], [], []
    for s, (stage, load, sync) in enumerate(zip(plan.stages, loads, syncs, strict=True)):
        again = float(again_seconds(load, stage.recompute))
        weight = 0.0 if _is_sharded(plan, s) else float(load.weight_s)
        alone = load.backward_s - weight + load.comm_backward_s + sync.backward_s
        forward.append(float(load.forward_s + load.comm_forward_s + sync.forward_s))
        inputs.append(float(alone) + again)
        last_inputs.append(float(alone) + again * stage.recompute_last)
        weights.append(weight)
    group = hop_group(profile.cluster, dp=plan.dp, cp=plan.cp, tp=plan.tp, pp=plan.pp)
    tps = [axis_group(profile.cluster, size=plan.stage_tp(s), stride=1) for s in range(len(loads))]
    there = [
        boundary_seconds(
            profile, group, tp, num_bytes=a.forward_bytes, whole_bytes=a.whole_forward_bytes
        )
        for a, tp in zip(arrivals, tps, strict=True)
    ]
    # The gradient of what a stage received goes back to the stage before it.
    back = [
        boundary_seconds(
            profile, group, tp, num_bytes=a.backward_bytes, whole_bytes=a.whole_backward_bytes
        )
        for a, tp in zip(arrivals[1:], tps, strict=False)
    ]
    return JobSeconds(
        forward_s=tuple(forward),
        backward_input_s=tuple(inputs),
        backward_weight_s=tuple(weights),
        receive_forward_s=tuple(there),
        receive_backward_s=(*back, 0.0),
        last_backward_input_s=None if last_inputs == inputs else tuple(last_inputs),
        sends_ahead_s=tuple(
            float(own[0].weight_s) * _sends_ahead(plan, s) for s, own in enumerate(blocks)
        ),
        last_sends_ahead_s=tuple(
            seconds * _sends_ahead(plan, s) for s, seconds in enumerate(weights)
        ),
    )


def _sends_ahead(plan: Plan, stage: int) -> bool:
    """Whether a stage puts weight gradients aside: not what ZeRO reduces, nor what is remade."""
    return plan.stages[stage].recompute == "none" and not _is_sharded(plan, stage)


def _is_sharded(plan: Plan, stage: int) -> bool:
    """Whether ZeRO has replicas of a stage to shard over."""
    return plan.zero_stage > 0 and plan.stage_dp(stage) * plan.cp > 1
