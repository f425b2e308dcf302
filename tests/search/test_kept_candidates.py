"""Searches of one model after each other share candidates, and answer as each alone does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel.memory.bound import NOTHING, OnHost
from search import SearchRequest, find_plan
from search.kept_candidates import KeptCandidates
from search.result_cache import to_json
from tests.captures import capture_tiny
from tests.search.machine import Machine

MACHINE = Machine(context_bytes=0.0)
BASE = SearchRequest(num_devices=4, global_batch=16)


def answer(result):
    told = to_json(result)
    return {name: value for name, value in told.items() if name not in ("search_s", "was_kept")}


def test_a_kept_search_answers_as_a_fresh_one_does():
    """Whatever was asked before: other batches, limits, fixed choices, devices, and back."""
    graph, kept = capture_tiny("mlp"), KeptCandidates()
    for changes in (
        {}, {"global_batch": 32}, {"tp": 2}, {"memory_limit_bytes": 20_000}, {"num_devices": 2},
        {"memory_limit_bytes": 1000}, {"zero": 3, "global_batch": 8}, {},
    ):  # fmt: skip
        request = replace(BASE, **changes)
        fresh = find_plan(graph, MACHINE, request)
        warm = find_plan(graph, MACHINE, request, candidates_of=kept)
        assert answer(warm) == answer(fresh), changes


@pytest.mark.parametrize(
    ("changes", "is_kept"),
    [
        ({"global_batch": 32, "tp": 2}, True),
        ({"num_devices": 2}, False),
        ({"axes": ()}, True),
        ({"solver": "ilp"}, False),
        ({"execution": "ours-compiled"}, False),
        ({"clip_gradients": True}, False),
        ({"receive_ahead": 1}, False),
        ({"model_file": "other.py"}, False),
        ({"memory_limit_bytes": 20_000, "zero": 1, "recompute": "full"}, True),
    ],
)
def test_candidates_are_those_of_the_devices_not_of_the_batch(changes, is_kept):
    graph, kept = capture_tiny("mlp"), KeptCandidates()
    first = kept(graph, MACHINE, BASE, NOTHING)
    again = kept(graph, MACHINE, replace(BASE, **changes), NOTHING)
    assert (again is first) == is_kept


def test_the_oldest_candidates_are_let_go():
    graph, kept = capture_tiny("mlp"), KeptCandidates(most=1)
    first = kept(graph, MACHINE, BASE, NOTHING)
    kept(graph, MACHINE, replace(BASE, num_devices=2), NOTHING)
    assert kept(graph, MACHINE, BASE, NOTHING) is not first


def test_candidates_are_of_one_model_one_profile_and_one_place_on_the_host():
    graph, kept = capture_tiny("mlp"), KeptCandidates()
    first = kept(graph, MACHINE, BASE, NOTHING)
    assert kept(graph, MACHINE, BASE, NOTHING) is first
    for others in (
        (capture_tiny("mlp"), MACHINE, BASE, NOTHING),
        (graph, replace(MACHINE, alpha_s=1.0), BASE, NOTHING),
        (graph, MACHINE, BASE, OnHost(optimizer=True)),
    ):
        assert kept(*others) is not first


def test_of_those_kept_the_one_that_was_asked_for_last_stays():
    graph, kept = capture_tiny("mlp"), KeptCandidates(most=2)
    requests = [replace(BASE, num_devices=count) for count in (4, 2, 1)]
    four, two = (kept(graph, MACHINE, each, NOTHING) for each in requests[:2])
    kept(graph, MACHINE, requests[0], NOTHING)
    kept(graph, MACHINE, requests[2], NOTHING)
    assert kept(graph, MACHINE, requests[0], NOTHING) is four
    assert kept(graph, MACHINE, requests[1], NOTHING) is not two
