"""Where groups of ranks lie on nodes, by hand and against every rank."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from costmodel.topology import (
    axis_group,
    group_along,
    lowered_groups,
    neighbours,
    pipeline_group,
)
from planner.cluster import Link, Tier
from planner.language.layout.axes import Degrees
from profiles import Group
from profiles.lookup.tiers import two_levels
from tests.search.machine import Machine


def cluster_of(devices_per_node: int):
    return Machine(devices_per_node=devices_per_node).cluster


def test_each_axis_is_as_far_apart_as_those_inside_it():
    """dp 2, cp 2, tp 2 on nodes of 4: ranks 0 1 | 2 3 are node 0."""
    degrees, cluster = Degrees(dp=2, cp=2, tp=2), cluster_of(4)
    assert group_along(cluster, degrees, "tp") == Group(ranks_per_node=2)
    assert group_along(cluster, degrees, "cp") == Group(ranks_per_node=2)
    assert group_along(cluster, degrees, "dp") == Group(ranks_per_node=1, num_nodes=2)
    assert group_along(cluster, degrees, "data") == Group(ranks_per_node=2, num_nodes=2)
    assert {name: axis.size for name, axis in lowered_groups(cluster, degrees).items()} == {
        "tp": 2,
        "hp": 1,
        "cp": 2,
        "ep": 1,
    }


def test_a_pipeline_that_spans_nodes_sends_between_them():
    """Two pp ranks of four ranks each: inside a node of 8, between nodes of 4."""
    degrees = Degrees(dp=2, tp=2)
    assert pipeline_group(cluster_of(8), degrees, pp=2) == Group(ranks_per_node=2)
    assert pipeline_group(cluster_of(4), degrees, pp=2) == Group(ranks_per_node=1, num_nodes=2)


@pytest.mark.parametrize(
    ("cp", "pair"),
    [
        (4, Group(ranks_per_node=2)),
        (16, Group(ranks_per_node=1, num_nodes=2)),
        (32, Group(ranks_per_node=1, num_nodes=2, domains=(2, 1))),
        (128, Group(ranks_per_node=1, num_nodes=2, domains=(2, 2))),
    ],
)
def test_ranks_of_a_ring_wait_for_its_farthest_link(cp, pair):
    """B10: nodes of 4 in domains of 16, those in domains of 64."""
    rail, spine = (Link(name=name, alpha_s=0, beta_s_per_byte=1) for name in ("rail", "spine"))
    tiers = Tier(devices=16, link=rail), Tier(devices=64, link=spine)
    cluster = Machine(devices_per_node=4, tiers=tiers).cluster
    assert neighbours(group_along(cluster, Degrees(cp=cp), "cp")) == pair


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_what_leaves_a_part_of_a_group_takes_the_link_between_groups(ranks):
    """Nodes of 4 in domains of 8, and stages with as many ranks on another group as here: what is
    inside takes the links that it takes alone.
    """
    spine, between = (
        Link(name=name, alpha_s=0, beta_s_per_byte=1) for name in ("spine", "between")
    )
    tiers = Tier(devices=8, link=spine), Tier(devices=16, link=between)
    cluster = Machine(devices_per_node=4, tiers=tiers).cluster
    group = axis_group(replace(cluster, stage_ranks=ranks), size=2 * ranks, stride=1)
    levels = two_levels("all_reduce", group, tiers)
    assert levels.link == between
    assert levels.inside == axis_group(cluster, size=ranks, stride=1)


@pytest.mark.parametrize("name", ["dp", "cp", "tp", "data", "batch"])
def test_a_group_has_the_ranks_that_share_a_node(name):
    """Where sizes divide a node: as counted over the ranks of a mesh."""
    for dp, cp, tp in product((1, 2, 4), repeat=3):
        degrees, cluster = Degrees(dp=dp, cp=cp, tp=tp), cluster_of(8)
        stride = {"dp": cp * tp, "cp": tp, "tp": 1, "data": tp, "batch": cp * tp}[name]
        ranks = [index * stride for index in range(degrees.along(name))]
        found = group_along(cluster, degrees, name)
        assert found.ranks_per_node == sum(rank < 8 for rank in ranks)
        assert found == axis_group(cluster, size=len(ranks), stride=stride)
