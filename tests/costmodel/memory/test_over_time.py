"""Memory over time: its fullest moment is the plan's memory, and moments lie on the jobs."""

from __future__ import annotations

import pytest

from costmodel import CostCache, estimate
from costmodel.memory.exact.over_time import memory_over_time
from costmodel.time.plan_price import price_plan
from profiles import load_profile
from tests.builders import tiny_models
from tests.captures import capture_module
from tests.costmodel.test_estimate import make_plan

PLANS = [
    {},
    {"pp": 2},
    {"dp": 2, "zero": 3, "pp": 2},
    {"dp": 2, "zero": 0},
    {"tp": 2, "recompute": "full", "m": 8, "pp": 2},
]


@pytest.fixture(scope="module")
def graph():
    model = tiny_models()["gpt"]
    return capture_module(model.build(), model.batch(2), model.batch(3), name="gpt")


@pytest.mark.parametrize("choices", PLANS, ids=str)
def test_the_fullest_moment_is_the_plans_memory(graph, choices):
    profile = load_profile("h100-sxm5-80gb")
    plan, costs = make_plan(graph, **choices), CostCache(graph, profile)
    found = estimate(graph, profile, plan, costs=costs)
    over_time = memory_over_time(price_plan(plan, costs), costs, found.timeline)
    assert len(over_time) == plan.pp
    for moments, parts, jobs in zip(
        over_time, found.memory, found.timeline.schedule.jobs, strict=True
    ):
        assert max(moment.parts.total for moment in moments) == pytest.approx(parts.total)
        assert [moment.job for moment in moments] == [*map(str, jobs), "O"]
        starts = [moment.start_s for moment in moments]
        assert starts == sorted(starts)


def test_activations_rise_and_end_at_nothing(graph):
    profile = load_profile("h100-sxm5-80gb")
    plan, costs = make_plan(graph, m=4), CostCache(graph, profile)
    (moments,) = memory_over_time(
        price_plan(plan, costs), costs, estimate(graph, profile, plan, costs=costs).timeline
    )
    kept = {moment.job: moment.parts.activation_bytes for moment in moments}
    assert kept["0B0"] > kept["O"] == 0
