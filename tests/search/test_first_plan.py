"""The plan that a search begins from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from search.candidates import Candidates
from search.find_plan import find_plan
from search.nodes.first_plan import take_first_plan
from search.request import SearchRequest
from search.search_state import SearchState
from tests.captures import capture_tiny
from tests.search.test_nodes import MACHINE

REQUEST = SearchRequest(num_devices=4, global_batch=8, offload="none")


def begun(limit_bytes: float = float("inf")) -> SearchState:
    """Return a search that has its first plan alone."""
    candidates = Candidates.of(capture_tiny("gpt"), MACHINE, REQUEST)
    search = SearchState(
        candidates=candidates,
        request=REQUEST,
        memory_limit_bytes=limit_bytes,
        limits={"": limit_bytes},
    )
    take_first_plan(search, candidates.shapes(REQUEST))
    return search


@pytest.mark.parametrize("part", [1.0, 0.8, 0.6])
def test_it_fits_and_is_a_plan_of_the_space(part):
    """With all memory that it takes, and with less, where it recomputes or is divided more."""
    free = begun().best
    assert free is not None
    limit = part * free.estimate.peak_bytes
    search = begun(limit)
    if search.best is None:  # nothing that is tried fits
        assert part < 0.8
        return
    assert search.fits(search.best)
    assert search.best.estimate.peak_bytes <= limit
    request = replace(REQUEST, memory_limit_bytes=int(limit))
    best = find_plan(capture_tiny("gpt"), MACHINE, request)
    assert best.plan is not None
    assert best.plan.estimate["step_s"] <= search.best_s * (1 + 1e-9)


def test_nothing_is_taken_where_nothing_fits():
    assert begun(limit_bytes=1.0).best is None


def test_runners_up_fit_where_memory_is_short():
    """They recompute as much as they must: what bounds ruled out was never made to fit."""
    free = find_plan(capture_tiny("gpt"), MACHINE, REQUEST)
    assert free.plan is not None
    limit = int(0.8 * free.plan.estimate["peak_bytes"])
    tight = find_plan(capture_tiny("gpt"), MACHINE, replace(REQUEST, memory_limit_bytes=limit))
    assert tight.plan is not None
    assert len(tight.runners_up) > 1
    for runner_up in tight.runners_up:
        assert runner_up.peak_bytes <= limit
        assert runner_up.step_s >= tight.plan.estimate["step_s"]
