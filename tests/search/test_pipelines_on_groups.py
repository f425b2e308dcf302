"""Pipelines whose stages have replicas on every group: each group's own chain and limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel.estimate import rank_bytes_by_group
from planner.layout.axes import Degrees
from search import SearchRequest
from search.candidates import Candidates
from search.nodes.pipelines_on_groups import (
    TOO_LARGE,
    Others,
    PipelinesNode,
    pipelines_node,
)
from search.partition.chain_dp import solve_chain
from search.partition.chain_problem import Cut
from search.priced_configuration import PricedConfiguration
from search.search_state import SearchState
from search.space.configuration import Configuration
from tests.search.machine import Machine
from tests.search.test_device_groups import two_speeds
from tests.search.test_referee import graph_of

PLENTY = {"fast": 1e12, "slow": 2e12}


def state(machine: Machine, limits: dict[str, float] = PLENTY) -> SearchState:
    asked = SearchRequest(num_devices=4, global_batch=20, pp=2, tp=1, offload="none")
    candidates = Candidates.of(graph_of("uneven"), machine, asked)
    return SearchState(candidates=candidates, request=asked, memory_limit_bytes=1e12, limits=limits)


def node(search: SearchState, shares=(8, 2), recompute="none") -> PipelinesNode:
    """Two stages with a replica on a fast and on a slow device, of so many samples each."""
    configuration = Configuration(
        degrees=Degrees(dp=2), pp=2, vpp=1, microbatch_size=5, num_microbatches=2,
        schedule="1f1b", zero=0, recompute=recompute, device_groups=("fast+slow",) * 2,
        shares=shares,
    )  # fmt: skip
    of_groups = {
        name: (share, next(search.candidates.tables_of_parts(1, share, pp=2))[name])
        for name, share in zip(("fast", "slow"), shares, strict=True)
    }
    return pipelines_node(configuration, of_groups, bound=0.0)


def test_each_group_has_a_view_with_its_share():
    found = node(state(two_speeds()))
    assert [(v.device_group, v.configuration.microbatch_size) for v in found.views] == [
        ("fast", 8), ("slow", 2)
    ]  # fmt: skip
    assert all(view.configuration.shares == () for view in found.views)
    assert found.configuration.shares == (8, 2)
    assert replace(found, views=found.views[:1]).num_jobs * 2 == found.num_jobs


def test_the_view_with_the_highest_bound_is_partitioned():
    """Four times the samples on devices four times as fast; with equal shares the slow ones."""
    search = state(two_speeds())
    for shares in ((8, 2), (5, 5)):
        each = node(search, shares)
        values = {}
        for view in each.views:
            cut = solve_chain(view.problem(search)).cut
            assert cut is not None
            values[view.device_group] = cut.value
        done, others = each.refine(search)
        assert isinstance(others, Others)
        assert others.bound == max(values.values())
        (problem,) = each.problems(search)
        slowest = max(values, key=values.__getitem__)
        mine = next(v for v in each.views if v.device_group == slowest).problem(search)
        assert problem.memory_limit_bytes == mine.memory_limit_bytes == PLENTY[slowest]
        assert done.estimate.step_s >= others.bound * (1 - 1e-9)
        if shares == (5, 5):
            assert slowest == "slow"
            assert values["slow"] > 2 * values["fast"]


def test_a_plan_has_its_shares_and_its_stages_on_all_groups():
    search = state(two_speeds())
    (done, _) = node(search).refine(search)
    assert done.plan.device_groups == ("fast+slow", "fast+slow")
    assert done.plan.shares == (8, 2)
    assert search.num_evaluated == 1


def test_a_stage_recomputes_where_any_group_is_too_full():
    """The fast devices, with more samples, are given a byte less than they need."""
    search = state(two_speeds())
    each = node(search, recompute="none|full")
    table = each.views[0].table
    cut = Cut(cuts=(0, 2, len(search.candidates.costs.graph.blocks)), choices=(0, 0), value=0.0)
    plan = PricedConfiguration(search.candidates, each.configuration, table).plan(cut)
    need = rank_bytes_by_group(plan, search.candidates.costs, range(2))
    fullest = max(of_groups["fast"] for of_groups in need)
    over = [of_groups["fast"] == fullest for of_groups in need]
    tight = replace(search, limits={"fast": float(fullest - 1), "slow": 1e12})
    (found,) = each.fitting(tight, cut)
    assert [stage.recompute == "full" for stage in found.plan.stages] == over
    assert found.configuration.recompute == ("mixed" if len({*over}) == 2 else "full")
    assert each.evaluate(search, cut) is not None
    nothing = replace(search, limits={"fast": 1.0, "slow": 1e12})
    assert each.evaluate(nothing, cut) is None


@pytest.mark.parametrize("group", ["fast", "slow"])
def test_where_a_share_does_not_fit_its_group_nothing_does(group):
    search = state(two_speeds(), PLENTY | {group: 1.0})
    assert list(node(search).refine(search)) == []
    assert search.pruned == {TOO_LARGE: 1}
