"""Searches under less and less memory, from what those before them left behind."""

from __future__ import annotations

from dataclasses import replace

from search import SearchRequest
from search.candidates import Candidates
from search.find_plan import search_among
from search.search_state import WarmStart
from tests.captures import capture_tiny
from tests.search.machine import Machine

MACHINE = Machine(
    context_bytes=0.0, devices_per_node=4, flop_per_s=1e9, bytes_per_s=1e9, alpha_s=1e-5
)


def test_a_warm_search_finds_what_a_cold_one_finds():
    graph = capture_tiny("mlp")
    request = SearchRequest(num_devices=4, global_batch=8, offload="none")
    candidates, warm_start = Candidates.of(graph, MACHINE, request), WarmStart()
    evaluated = []
    for _ in range(20):
        warm = search_among(candidates, request, warm_start=warm_start, runners_up=False)
        cold = search_among(candidates, request, runners_up=False)
        assert (warm.plan is None) == (cold.plan is None)
        if warm.plan is None or cold.plan is None:
            break
        assert warm.plan.estimate["step_s"] == cold.plan.estimate["step_s"]
        assert warm.certificate is not None
        assert cold.certificate is not None
        assert warm.certificate.gap == cold.certificate.gap == 0.0
        evaluated.append((warm.certificate.evaluated, cold.certificate.evaluated))
        peak_bytes = int(warm.plan.estimate["peak_bytes"])
        request = replace(request, memory_limit_bytes=peak_bytes - 1)
    assert len(evaluated) > 3
    assert sum(warm for warm, _ in evaluated) <= sum(cold for _, cold in evaluated)


def test_the_fastest_plan_that_fits_is_remembered():
    graph = capture_tiny("mlp")
    request = SearchRequest(num_devices=2, global_batch=4, offload="none")
    warm_start = WarmStart()
    search_among(Candidates.of(graph, MACHINE, request), request, warm_start=warm_start)
    estimates = [estimate for _, estimate in warm_start.plans.values()]
    assert len(estimates) > 1
    limit = max(estimate.peak_bytes for estimate in estimates) - 1
    known = warm_start.fastest(limit)
    fitting = [estimate.step_s for estimate in estimates if estimate.peak_bytes <= limit]
    assert (known is None) == (not fitting)
    if known is not None:
        assert known[-1].step_s == min(fitting)
    assert warm_start.fastest(1.0) is None


def test_bounds_only_rise():
    warm_start = WarmStart()
    for bound in (1.0, 3.0, 2.0):
        warm_start.raise_bound("key", bound)
    assert warm_start.bounds["key"] == 3.0
