"""Ops on the roofline: their seconds are those that blocks are priced with, and none is above."""

from __future__ import annotations

import pytest

from costmodel import CostCache, estimate
from costmodel.time.plan_price import price_plan
from costmodel.time.roofline import roofline_points
from costmodel.utilization import model_flop_utilization, product_dtype
from profiles import load_profile
from tests.builders import tiny_models
from tests.captures import capture_module
from tests.costmodel.test_estimate import OneFlopASecond, make_plan


@pytest.fixture(scope="module")
def graph():
    model = tiny_models()["gpt"]
    return capture_module(model.build(), model.batch(2), model.batch(3), name="gpt")


@pytest.fixture(scope="module")
def profile():
    return load_profile("h100-sxm5-80gb")


def test_points_have_all_flop_of_the_ranks(graph, profile):
    costs = CostCache(graph, profile)
    plan = make_plan(graph, pp=2, m=3)
    flop = sum(
        p.flop for rank in range(2) for p in roofline_points(price_plan(plan, costs), costs, rank)
    )
    assert flop == pytest.approx(estimate(graph, profile, plan, costs=costs).flop)


def test_a_device_of_one_flop_a_second_reaches_that(graph, profile):
    costs = CostCache(graph, OneFlopASecond(profile))
    points = roofline_points(price_plan(make_plan(graph), costs), costs, 0)
    assert points
    assert all(point.flop_per_s == pytest.approx(1.0) for point in points)
    assert [p.seconds for p in points] == sorted((p.seconds for p in points), reverse=True)


def test_no_op_is_above_the_roof(graph, profile):
    cluster = profile.cluster
    costs = CostCache(graph, profile)
    for point in roofline_points(price_plan(make_plan(graph, tp=2), costs), costs, 0):
        peak = dict(cluster.peak_flop_per_s).get(point.dtype, float("inf"))
        roof = min(peak, point.intensity * cluster.memory_bytes_per_s)
        assert point.flop_per_s <= roof * 1.0001, point


def test_mfu_is_flop_over_peak(graph, profile):
    costs = CostCache(graph, profile)
    plan = make_plan(graph, pp=2)
    assert product_dtype(costs) == "float32"
    peak = dict(profile.cluster.peak_flop_per_s)["float32"]
    assert model_flop_utilization(2 * peak, 4.0, plan, costs) == pytest.approx(0.25)
