"""Issue 19, point 5: replicas of one stage on unlike devices, data split between them by work."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from costmodel import estimate
from costmodel.estimate import cost_cache, rank_bytes_by_group
from costmodel.uncertainty import Interval, plan_memory_interval
from planner.errors import LayoutError
from planner.language.plan import Plan
from search import SearchRequest, find_plan
from search.candidates import Candidates
from search.nodes.replicas_on_groups import near_shares
from search.report.overview import find_overview
from search.report.report_numbers import gather_report
from tests.referees.groups import bytes_of_groups, every_shared_plan, with_memory, within
from tests.search.test_device_groups import random_cluster, searched, two_speeds
from tests.search.test_own_meshes import pooled
from tests.search.test_referee import graph_of


def request(**choices) -> SearchRequest:
    return SearchRequest(num_devices=4, offload="none", pp=1, memory_odds=0.5, **choices)


def test_faster_devices_take_more_samples():
    """Four times as fast, of 20 samples on 2 + 2 devices: 8 and 2 each."""
    plan = find_plan(graph_of("equal"), two_speeds(), request(global_batch=20, tp=1)).plan
    assert plan is not None
    assert plan.device_groups == ("fast+slow",)
    by_group = dict(zip(("fast", "slow"), plan.shares[1:3], strict=True))
    assert by_group["fast"] > 2 * by_group["slow"]
    assert Plan.model_validate(plan.model_dump(mode="json")) == plan


def test_a_plan_over_groups_is_shown():
    """Rates and limits are of the groups that its replicas lie on, wherever it is printed."""
    graph, machine = graph_of("equal"), two_speeds()
    plan = find_plan(graph, machine, request(global_batch=20, tp=1)).plan
    assert plan is not None
    costs = cost_cache(graph, machine, 4)
    priced = estimate(graph, machine, plan, costs=costs)
    (group,) = priced.device_groups
    by_group = rank_bytes_by_group(plan, costs, [0])[0]
    assert by_group[group] == max(by_group.values()) == priced.peak_bytes
    view = find_overview(plan, costs, priced, Interval(low_s=1.0, high_s=2.0, basis="a test"))
    devices = {each.name: each.profile for each in machine.groups}
    assert view.limit_bytes == (devices[group].memory_bytes,)
    assert view.mfu is None or view.mfu > 0
    peaks = [dict(each.cluster.peak_flop_per_s)["float32"] for each in devices.values()]
    if view.mfu is not None:  # two devices of each group
        assert view.mfu == pytest.approx(priced.flop / (priced.step_s * 2 * sum(peaks)))
    numbers = gather_report(plan, costs, priced, view.interval)
    assert [network.name for network in numbers.networks] == [
        each.cluster.name for each in devices.values()
    ]
    assert plan_memory_interval(plan, machine) is not None


def test_equal_devices_take_equal_parts():
    fast = two_speeds().groups[0].profile
    groups = tuple(replace(g, profile=replace(fast, name=g.name)) for g in two_speeds().groups)
    machine = replace(two_speeds(), groups=groups)
    plan = find_plan(graph_of("equal"), machine, request(global_batch=16, tp=1)).plan
    assert plan is not None
    assert plan.shares == ()


def test_a_share_is_within_the_memory_of_its_devices():
    """The fast devices hold fewer samples than they could do in the time."""
    graph = graph_of("equal")
    asked = request(global_batch=20, tp=1, zero=0, recompute="none", microbatch_size=5)
    machine = two_speeds()
    free = find_plan(graph, machine, asked).plan
    assert free is not None
    costs = Candidates.of(graph, machine, asked).costs
    (most,) = rank_bytes_by_group(free, costs, [0])
    limits = {"fast": float(most["fast"] - 1), "slow": 1e9}
    less = find_plan(graph, with_memory(machine, limits), asked).plan
    assert less is not None
    assert (less.shares or (5,) * 4)[0] < free.shares[0]
    assert less.estimate["step_s"] > free.estimate["step_s"]


@pytest.mark.parametrize("number", range(6))
def test_the_best_equals_trying_all_shares(number):
    rng = np.random.default_rng([20, number])
    graph = [graph_of("uneven"), graph_of("tied"), pooled(16, 64, 32)][number % 3]
    machine = random_cluster(rng)
    num_devices = sum(group.num_devices for group in machine.groups)
    asked = SearchRequest(
        num_devices=num_devices,
        global_batch=num_devices * int(rng.choice([1, 2])),
        pp=1,
        offload="none",
        allow=(("recompute", "none"), ("recompute", "full"), ("zero", "0"), ("zero", "1")),
    )
    every = list(every_shared_plan(graph, machine, asked))
    result = find_plan(graph, machine, asked)
    assert result.plan is not None
    best_s = min(answer.step_s for _, answer in every)
    assert result.plan.estimate["step_s"] == pytest.approx(best_s, rel=1e-9)
    assert result.certificate is not None
    assert result.certificate.lower_bound_s <= best_s * (1 + 1e-9)
    assert result.certificate.gap < 1e-9


def test_of_many_shares_those_near_the_speeds_are_tried():
    found = list(near_shares(1000, (2, 2), (4.0, 1.0)))
    assert (400, 100) in found
    assert found[0] == (250, 250)
    assert all(2 * sum(shares) == 1000 for shares in found)
    assert len(found) < 10
    assert list(near_shares(7, (2, 1), (1.0, 1.0)))  # 2 + 2 + 3, and others


def test_no_group_holds_a_whole_replica():
    with pytest.raises(LayoutError, match="no group holds whole replicas: `tp` and `cp` must"):
        find_plan(graph_of("equal"), two_speeds(), request(global_batch=4, tp=4))


def test_replicas_of_a_pipeline_lie_on_all_groups_where_its_stages_exchange_more():
    """Devices as fast, and stages that would hand their samples over a slow link between groups:
    replicas do, which exchange gradients once a step alone. The bound of the exchange inside a
    group alone, which is slower here, once hid this plan.
    """
    result, best_s, _ = searched(54)
    assert result.plan is not None
    assert result.plan.device_groups == ("old+new", "old+new")
    assert result.plan.estimate["step_s"] == pytest.approx(best_s, rel=1e-9)
    assert result.certificate is not None
    assert result.certificate.gap < 1e-9


@pytest.mark.parametrize("number", range(3))
def test_the_best_pipeline_equals_trying_all_shares_and_boundaries(number):
    """Groups of 2 and 4 devices and two stages of 3: no group has whole ones."""
    rng = np.random.default_rng([21, number])
    machine = random_cluster(rng)
    sizes = [(2, 4), (4, 2)][number % 2]
    groups = tuple(
        replace(g, num_devices=n, profile=replace(g.profile, devices_per_node=2, tiers=(
            replace(g.profile.tiers[-1], devices=n),)))
        for g, n in zip(machine.groups, sizes, strict=True)
    )  # fmt: skip
    machine = replace(machine, groups=groups)
    asked = SearchRequest(
        num_devices=6, global_batch=12, pp=2, tp=1, offload="none", memory_odds=0.5,
        allow=(("schedule", "1f1b"), ("recompute", "none"), ("recompute", "full"), ("zero", "0"),
               ("zero", "1")),
    )  # fmt: skip
    graph = graph_of("uneven")
    costs = Candidates.of(graph, machine, asked).costs
    every = [
        (answer.step_s, bytes_of_groups(plan, answer, costs))
        for plan, answer in every_shared_plan(graph, machine, asked)
    ]
    _, need = min(every, key=lambda each: each[0])
    limits = {name: float(int(num_bytes * 0.9)) for name, num_bytes in need.items()}
    best_s = min((step_s for step_s, most in every if within(most, limits)), default=float("inf"))
    result = find_plan(graph, with_memory(machine, limits), asked)
    if result.plan is None:
        assert best_s == float("inf")
        return
    assert result.plan.device_groups == ("old+new", "old+new")
    assert result.plan.estimate["step_s"] == pytest.approx(best_s, rel=1e-9)
    assert result.certificate is not None
    assert result.certificate.lower_bound_s <= best_s * (1 + 1e-9)
