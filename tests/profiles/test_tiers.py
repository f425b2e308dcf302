"""Issue 19, point 4: tiers of links beyond nodes, by hand."""

from __future__ import annotations

import pytest

from costmodel.topology import axis_group, group_along, pair_group, pipeline_group
from planner.cluster import Link, Tier
from planner.language.layout.axes import Degrees
from profiles import Group
from profiles.lookup.collective_model import CollectiveModel
from profiles.lookup.tiers import inside_domain, two_levels
from tests.search.machine import Machine

RAIL = Tier(devices=8, link=Link(name="rail", alpha_s=1e-5, beta_s_per_byte=1e-9))
SPINE = Tier(devices=16, link=Link(name="spine", alpha_s=1e-4, beta_s_per_byte=1e-8))
SOCKET = Tier(devices=2, link=Link(name="socket", alpha_s=1e-6, beta_s_per_byte=1e-10))


def cluster_of(*tiers: Tier):
    """Nodes of 4."""
    return Machine(devices_per_node=4, tiers=tiers).cluster


def test_groups_are_in_as_many_domains_as_their_ranks():
    """Nodes of 4, rails of 8, a spine over 16 each: dp 8 of stride 4 has 2 ranks a rail."""
    cluster = cluster_of(RAIL, SPINE)
    assert axis_group(cluster, size=4, stride=1) == Group(ranks_per_node=4)
    assert axis_group(cluster, size=2, stride=4) == Group(ranks_per_node=1, num_nodes=2)
    found = axis_group(cluster, size=8, stride=4)
    assert found == Group(ranks_per_node=1, num_nodes=8, domains=(4, 2))
    assert inside_domain(found, 1) == Group(ranks_per_node=1, num_nodes=4, domains=(2, 1))
    assert inside_domain(inside_domain(found, 1), 0) == Group(ranks_per_node=1, num_nodes=2)


def test_a_run_with_an_axis_between_spreads_as_its_parts_do():
    """dp and tp share "data" of 2 x 2 with cp between: ranks 0 1 8 9 lie in two rails of 8."""
    degrees = Degrees(rp=2, dp=2, cp=1, tp=2)
    found = group_along(cluster_of(RAIL), degrees.with_sizes(cp=2), "rp")
    assert found == Group(ranks_per_node=1, num_nodes=2, domains=(2,))


def test_pairs_cross_what_lies_within_their_distance():
    cluster = cluster_of(RAIL, SPINE)
    assert pair_group(cluster, apart=3) == Group(ranks_per_node=2)
    assert pair_group(cluster, apart=4) == Group(ranks_per_node=1, num_nodes=2)
    assert pair_group(cluster, apart=8).domains == (2, 1)
    assert pipeline_group(cluster, Degrees(dp=4, tp=4), pp=2).domains == (2, 2)


def test_a_tier_inside_a_node_tells_groups_that_stay_there():
    cluster = cluster_of(SOCKET)
    assert axis_group(cluster, size=2, stride=1) == Group(ranks_per_node=2)
    assert axis_group(cluster, size=4, stride=1) == Group(ranks_per_node=4, domains=(2,))
    assert axis_group(cluster, size=8, stride=1) == Group(ranks_per_node=4, num_nodes=2)
    assert pair_group(cluster, apart=2) == Group(ranks_per_node=2, domains=(2,))
    assert inside_domain(Group(ranks_per_node=4, domains=(2,)), 0) == Group(ranks_per_node=2)


def test_an_all_reduce_in_two_levels_by_hand():
    """16 ranks on 4 nodes of 4 in 2 rails of 8. 80 MB: inside a rail a reduce-scatter and an
    all-gather over 8 ranks; across, an all-reduce over 2 of the 10 MB that each rank has:
    2 * 1/2 * 10 MB * 1 ns + 2 messages of 10 us.
    """
    cluster = cluster_of(RAIL)
    model = CollectiveModel(cluster, (), ())
    group = axis_group(cluster, size=16, stride=1)
    assert group == Group(ranks_per_node=4, num_nodes=4, domains=(2,))
    inside = Group(ranks_per_node=4, num_nodes=2)
    both = sum(model.seconds(k, 8e7, inside).seconds for k in ("reduce_scatter", "all_gather"))
    assert model.seconds("all_reduce", 8e7, group).seconds == pytest.approx(both + 1e-2 + 2e-5)
    # Gathered: each rank first gets the 5 MB of its counterpart.
    gathered = model.seconds("all_gather", 8e7, inside).seconds
    assert model.seconds("all_gather", 8e7, group).seconds == pytest.approx(gathered + 5e-3 + 1e-5)
    # Each rank's own 80 MB: half of them leave the rail.
    dealt = model.seconds("all_to_all", 8e7, inside).seconds
    assert model.seconds("all_to_all", 8e7, group).seconds == pytest.approx(dealt + 4e-2 + 1e-5)


def test_a_message_across_takes_the_outermost_link_alone():
    cluster = cluster_of(RAIL, SPINE)
    model = CollectiveModel(cluster, (), ())
    assert (
        two_levels("send_recv", pair_group(cluster, apart=16), cluster.tiers).link.name == "spine"
    )
    seconds = model.seconds("send_recv", 1e6, pair_group(cluster, apart=16)).seconds
    assert seconds == pytest.approx(1e-4 + 1e-2)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_no_size_is_quicker_than_the_least(kind):
    cluster = cluster_of(RAIL, SPINE)
    model = CollectiveModel(cluster, (), ())
    group = axis_group(cluster, size=32, stride=1)
    least = model.least_s_per_byte(kind, group, most_bytes=1e8)
    for num_bytes in (1e3, 1e6, 1e8):
        assert model.seconds(kind, num_bytes, group).seconds >= least * num_bytes * (1 - 1e-9)
