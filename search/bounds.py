"""Bounds that need no stage boundaries: cheap reasons to leave a configuration out.

Time. Let T be the seconds of one microbatch's forward and backward through all blocks on one
rank's shards, m the microbatches, pp the pipeline ranks. Any schedule takes at least

    m T / pp                                   some rank does at least its share of the work
    m * (longest block)                        a block lies on one rank
    T                                          one microbatch passes every block
    T / (1 - (1 - 1/m)**pp)    vpp = 1         with L the step and p_s the seconds before stage
                                               s, p_s + m t_s <= L; so L - p_{s+1} >=
                                               (L - p_s)(1 - 1/m), and p_pp = T

Memory. Some rank holds at least its share of the parameters, and every block is held whole by
some rank that keeps at least one microbatch of it.

Each bound is below the cost model's own answer for every cut, so pruning by it is safe.
"""

from __future__ import annotations

import numpy as np

from costmodel.memory import stage_memory
from costmodel.stage import StageLoad
from search.space import Configuration
from search.stage_table import StageTable


def least_step_s(table: StageTable, configuration: Configuration) -> float:
    """Return a step time that no stage boundaries can beat."""
    m, pp = configuration.num_microbatches, configuration.pp
    forward = table.forward_s
    again = forward if configuration.recompute == "full" else 0.0
    block = forward + table.backward_s + again
    total = float(block.sum())
    bound = max(m * total / pp, m * float(block.max()), total)
    if configuration.vpp == 1:
        bound = max(bound, total / (1.0 - (1.0 - 1.0 / m) ** pp) if m > 1 else total)
    return bound


def least_peak_bytes(table: StageTable, configuration: Configuration) -> float:
    """Return bytes that the fullest rank of any stage boundaries needs at least."""
    load, profile = table.blocks, table.profile
    share = StageLoad(
        param_bytes=float(load.param_bytes.sum() - sum(size for _, _, size in table.ties))
        / configuration.pp,
        frozen_bytes=0.0,
    )
    replicas = configuration.dp * configuration.cp

    def memory(part: StageLoad, recompute: bool) -> float:
        return float(
            np.max(
                stage_memory(
                    part,
                    in_flight=1,
                    recompute=recompute,
                    dp=replicas,
                    zero_stage=configuration.zero,
                    profile=profile,
                ).total
            )
        )

    choices = {"none": (False,), "full": (True,), "mixed": (False, True)}[configuration.recompute]
    per_block = [
        np.asarray(
            stage_memory(
                load,
                in_flight=1,
                recompute=recompute,
                dp=replicas,
                zero_stage=configuration.zero,
                profile=profile,
            ).total
        )
        for recompute in choices
    ]
    return max(memory(share, False), float(np.min(per_block, axis=0).max()))
