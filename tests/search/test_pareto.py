"""X4: the Pareto set over step time, peak memory, number of devices and cost."""

from dataclasses import replace

import pytest

from commands.render.plans.search import describe_pareto
from planner.errors import LayoutError
from planner.language.graph.batch import tokens_per_sample
from search import SearchRequest
from search.report.pareto import Point, cost_of, find_pareto, non_dominated
from tests.captures import capture_tiny
from tests.referees.plans import every_answer
from tests.search.machine import Machine

MACHINE = Machine(
    context_bytes=0.0, devices_per_node=4, flop_per_s=1e9, bytes_per_s=1e9, alpha_s=1e-5
)


def test_the_set_is_what_brute_force_finds():
    """Every point is of the front of all plans of 1, 2 and 4 devices, and none is missing."""
    graph = capture_tiny("mlp")
    request = SearchRequest(num_devices=2, global_batch=4, offload="none")
    counts, price = (1, 2, 4), 3.0
    left_out = {}
    points = find_pareto(
        graph, MACHINE, request, num_devices=(*counts, 7), price_per_device_hour=price,
        leave_out=left_out.__setitem__,
    )  # fmt: skip
    assert list(left_out) == [7]
    assert "7 devices with a global batch of 4 cannot be used" in left_out[7]
    every = {
        (
            answer.estimate.step_s,
            float(answer.estimate.peak_bytes),
            float(count),
            price * count * answer.estimate.step_s / 3600,
        )
        for count in counts
        for answer in every_answer(graph, MACHINE, replace(request, num_devices=count))
    }
    front = sorted(point for point in every if not any(_beats(other, point) for other in every))
    assert len(points) > 3
    assert len({point.num_devices for point in points}) > 1
    assert [point.objectives for point in points] == [pytest.approx(point) for point in front]


def test_what_may_be_on_the_host_is_in_the_set():
    """M27: with offload left to the search, the front of all plans under each kind of it."""
    graph = capture_tiny("mlp")
    allow = (("schedule", "1f1b"), ("zero", "0"), ("recompute", "none"), ("recompute", "full"))
    request = SearchRequest(num_devices=2, global_batch=4, tp=1, allow=allow)
    points = find_pareto(graph, MACHINE, request)
    assert len(points) > 3
    every = {
        (answer.estimate.step_s, float(answer.estimate.peak_bytes), 2.0, 0.0)
        for offload in ("none", "optimizer", "activations", "both")
        for answer in every_answer(graph, MACHINE, replace(request, offload=offload))
    }
    front = sorted(point for point in every if not any(_beats(other, point) for other in every))
    assert [point.objectives for point in points] == [pytest.approx(point) for point in front]
    away = [point.to_dict()["optimizer_on_host"] for point in points]
    assert away[0] is False
    assert away[-1] is True


def _beats(point, other):
    """At least as good everywhere, and better somewhere by more than rounding."""
    return all(a <= b * (1 + 1e-9) for a, b in zip(point, other, strict=True)) and any(
        a < b * (1 - 1e-9) for a, b in zip(point, other, strict=True)
    )


def test_cost_per_token():
    """3 a device and hour, 2 devices: step seconds x 6 / 3600, over 8 samples of 16 tokens."""
    gpt = capture_tiny("gpt")
    request = SearchRequest(num_devices=2, global_batch=8, schedule="1f1b", dp=2)
    point = find_pareto(gpt, MACHINE, request, price_per_device_hour=3.0)[0]
    assert tokens_per_sample(gpt) == 16
    assert point.cost_per_step == pytest.approx(point.step_s * 6 / 3600)
    data = point.to_dict()
    assert data["cost_per_million_tokens"] == pytest.approx(
        1e6 * point.step_s * 6 / 3600 / (8 * 16)
    )
    titles = {
        price: describe_pareto(find_pareto(gpt, MACHINE, request, price_per_device_hour=price))
        for price in (0.0, 3.0)
    }
    assert titles[0.0].title.plain.strip() == "Time against memory"
    assert titles[3.0].title.plain.strip() == "Time, memory against cost"
    assert tokens_per_sample(capture_tiny("mlp")) == 0


def point(step_s, peak_bytes=1, num_devices=1, cost_per_step=0.0):
    return Point(
        plan=None, num_devices=num_devices, step_s=step_s, peak_bytes=peak_bytes,
        cost_per_step=cost_per_step, tokens_per_step=0,
    )  # type: ignore[arg-type]  # fmt: skip


def test_a_point_stays_unless_another_is_as_good_in_everything():
    fast, lean, few, cheap = point(1, 9, 8, 9), point(9, 1, 8, 9), point(9, 9, 1, 9), point(9, 9, 8)
    worse, equal = point(1, 9, 8, 9.5), point(1, 9, 8, 9)
    assert non_dominated([fast, lean, worse, few, cheap]) == [fast, lean, few, cheap]
    assert non_dominated([fast, equal]) == [fast, equal]
    assert non_dominated([]) == []


def test_a_price_is_of_one_device_and_an_hour():
    assert cost_of(2.0, 8, 1800.0) == 8.0
    assert point(1.0).cost_per_million_tokens is None


def test_a_count_that_cannot_be_used_is_refused_where_it_is_the_only_one():
    graph, asked = capture_tiny("mlp"), SearchRequest(num_devices=7, global_batch=4, offload="none")
    with pytest.raises(LayoutError, match="7 devices with a global batch of 4"):
        find_pareto(graph, MACHINE, asked)
