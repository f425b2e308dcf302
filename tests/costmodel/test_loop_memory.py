"""Loops over experts that are told: bytes of a dry run, with weights of modules put together."""

from __future__ import annotations

import pytest

from costmodel.cache import CostCache
from costmodel.estimate import estimate
from planner.language.lowering.defaults import default_plan
from planner.runtime.proofs.dryrun import dry_run
from tests.costmodel.test_frozen import CpuProfile
from tests.runtime.test_loops import build, graph_of

LAYOUTS = {
    "one": {},
    "dp": {"dp": 2},
    "tp": {"tp": 2},
    "full": {"recompute": "full"},
    "pp": {"pp": 2},
}


@pytest.mark.parametrize("name", ["of_qwen2_moe", "of_stacks"])
def test_bytes_are_those_of_the_dry_run(name):
    graph = graph_of(name)
    costs = CostCache(graph, CpuProfile())
    for label, layout in LAYOUTS.items():
        plan = default_plan(graph, microbatch_size=64, num_microbatches=2, **layout)
        for pp_rank, memory in enumerate(estimate(graph, costs.profile, plan, costs=costs).memory):
            rank = pp_rank * plan.world_size // plan.pp
            run = dry_run(plan, graph, lambda: build(name), rank=rank, on_gloo=True)
            # As far as for routing that is written with a sort, whose rows are as narrow.
            assert float(memory.tensor_bytes) == pytest.approx(run.peak_bytes, rel=0.11), label
