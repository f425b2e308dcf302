"""Issue 19, 7: which groups preflight times, in how many rounds, and by which planned shape."""

from __future__ import annotations

from itertools import combinations

import pytest

from planner.language.lowering.defaults import default_plan
from planner.runtime.preflight.exchanges import node_rounds, planned_rounds
from tests.runtime.scenarios import capture


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 13])
def test_every_pair_of_nodes_meets_once_in_about_as_many_rounds_as_nodes(count):
    nodes = [(2 * at, 2 * at + 1) for at in range(count)]
    rounds = node_rounds(nodes)
    assert len(rounds) == (0 if count == 1 else count - 1 + count % 2)
    met = [exchange.ranks for exchanges in rounds for exchange in exchanges]
    assert sorted(met) == sorted(combinations([first for first, _ in nodes], 2))
    assert_no_rank_is_shared(rounds)


@pytest.mark.parametrize(
    ("sizes", "axes"),
    [
        ({"dp": 2, "tp": 2, "pp": 2}, {"tp": 1, "data": 1, "pp": 1}),
        ({"pp": 4}, {"pp": 2}),  # 0-1 and 2-3 at once, then 1-2
        ({"pp": 2, "vpp": 2, "schedule": "interleaved_1f1b"}, {"pp": 1}),
        ({"dp": 2, "rp": 2, "zero_stage": 3}, {"shards": 1, "copies": 1}),
        ({"dp": 4, "zero_stage": 3}, {"data": 1}),
        ({"dp": 4, "ep": 2}, {"data": 1, "ep": 1, "expert data": 1}),
        ({"dp": 4, "ep": 2, "zero_stage": 1}, {"data": 1, "ep": 1, "expert shards": 1}),
    ],
)
def test_groups_of_an_axis_run_at_once(sizes, axes):
    plan = default_plan(capture("routed-gpt" if "ep" in sizes else "deep-gpt"), **sizes)
    rounds = planned_rounds(plan)
    assert_no_rank_is_shared(rounds)
    found: dict[str, int] = {}
    for exchanges in rounds:
        assert len({exchange.axis for exchange in exchanges}) == 1
        found[exchanges[0].axis] = found.get(exchanges[0].axis, 0) + 1
    assert found == axes


def assert_no_rank_is_shared(rounds):
    for exchanges in rounds:
        ranks = [rank for exchange in exchanges for rank in exchange.ranks]
        assert len(ranks) == len(set(ranks))
