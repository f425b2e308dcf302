"""M16: what clipping gradients and loading a batch add to a step, by hand and in their limits."""

from dataclasses import replace

import pytest

from costmodel import CostCache, estimate
from costmodel.time.clipping import NORM_CALLS, ClipSeconds, clip_seconds, last_rank
from costmodel.time.inputs import input_seconds
from planner.language.lowering.defaults import default_plan
from profiles import load_profile
from tests.builders import tiny_models
from tests.captures import capture_module
from tests.search.machine import Machine


@pytest.fixture(scope="module")
def graph():
    model = tiny_models()["gpt"]
    return capture_module(model.build(), model.batch(2), model.batch(3), name="gpt")


def step(graph, machine, *, clips, **degrees):
    plan = default_plan(graph, **degrees)
    return estimate(graph, machine, plan, costs=CostCache(graph, machine, clips_gradients=clips))


def test_one_device_reads_its_gradients_once_and_scales_them(graph):
    """Three passes over the gradients and a few launches; nobody to wait for."""
    machine = Machine(launch_overhead_s=2e-6)
    without, clipped = (step(graph, machine, clips=clips) for clips in (False, True))
    num_bytes = sum(t.bytes_at(1) for t in graph.params if t.requires_grad)
    expected = 3 * num_bytes / machine.bytes_per_s + NORM_CALLS * 2e-6
    assert without.path.parts["clipping_s"] == 0
    assert clipped.path.parts["clipping_s"] == pytest.approx(expected)
    assert clipped.step_s - without.step_s == pytest.approx(expected)


def test_shards_are_clipped_by_their_owners(graph):
    """ZeRO's ranks hold half of the gradients each; all sum one number."""
    machine = Machine()
    whole = step(graph, machine, clips=True, dp=2).path.parts["clipping_s"] - machine.alpha_s * 2
    shard = step(graph, machine, clips=True, dp=2, zero_stage=1).path.parts["clipping_s"]
    assert shard - machine.alpha_s * 2 == pytest.approx(whole / 2, rel=1e-3)


def test_endless_bandwidth_leaves_no_clipping(graph):
    machine = Machine(bytes_per_s=1e24, intra_bytes_per_s=1e30, alpha_s=0.0)
    assert step(graph, machine, clips=True, dp=2, pp=2).path.parts["clipping_s"] == pytest.approx(
        0.0
    )


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("degrees", [{"pp": 2, "num_microbatches": 4}, {"dp": 2, "pp": 3}])
def test_the_last_optimizer_job_ends_the_step(graph, clips, degrees):
    """A rank's job follows its own sums, with clipping the norm of all ranks."""
    found = step(graph, Machine(launch_overhead_s=2e-6), clips=clips, **degrees)
    jobs = found.timeline.step_jobs_s
    ends = [rank_jobs[-1][1] for rank_jobs in jobs]
    assert max(ends) + found.path.parts["inputs_s"] == pytest.approx(found.step_s, rel=1e-12)
    begins = [rank_jobs[0][0] for rank_jobs in jobs]
    norms_are_there = max(found.timeline.rank_end_s)
    # The last stage is the first to be done: its optimizer runs beside backwards of the others.
    assert (min(begins) > norms_are_there) == clips
    assert begins[-1] >= found.timeline.rank_end_s[-1]


def test_everybody_waits_for_the_last_gradient():
    """Rank 1 has its gradients last (9 + 1), then rank 0's scaling and update (2 + 5) are
    longer than its own (1 + 3): 10 + 0.5 + 7 in all.
    """
    clips = [ClipSeconds(norm_s=2, scale_s=2), ClipSeconds(norm_s=1, scale_s=1)]
    last, seconds = last_rank([7.0, 9.0], [5.0, 3.0], clips, norm_sum_s=0.5)
    assert (last, 9.0 + seconds + 3.0) == (1, 17.5)
    assert last_rank([7.0, 9.0], [5.0, 2.0], [], norm_sum_s=0.5) == (0, 0.0)


def test_shards_on_the_host_are_read_at_its_pace():
    profile = load_profile("h100-sxm5-80gb")
    there, here = (
        clip_seconds(profile, gradient_bytes=1e9, num_tensors=1, on_host=on_host)
        for on_host in (True, False)
    )
    assert there.scale_s > 20 * here.scale_s


def test_the_first_stage_waits_for_its_tokens(graph):
    """Token ids and labels of all microbatches on one device; with a pipeline the first stage
    copies the ids alone, and a CPU has everything in its memory.
    """
    machine = Machine()
    size, m = 2, 4
    ids, labels = (graph.tensor[name].bytes_at(size) for name in graph.batch_inputs)
    single = step(graph, machine, clips=False, microbatch_size=size, num_microbatches=m)
    two = step(graph, machine, clips=False, microbatch_size=size, num_microbatches=m, pp=2)
    link = machine.host.link_bytes_per_s
    assert single.path.parts["inputs_s"] == pytest.approx(
        machine.alpha_s + m * (ids + labels) / link
    )
    assert two.path.parts["inputs_s"] == pytest.approx(machine.alpha_s + m * ids / link)
    assert single.step_s == pytest.approx(single.path.parts["inputs_s"] + single.timeline.makespan_s
                                       + single.path.parts["optimizer_s"])  # fmt: skip

    class OnCpu(Machine):
        @property
        def cluster(self):
            return replace(super().cluster, device_type="cpu")

    costs = CostCache(graph, OnCpu())
    everything = range(len(graph.blocks))
    assert input_seconds(costs, everything, microbatch_size=2, num_microbatches=4) == 0
