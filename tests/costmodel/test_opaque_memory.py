"""Bytes of modules that run as they are: predicted, and of a dry run."""

from __future__ import annotations

import pytest

from costmodel.cache import CostCache
from costmodel.estimate import estimate
from planner.plan.defaults import default_plan
from planner.runtime.check.dryrun import dry_run
from tests.captures import capture_module
from tests.costmodel.test_frozen import CpuProfile
from tests.opaque_models import PARTS, Chain, batch

LAYOUTS = {
    "one": {},
    "dp": {"dp": 2},
    "tp": {"tp": 2},
    "full": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "pp": {"pp": 2},
}


@pytest.mark.parametrize("what", PARTS)
def test_bytes_are_those_of_the_dry_run(what):
    graph = capture_module(Chain(PARTS[what]), batch(2), batch(3))
    costs = CostCache(graph, CpuProfile())
    for name, layout in LAYOUTS.items():
        plan = default_plan(graph, microbatch_size=8, num_microbatches=2, **layout)
        parts = estimate(graph, costs.profile, plan, costs=costs).memory
        for pp_rank, memory in enumerate(parts):
            rank = pp_rank * plan.world_size // plan.pp
            run = dry_run(plan, graph, lambda: Chain(PARTS[what]), rank=rank, on_gloo=True)
            assert float(memory.tensor_bytes) == pytest.approx(run.peak_bytes, rel=0.01), name
