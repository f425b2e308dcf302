"""M25: tables on the host in the cost model: bytes against the dry run, seconds by hand."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from costmodel import CostCache, estimate
from costmodel.time.tables import table_seconds
from planner.language.graph import ModelGraph
from planner.language.graph.tables import with_table_lookups
from planner.language.lowering.defaults import default_plan
from planner.runtime.proofs.dryrun import dry_run
from profiles import load_profile
from profiles.hosts import REACHED_FRACTION
from tests.captures import capture_module
from tests.cpu_profile import CpuProfile
from tests.runtime.test_sparse_tables import Towers

ROWS, WIDTH, SEEN = 4000, 16, 8
TABLES = ("items.weight", "users.weight")
recommender = partial(Towers, rows=ROWS, width=WIDTH)


def batch(size: int) -> dict[str, Tensor]:
    user, item = torch.randint(0, ROWS, (2, size))
    return {
        "user": user,
        "seen": torch.randint(0, ROWS, (size, SEEN)),
        "item": item,
        "taken": torch.rand(size),
    }


@cache
def graph() -> ModelGraph:
    return capture_module(recommender(), batch(2), batch(3), name="recommender")


@pytest.mark.parametrize(
    "layout",
    [
        {"num_microbatches": 2},
        {"num_microbatches": 2, "recompute": "selective"},
        {"num_microbatches": 2, "dp": 2, "zero_stage": 3},
        {"num_microbatches": 4, "pp": 2},
        {"num_microbatches": 2, "tp": 2},
        {"num_microbatches": 2, "recompute": "full"},
    ],
    ids=str,
)
@pytest.mark.parametrize("on_host", [True, False], ids=["on the host", "on the device"])
def test_bytes_are_those_of_the_dry_run(layout: dict[str, Any], on_host: bool):
    """Within 1% on the device, which has neither tables nor states if the host has them, and within
    5% on the host; with tables within 5% on the device, as an update's copies of rows are.
    """
    costs = CostCache(graph(), CpuProfile())
    plan = default_plan(graph(), microbatch_size=32, **layout)
    plan = plan.model_copy(update={"tables_on_host": TABLES if on_host else ()})
    predicted = estimate(graph(), costs.profile, plan, costs=costs).memory
    # (A matrix of one row is priced less well, tables or not, where a rank has few others.)
    near = 0.05 if "pp" in layout or "tp" in layout or not on_host else 0.01
    for pp_rank in range(plan.pp):
        run = dry_run(plan, graph(), recommender, rank=pp_rank * plan.dp * plan.tp, on_gloo=True)
        found = predicted[pp_rank]
        # (A dry run takes the rows of other stages for as many as its own, in the exchange.)
        if on_host or plan.pp == 1:
            assert float(found.tensor_bytes) == pytest.approx(run.peak_bytes, rel=near)
        if plan.pp == 1:
            assert float(found.host_bytes) == pytest.approx(run.host_peak_bytes, rel=0.05)


def test_seconds_of_lookups():
    """Of a lookup of 32 x 8 rows on an H100, by hand."""
    profile = load_profile("h100-sxm5-80gb")
    program = with_table_lookups(graph(), TABLES).classes[0].bind(32)
    forward_s, backward_s = table_seconds(program, profile)
    counts = 32, 32 * SEEN
    host = profile.host.memory_bytes_per_s * REACHED_FRACTION / profile.cluster.devices_per_node

    def copied(num_bytes: int, *, to_host: bool) -> float:
        work = "device_to_host" if to_host else "host_to_device"
        return profile.step_seconds(work, num_bytes=num_bytes, num_tensors=1).seconds

    rows = [4 * WIDTH * count for count in counts]
    assert forward_s == pytest.approx(
        sum(copied(8 * n, to_host=True) for n in counts)
        + sum(3 * num_bytes / host + copied(num_bytes, to_host=False) for num_bytes in rows)
    )
    # Adam passes 7 times over rows; their copies are masters, of which none is written back apart.
    assert backward_s == pytest.approx(
        sum(copied(n, to_host=True) + (3 + 7 + 1) * n / host for n in rows)
    )
