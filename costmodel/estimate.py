"""estimate: what one training step of a plan takes, in time and in memory, in named parts.

The price of a plan's stages (`costmodel.time.plan_price`), simulated job by job, ends with what is
done once a step (`costmodel.time.step`, with the formula of a step). `costmodel.time.step_path`
splits it by cause; memory is walked along the same jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from costmodel.cache import CostCache, costs_of_groups
from costmodel.execution import Execution, find_execution
from costmodel.execution.dispatch.imbalance import (
    GIVEN,
    Imbalance,
    imbalance_of_step,
)
from costmodel.execution.dispatch.of_plan import dispatchers_of_plan
from costmodel.execution.executed import executed
from costmodel.memory.exact.plan_memory import plan_memory
from costmodel.memory.parts import MemoryParts
from costmodel.time.plan_price import PlanPrice, price_plan
from costmodel.time.replica_views import ReplicaView, replica_views
from costmodel.time.step import LastRank, copies_beside_jobs
from costmodel.time.step_path import StepPath
from planner.language.across.cut.whole_batch import graph_under
from planner.language.graph import ModelGraph
from planner.language.graph.tables import with_table_lookups
from planner.language.plan import OURS, Plan
from planner.language.plan.schedule_of import schedule_of
from planner.language.schedule.step_jobs import StepJobKind, step_jobs
from planner.language.schedule.timing.job_seconds import JobSeconds
from planner.language.schedule.timing.job_table import JobTable, build_job_table, job_table
from planner.language.schedule.timing.simulate import Timeline, simulate
from planner.language.schedule.timing.steady import SteadySchedule
from profiles import Profile


@dataclass(frozen=True, kw_only=True)
class ExpertsRows:
    """How rows of a plan go to the ranks of their experts."""

    dispatchers: tuple[str, ...]
    """What brings them there: of each kind of block the dispatcher that takes least."""
    imbalance: Imbalance
    """How unevenly ranks receive them."""
    fullest: float
    """Rows of the rank that receives most, over the mean, as time has them."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {
            "dispatchers": list(self.dispatchers),
            "imbalance": self.imbalance.sigma,
            "imbalance_from": self.imbalance.source,
            "fullest": self.fullest,
            "memory_odds": self.imbalance.odds,
        }


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A step's time and memory."""

    step_s: float
    """Seconds of one step."""
    path: StepPath
    """The same by cause, over all ranks."""
    memory: tuple[MemoryParts, ...]
    """Bytes of each pp rank: of each of its dp, cp and tp ranks."""
    device_groups: tuple[str, ...]
    """The group of devices that each pp rank's `memory` is of; empty where all are equal."""
    timeline: Timeline
    """When each job runs."""
    flop: float
    """The model's own work per step, of all ranks; recomputation not counted."""
    samples: int
    """Samples of a step."""
    source: str
    """``measured`` or ``shipped``: where the profile's numbers come from."""
    experts: ExpertsRows | None = None
    """How rows go to experts; None where all ranks have all of them."""

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
            "time": self.path.parts,
            "bottleneck_pp_rank": self.path.bottleneck,
            "work_by_pp_rank_s": list(self.path.rank_work_s),
            "bubble_fraction": self.bubble_fraction,
            "peak_bytes": self.peak_bytes,
            "memory": [parts.to_dict() for parts in self.memory],
            "flop": self.flop,
            "source": self.source,
            **({} if self.experts is None else {"experts": self.experts.to_dict()}),
        }


def estimate(
    graph: ModelGraph,
    profile: Profile,
    plan: Plan,
    *,
    execution: Execution | None = None,
    costs: CostCache | None = None,
) -> Estimate:
    """Return what one step of a plan takes on a machine.

    `graph` is the capture in the plan's precision. `execution` is the runtime that the plan is
    priced for, the plan's own where not given. `costs` keeps prices of block classes between
    calls, on the profile and for the runtime it was made with (`cost_cache` where not given), and
    says whether gradients are clipped. Raises ScheduleError when the
    plan's schedule can't be built.
    """
    if costs is None:
        execution = execution or find_execution(plan.execution)
        costs = cost_cache(
            graph,
            profile,
            plan.world_size,
            execution=execution,
            imbalance=imbalance_of_plan(plan, profile, execution),
        )
    costs = costs_under(plan, costs)
    views = replica_views(plan, costs)
    num_replicas = sum(view.replicas for view in views)
    found = [_simulated(view) for view in views]
    flop, memory, groups = 0.0, [], []
    for view, step in zip(views, found, strict=True):
        price = step.price
        # Of each rank of a view, times the ranks of a stage (all stages have as many), as if all
        # replicas were of this view, times its part of them.
        flop_of_ranks = (price.times.forward_flop + price.times.backward_flop).sum()
        flop += float(flop_of_ranks) * plan.degrees.num_ranks * view.replicas / num_replicas
        weights = price.weights(range(plan.pp))
        memory.append(plan_memory(view.plan, costs, _walked_jobs(step.table, plan, costs), weights))
        groups.append(view.plan.device_groups)
    # Each pp rank's fullest among all views, and the devices of that.
    fullest = [
        max(zip(of_rank, lie_on, strict=True), key=lambda found: found[0].total)
        for of_rank, lie_on in zip(
            zip(*memory, strict=True), zip(*groups, strict=True), strict=True
        )
    ]
    # Replicas meet in the exchange of gradients, so the slowest of them sets the step.
    slowest = max(found, key=lambda each: each.last.step_s)
    return Estimate(
        step_s=slowest.last.step_s,
        path=_step_path(slowest),
        memory=tuple(parts for parts, _ in fullest),
        device_groups=tuple(group for _, group in fullest),
        timeline=_with_step_jobs(slowest),
        flop=flop * plan.num_microbatches,
        samples=plan.global_batch,
        source=costs.profile.source,
        experts=_rows_of_experts(plan, costs),
    )


def _rows_of_experts(plan: Plan, costs: CostCache) -> ExpertsRows | None:
    """Return how rows of a plan's blocks go to their experts."""
    used = dispatchers_of_plan(plan, costs)
    if not used:
        return None
    ranks, imbalance = plan.degrees["ep"], costs.imbalance
    return ExpertsRows(
        dispatchers=tuple(dict.fromkeys(name for name, _ in used)),
        imbalance=imbalance,
        fullest=max(
            costs.fullest(index, plan.microbatch_size, ranks, held=False)
            for index in range(len(costs.graph.classes))
        ),
    )


def step_seconds(plan: Plan, costs: CostCache) -> float:
    """Return the seconds of a step alone: no memory is walked, nothing split by cause."""
    return max(_simulated(view).last.step_s for view in replica_views(plan, costs))


def rank_bytes(plan: Plan, costs: CostCache, pp_ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the peak memory of these pp ranks alone."""
    return tuple(
        max(of_groups.values()) for of_groups in rank_bytes_by_group(plan, costs, pp_ranks)
    )


def rank_bytes_by_group(
    plan: Plan, costs: CostCache, pp_ranks: Sequence[int]
) -> tuple[dict[str, int], ...]:
    """Return the peak memory of these pp ranks on each group of devices that their replicas lie
    on.
    """
    steady = _walked_jobs(_table_of(plan), plan, costs)
    found: tuple[dict[str, int], ...] = tuple({} for _ in pp_ranks)
    for view in replica_views(plan, costs):
        weights = price_plan(view.plan, view.costs).weights(pp_ranks)
        memory = plan_memory(view.plan, costs, steady, weights)
        for rank, parts, most in zip(pp_ranks, memory, found, strict=True):
            group = view.plan.device_groups[rank]
            most[group] = max(most.get(group, 0), int(parts.total))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """The simulated step of some replicas."""

    price: PlanPrice
    """What their jobs take; its plan has their devices."""
    table: JobTable
    """In which order their jobs run."""
    copies_s: tuple[np.ndarray, ...] | None
    """What copies of activations take beside each job of each rank, if there are any."""
    timeline: Timeline
    """When their jobs run."""
    last: LastRank
    """The rank that ends the step."""


def slowest_step(plan: Plan, costs: CostCache) -> SimulatedStep:
    """Return the step of the replicas whose step is longest, with its messages and all its jobs."""
    costs = costs_under(plan, costs)
    steps = (_simulated(view, keeps_messages=True) for view in replica_views(plan, costs))
    slowest = max(steps, key=lambda each: each.last.step_s)
    return replace(slowest, timeline=_with_step_jobs(slowest))


def _with_step_jobs(step: SimulatedStep) -> Timeline:
    return replace(step.timeline, step_jobs_s=_step_jobs_s(step))


def _simulated(view: ReplicaView, *, keeps_messages: bool = False) -> SimulatedStep:
    """Return the prices of some replicas, and when their jobs run."""
    price = price_plan(view.plan, view.costs)
    table = _table_of(view.plan)
    on_host = [s for s, stage in enumerate(view.plan.stages) if stage.activations_on_host]
    saved = _saved_bytes(price) if on_host else ()
    copies_s = copies_beside_jobs(
        [view.costs.of_group(group) for group in view.plan.device_groups],
        table,
        {s: saved[s] for s in on_host},
    )
    timeline = simulate(table, price.job_seconds, at_least=copies_s, keeps_messages=keeps_messages)
    return SimulatedStep(
        price=price,
        table=table,
        copies_s=copies_s,
        timeline=timeline,
        last=price.once.last_rank(timeline.rank_end_s),
    )


def cost_cache(
    graph: ModelGraph,
    profile: Profile,
    num_devices: int,
    *,
    execution: Execution | None = None,
    clips_gradients: bool = False,
    imbalance: Imbalance | None = None,
) -> CostCache:
    """Return prices of a graph as a runtime executes it on so many devices of a machine; with an
    `imbalance` of its routers other than the runtime's.

    Raises PlannerError where it is not priced on such a profile.
    """
    runtime = execution or find_execution(OURS)
    imbalance = imbalance or imbalance_of_step(runtime, profile)

    def on(profile: Profile) -> CostCache:
        return CostCache(
            graph,
            executed(profile, runtime, num_devices),
            execution=runtime,
            clips_gradients=clips_gradients,
            imbalance=imbalance,
        )

    return costs_of_groups(profile, on)


def imbalance_of_plan(plan: Plan, profile: Profile, execution: Execution) -> Imbalance:
    """Return how uneven the routers of a plan's steps are: as its search was told, where it was."""
    told = plan.estimate.get("experts", {})
    given = told.get("imbalance") if told.get("imbalance_from") == GIVEN else None
    odds = float(told.get("memory_odds", 0.5))
    return imbalance_of_step(execution, profile, given=given, odds=odds)


def costs_under(plan: Plan, costs: CostCache) -> CostCache:
    """Return prices of the graph as a plan runs it: ops on the whole batch, tables on the host."""
    graph = with_table_lookups(graph_under(costs.graph, plan), plan.tables_on_host)
    if graph is costs.graph:
        return costs

    def of(costs: CostCache) -> CostCache:
        return CostCache(
            graph,
            costs.profile,
            execution=costs.execution,
            clips_gradients=costs.clips_gradients,
            imbalance=costs.imbalance,
        )

    made = of(costs)
    made.groups = {name: of(each) for name, each in costs.groups.items()}
    made.group_sizes = costs.group_sizes
    return made


def _table_of(plan: Plan) -> JobTable:
    """The plan's job table; those that follow from a name are kept, for searches."""
    if plan.table:
        return build_job_table(schedule_of(plan))
    table = job_table(plan.schedule, plan.pp, plan.vpp, plan.num_microbatches)
    if table.schedule.stage_to_pp_rank != plan.stage_to_pp_rank:
        schedule_of(plan)  # raises: the stages sit on other ranks than the schedule's
    return table


def _walked_jobs(table: JobTable, plan: Plan, costs: CostCache) -> SteadySchedule:
    """Return the jobs along which memory is walked: without repetitions, unless bytes go at a job
    that is found by counting (copies to the host, messages that gloo has sent).
    """
    counts = any(stage.activations_on_host for stage in plan.stages)
    if counts or costs.profile.cluster.device_type == "cpu":
        return SteadySchedule.whole(table.schedule)
    return table.steady(ahead=plan.receive_ahead)


def plan_job_seconds(plan: Plan, costs: CostCache) -> JobSeconds:
    """Return what the jobs and transfers of a plan take, whatever their order: those of the
    slowest replicas.
    """
    return slowest_price(plan, costs).job_seconds


def plan_kept_bytes(plan: Plan, costs: CostCache) -> tuple[float, ...]:
    """Return what one microbatch in flight keeps on each stage of a plan, of the slowest
    replicas.
    """
    price = slowest_price(plan, costs)
    return tuple(saved + price.side_bytes(s) for s, saved in enumerate(_saved_bytes(price)))


def slowest_price(plan: Plan, costs: CostCache) -> PlanPrice:
    """Return the prices of the replicas whose step is longest; its plan has their devices."""
    views = replica_views(plan, costs)
    if len(views) == 1:
        return price_plan(views[0].plan, views[0].costs)
    steps = (_simulated(view) for view in views)
    return max(steps, key=lambda each: each.last.step_s).price


def _saved_bytes(price: PlanPrice) -> tuple[float, ...]:
    """Return what blocks of each stage save of one microbatch, shared side inputs apart."""
    by_block = price.plan.recompute_by_block
    kept = {mesh: mesh.runs.kept(by_block) for mesh in dict.fromkeys(price.meshes)}
    return tuple(kept[mesh][s].item() for s, mesh in enumerate(price.meshes))


def _step_jobs_s(step: SimulatedStep) -> tuple[tuple[tuple[float, float], ...], ...]:
    """Start and end of each rank's optimizer and learning-rate job.

    A scheduler sets a few numbers on the host, which takes microseconds: no time is counted.
    """
    once = step.price.once
    jobs = []
    for rank, start_s in enumerate(once.update_starts(step.timeline.rank_end_s)):
        seconds = {StepJobKind.OPTIMIZER: once.updates[rank].optimizer_s}
        spans = []
        for job in step_jobs(rank):
            spans.append((start_s, start_s + seconds.get(job.kind, 0.0)))
            start_s = spans[-1][1]
        jobs.append(tuple(spans))
    return tuple(jobs)


def _step_path(step: SimulatedStep) -> StepPath:
    """Split a step by cause (`costmodel.time.step_path`)."""
    price, last = step.price, step.last
    work = price.rank_work()
    busy_s, after_s = np.array(step.timeline.busy_s), np.array(price.once.after_s)
    # With clipping all updates wait for each other, and their differences are counted there.
    update_s = np.array(
        [
            last.optimizer_s if price.costs.clips_gradients else update.optimizer_s
            for update in price.once.updates
        ]
    )
    whole_s = busy_s + after_s + update_s
    # Copies that outlast the jobs beside them lengthen these.
    copied = step.copies_s is not None
    offload_s = busy_s - sum(work.values()) if copied else np.zeros(price.plan.pp)
    kinds = {
        **{name: seconds for name, seconds in work.items() if name != "waited_s"},
        "dp_comm_s": work["dp_comm_s"] + after_s,
        "optimizer_s": update_s,
        "offload_s": np.maximum(offload_s, 0.0),
    }
    most_s = float(whole_s.max())
    # Simulated again with instant transfers: what the step gains is theirs. What it is beyond the
    # bottleneck's work is that rank's waiting for jobs: fill and drain.
    instant_s = _without_transfers(step).before_clipping_s
    fill_drain_s = max(0.0, instant_s - most_s)
    messages_s = max(0.0, last.before_clipping_s - instant_s)
    # What clipping makes ranks wait for each other: the rest.
    clipping_s = last.before_clipping_s + last.clipping_s - most_s - fill_drain_s - messages_s
    return StepPath(
        work_s={name: float(seconds.mean()) for name, seconds in kinds.items()},
        imbalance_s=most_s - float(whole_s.mean()),
        fill_drain_s=fill_drain_s,
        # What jobs wait for transfers that do not overlap lies in the jobs' own seconds; its cause
        # is the message all the same.
        messages_s=messages_s + float(work["waited_s"].mean()),
        inputs_s=last.inputs_s,
        clipping_s=clipping_s if price.costs.clips_gradients else 0.0,
        by_rank_s={
            name: tuple(seconds.tolist())
            for name, seconds in {**kinds, "waited_s": work["waited_s"]}.items()
        },
    )


def _without_transfers(step: SimulatedStep) -> LastRank:
    """Return the rank that would end the step if transfers between stages took no time."""
    if step.price.plan.pp == 1:
        return step.last
    none = (0.0,) * len(step.price.plan.stages)
    instant = replace(step.price.job_seconds, receive_forward_s=none, receive_backward_s=none)
    timeline = simulate(step.table, instant, at_least=step.copies_s)
    return step.price.once.last_rank(timeline.rank_end_s)
