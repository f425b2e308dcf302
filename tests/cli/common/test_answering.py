"""What a search found is told the same on the screen, in the plan's file and on the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands.common.answering import answer_of, predict_result
from costmodel import CostCache, estimate
from planner.language.plan import Plan
from profiles import load_profile
from search import RunnerUp, SearchRequest, SearchResult
from search.report.pareto import Point
from tests.captures import capture_tiny
from tests.costmodel.test_estimate import make_plan

LIMIT = 3 * 2**30
RUNNER = RunnerUp(
    label="dp 4", step_s=2.0, peak_bytes=7.0, reason="slower", differences=(("tp_comm_s", 1.0),)
)


@pytest.fixture(scope="module")
def graph():
    return capture_tiny("gpt")


@pytest.fixture(scope="module")
def profile():
    return load_profile("h100-sxm5-80gb")


@pytest.fixture(scope="module")
def plan(graph) -> Plan:
    found = make_plan(graph, dp=2, pp=2, m=4)
    return found.model_copy(update={"estimate": {"certificate": {"gap": 0.0}}})


def asked(**changes) -> SearchRequest:
    return SearchRequest(num_devices=4, global_batch=16, **changes)


def answered(graph, profile, plan, request, points=()):
    result = SearchResult(plan=plan, certificate=None, runners_up=(RUNNER,))
    return answer_of(
        predict_result(graph, profile, request, plan), request, result,
        model=Path("model.py"), out=Path("plan.json"), points=points,
    )  # fmt: skip


def test_a_result_is_priced_as_it_was_searched(graph, profile, plan):
    """For its runtime, and with the clipping that the step does."""
    plain, clipped, other = (
        predict_result(graph, profile, asked(**changes), plan).estimate.step_s
        for changes in ({}, {"clip_gradients": True}, {"execution": "megatron-core"})
    )
    assert plain == estimate(graph, profile, plan).step_s
    assert clipped > plain
    assert other != plain


def test_the_prices_of_the_search_are_used(graph, profile, plan):
    costs = CostCache(graph, profile, clips_gradients=True)
    found = predict_result(graph, profile, asked(), plan, costs=costs)
    assert found.costs is costs
    assert found.estimate.path.clipping_s > 0


def test_the_file_is_told_what_the_screen_is(graph, profile, plan):
    point = Point(
        plan=plan, num_devices=4, step_s=0.5, peak_bytes=9, cost_per_step=0.0, tokens_per_step=0
    )
    answer = answered(graph, profile, plan, asked(memory_limit_bytes=LIMIT), (point,))
    told = answer.plan.estimate
    assert told["certificate"] == {"gap": 0.0}  # what the search wrote is kept
    assert told["step_s"] == answer.overview.step_s
    assert told["peak_bytes"] == answer.overview.peak_bytes
    assert told["runners_up"][0]["label"] == "dp 4"
    assert told["front"] == [
        {"label": "dp 2 x pp 2", "step_s": 0.5, "peak_bytes": 9, "num_devices": 4}
    ]
    assert told["memory_limit_bytes"] == LIMIT
    assert told["memory_interval"]["limit_bytes"] == LIMIT
    assert answer.overview.limit_bytes == (LIMIT, LIMIT)
    assert [line.pp_rank for line in answer.predicted] == [0, 1]
    assert (answer.model_file, answer.out) == (Path("model.py"), Path("plan.json"))
    assert "step_s" not in plan.estimate  # the plan that was given is as it was


def test_without_a_limit_the_devices_memory_is_it(graph, profile, plan):
    answer = answered(graph, profile, plan, asked())
    assert "memory_limit_bytes" not in answer.plan.estimate
    assert answer.overview.limit_bytes[0] == profile.memory_bytes
