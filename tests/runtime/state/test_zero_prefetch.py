"""ZeRO 3 gathers a block's weights where they are used, and nowhere else."""

from __future__ import annotations

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

import planner
from planner.language.graph import ModelGraph
from planner.language.lowering.defaults import default_plan
from tests.builders import MlpWithTarget, mlp_batch
from tests.captures import capture_tiny
from tests.spawn import run_ranks

MICROBATCHES = 3


def gathers_of_a_step(graph: ModelGraph) -> tuple[int, int]:
    """How often weights are gathered in a step, and how many blocks have weights."""
    plan = default_plan(graph, dp=2, zero_stage=3, num_microbatches=MICROBATCHES, microbatch_size=2)
    module = MlpWithTarget()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = planner.apply(plan, module, optimizer=optimizer)
    engine.step(mlp_batch(12))
    gather, count = groups.foreach_all_gather, 0

    def counting(*given, **settings):
        nonlocal count
        count += 1
        return gather(*given, **settings)

    groups.foreach_all_gather = counting
    try:
        engine.step(mlp_batch(12))
    finally:
        groups.foreach_all_gather = gather
    engine.close()
    return count, sum(bool(block.params) for block in graph.blocks)


def test_nothing_is_gathered_in_vain():
    """In a backward, a stage's first block would fetch the last block of the microbatch before."""
    for count, blocks in run_ranks(gathers_of_a_step, 2, capture_tiny("mlp")):
        # Of each microbatch all blocks in the forward, and all in the backward.
        assert count == 2 * MICROBATCHES * blocks
