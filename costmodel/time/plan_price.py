"""What each stage of a plan takes: the case of one cut of `costmodel.time.stage_costs`.

Stages may have meshes of their own, and then tp, dp and a replica's share of a microbatch differ
by stage; they may lie on groups of other devices, too.
The whole cut is priced under each mesh, and each stage takes its own mesh's entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from costmodel.cache import CostCache
from costmodel.time.communication import DataParallelSeconds
from costmodel.time.inputs import input_seconds
from costmodel.time.stage_costs.chain import Split, chain_costs
from costmodel.time.stage_costs.load import StageLoad
from costmodel.time.stage_costs.runs import Floats
from costmodel.time.stage_costs.stage_costs import StageCosts, cut_runs, pick, transfers
from costmodel.time.stage_costs.times import RecomputeTimes, RunTimes
from costmodel.time.step import OnceAStep, once_a_step
from costmodel.topology import pipeline_group, replica_mesh, way_out
from planner.language.lowering.experts import check_experts
from planner.language.plan import Plan
from planner.language.plan.replication import Replication
from planner.language.schedule.timing.job_seconds import JobSeconds
from profiles import Group


@dataclass(frozen=True, kw_only=True)
class PlanPrice:
    """Prices of a plan's stages; arrays have an entry for each stage, in stage order."""

    plan: Plan
    """The plan."""
    costs: CostCache
    """What its blocks cost on its devices."""
    times: RunTimes
    """Seconds of one microbatch on each stage."""
    again: RecomputeTimes
    """Seconds that recomputation adds to the backward of one microbatch on each stage."""
    load: StageLoad
    """Bytes of each stage."""
    meshes: tuple[StageCosts, ...]
    """For each stage the costs of all stages under its mesh."""
    exposed: DataParallelSeconds
    """What exchange with replicas adds to each stage's compute."""
    job_seconds: JobSeconds
    """Seconds of jobs and of transfers between stages."""
    once: OnceAStep
    """What is done once a step, by pp rank."""
    job_host_s: tuple[Floats, Floats]
    """Seconds in which each stage's device waits for its host about a forward or a backward job,
    beside what it waits in blocks."""
    job_waits_s: tuple[Floats, Floats]
    """Seconds in which a forward or a backward of each stage waits for a transfer that does not
    overlap."""

    @property
    def waited_s(self) -> Floats:
        """Seconds in which a microbatch's jobs of each stage wait for such transfers."""
        return np.add(*self.job_waits_s)

    def side_bytes(self, stage: int) -> int:
        """Return the shared non-differentiable inputs of a stage, for each microbatch."""
        at = self.plan.stages[stage]
        return self.meshes[stage].runs.chain.side_bytes(at.first_block, at.last_block + 1)

    def weights(self, pp_ranks: Iterable[int]) -> dict[int, StageLoad]:
        """Return the parameters of these ranks, of all stages of each together."""
        found, load = {}, self.load
        for pp_rank in pp_ranks:
            own = stages_of_rank(self.plan, pp_rank)
            found[pp_rank] = StageLoad(
                param_bytes=int(load.param_bytes[own].sum()),
                num_params=int(load.num_params[own].sum()),
                largest_param_bytes=int(load.largest_param_bytes[own].max()),
                spread_bytes=int(load.spread_bytes[own].sum()),
            )
        return found

    def rank_work(self) -> dict[str, np.ndarray]:
        """Return the seconds of each pp rank's jobs by kind, an entry for each rank.

        Copies of activations that are longer than the jobs beside them are not in it.
        """
        plan, times, exposed = self.plan, self.times, self.exposed
        m = plan.num_microbatches
        # Of m microbatches, those that are recomputed: all, or all but the last.
        again_m = np.array([m - (not stage.recompute_last) for stage in plan.stages])
        # Full recomputation runs the whole forward again: its host time and collectives, too.
        rerun_host, rerun_comm = again_m * self.again.host_s, again_m * self.again.comm_s
        host_s = times.host_forward_s + times.host_backward_s
        of_jobs_s = sum(self.job_host_s)
        by_stage = {
            "compute_s": m * (times.forward_s + times.backward_s - host_s),
            # Host time and collectives of the second run are reported with those of the first.
            "recompute_s": again_m * self.again.whole_s - rerun_host - rerun_comm,
            "host_s": m * (host_s + of_jobs_s) + rerun_host,
            "tp_comm_s": m * (times.comm_forward_s + times.comm_backward_s) + rerun_comm,
            "dp_comm_s": m * (exposed.forward_s + exposed.backward_s),
            "waited_s": m * self.waited_s,
        }
        own = [stages_of_rank(plan, rank) for rank in range(plan.pp)]
        return {
            name: np.array([float(np.asarray(seconds)[mine].sum()) for mine in own])
            for name, seconds in by_stage.items()
        }


def price_plan(plan: Plan, costs: CostCache) -> PlanPrice:
    """Return the prices of a plan's stages, each on one group of devices. Raises LayoutError where
    experts do not divide.
    """
    check_experts(costs.graph, plan.degrees)
    meshes = [
        (stage.device_group, plan.stage_degrees(s)["tp"]) for s, stage in enumerate(plan.stages)
    ]
    by_mesh = _costs_by_mesh(plan, costs, meshes)
    own = [by_mesh[mesh] for mesh in meshes]
    receive_s = _receive_seconds(plan, meshes, by_mesh)
    jobs = {
        mesh: costs_of_mesh.job_seconds(
            plan.recompute_by_block,
            receive_s=receive_s,
            recompute_last=[stage.recompute_last for stage in plan.stages],
        )
        for mesh, costs_of_mesh in by_mesh.items()
    }
    again = {
        mesh: costs_of_mesh.runs.recomputation(plan.recompute_by_block)
        for mesh, costs_of_mesh in by_mesh.items()
    }
    # The rank of the first stage copies the batch for all its stages before its first job.
    first = [plan.stages[s] for s in stages_of_rank(plan, plan.stages[0].pp_rank)]
    inputs_s = input_seconds(
        costs.of_group(plan.stages[0].device_group),
        [block for stage in first for block in stage.blocks],
        microbatch_size=plan.stage_microbatch_size(0),
        num_microbatches=plan.num_microbatches,
    )
    return PlanPrice(
        plan=plan,
        costs=costs,
        times=pick([stage.times for stage in own]),
        again=pick([again[mesh] for mesh in meshes]),
        load=pick([stage.runs.load for stage in own]),
        meshes=tuple(own),
        exposed=pick([stage.exposed for stage in own]),
        job_seconds=pick([jobs[mesh] for mesh in meshes]),
        once=once_a_step(
            costs,
            [costs.of_group(group) for group in plan.device_groups],
            own,
            plan.stage_to_pp_rank,
            num_ranks=plan.world_size,
            inputs_s=inputs_s,
        ),
        job_host_s=(
            np.array([stage.job_host_s[0][s] for s, stage in enumerate(own)]),
            np.array([stage.job_host_s[1][s] for s, stage in enumerate(own)]),
        ),
        job_waits_s=transfers(costs.execution, receive_s)[1],
    )


Mesh = tuple[str, int]
"""What stages of a plan may differ in: the group of devices and the tp degree."""


def _costs_by_mesh(plan: Plan, costs: CostCache, meshes: Sequence[Mesh]) -> dict[Mesh, StageCosts]:
    """Return the costs of all stages under each mesh that the plan has."""
    by_mesh: dict[Mesh, StageCosts] = {}
    cuts = [*(stage.first_block for stage in plan.stages), plan.stages[-1].last_block + 1]
    for s, mesh in enumerate(meshes):
        group, tp = mesh
        if mesh not in by_mesh:
            of_group = costs.of_group(group)
            degrees = replica_mesh(plan.stage_degrees(s))
            split = Split(
                degrees=degrees,
                microbatch_size=plan.stage_microbatch_size(s),
                layouts=tuple(
                    layout
                    for layout in plan.layouts
                    # A plan has layouts for each mesh of its stages: those of this mesh's tp are
                    # taken.
                    if degrees[layout.axis] > 1
                    and plan.degrees.with_own(layout.own_sizes)["tp"] == tp
                ),
                recomputed=tuple((choice.class_index, choice.ops) for choice in plan.recomputed),
                beside=plan.makes_beside,
                pieces=plan.gather_pieces,
                logit_rows=plan.logit_rows,
                polls=of_group.polls(plan.degrees, pp=plan.pp),
            )
            by_mesh[mesh] = StageCosts(
                runs=cut_runs(chain_costs(of_group, split), cuts),
                replication=Replication.of(plan, s),
            )
    return by_mesh


def _receive_seconds(
    plan: Plan, meshes: Sequence[Mesh], by_mesh: Mapping[Mesh, StageCosts]
) -> tuple[Floats, Floats]:
    """Return the transfers into each stage, and of its gradient back to the stage before.

    Ranks of a node gather what they were sent in pieces: those of the stage's own tp, on the way
    back those of the stage before.
    """
    groups = plan.device_groups
    inside, outside = {}, {}
    for mesh, costs_of_mesh in by_mesh.items():
        cluster = costs_of_mesh.runs.chain.costs.cluster
        inside[mesh] = pipeline_group(cluster, plan.degrees, pp=groups.count(mesh[0]))
        outside[mesh] = way_out(cluster)
    found: dict[tuple[Mesh, Group, int], tuple[Floats, Floats]] = {}
    there, back = [], []
    # Stage 0 has no stage before it; it stands in for that itself, and no job waits for its entry.
    for s, (mesh, before) in enumerate(zip(meshes, [meshes[0], *meshes[:-1]], strict=True)):
        # Stages on different groups of devices meet over the network between the groups.
        pp_group = inside[mesh] if before[0] == mesh[0] else outside[mesh]
        runs = by_mesh[mesh].runs
        for tp in (mesh[1], before[1]):
            if (mesh, pp_group, tp) not in found:
                found[mesh, pp_group, tp] = runs.receive_s(pp_group, to_tp=tp)
        there.append(found[mesh, pp_group, mesh[1]][0][s])
        back.append(found[mesh, pp_group, before[1]][1][s])
    return np.array(there), np.array(back)


def stages_of_rank(plan: Plan, pp_rank: int) -> list[int]:
    """Return the stages of a pp rank."""
    return [s for s, stage in enumerate(plan.stages) if stage.pp_rank == pp_rank]
