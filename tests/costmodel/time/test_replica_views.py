"""Issue 19, point 5: replicas of one stage on unlike devices, with equal parts and with shares."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel.estimate import (
    cost_cache,
    estimate,
    plan_job_seconds,
    rank_bytes_by_group,
    step_seconds,
)
from costmodel.time.plan_price import price_plan
from costmodel.time.replica_views import replica_views
from planner.cluster import Link, Tier
from planner.errors import PlanError
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from profiles.profile import DeviceGroup
from tests.search.machine import Machine
from tests.search.test_referee import graph_of

BETWEEN = Link(name="between", alpha_s=1e-4, beta_s_per_byte=1e-6)
ONE = Machine(name="one", context_bytes=0.0, devices_per_node=2, flop_per_s=1e9, bytes_per_s=1e9)


def cluster(*speeds: float, devices: int = 2) -> Machine:
    """Groups of as many devices, so many times as fast as ONE."""
    groups = []
    for name, speed in zip("abcd", speeds, strict=False):
        machine = replace(
            ONE,
            name=name,
            flop_per_s=ONE.flop_per_s * speed,
            bytes_per_s=ONE.bytes_per_s * speed,
            tiers=(Tier(devices=devices, link=BETWEEN),),
        )
        groups.append(DeviceGroup(name=name, profile=machine, num_devices=devices))
    return replace(groups[0].profile, name="several", groups=tuple(groups))


def on(groups: list[str], *, shares: tuple[int, ...] = (), model="equal", **choices) -> Plan:
    """A plan whose stages lie on these groups."""
    plan = default_plan(graph_of(model), **choices)
    data = plan.model_dump(mode="json")
    for stage, group in zip(data["stages"], groups, strict=True):
        stage["device_group"] = group
    return Plan.model_validate({**data, "shares": shares})


def step_s(plan: Plan, machine: Machine) -> float:
    costs = cost_cache(graph_of("equal"), machine, plan.world_size)
    seconds = step_seconds(plan, costs)
    assert seconds == estimate(costs.graph, machine, plan, costs=costs).step_s
    return seconds


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_equal_groups_are_one_with_a_tier(zero):
    """Two groups of two devices, linked by `between`, are four devices in domains of two."""
    choices = {"dp": 4, "microbatch_size": 2, "num_microbatches": 2, "zero_stage": zero}
    alone = replace(ONE, tiers=(Tier(devices=2, link=BETWEEN),))
    expected = step_s(on([""], **choices), alone)
    assert step_s(on(["a+b"], **choices), cluster(1.0, 1.0)) == pytest.approx(expected, rel=1e-12)


def test_the_slowest_replica_sets_the_pace():
    choices = {"dp": 4, "microbatch_size": 2, "num_microbatches": 2}
    mixed, both = cluster(4.0, 1.0), cluster(1.0, 1.0)
    assert step_s(on(["a+b"], **choices), mixed) == step_s(on(["a+b"], **choices), both)
    assert step_s(on(["b+a"], **choices), mixed) == step_s(on(["a+b"], **choices), mixed)


def test_shares_by_speed_are_faster_than_equal_parts():
    choices = {"dp": 4, "microbatch_size": 5, "num_microbatches": 2}
    mixed = cluster(4.0, 1.0)
    equal = step_s(on(["a+b"], **choices), mixed)
    by_speed = step_s(on(["a+b"], shares=(8, 8, 2, 2), **choices), mixed)
    against = step_s(on(["a+b"], shares=(2, 2, 8, 8), **choices), mixed)
    assert by_speed < equal < against
    plan = on(["a+b"], shares=(8, 8, 2, 2), **choices)
    found = estimate(graph_of("equal"), mixed, plan)
    assert found.samples == plan.global_batch
    costs = cost_cache(graph_of("equal"), mixed, 4)
    # What `planner simulate` shows is the timetable of the slowest.
    assert plan_job_seconds(plan, costs).forward_s == pytest.approx(
        [found.timeline.end_s[0][0] - found.timeline.start_s[0][0]]
    )
    flop = estimate(graph_of("equal"), mixed, on(["a+b"], **choices)).flop
    assert found.flop == pytest.approx(flop, rel=1e-9)  # as many samples


def test_shares_on_equal_devices_cost_the_largest():
    choices = {"dp": 2, "num_microbatches": 2}
    unequal = step_s(on([""], shares=(3, 1), microbatch_size=2, **choices), ONE)
    assert unequal == step_s(on([""], microbatch_size=3, **choices), ONE)


def test_a_replica_stays_on_its_groups_from_stage_to_stage():
    """Each group holds a pipeline: nothing but gradients goes between them, so a slow link does
    not matter to transfers.
    """
    choices = {"dp": 2, "pp": 2, "microbatch_size": 2, "num_microbatches": 4}
    two = cluster(1.0, 1.0)
    costs = cost_cache(graph_of("equal"), two, 4)
    views = replica_views(on(["a+b", "a+b"], **choices), costs)
    assert [view.plan.device_groups for view in views] == [("a", "a"), ("b", "b")]
    # A device of each group has a rank of both stages.
    parts = (view.costs.of_group(group) for view, group in zip(views, "ab", strict=True))
    assert [part.cluster.stage_ranks for part in parts] == [1, 1]
    along, across, by_stage = (
        estimate(graph_of("equal"), two, on(groups, **choices), costs=costs).path.parts
        for groups in (["a+b", "a+b"], ["a+b", "b+a"], ["a", "b"])
    )
    assert along["messages_s"] < across["messages_s"]
    # With a group for each stage transfers cross, and gradients stay inside.
    assert by_stage["messages_s"] > along["messages_s"]
    assert by_stage["dp_comm_s"] < along["dp_comm_s"]


def test_stages_of_a_replica_share_weights_inside_its_group():
    """Two stages with a replica on each group: the ranks with a weight are neighbours there, as
    those of a pipeline alone on a group are.
    """
    costs = cost_cache(graph_of("tied"), cluster(1.0, 1.0), 4)
    views = replica_views(on(["a+b", "a+b"], model="tied", dp=2, pp=2), costs)
    alone = price_plan(on(["a", "a"], model="tied", pp=2), costs).once.tied_s
    assert min(alone) > 0
    assert {price_plan(view.plan, view.costs).once.tied_s for view in views} == {alone}


def test_memory_is_told_by_group():
    choices = {"dp": 4, "microbatch_size": 5, "num_microbatches": 2}
    plan = on(["a+b"], shares=(8, 8, 2, 2), **choices)
    costs = cost_cache(graph_of("equal"), cluster(4.0, 1.0), 4)
    (of_groups,) = rank_bytes_by_group(plan, costs, [0])
    assert of_groups["a"] > of_groups["b"]
    found = estimate(graph_of("equal"), cluster(4.0, 1.0), plan)
    assert found.peak_bytes == of_groups["a"]


def test_groups_hold_whole_replicas():
    costs = cost_cache(graph_of("equal"), cluster(1.0, 1.0), 4)
    with pytest.raises(PlanError, match=r"lies on a\+b, which have 2 \+ 2 devices for it"):
        step_seconds(on(["a+b"], dp=2), costs)
    with pytest.raises(PlanError, match=r"has 1 replicas of 4 ranks; each group holds whole"):
        step_seconds(on(["a+b"], tp=4), costs)
    with pytest.raises(PlanError, match="'c'"):
        step_seconds(on(["a+c"], dp=4), costs)
