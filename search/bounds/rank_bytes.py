"""The bytes of a rank as bounds and cuts read them: the cost model's bound of a configuration."""

from __future__ import annotations

from costmodel import StageLoad
from costmodel.memory.bound import RankBound
from planner.plan import Recompute
from search.space.shapes import Configuration
from search.stages.stage_table import StageTable


def rank_bound(
    table: StageTable, config: Configuration, load: StageLoad, recompute: Recompute = "none"
) -> RankBound:
    """Return the bytes of a configuration's rank (or ranks, of arrays) that has a load."""
    return RankBound(
        load=load,
        num_microbatches=config.num_microbatches,
        recompute=recompute,
        replicas=config.replication.replicas,
        copies=config.replication.copies,
        zero=config.zero,
        profile=table.profile,
        precision=table.precision,
        on_host=table.on_host,
        copies_update=table.costs.execution.copies_update,
        sum_factor=table.costs.execution.sum_factor(table.precision),
    )
