"""Quick counts beside what they stand for: bytes by a line, layouts before they are priced."""

import numpy as np
import pytest

from costmodel.stage import StageLoad
from planner.units import GIB
from search import SearchRequest
from search.candidates import Candidates
from search.rank_bytes import RankBytes
from tests.builders import tiny_models
from tests.captures import capture_module
from tests.search.machine import Machine

MACHINE = Machine(context_bytes=1e6, devices_per_node=4)


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("splits_backward", [False, True])
def test_what_fits_is_what_the_peak_says(zero, splits_backward):
    """M17: `fits` is `at` within the limit for every number of microbatches in flight."""
    rng = np.random.default_rng(17)
    sizes = {
        name: rng.uniform(0, GIB, 50)
        for name in ("saved_bytes", "saved_peak_bytes", "param_bytes", "largest_param_bytes")
    }
    rank = RankBytes(
        load=StageLoad(**sizes), num_microbatches=6, recompute="none", replicas=2, zero=zero,
        profile=MACHINE, splits_backward=splits_backward,
    )  # fmt: skip
    for in_flight in range(1, 7):
        peak = rank.at(in_flight)
        for limit in (2 * GIB, 5 * GIB, float(np.median(peak)) + 1.0):
            assert np.array_equal(rank.fits(in_flight, limit), peak <= limit)


@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_no_layout_is_faster_than_its_draft_says(name):
    """X1: what spares a layout from being priced is below its price."""
    model = tiny_models()[name]
    graph = capture_module(
        model.build(), model.batch(2), model.batch(3), loss=model.loss, name=name
    )
    candidates = Candidates.of(graph, MACHINE, SearchRequest(num_devices=4, global_batch=8))
    drafts = [draft for tp in (2, 4) for size in (1, 2, 4) for draft in candidates.drafts(tp, size)]
    assert any(draft.least_s > 0 for draft in drafts)
    for draft in drafts:
        priced = float((draft.table.forward_s + draft.table.backward_s).sum())
        assert draft.least_s <= priced * (1 + 1e-9)
