"""Memory of each pp rank of a plan: its walk over the job table, and the fullest sample of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from costmodel.cache import CostCache
from costmodel.memory.exact.communicators import communicator_bytes, has_communicators
from costmodel.memory.exact.messages import find_traffic
from costmodel.memory.exact.rank_walk import MemorySample, walk_rank
from costmodel.memory.exact.resident import RankState, resident_parts
from costmodel.memory.exact.stage.placed_stage import PlacedStages
from costmodel.memory.parts import MemoryParts, with_overheads
from costmodel.time.stage_costs.load import StageLoad
from costmodel.time.tied import check_copies, tied_stages
from planner.deadline import check_time
from planner.language.lowering.wiring import Edge, build_edges
from planner.language.plan import Plan
from planner.language.schedule.jobs import Schedule
from planner.language.schedule.timing.steady import SteadySchedule


def plan_memory(
    plan: Plan, costs: CostCache, steady: SteadySchedule, weights: Mapping[int, StageLoad]
) -> tuple[MemoryParts, ...]:
    """Return the memory of some pp ranks, from the job table's own order, whose repetitions are
    left out; `weights` are the parameters of each, of all its stages together.
    """
    return tuple(
        _fullest(walked, gap=steady.gaps[walked.state.pp_rank], left_out=steady.left_out)
        for walked in walk_plan(plan, costs, steady.schedule, weights)
    )


@dataclass(frozen=True, kw_only=True)
class WalkedRank:
    """What a rank holds all the time, and its samples: one for each job of its row, in order."""

    state: RankState
    samples: Iterator[MemorySample]
    """Made while they are read, once."""
    communicator_bytes: int
    """Of communicators that the profile's context has not."""

    @cached_property
    def resident(self) -> Counter[str]:
        """Bytes that lie there all the time, by field of `MemoryParts`."""
        return resident_parts(self.state)

    def parts(self, sample: MemorySample, *, on_host: int, update_bytes: int = 0) -> MemoryParts:
        """Return a rank's memory at the height of a job. `on_host` are bytes of activations on the
        host; `update_bytes` what the optimizer's step holds, where it comes beside.
        """
        rank = self.state
        # Under ZeRO `fsdp_walk` counts sums, those that are there from the start too.
        stay = rank.ranks.has_buckets and not rank.ranks.is_sharded
        gradients = rank.summed_bytes if stay else sample.gradient_bytes
        height = sample.peak_bytes - sample.gradient_bytes + gradients
        apart = (
            sample.saved_bytes + sample.gradient_bytes + sample.weight_bytes + sample.buffer_bytes
        )
        # What is left of the height: what the job itself allocates and frees.
        inside_job = sample.peak_bytes - apart
        parts = Counter(self.resident)
        parts["host_bytes"] += on_host
        parts["parameter_bytes"] += sample.weight_bytes
        parts["gradient_bytes"] += gradients
        parts["activation_bytes"] += sample.saved_bytes
        # The total is then resident + max(height, update_bytes): the job and the optimizer's step
        # never overlap in time.
        parts["transient_bytes"] += inside_job + max(0, update_bytes - height)
        parts["communication_bytes"] += sample.buffer_bytes
        return self._with_overheads(parts)

    def update_parts(self) -> MemoryParts:
        """Return a rank's memory in the optimizer's step, when all activations are gone."""
        rank = self.state
        parts = Counter(self.resident)
        # Where gradients' shards are on the host, fewer are left on the device.
        gradients = min(rank.summed_bytes, rank.update_bytes)
        parts["gradient_bytes"] += gradients
        parts["transient_bytes"] += rank.update_bytes - gradients
        return self._with_overheads(parts)

    def _with_overheads(self, parts: Counter[str]) -> MemoryParts:
        return with_overheads(
            MemoryParts(**parts),
            self.state.costs.profile,
            communicator_bytes=self.communicator_bytes,
        )


def walk_plan(
    plan: Plan, costs: CostCache, schedule: Schedule, weights: Mapping[int, StageLoad]
) -> Iterator[WalkedRank]:
    """Yield some pp ranks, each with its walk over its row of the job table; `weights` as in
    `plan_memory`.
    """
    edges = build_edges(costs.graph, plan)
    check_copies(plan, costs.graph)
    tied = tied_stages(plan, costs.graph)
    placed = PlacedStages(plan, costs, edges)
    for pp_rank, load in weights.items():
        rank = RankState(
            plan=plan,
            costs=costs.of_group(plan.device_groups[pp_rank]),
            pp_rank=pp_rank,
            stages={
                s: placed.jobs(s) for s, home in enumerate(plan.stage_to_pp_rank) if home == pp_rank
            },
            weights=load,
            tied=tied,
        )
        yield WalkedRank(
            state=rank,
            samples=_samples(rank, schedule, edges),
            communicator_bytes=communicator_bytes(rank, edges),
        )


def _samples(rank: RankState, schedule: Schedule, edges: Sequence[Edge]) -> Iterator[MemorySample]:
    plan = rank.plan
    row, home = schedule.jobs[rank.pp_rank], schedule.stage_to_pp_rank.__getitem__
    traffic = find_traffic(
        schedule.jobs,
        edges,
        home,
        rank.pp_rank,
        # gloo does not tell when a message has left, so its sender keeps it.
        keeps_sent=rank.costs.profile.cluster.device_type == "cpu",
        tp=lambda stage: plan.stage_degrees(stage)["tp"],
    )
    return walk_rank(
        row,
        rank.stages,
        home,
        receive_ahead=plan.receive_ahead,
        traffic=traffic,
        streams_keep=has_communicators(rank),
        keeps_gradient=rank.costs.execution.keeps_gradient,
    )


def _fullest(walked: WalkedRank, *, gap: int, left_out: int) -> MemoryParts:
    """Return a rank's memory at its fullest sample, with the most bytes of activations that lie on
    its host. Before job `gap` so many microbatches are left out of its row.
    """
    # Each microbatch's loss stays to the end of the step, also of those that are left out.
    losses = left_out * sum(stage.loss_bytes for stage in walked.state.stages.values())
    worst, on_host = None, 0
    for position, sample in enumerate(walked.samples):
        check_time()
        on_host = max(on_host, sample.host_bytes)
        if losses and position >= gap:
            sample = sample.with_more_saved(losses)
        if worst is None or sample.peak_bytes > worst.peak_bytes:
            worst = sample
    assert worst is not None, "every rank has jobs"
    # The optimizer's step comes when all activations are gone; it may be higher all the same.
    return walked.parts(worst, on_host=on_host, update_bytes=walked.state.update_bytes)
