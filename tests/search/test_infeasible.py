"""Nothing fits: the plan of least memory, and the limit under which it fits."""

import pytest

from search import SearchRequest
from search.candidates import Candidates
from search.report.infeasible import can_fit, find_leanest, round_up
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
    assert can_fit(candidates, shapes, leanest.peak_bytes)
    assert not can_fit(candidates, shapes, leanest.peak_bytes - 1)
