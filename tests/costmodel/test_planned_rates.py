"""Issue 19, 7: seconds of exchanges that preflight compares with, by hand."""

from __future__ import annotations

import pytest

from costmodel.planned_rates import planned_exchange_seconds
from planner.units import MIB
from tests.search.machine import Machine

MACHINE = Machine(alpha_s=1e-5, intra_bytes_per_s=1e9, inter_bytes_per_s=1e8)


def test_shapes_are_a_kind_with_ranks_of_a_node_and_nodes():
    """A ring of r ranks passes (r - 1) / r of the bytes, an all-reduce twice; over nodes slower."""
    shapes = [("all_reduce", 4, 1), ("all_gather", 1, 4), ("send_recv", 1, 2), ("all_gather", 2, 1)]
    found = planned_exchange_seconds(MACHINE, iter(shapes), iter((MIB, 8 * MIB)))
    assert list(found) == shapes
    for num_bytes in (MIB, 8 * MIB):
        assert {shape: by_bytes[num_bytes] for shape, by_bytes in found.items()} == pytest.approx(
            {
                ("all_reduce", 4, 1): 2 * (1e-5 + 0.75 * num_bytes / 1e9),
                ("all_gather", 1, 4): 1e-5 + 0.75 * num_bytes / 1e8,
                ("send_recv", 1, 2): 1e-5 + num_bytes / 1e8,
                ("all_gather", 2, 1): 1e-5 + 0.5 * num_bytes / 1e9,
            }
        )
    assert all(set(by_bytes) == {MIB, 8 * MIB} for by_bytes in found.values())
