"""Nothing fits: the plan of least memory, and the limit under which it fits."""

from dataclasses import replace
from importlib import import_module

import pytest

from search import SearchRequest, find_plan
from search.candidates import Candidates
from search.find_plan import search_among
from search.nodes import lean_plan
from search.nodes.lean_plan import find_fitting, find_leanest
from search.report.infeasible import round_up
from tests.captures import capture_tiny
from tests.search.machine import Machine


@pytest.mark.parametrize(
    ("number", "rounded"),
    [(1.23451, 1.235), (1.2345, 1.235), (1234.0, 1234.0), (0.011111, 0.01112)],
)
def test_a_limit_is_rounded_up(number, rounded):
    assert round_up(number) == rounded
    assert round_up(number) >= number


def test_the_leanest_plan_fits_its_own_bytes_and_nothing_fits_less():
    request = SearchRequest(num_devices=2, global_batch=4, offload="none")
    candidates = Candidates.of(capture_tiny("mlp"), Machine(context_bytes=0.0), request)
    shapes = candidates.shapes(request)
    leanest = find_leanest(candidates, shapes).estimate
    assert find_fitting(candidates, shapes, leanest.peak_bytes)
    assert not find_fitting(candidates, shapes, leanest.peak_bytes - 1)


def test_where_much_is_too_large_a_lean_plan_is_the_first_and_the_answer_is_the_same(monkeypatch):
    """N6: tight memory, so that partitions are cut again; a plan to show comes first, where even
    cuts gave none."""
    monkeypatch.setattr(import_module("search.find_plan"), "take_first_plan", lambda *_: None)
    request = SearchRequest(
        num_devices=4, global_batch=16, offload="none", pp=2, recompute="none", zero=0
    )
    machine, graph = Machine(context_bytes=0.0), capture_tiny("gpt")
    candidates = Candidates.of(graph, machine, request)
    limit = find_leanest(candidates, candidates.shapes(request)).estimate.peak_bytes
    request = replace(request, memory_limit_bytes=int(1.02 * limit))
    asked = []

    def fitting(*given, **options):
        asked.append(given)
        return found(*given, **options)

    found = lean_plan.find_fitting
    monkeypatch.setattr(lean_plan, "find_fitting", fitting)
    monkeypatch.setattr(lean_plan, "MOST_TOO_LARGE", 10**9)
    plain = find_plan(graph, machine, request)
    assert not asked
    monkeypatch.setattr(lean_plan, "MOST_TOO_LARGE", 1)
    early = find_plan(graph, machine, request)
    assert asked
    assert early.plan.estimate["step_s"] == plain.plan.estimate["step_s"]
    assert early.certificate.gap == plain.certificate.gap


def test_what_would_fit_is_told_once_all_offload_was_tried(monkeypatch):
    """N6: where the optimizer on the host fits, nobody looks for the plan of least memory without;
    a trial that asks for a plan alone does not either."""
    monkeypatch.setattr(import_module("search.find_plan"), "find_leanest", None)
    graph, machine = capture_tiny("mlp"), Machine(context_bytes=0.0)
    request = SearchRequest(num_devices=1, global_batch=4, offload="none")
    candidates = Candidates.of(graph, machine, request)
    limit = find_leanest(candidates, candidates.shapes(request)).estimate.peak_bytes - 1
    tight = replace(request, memory_limit_bytes=limit)
    assert search_among(candidates, tight, runners_up=False).plan is None
    assert find_plan(graph, machine, replace(tight, offload="auto")).plan.optimizer_on_host
