"""What a profile measured beside messages: FSDP2's own work, and ranks that wait for each other."""

import pytest

from costmodel import CostCache, estimate
from costmodel.time.communication import data_parallel_seconds
from costmodel.time.plan_price import price_plan
from costmodel.time.tied import tied_pair_seconds
from planner.language.plan.replication import Replication
from profiles import Group, Profile, load_profile
from profiles.records import StepFit, WaitFit
from tests.builders import tiny_models
from tests.captures import capture_module
from tests.costmodel.test_estimate import make_plan

FITS = {"zero_forward": 1.0, "zero_backward": 2.0, "zero_gather": 4.0, "zero_reduce": 10.0}
"""Seconds a block; a thousandth of it for each tensor."""


@pytest.fixture(scope="module")
def plain():
    """A shipped profile as if of CPUs, where nothing is hidden."""
    file = load_profile("h100-sxm5-80gb").file
    cluster = file.cluster.model_copy(update={"device_type": "cpu"})
    return Profile(file.model_copy(update={"cluster": cluster}))


def _with(profile, **fields):
    return Profile(profile.file.model_copy(update=fields))


@pytest.fixture(scope="module")
def measured(plain):
    fits = tuple(
        StepFit(
            work=work,
            s_per_call=seconds,
            s_per_tensor=seconds / 1000,
            s_per_byte=0.0,
            relative_error=0.0,
            origin="measured",
            detail="test",
        )
        for work, seconds in FITS.items()
    )
    return _with(plain, step_fits=fits)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_fsdps_own_work_comes_with_its_blocks(plain, measured, zero):
    """E: 3 blocks of 6 tensors in all; hooks in every job, copies where something is moved."""
    replication = Replication(replicas=2, zero_stage=zero)
    asked = {"param_bytes": 1e3, "num_blocks": 3, "num_tensors": 6}
    bare = data_parallel_seconds(plain, Group(ranks_per_node=2), replication, **asked)
    full = data_parallel_seconds(measured, Group(ranks_per_node=2), replication, **asked)
    each = 3 + 6 / 1000
    assert full.host_forward_s == pytest.approx(each * FITS["zero_forward"])
    assert full.host_backward_s == pytest.approx(each * FITS["zero_backward"])
    gather = each * FITS["zero_gather"]
    reduce = each * (FITS["zero_reduce"] - FITS["zero_backward"])
    more = {
        name: getattr(full, name) - getattr(bare, name)
        for name in ("forward_s", "backward_s", "first_forward_s", "last_backward_s")
    }
    expected = {
        1: (0, 0, gather, reduce),
        2: (0, reduce, gather, 0),
        3: (gather, gather + reduce, 0, 0),
    }[zero]
    # (The copies' passes over memory, which `bare` has in their stead, take nanoseconds.)
    assert tuple(more.values()) == pytest.approx(expected, abs=1e-6)
    hidden = full.hidden_behind(measured, forward_s=1.0, backward_s=1.0, num_pieces=3)
    assert hidden.forward_s == pytest.approx(full.forward_s + full.host_forward_s)


def test_collectives_wait_for_the_slowest_rank(plain):
    """E: so much a call, and a part of the compute before it; nothing where nothing is sent."""
    wait = WaitFit(s_per_call=1e-3, s_per_compute_s=0.5, origin="measured", detail="test")
    waiting = _with(plain, collective_wait=wait)
    assert waiting.wait_seconds(2.0, 3) == pytest.approx(1.003)
    assert waiting.wait_seconds(2.0, 0) == 0.0
    around = _with(plain, collective_wait=wait.model_copy(update={"s_per_redistribution": 1e-2}))
    assert around.wait_seconds(2.0, 3) == waiting.wait_seconds(2.0, 3)
    assert around.wait_seconds(2.0, 3, inside=True) == pytest.approx(1.033)
    # Calls that follow each other at once, as of 2 s of compute in 3 with 8 s before each.
    bunched = _with(plain, collective_wait=wait.model_copy(update={"least_compute_s": 8.0}))
    assert bunched.wait_seconds(2.0, 3) == pytest.approx(1.0 + 1e-3 * 2 / 8)
    assert bunched.wait_seconds(80.0, 3) == pytest.approx(40.003)
    asked = {"param_bytes": 1e3, "num_blocks": 3}
    zeros = {zero: Replication(replicas=2, zero_stage=zero) for zero in (1, 3)}
    raw = data_parallel_seconds(waiting, Group(ranks_per_node=2), zeros[3], **asked)
    amid = raw.hidden_behind(waiting, forward_s=2.0, backward_s=4.0, num_pieces=3)
    assert amid.forward_s - raw.forward_s == pytest.approx(1.003)
    assert amid.backward_s - raw.backward_s == pytest.approx(2.003)
    zero_1 = data_parallel_seconds(waiting, Group(ranks_per_node=2), zeros[1], **asked)
    assert zero_1.hidden_behind(waiting, forward_s=2.0, backward_s=4.0, num_pieces=3).forward_s == 0


def test_only_split_blocks_wait(plain):
    """E: tp plans grow by it, and one device by nothing."""
    model = tiny_models()["gpt"]
    graph = capture_module(model.build(), model.batch(2), model.batch(3), name="gpt")
    wait = WaitFit(s_per_call=1e-3, s_per_compute_s=0.5, origin="measured", detail="test")
    waiting = _with(plain, collective_wait=wait)

    def tp_comm(profile, **layout):
        costs = CostCache(graph, profile)
        return estimate(graph, profile, make_plan(graph, **layout), costs=costs).path.parts[
            "tp_comm_s"
        ]

    assert tp_comm(waiting) == tp_comm(plain) == 0.0
    assert tp_comm(waiting, tp=2) > tp_comm(plain, tp=2) + 1e-3


def test_stages_that_share_a_parameter_sum_its_gradient(plain):
    """E: one exchange a step on both ranks; none where the stages lie on one rank; halves under
    ZeRO with two replicas."""
    pytest.importorskip("transformers")
    model = tiny_models()["hf-gpt2"]
    graph = capture_module(model.build(), model.batch(2), model.batch(3), name="gpt2")
    costs = CostCache(graph, plain)
    whole = price_plan(make_plan(graph, pp=2), costs).once.tied_s
    assert whole[0] == whole[1] > 0
    assert price_plan(make_plan(graph), costs).once.tied_s == (0.0,)
    shared = [t for t in graph.params if sum(t.name in block.params for block in graph.blocks) > 1]
    num_bytes = float(sum(t.bytes_at(1) for t in shared))
    # Ranks 0 and 6 of a node of 8 are on that node.
    inside = tied_pair_seconds(plain, num_bytes=1e6, ranks_apart=1)
    assert tied_pair_seconds(plain, num_bytes=1e6, ranks_apart=6) == inside
    assert whole[0] == tied_pair_seconds(plain, num_bytes=num_bytes, ranks_apart=1)
    sharded = price_plan(make_plan(graph, pp=2, dp=2, zero=1), costs).once.tied_s
    assert sharded[0] == tied_pair_seconds(plain, num_bytes=num_bytes / 2, ranks_apart=2)
