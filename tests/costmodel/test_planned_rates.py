"""Issue 19, 7: seconds of exchanges that preflight compares with, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel.planned_rates import between_nodes_seconds, group_of_numbers, planned_seconds
from planner.cluster import Link, Tier
from planner.errors import PlanError
from planner.language.lowering.defaults import default_plan
from planner.units import MIB
from profiles import Group
from profiles.profile import DeviceGroup
from tests.search.machine import Machine
from tests.search.test_referee import graph_of

MACHINE = Machine(alpha_s=1e-5, intra_bytes_per_s=1e9, inter_bytes_per_s=1e8, devices_per_node=4)
BETWEEN = Tier(devices=4, link=Link(name="between", alpha_s=1e-4, beta_s_per_byte=1e-7))


def test_ranks_fill_nodes_in_order():
    """A ring of r ranks passes (r - 1) / r of the bytes, an all-reduce twice; over nodes slower."""
    seconds = planned_seconds(default_plan(graph_of("equal"), dp=8), MACHINE)
    for num_bytes in (MIB, 8 * MIB):
        assert [
            seconds("all_reduce", (0, 1, 2, 3), num_bytes),
            seconds("all_gather", (0, 4), num_bytes),
            seconds("send_recv", (3, 4), num_bytes),
            seconds("all_gather", (4, 5), num_bytes),
        ] == pytest.approx(
            [
                2 * (1e-5 + 0.75 * num_bytes / 1e9),
                1e-5 + 0.5 * num_bytes / 1e8,
                1e-5 + num_bytes / 1e8,
                1e-5 + 0.5 * num_bytes / 1e9,
            ]
        )
    assert between_nodes_seconds(MACHINE, MIB) == pytest.approx(1e-5 + MIB / 1e8)


def test_domains_of_tiers_are_crossed_or_not():
    """Nodes of 4 in rails of 8."""
    rail = Tier(devices=8, link=BETWEEN.link)
    cluster = replace(MACHINE, tiers=(rail,)).cluster
    assert group_of_numbers(cluster, (0, 4)) == Group(ranks_per_node=1, num_nodes=2)
    assert group_of_numbers(cluster, (0, 4, 8, 12)) == Group(
        ranks_per_node=1, num_nodes=4, domains=(2,)
    )
    seconds = planned_seconds(
        default_plan(graph_of("equal"), dp=16), replace(MACHINE, tiers=(rail,))
    )
    assert seconds("send_recv", (7, 8), MIB) == pytest.approx(1e-4 + MIB * 1e-7)
    assert seconds("send_recv", (3, 4), MIB) == pytest.approx(1e-5 + MIB / 1e8)


def two_groups() -> Machine:
    fast = replace(MACHINE, name="fast", tiers=(BETWEEN,))
    slow = replace(fast, name="slow", intra_bytes_per_s=1e8)
    groups = tuple(
        DeviceGroup(name=each.name, profile=each, num_devices=4) for each in (fast, slow)
    )
    return replace(fast, name="both", groups=groups)


def on(names: list[str], **choices):
    plan = default_plan(graph_of("equal"), **choices)
    stages = tuple(
        stage.model_copy(update={"device_group": name})
        for stage, name in zip(plan.stages, names, strict=True)
    )
    return plan.model_copy(update={"stages": stages})


def test_each_group_of_devices_has_its_own_links():
    """Stages on a group each: data groups stay inside, the pipeline goes between."""
    seconds = planned_seconds(on(["slow", "fast"], dp=4, pp=2), two_groups())
    slow, fast = seconds("all_gather", (0, 1), MIB), seconds("all_gather", (4, 5), MIB)
    assert slow == pytest.approx(1e-5 + 0.5 * MIB / 1e8)
    assert fast == pytest.approx(1e-5 + 0.5 * MIB / 1e9)
    assert seconds("send_recv", (0, 4), MIB) == pytest.approx(1e-4 + MIB * 1e-7)


def test_replicas_on_both_groups_exchange_between_them():
    seconds = planned_seconds(on(["fast+slow"], dp=8), two_groups())
    inside, over = seconds("all_reduce", (0, 1, 2, 3), MIB), seconds("all_reduce", range(8), MIB)
    assert over > inside + 2 * 0.5 * MIB / 4 * 1e-7 * 0.9
    pipelines = planned_seconds(on(["fast+slow"] * 2, dp=4, pp=2), two_groups())
    assert pipelines("send_recv", (0, 4), MIB) == pytest.approx(1e-5 + MIB / 1e9)
    assert pipelines("all_reduce", (0, 2), MIB) > 1e-4  # a replica on each group


def test_a_cluster_without_the_plan_s_groups_is_refused():
    with pytest.raises(PlanError, match="devices of old and the cluster 'both' has fast, slow"):
        planned_seconds(on(["old", "fast"], dp=4, pp=2), two_groups())
    with pytest.raises(PlanError, match="devices of no named group"):
        planned_seconds(default_plan(graph_of("equal"), dp=8), two_groups())
