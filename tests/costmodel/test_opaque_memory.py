"""Modules that run as they are: bytes of a dry run, and a launch for each kernel inside."""

from __future__ import annotations

import pytest

from costmodel.cache import CostCache
from costmodel.estimate import estimate
from planner.language.lowering.defaults import default_plan
from planner.language.ops.flops import op_kernels
from planner.runtime.proofs.dryrun import dry_run
from profiles import load_profile
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


def test_the_host_launches_each_kernel_inside():
    """A tiny loop over experts takes as long as its launches, not as one op's."""
    graph = capture_module(Chain(PARTS["loop over experts"]), batch(2), batch(3))
    profile = load_profile("h100")
    plan = default_plan(graph, microbatch_size=2, num_microbatches=1)
    kernels = 0
    for block in graph.blocks:
        bound = graph.classes[block.class_index].bind(2)
        kernels += sum(sum(op_kernels(op, bound.tensor)) for op in bound.ops)
    assert kernels > 400
    assert estimate(graph, profile, plan).step_s > 0.9 * kernels * profile.launch_overhead_s
