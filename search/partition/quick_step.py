"""The step time of a cut configuration by one simulation, without making a plan.

The estimate's own costs of stages (`costmodel.time.stage_costs`) and its simulation, without
memory and named parts: about a tenth of the time. A test holds the two equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from costmodel import StageCosts
from costmodel.time.clipping import last_rank, norm_sum_seconds
from costmodel.time.offload import least_job_seconds
from costmodel.time.tied import tied_pair_seconds
from costmodel.topology import pipeline_group
from planner.plan import Recompute
from planner.schedule import job_table, simulate, stage_to_pp_rank
from search.partition.chain_problem import Cut
from search.space.configuration import Configuration
from search.space.job_tables import copies_of
from search.stages.rank_stages import RankStages
from search.stages.stage_table import StageTable


def quick_step_s(
    config: Configuration, table: StageTable, cut: Cut, recomputed: tuple[Recompute, ...]
) -> float:
    """Return the simulated step time of a configuration cut this way, whose blocks recompute so."""
    ranks = RankStages(table=table, configuration=config)
    stages = ranks.cut(cut.cuts)
    key = (
        config.schedule,
        config.pp,
        config.vpp,
        config.num_microbatches,
        config.degrees,
        config.zero // 2,
        # ZeRO 0 and 1 differ after the last job, in what is sent ahead of weight gradients, and
        # in FSDP2's own work in every job, where that was measured.
        config.replication.is_sharded,
        float(np.sum(stages.exposed.forward_s)),
        float(np.sum(stages.exposed.backward_s)),
        cut.cuts,
        recomputed,
    )
    if key not in table.rank_ends:
        table.rank_ends[key] = _simulated_rank_ends(config, table, stages, recomputed)
    homes = np.asarray(stage_to_pp_rank(config.schedule, config.pp, config.vpp))
    param_bytes, num_params = stages.runs.params
    # After its last job a rank sums its gradients with its replicas, and updates its weights.
    ready, updates = [], []
    for rank, end in enumerate(table.rank_ends[key]):
        mine = homes == rank
        ready.append(end + float(stages.after_s[mine].sum()))
        held = float(param_bytes[mine].sum()), float(num_params[mine].sum())
        updates.append(stages.prices.update(*held))
    # Stages that share a weight sum its gradient between their ranks.
    for i, j, size in table.ties:
        first, second = homes[np.searchsorted(cut.cuts, (i, j), side="right") - 1].tolist()
        if first != second:
            # Ranks are numbered pp-major: stages on neighbouring pp ranks lie a mesh apart.
            ranks_apart = abs(second - first) * config.degrees.num_ranks
            seconds = tied_pair_seconds(
                table.profile,
                num_bytes=ranks.replication.gradient_bytes(size),
                ranks_apart=ranks_apart,
            )
            ready[first] += seconds
            ready[second] += seconds
    # Clipping needs the norm over all parameters: every rank waits for the last one.
    clips = [update.clip for update in updates] if table.costs.clips_gradients else []
    world = config.degrees.num_ranks * config.pp
    norm_sum_s = norm_sum_seconds(table.profile, world) if clips else 0.0
    optimizer_s = [update.optimizer_s for update in updates]
    last, clipping_s = last_rank(ready, optimizer_s, clips, norm_sum_s=norm_sum_s)
    first_rank = [
        block
        for stage in np.flatnonzero(homes == homes[0])
        for block in range(cut.cuts[stage], cut.cuts[stage + 1])
    ]
    # All jobs wait, directly or not, for the first stage's copies of the batch.
    inputs_s = table.inputs_s(first_rank, config.num_microbatches)
    return inputs_s + ready[last] + clipping_s + optimizer_s[last]


def _simulated_rank_ends(
    config: Configuration, table: StageTable, stages: StageCosts, recomputed: Sequence[Recompute]
) -> tuple[float, ...]:
    """Return when each pp rank ends its last job."""
    pipeline = pipeline_group(table.profile.cluster, config.degrees, pp=config.pp)
    timeline = simulate(
        job_table(*config.pipeline),
        stages.job_seconds(recomputed, receive_s=stages.runs.receive_s(pipeline)),
        at_least=_copies_beside_jobs(config, table, stages, recomputed),
    )
    return timeline.rank_end_s


def _copies_beside_jobs(
    config: Configuration, table: StageTable, stages: StageCosts, recomputed: Sequence[Recompute]
) -> tuple[np.ndarray, ...] | None:
    """Return what copies of activations take beside each job of each rank, if there are any."""
    if not table.on_host.activations:
        return None
    runs = stages.runs
    kept = runs.chain.kept(runs.start, runs.end, recomputed)
    moved = dict(enumerate(kept.tolist()))
    rows = job_table(*config.pipeline).schedule.jobs
    found = copies_of(*config.pipeline)
    return tuple(
        least_job_seconds(table.profile, len(row), made, moved)
        for row, made in zip(rows, found, strict=True)
    )
