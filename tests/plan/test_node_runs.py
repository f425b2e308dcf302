"""Which nodes a plan's ranks lie on, and how many ranks a launcher starts on each."""

from __future__ import annotations

import pytest

from planner.errors import PlanError
from planner.language.lowering.defaults import default_plan
from planner.language.plan.node_runs import described, node_runs, ranks_of_nodes
from planner.runtime.start.launch import ranks_of_node
from tests.runtime.scenarios import capture


def plan_on(*groups: str, nodes=()):
    """A plan of 16 ranks and as many stages as groups are given."""
    plan = default_plan(capture("gpt"), pp=len(groups), dp=16 // len(groups))
    stages = tuple(
        stage.model_copy(update={"device_group": group})
        for stage, group in zip(plan.stages, groups, strict=True)
    )
    cluster = plan.cluster.model_copy(update={"nodes": nodes})
    return plan.model_copy(update={"stages": stages, "cluster": cluster})


UNLIKE = (("old", 4, 2), ("new", 8, 1))


def test_nodes_are_told_in_the_order_of_ranks():
    runs = node_runs(plan_on("new", "old", nodes=UNLIKE))
    assert [(run.group, run.ranks, run.nodes) for run in runs] == [("new", 8, 1), ("old", 4, 2)]
    assert described(runs) == "1 node of new with 8 ranks, then 2 of old with 4"
    assert node_runs(plan_on("", "")) == ()


@pytest.mark.parametrize(
    ("groups", "nodes", "num_nodes", "ranks"),
    [
        (("old", "new"), UNLIKE, 3, (4, 4, 8)),
        (("new", "old"), UNLIKE, 3, (8, 4, 4)),
        (("new", "old"), UNLIKE, 1, (16,)),  # all on one machine
        (("new", "old"), UNLIKE, 4, (4,) * 4),  # a launcher for each half of a large node
        (("new", "old"), UNLIKE, 16, (1,) * 16),
        (("", ""), (), 2, (8, 8)),
    ],
)
def test_a_launcher_starts_the_ranks_of_its_node(groups, nodes, num_nodes, ranks):
    plan = plan_on(*groups, nodes=nodes)
    assert ranks_of_nodes(plan, num_nodes) == ranks
    assert [ranks_of_node(plan, num_nodes, at) for at in range(num_nodes)] == list(ranks)


def test_what_does_not_lie_on_the_nodes_is_refused():
    plan = plan_on("new", "old", nodes=UNLIKE)
    with pytest.raises(PlanError, match=r"num_nodes=2 would put 8 ranks on each node.*give 3"):
        ranks_of_nodes(plan, 2)
    with pytest.raises(PlanError, match=r"num_nodes=5 does not divide the plan's 16.*give 3"):
        ranks_of_nodes(plan, 5)
    with pytest.raises(PlanError, match=r"unlike nodes \(1 node of new.*say with `node_rank`"):
        ranks_of_node(plan, 3, None)
    with pytest.raises(PlanError, match=r"`node_rank` 3 was given; 3 nodes have .* from 0 to 2"):
        ranks_of_node(plan, 3, 3)
    with pytest.raises(PlanError, match="`elastic` and `on_oom` replan search plans for nodes"):
        ranks_of_node(plan, 3, 0, restarts_by_plan=True)
    assert ranks_of_node(plan, 4, 0, restarts_by_plan=True) == 4


def test_equal_nodes_of_unlike_devices_need_their_numbers_too():
    """Sorted by name, the nodes could hold each other's stages."""
    plan = plan_on("new", "old", nodes=(("old", 4, 2), ("new", 4, 2)))
    with pytest.raises(PlanError, match="say with `node_rank`"):
        ranks_of_node(plan, 4, None)
    assert ranks_of_node(plan, 4, 1) == 4
