"""Offload in the cost model: bytes against the dry run, seconds by hand."""

from __future__ import annotations

import pytest

from costmodel import CostCache, estimate
from costmodel.time.offload import HOST_BUCKET_BYTES, host_step_seconds, least_job_seconds
from planner.language.lowering.defaults import default_plan
from planner.language.schedule import build_schedule
from planner.language.schedule.timing.offloads import offloads_of
from planner.runtime.proofs.dryrun import dry_run
from planner.runtime.state.optimizers import host_optimizer
from profiles import load_profile
from profiles.devices import host_of
from profiles.hosts import REACHED_FRACTION
from tests.builders import tiny_models
from tests.captures import capture_module
from tests.cpu_profile import CpuProfile


def test_buckets_are_the_runtimes():
    assert HOST_BUCKET_BYTES == host_optimizer.BUCKET_BYTES


MANY = {"pp": 2, "num_microbatches": 6, "schedule": "fthenb"}


@pytest.mark.parametrize(
    ("layout", "activations"),
    [
        ({"num_microbatches": 2}, False),
        (MANY, True),
        pytest.param({**MANY, "recompute": "full"}, True, marks=pytest.mark.slow),
        ({"dp": 2, "num_microbatches": 2, "zero_stage": 3}, False),
    ],
    ids=str,
)
def test_bytes_are_those_of_the_dry_run(layout, activations):
    """M24: on every device within 1%; on its host within 1% too."""
    model = tiny_models()["gpt"]
    graph = capture_module(model.build(), model.batch(2), model.batch(3), name="gpt")
    costs = CostCache(graph, CpuProfile())
    plan = default_plan(graph, microbatch_size=8, **layout)
    stages = [s.model_copy(update={"activations_on_host": activations}) for s in plan.stages]
    plan = plan.model_copy(update={"optimizer_on_host": True, "stages": tuple(stages)})
    predicted = estimate(graph, costs.profile, plan, costs=costs).memory
    for pp_rank in range(plan.pp):
        rank = pp_rank * plan.dp * plan.tp
        run = dry_run(plan, graph, model.build, rank=rank, on_gloo=True)
        assert float(predicted[pp_rank].tensor_bytes) == pytest.approx(run.peak_bytes, rel=0.01)
        assert float(predicted[pp_rank].host_bytes) == pytest.approx(run.host_peak_bytes, rel=0.01)


def test_seconds_of_a_step_on_the_host():
    """1 GB of bf16 weights on a DGX A100, by hand."""
    profile = load_profile("a100-pcie-80gb")
    assert not any(fit.work.endswith(("device", "host")) for fit in profile.file.step_fits)
    host = host_of("NVIDIA A100 80GB PCIe")
    # fp32: 2 GB of gradients come down at 25 GB/s, 1 GB of weights goes up.
    down, up = 2e9 / 25e9, 1e9 / 25e9
    # AdamW passes 7 times over 2 GB; 2 GB are read and 1 GB written for the weights. 409.6 GB/s
    # are shared by the node's devices, and half of it is reached.
    share = host.memory_bytes_per_s * REACHED_FRACTION / profile.cluster.devices_per_node
    update = (7 * 2e9 + 2e9 + 1e9) / share
    assert host.memory_bytes_per_s == pytest.approx(409.6e9)
    num_buckets = -(-2e9 // HOST_BUCKET_BYTES)
    seconds = host_step_seconds(
        profile, param_bytes=1e9, num_tensors=100, sharded=False, precision="bf16"
    )
    assert seconds == pytest.approx(max(down, update, up) + (down + up) / num_buckets)
    sharded = host_step_seconds(
        profile, param_bytes=1e9, num_tensors=100, sharded=True, precision="bf16"
    )
    assert sharded == pytest.approx(7 * 2e9 / share)


def test_copies_lengthen_the_jobs_they_run_beside():
    """Each forward but the first has the one before it leaving; and so back."""
    profile = load_profile("a100-pcie-80gb")
    row = build_schedule("fthenb", pp=1, vpp=1, num_microbatches=4).jobs[0]
    copy_s = 1e6 / profile.host.link_bytes_per_s
    found = least_job_seconds(profile, len(row), offloads_of(row, {0}), {0: 1e6})
    #        F0 F1 F2 F3 B0 B1 B2 B3: m leaves at m + 1, arrives at m + 3
    assert found == pytest.approx([0, *[copy_s] * 6, 0])


def test_a_slow_link_is_a_part_of_the_step(monkeypatch):
    """A thousandth of the rate: copies are longer than the jobs they run beside."""
    model = tiny_models()["gpt"]
    graph = capture_module(model.build(), model.batch(2), model.batch(3), name="gpt")
    plan = default_plan(graph, **MANY, microbatch_size=8)
    stages = [s.model_copy(update={"activations_on_host": True}) for s in plan.stages]
    leaves = plan.model_copy(update={"stages": tuple(stages)})
    profile = load_profile("a100-pcie-80gb")
    without = estimate(graph, profile, plan)
    host = profile.host
    slow = host.model_copy(update={"link_bytes_per_s": host.link_bytes_per_s / 1000})
    monkeypatch.setattr(type(profile), "host", property(lambda self: slow))
    there = estimate(graph, profile, leaves)
    assert without.path.parts["offload_s"] == 0
    # On either rank seven jobs have 1 to 6 microbatches' copies beside them; none hides much.
    assert there.path.parts["offload_s"] > 0.5 * there.step_s
    assert there.step_s == pytest.approx(
        there.timeline.makespan_s + there.path.parts["optimizer_s"], rel=0.05
    )
