"""Nodes are in the order of the numbers that they were told, in every round."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo

from planner.errors import PlannerError
from planner.nodes.meeting import in_order
from planner.runtime.start.node_order import InOrder


class Met:
    """A rendezvous that has met: this node is number `rank` by its name."""

    def __init__(self, store, rank: int, count: int, *, shares: bool) -> None:
        self.met = RendezvousInfo(store, rank, count, RendezvousStoreInfo("by-name", 1))
        self.use_agent_store = shares

    def next_rendezvous(self) -> RendezvousInfo:
        return self.met


def meet(numbers, *, shares=True):
    """What each node gets of a round, by its place among the names."""
    store = dist.HashStore()
    nodes = [
        InOrder(Met(store, at, len(numbers), shares=shares), number)
        for at, number in enumerate(numbers)
    ]
    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(InOrder.next_rendezvous, nodes))


def test_nodes_are_sorted_by_the_numbers_they_were_told():
    assert [met.rank for met in meet([2, 0, 1])] == [2, 0, 1]
    assert [met.rank for met in meet([7, 3])] == [1, 0]  # nodes are left out of later rounds
    assert [met.rank for met in meet([None, None, None])] == [0, 1, 2]
    assert {met.world_size for met in meet([2, 0, 1])} == {3}


def test_ranks_meet_where_their_first_one_is():
    """The store of a rendezvous stays where it is; one that rank 0 makes is on the first node."""
    shared = [met.bootstrap_store_info.master_addr for met in meet([1, 0])]
    assert shared == ["by-name"] * 2
    own = [met.bootstrap_store_info for met in meet([1, 0], shares=False)]
    assert own[0] == own[1]
    assert own[0].master_addr != "by-name"


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ([0, None, 2], "given on some nodes and not on b; give it on all"),
        ([0, 1, 0], "`node_rank` 0 was given on a and on c; give each node a number of its own"),
    ],
)
def test_numbers_that_are_no_order_are_refused(numbers, told):
    with pytest.raises(PlannerError, match=told):
        in_order(numbers, ["a", "b", "c"])


def test_all_nodes_are_told_why_they_have_no_order():
    with pytest.raises(PlannerError, match="was given on some nodes"):
        meet([0, None])
