"""N16, B11: Dispatchers of experts' rows against published measurements, where these lie."""

from statistics import fmean

import pytest

from benchmarks.published import PUBLISHED, dispatchers

pytestmark = pytest.mark.skipif(
    not (PUBLISHED / "moe_dispatch.csv").exists(), reason="needs tables of published runs"
)


def test_lone_layers_are_within_15_percent_on_most_dispatchers():
    """12 layers of 8 H100, forward and backward. What is not: DeepSeek-V3's in bf16, whose
    backward is 16 to 26% too long, and its forward on HybridEP."""
    found = list(dispatchers.layers())
    assert len(found) == 24
    assert sum(abs(each.error) < 0.15 for each in found) >= 19
    assert max(abs(each.error) for each in found) < 0.27
    assert fmean(abs(each.error) for each in found) < 0.12


def test_the_dispatcher_that_won_wins():
    """Of 8 pairs all; DeepSeek-V3 in microbatches of 1 and of 4 has other winners."""
    found = list(dispatchers.runs())
    pairs = dispatchers.signs(found)
    assert len(pairs) == 8
    assert sum(fast.predicted < slow.predicted for fast, slow in pairs) >= 7
    on_b300 = [abs(each.error) for each in found if "B300" in each.case]
    assert fmean(on_b300) < 0.12
    # On H100 with EFA all runs are 37 to 56% longer than told: so are those of one dispatcher.
    assert fmean(abs(each.error) for each in found) < 0.25


def test_natural_routing_takes_longer():
    """Measured 1.51 and 1.91 times as long as forced; told are 1.1 and 1.2 to 1.3."""
    for each in dispatchers.routings():
        assert 1.05 < each.predicted < each.measured
        assert abs(each.error) < 0.40
