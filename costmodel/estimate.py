"""estimate: what one training step of a plan takes, in time and in memory, in named parts.

    step_s = max over pp ranks r of  end(r) + sync(r) + optimizer(r)

where end(r) is the end of r's last job in the simulated table, sync(r) what r still has to
exchange with its dp replicas then, and optimizer(r) its parameter update. On the rank that
ends last,

    step_s = compute_s + recompute_s + host_s + tp_comm_s + dp_comm_s + pp_comm_s + bubble_s
             + optimizer_s

pp_comm_s is what the step would gain if transfers between stages took no time; bubble_s is
the rest of the time the rank waits for others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from costmodel.boundary import Arrivals, Layouts, block_entry_seconds, stage_arrivals
from costmodel.cache import CostCache
from costmodel.communication import (
    DataParallelSeconds,
    adamw_seconds,
    data_parallel_seconds,
    hop_seconds,
)
from costmodel.memory import (
    MemoryParts,
    activation_peak,
    job_peak_bytes,
    kept_bytes,
    rank_memory,
)
from costmodel.simulate import JobSeconds, JobTable, Timeline, build_job_table, simulate
from costmodel.stage import StageLoad, block_load, join
from costmodel.topology import dp_group, hop_group, tp_group
from planner.graph import ModelGraph
from planner.plan import Plan
from planner.schedule import build_schedule, schedule_of
from profiles import Profile


@dataclass(frozen=True, kw_only=True)
class TimeParts:
    """Seconds of one step on the rank that ends last; they sum to the step."""

    compute_s: float
    recompute_s: float
    host_s: float
    tp_comm_s: float
    dp_comm_s: float
    pp_comm_s: float
    bubble_s: float
    optimizer_s: float

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return sum(asdict(self).values())


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A step's time and memory. `memory[pp_rank]` is of each rank of that pp rank.

    `flop` is the model's own work per step (recompute not counted), of all ranks.
    """

    time: TimeParts
    memory: tuple[MemoryParts, ...]
    timeline: Timeline
    flop: float
    samples: int
    source: str

    @property
    def step_s(self) -> float:
        """Seconds of one step."""
        return self.time.step_s

    @property
    def peak_bytes(self) -> int:
        """Memory of the rank that needs most."""
        return max(int(parts.total) for parts in self.memory)

    @property
    def bubble_fraction(self) -> float:
        """Idle part of all ranks' time in the simulated table."""
        return self.timeline.bubble_fraction

    def to_dict(self) -> dict[str, Any]:
        """Return the named parts as JSON data, for `Plan.estimate`."""
        return {
            "step_s": self.step_s,
            "samples_per_s": self.samples / self.step_s,
            "time": asdict(self.time),
            "bubble_fraction": self.bubble_fraction,
            "peak_bytes": self.peak_bytes,
            "memory": [parts.to_dict() for parts in self.memory],
            "flop": self.flop,
            "source": self.source,
        }


def estimate(
    graph: ModelGraph, profile: Profile, plan: Plan, *, costs: CostCache | None = None
) -> Estimate:
    """Return what one step of a plan takes on a machine.

    `costs` keeps prices of block classes between calls. Raises ScheduleError when the
    plan's schedule can't be built.
    """
    costs = costs or CostCache(graph, profile)
    layouts = _layouts_of(plan)
    loads = _loads_of(plan, costs, layouts)
    table = _table_of(plan)
    syncs = [_sync(plan, profile, load) for load in loads]
    seconds = _job_seconds(plan, costs, layouts, loads, syncs)
    timeline = simulate(table, seconds)
    time = _time_parts(plan, profile, loads, syncs, timeline, table, seconds)
    per_microbatch = sum(float(load.forward_flop + load.backward_flop) for load in loads)
    return Estimate(
        time=time,
        memory=_memory(plan, costs, layouts, loads, timeline),
        timeline=timeline,
        flop=per_microbatch * plan.num_microbatches * plan.dp * plan.tp,
        samples=plan.global_batch,
        source=profile.source,
    )


def stage_load(
    costs: CostCache, blocks: Sequence[int], layouts: Layouts, *, tp: int, microbatch_size: int
) -> StageLoad:
    """Return the load of a stage of these blocks: tied parameters once, entries included."""
    graph = costs.graph
    group = tp_group(costs.profile.cluster, tp=tp)
    loads = []
    held: set[str] = set()
    side: set[str] = set()
    for index in blocks:
        block = graph.blocks[index]
        layout = layouts.get(block.class_index)
        cost = costs.block(block.class_index, tp, microbatch_size, layout)
        side.update(block.inputs[position] for position in cost.side_positions)
        load = block_load(cost)
        there, back = block_entry_seconds(
            graph, index, layouts, costs.profile, group=group, microbatch_size=microbatch_size
        )
        again = [name for name in block.params if name in held]
        load = replace(
            load,
            comm_forward_s=load.comm_forward_s + there,
            comm_backward_s=load.comm_backward_s + back,
            param_bytes=load.param_bytes - _trained_bytes(costs, index, layout, tp, again),
        )
        held.update(block.params)
        loads.append(load)
    total = join(loads)
    each, once = costs.side_bytes(frozenset(side), microbatch_size)
    return replace(total, side_bytes=each, frozen_bytes=total.frozen_bytes + once)


def _trained_bytes(
    costs: CostCache, block_index: int, layout: Any, tp: int, names: Sequence[str]
) -> int:
    """Local bytes of those of a block's trainable parameters that are named."""
    block = costs.graph.blocks[block_index]
    total = 0
    for position, name in enumerate(block.params):
        meta = costs.graph.tensor[name]
        if name in names and meta.kind == "param" and meta.requires_grad:
            sharded = layout is not None and layout.params[position].startswith("S")
            total += meta.bytes_at(1) // (tp if sharded else 1)
    return total


@lru_cache(maxsize=64)
def _job_table(name: str, pp: int, vpp: int, num_microbatches: int) -> JobTable:
    return build_job_table(build_schedule(name, pp=pp, vpp=vpp, num_microbatches=num_microbatches))


def _table_of(plan: Plan) -> JobTable:
    """The plan's job table; those that follow from a name are kept, for searches."""
    if plan.table:
        return build_job_table(schedule_of(plan))
    table = _job_table(plan.schedule, plan.pp, plan.vpp, plan.num_microbatches)
    if table.schedule.stage_to_pp_rank != plan.stage_to_pp_rank:
        schedule_of(plan)  # raises: the stages sit on other ranks than the schedule's
    return table


def plan_job_seconds(plan: Plan, costs: CostCache) -> JobSeconds:
    """Return what the jobs and transfers of a plan take, whatever their order."""
    layouts = _layouts_of(plan)
    loads = _loads_of(plan, costs, layouts)
    syncs = [_sync(plan, costs.profile, load) for load in loads]
    return _job_seconds(plan, costs, layouts, loads, syncs)


def plan_kept_bytes(plan: Plan, costs: CostCache) -> tuple[float, ...]:
    """Return what one microbatch in flight keeps on each stage of a plan."""
    loads = _loads_of(plan, costs, _layouts_of(plan))
    return tuple(
        float(kept_bytes(load, recompute=stage.recompute == "full"))
        for stage, load in zip(plan.stages, loads, strict=True)
    )


def _layouts_of(plan: Plan) -> Layouts:
    return {} if plan.tp == 1 else {lay.class_index: lay for lay in plan.layouts}


def _loads_of(plan: Plan, costs: CostCache, layouts: Layouts) -> list[StageLoad]:
    return [
        stage_load(costs, stage.blocks, layouts, tp=plan.tp, microbatch_size=plan.microbatch_size)
        for stage in plan.stages
    ]


def _sync(plan: Plan, profile: Profile, load: StageLoad) -> DataParallelSeconds:
    return data_parallel_seconds(
        profile,
        dp_group(profile.cluster, dp=plan.dp, cp=plan.cp, tp=plan.tp),
        zero_stage=plan.zero_stage,
        param_bytes=float(load.param_bytes),
        num_blocks=int(load.num_blocks),
    )


def _job_seconds(
    plan: Plan,
    costs: CostCache,
    layouts: Layouts,
    loads: Sequence[StageLoad],
    syncs: Sequence[DataParallelSeconds],
) -> JobSeconds:
    """Seconds of each stage's jobs; a W takes the weight gradients' part of a backward."""
    profile = costs.profile
    group = hop_group(profile.cluster, dp=plan.dp, cp=plan.cp, tp=plan.tp, pp=plan.pp)
    forward, inputs, weights = [], [], []
    for stage, load, sync in zip(plan.stages, loads, syncs, strict=True):
        again = _full_forward(load) if stage.recompute == "full" else 0.0
        backward = load.backward_s + load.comm_backward_s + again + sync.per_backward_s
        weight_part = load.weight_s
        forward.append(_full_forward(load) + sync.per_forward_s)
        inputs.append(float(backward - weight_part))
        weights.append(float(weight_part))
    arrivals = [
        stage_arrivals(
            costs.graph, stage.blocks, layouts, tp=plan.tp, microbatch_size=plan.microbatch_size
        )
        for stage in plan.stages
    ]
    # The gradient of what a stage received goes back to the stage before it.
    returned = [*(a.backward_bytes for a in arrivals[1:]), 0]
    return JobSeconds(
        forward_s=tuple(forward),
        backward_input_s=tuple(inputs),
        backward_weight_s=tuple(weights),
        receive_forward_s=tuple(hop_seconds(profile, group, a.forward_bytes) for a in arrivals),
        receive_backward_s=tuple(hop_seconds(profile, group, b) for b in returned),
    )


def _full_forward(load: StageLoad) -> float:
    return float(load.forward_s + load.comm_forward_s)


def _time_parts(
    plan: Plan,
    profile: Profile,
    loads: Sequence[StageLoad],
    syncs: Sequence[DataParallelSeconds],
    timeline: Timeline,
    table: JobTable,
    seconds: JobSeconds,
) -> TimeParts:
    """Split the step of the rank that ends last into its parts."""
    stages_of = [
        [s for s, stage in enumerate(plan.stages) if stage.pp_rank == rank]
        for rank in range(plan.pp)
    ]
    after = [
        sum(syncs[s].after_s + syncs[s].first_forward_s for s in stages) for stages in stages_of
    ]
    optimizer = [
        adamw_seconds(
            profile,
            param_bytes=sum(float(loads[s].param_bytes) for s in stages)
            / (plan.dp if plan.zero_stage else 1),
            num_tensors=sum(int(loads[s].num_params) for s in stages),
            sharded=plan.zero_stage > 0 and plan.dp > 1,
        )
        for stages in stages_of
    ]
    ends = [
        end + sync + update
        for end, sync, update in zip(timeline.rank_end_s, after, optimizer, strict=True)
    ]
    rank = max(range(plan.pp), key=ends.__getitem__)
    stages, m = stages_of[rank], plan.num_microbatches
    instant = replace(
        seconds,
        receive_forward_s=(0.0,) * len(plan.stages),
        receive_backward_s=(0.0,) * len(plan.stages),
    )
    pp_comm = 0.0
    if plan.pp > 1:
        pp_comm = timeline.rank_end_s[rank] - simulate(table, instant).rank_end_s[rank]
    idle = timeline.rank_end_s[rank] - timeline.busy_s[rank]

    def total(amount: Callable[[int], float]) -> float:
        return m * sum(float(amount(s)) for s in stages)

    again = {s: plan.stages[s].recompute == "full" for s in stages}
    host = total(lambda s: (1 + again[s]) * loads[s].host_forward_s + loads[s].host_backward_s)
    recompute = total(lambda s: loads[s].forward_s - loads[s].host_forward_s if again[s] else 0.0)
    tp_comm = total(lambda s: (1 + again[s]) * loads[s].comm_forward_s + loads[s].comm_backward_s)
    compute = total(
        lambda s: (
            loads[s].forward_s
            - loads[s].host_forward_s
            + loads[s].backward_s
            - loads[s].host_backward_s
        )
    )
    per_job = total(lambda s: syncs[s].per_forward_s + syncs[s].per_backward_s)
    return TimeParts(
        compute_s=compute,
        recompute_s=recompute,
        host_s=host,
        tp_comm_s=tp_comm,
        dp_comm_s=per_job + after[rank],
        pp_comm_s=pp_comm,
        bubble_s=idle - pp_comm,
        optimizer_s=optimizer[rank],
    )


def _memory(
    plan: Plan, costs: CostCache, layouts: Layouts, loads: Sequence[StageLoad], timeline: Timeline
) -> tuple[MemoryParts, ...]:
    """Memory of each pp rank, from the job table's own order."""
    recompute = [stage.recompute == "full" for stage in plan.stages]
    kept = [float(kept_bytes(load, recompute=r)) for load, r in zip(loads, recompute, strict=True)]
    peak = [
        float(job_peak_bytes(load, recompute=r)) for load, r in zip(loads, recompute, strict=True)
    ]
    arrivals = [
        stage_arrivals(
            costs.graph, stage.blocks, layouts, tp=plan.tp, microbatch_size=plan.microbatch_size
        )
        for stage in plan.stages
    ]
    # Replicas without ZeRO accumulate in buckets made beforehand; others in what the first
    # backward of a stage leaves.
    preallocated = plan.dp > 1 and plan.zero_stage == 0
    appearing = None if preallocated else [float(load.param_bytes) for load in loads]
    graph = costs.graph
    batch_bytes = sum(graph.tensor[n].bytes_at(plan.global_batch) for n in graph.batch_inputs)
    parts = []
    for rank in range(plan.pp):
        mine = [s for s, stage in enumerate(plan.stages) if stage.pp_rank == rank]
        worst = activation_peak(timeline.schedule, rank, kept=kept, peak=peak, gradients=appearing)
        parts.append(
            rank_memory(
                join(loads[s] for s in mine),
                kept=worst.kept_bytes,
                transient=worst.top_bytes,
                dp=plan.dp * plan.cp,
                zero_stage=plan.zero_stage,
                profile=costs.profile,
                receive_bytes=_receive_bytes(arrivals, mine),
                recompute=any(recompute[s] for s in mine),
                batch_bytes=batch_bytes,
                gradients_then=None if appearing is None else worst.gradient_bytes,
            )
        )
    return tuple(parts)


def _receive_bytes(arrivals: Sequence[Arrivals], stages: Sequence[int]) -> int:
    """Buffers posted for the next message of each direction (the executor looks one job ahead)."""
    forward = max(arrivals[s].forward_bytes for s in stages)
    last = len(arrivals) - 1
    return forward + max(arrivals[s + 1].backward_bytes if s < last else 0 for s in stages)
