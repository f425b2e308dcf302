"""The step time of a cut configuration by one simulation, without making a plan.

The costs of its stages go where those of a plan's go (`costmodel.time.step`), without memory and
named parts: about a tenth of an estimate's time. What is the same for other cuts of a search, when
ranks end their last jobs, is simulated once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from costmodel import StageCosts
from costmodel.time.step import copies_beside_jobs, once_a_step
from costmodel.topology import pipeline_group
from planner.language.plan import Recompute
from planner.language.schedule.registry import stage_to_pp_rank
from planner.language.schedule.timing.job_table import job_table
from planner.language.schedule.timing.simulate import simulate
from profiles import Group
from search.partition.chain_problem import Cut
from search.space.configuration import Configuration
from search.stages.rank_stages import RankStages
from search.stages.stage_table import StageTable


def quick_step_s(
    config: Configuration, table: StageTable, cut: Cut, recomputed: tuple[Recompute, ...]
) -> float:
    """Return the simulated step time of a configuration cut this way, whose blocks recompute so."""
    stages = RankStages(table=table, configuration=config).cut(cut.cuts)
    # However shards are copied, ranks of a stage have the same neighbours in other stages.
    pipeline = pipeline_group(table.costs.cluster, config.degrees, pp=config.pp)
    key = (
        config.pipeline,
        pipeline,
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
        table.rank_ends[key] = _simulated_rank_ends(config, table, stages, recomputed, pipeline)
    homes = stage_to_pp_rank(config.schedule, config.pp, config.vpp)
    first_rank = [
        block
        for stage, home in enumerate(homes)
        if home == homes[0]
        for block in range(cut.cuts[stage], cut.cuts[stage + 1])
    ]
    once = once_a_step(
        table.costs,
        [table.costs] * config.pp,
        [stages] * len(homes),
        homes,
        num_ranks=config.degrees.num_ranks * config.pp,
        inputs_s=table.inputs_s(first_rank, config.num_microbatches),
    )
    return once.last_rank(table.rank_ends[key]).step_s


def _simulated_rank_ends(
    config: Configuration,
    table: StageTable,
    stages: StageCosts,
    recomputed: Sequence[Recompute],
    pipeline: Group,
) -> tuple[float, ...]:
    """Return when each pp rank ends its last job; `pipeline` are ranks of neighbouring stages."""
    jobs = job_table(*config.pipeline)
    on_host = stages.runs.kept(recomputed).tolist() if table.on_host.activations else []
    timeline = simulate(
        jobs,
        stages.job_seconds(recomputed, receive_s=stages.runs.receive_s(pipeline)),
        at_least=copies_beside_jobs([table.costs] * config.pp, jobs, dict(enumerate(on_host))),
    )
    return timeline.rank_end_s
