"""N16, B11: Dispatchers of experts' rows against published measurements, where these lie."""

from statistics import fmean

import pytest

from benchmarks.published import PUBLISHED
from benchmarks.published.parts import dispatchers

pytestmark = pytest.mark.skipif(
    not (PUBLISHED / "moe_dispatch.csv").exists(), reason="needs tables of published runs"
)


def test_lone_layers_are_within_15_percent_on_all_dispatchers():
    """12 layers of 8 H100, forward and backward."""
    found = list(dispatchers.layers())
    assert len(found) == 24
    assert max(abs(each.error) for each in found) < 0.15
    assert fmean(abs(each.error) for each in found) < 0.07


def test_the_dispatcher_that_won_wins():
    """Of 8 pairs all; DeepSeek-V3 in microbatches of 1 and of 4 has other winners."""
    found = list(dispatchers.runs())
    pairs = dispatchers.signs(found)
    assert len(pairs) == 8
    assert all(fast.predicted < slow.predicted for fast, slow in pairs)
    on_b300 = [abs(each.error) for each in found if "B300" in each.case]
    assert fmean(on_b300) < 0.12
    # Hosts of P5 nodes are late as nanotron's runs tell; nothing is fitted to these.
    on_h100 = [abs(each.error) for each in found if "H100" in each.case]
    assert fmean(on_h100) < 0.10
    assert fmean(abs(each.error) for each in found) < 0.11


def test_natural_routing_takes_longer():
    """Measured 1.50 and 1.90 times as long as forced; told are 1.73 and 1.70."""
    for each in dispatchers.routings():
        assert each.predicted > 1.05
        assert abs(each.error) < 0.20
