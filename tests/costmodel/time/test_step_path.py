"""A step by cause: parts add up, and each has the one cause that it is named after."""

from __future__ import annotations

import pytest

from costmodel import CostCache, estimate
from costmodel.time.plan_price import price_plan
from costmodel.time.step_path import StepPath
from profiles import load_profile
from tests.builders import tiny_models
from tests.captures import capture_module
from tests.costmodel.test_estimate import FreeLinks, OneFlopASecond, make_plan


def step_path(plan, costs):
    return estimate(costs.graph, costs.profile, plan, costs=costs).path


@pytest.fixture(scope="module")
def graph():
    model = tiny_models()["gpt"]
    return capture_module(model.build(), model.batch(2), model.batch(3), name="gpt")


@pytest.fixture(scope="module")
def profile():
    return load_profile("h100-sxm5-80gb")


PLANS = [
    {},
    {"dp": 2, "zero": 3},
    {"tp": 2},
    {"pp": 3},
    {"pp": 4, "recompute": "full"},
    {"pp": 2, "dp": 2, "zero": 1, "recompute": "selective"},
]


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("choices", PLANS, ids=str)
def test_causes_add_up_to_the_step(graph, profile, choices, clips):
    costs = CostCache(graph, profile, clips_gradients=clips)
    plan = make_plan(graph, **choices)
    found = step_path(plan, costs)
    assert found.step_s == pytest.approx(estimate(graph, profile, plan, costs=costs).step_s)
    assert min(found.parts.values()) >= -1e-15
    assert found.rank_work_s[found.bottleneck] == max(found.rank_work_s)
    assert (found.clipping_s > 0) == clips


def test_a_slow_stage_is_imbalance_and_not_a_bubble(graph, profile):
    """Cuts of one stage with more blocks: what others wait for it has the stage's name."""
    machine = OneFlopASecond(profile)
    costs = CostCache(graph, machine)
    plan = make_plan(graph, pp=2, m=16)
    stages = [
        plan.stages[0].model_copy(update={"last_block": 1}),
        plan.stages[1].model_copy(update={"first_block": 2}),
    ]
    uneven = plan.model_copy(update={"stages": tuple(stages)})
    found = step_path(uneven, costs)
    work = sum(price_plan(uneven, costs).rank_work().values())
    assert found.bottleneck == int(work.argmax())
    assert found.imbalance_s == pytest.approx(work.max() - work.mean(), rel=1e-6)
    assert found.imbalance_s > step_path(plan, costs).imbalance_s
    assert found.bottleneck == 1
    # Ahead of the slow stage's 16 microbatches comes one forward of the fast one; its last backward
    # runs beside weight gradients of the slow one.
    jobs = price_plan(uneven, costs).job_seconds
    drain_s = jobs.backward_input_s[0] + jobs.backward_weight_s[0]
    hidden_s = jobs.last_sends_ahead_s[1]
    assert hidden_s > drain_s
    assert found.fill_drain_s == pytest.approx(jobs.forward_s[0], rel=1e-6)


def test_messages_are_what_free_links_save(graph, profile):
    """The step without messages is the step less the messages: nothing else in it changes."""
    costs, free = CostCache(graph, profile), CostCache(graph, FreeLinks(profile))
    plan = make_plan(graph, pp=3)
    found, none = step_path(plan, costs), step_path(plan, free)
    assert found.messages_s > 0
    assert none.messages_s == 0
    assert none.fill_drain_s == pytest.approx(found.fill_drain_s)
    assert found.step_s - none.step_s == pytest.approx(
        found.messages_s + found.inputs_s - none.inputs_s, rel=1e-6
    )


def test_one_rank_has_work_alone(graph, profile):
    found = step_path(make_plan(graph), CostCache(graph, profile))
    assert (found.imbalance_s, found.fill_drain_s, found.messages_s) == (0, 0, 0)
    assert found.to_dict()["parts"]["compute_s"] > 0


def test_uneven_recomputation_is_imbalance(graph, profile):
    plan = make_plan(graph, pp=2)
    stages = (plan.stages[0].model_copy(update={"recompute": "full"}), plan.stages[1])
    mixed = plan.model_copy(update={"stages": stages})
    costs = CostCache(graph, profile)
    work = price_plan(mixed, costs).rank_work()
    assert work["recompute_s"][0] > 0
    assert work["recompute_s"][1] == 0
    assert step_path(mixed, costs).work_s["recompute_s"] == pytest.approx(
        work["recompute_s"][0] / 2
    )


def test_the_step_is_the_sum_of_causes_and_the_bottleneck_the_rank_with_the_most_work():
    """Rank 1 works 7 + 2 s, rank 0 5 + 1 s; by kind the mean is 6 + 1.5 s, and 1.5 s imbalance."""
    path = StepPath(
        work_s={"compute_s": 6.0, "tp_comm_s": 1.5}, imbalance_s=1.5, fill_drain_s=0.5,
        messages_s=0.25, inputs_s=0.125, clipping_s=0.0625,
        by_rank_s={"compute_s": (5.0, 7.0), "tp_comm_s": (1.0, 2.0)},
    )  # fmt: skip
    assert path.rank_work_s == (6.0, 9.0)
    assert path.bottleneck == 1
    assert path.step_s == 9.9375
    assert [*path.parts] == [
        "compute_s", "tp_comm_s", "imbalance_s", "fill_drain_s", "messages_s", "inputs_s",
        "clipping_s",
    ]  # fmt: skip
    assert path.to_dict() == {
        "parts": path.parts,
        "bottleneck_pp_rank": 1,
        "by_pp_rank_s": {"compute_s": [5.0, 7.0], "tp_comm_s": [1.0, 2.0]},
    }
