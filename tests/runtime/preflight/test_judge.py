"""Issue 19, 7: what of nodes, ranks and rates is a problem, and that it is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.language.lowering.defaults import default_plan
from planner.nodes.node_links import slow_nodes
from planner.runtime.preflight.exchanges import Exchange, PlannedRates
from planner.runtime.preflight.facts import Facts, in_order_of_ranks
from planner.runtime.preflight.judge import judge_nodes, judge_ranks
from planner.runtime.preflight.pairs import Stuck
from planner.runtime.preflight.rank import Finding
from planner.runtime.preflight.rates import judge_rates, rates_of
from planner.runtime.preflight.reach import Unreached
from planner.units import GIB, MIB
from tests.runtime.scenarios import capture

HOSTS = ["a", "a", "b", "b"]
FACTS = Facts(
    node="a", name="a.x", pid=1, number=None, ranks_here=2,
    versions=(("torch", "2.13.0"),), files=(("the plan plan.json", "11aa"),),
)  # fmt: skip


@pytest.fixture
def plan():
    made = default_plan(capture("gpt"), dp=2, pp=2)
    memory = [{"total_bytes": 3 * GIB, "context_bytes": GIB}] * 2
    estimate = {
        "step_s": 1.0, "peak_bytes": 3 * GIB, "time": {}, "memory": memory, "source": "shipped",
    }  # fmt: skip
    cluster = made.cluster.model_copy(update={"devices_per_node": 2})
    return made.model_copy(update={"estimate": estimate, "cluster": cluster})


def finding(**changes):
    usual = {"phase": "done", "address": "10.0.0.1", "clocks": [100.0, 101.0, 102.0],
             "free_bytes": 8 * GIB, "shares_memory": True}  # fmt: skip
    return Finding(**usual | changes)


def problems(checks):
    return [problem for check in checks for problem in check.problems]


def all_found(**changes):
    return {rank: finding(**changes) for rank in range(4)}


def test_equal_nodes_and_good_ranks_have_no_problem(plan):
    assert not problems(judge_nodes([FACTS, replace(FACTS, node="b")], 4))
    assert not problems(judge_nodes([FACTS, replace(FACTS, node="b", ranks_here=1)], 3))
    assert not problems(judge_ranks(plan, HOSTS, all_found(), {}))


def test_nodes_that_differ_are_named_with_both_values():
    other = replace(FACTS, node="b", versions=(("torch", "2.12.1"),),
                    files=(("the plan plan.json", "not there"),),
                    refusal="1 GPU is here")  # fmt: skip
    assert problems(judge_nodes([FACTS, other, replace(FACTS, node="c")], 6)) == [
        "b can't run the plan: 1 GPU is here",
        "torch is not the same on all nodes: 2.13.0 on a, c; 2.12.1 on b",
        "the plan plan.json is not the same on all nodes: 11aa on a, c; not there on b",
    ]


def test_nodes_start_the_plans_ranks_together():
    """Where `num_nodes` is not the same on all, say."""
    (told,) = problems(judge_nodes([FACTS, replace(FACTS, node="b", ranks_here=1)], 4))
    assert told == (
        "nodes start 3 ranks (2 on a, 1 on b) and the plan has 4; give the same `num_nodes` on all"
    )


def test_nodes_are_in_the_order_of_their_numbers_or_names():
    nodes = [replace(FACTS, node=name, name=name, number=at) for name, at in [("b", 0), ("a", 1)]]
    assert [each.node for each in in_order_of_ranks(nodes)[0]] == ["b", "a"]
    nodes = [replace(each, number=None) for each in nodes]
    assert [each.node for each in in_order_of_ranks(nodes)[0]] == ["a", "b"]
    _, disorder = in_order_of_ranks([replace(each, number=0) for each in nodes])
    assert problems(judge_nodes(nodes, 4, disorder)) == [
        "`node_rank` 0 was given on a and on b; give each node a number of its own, from 0"
    ]


def test_pairs_that_fail_are_a_line_with_both_addresses(plan):
    lost = [Unreached(rank=2, why="no answer in 5 s"), Unreached(rank=3, why="no answer in 5 s")]
    found = {0: finding(phase="reach", unreached=lost), 1: finding(phase="reach", unreached=lost),
             2: finding(phase="reach", address="127.0.1.1"), 3: finding(phase="reach")}  # fmt: skip
    (line,) = problems(judge_ranks(plan, HOSTS, found, {}))
    assert line.startswith("a (10.0.0.1) does not reach b (127.0.1.1), rank 0 to rank 2 and 3 more")
    assert "no answer in 5 s; b gives an address that only it can reach" in line


def test_of_stuck_messages_the_first_round_is_the_cause(plan):
    found = all_found(phase="pairs")
    for rank, at in ((0, 3), (1, 1), (2, 1), (3, 2)):
        found[rank].stuck = Stuck(round=at, to_rank=(rank + at) % 4, from_rank=(rank - at) % 4,
                                  why="timed out")  # fmt: skip
    told = problems(judge_ranks(plan, HOSTS, found, {}))
    assert [line.split(" on ")[0] for line in told] == ["rank 1", "rank 2"]
    assert "sending to rank 2 on b or receiving from rank 0 on a: timed out" in told[0]


def test_ranks_that_left_nothing_are_named_once(plan):
    found = {0: finding(trouble="rank 0 waited 20 s for ranks 2, 3", phase="reach"),
             1: finding(trouble="rank 1 waited 20 s for ranks 2, 3", phase="reach")}  # fmt: skip
    ended = {2: "was killed by SIGKILL", 3: "was killed by SIGKILL"}
    assert problems(judge_ranks(plan, HOSTS, found, ended)) == [
        "ranks 0, 1 on a: waited 20 s for ranks 2, 3 (reach)",
        "ranks 2, 3 on b: was killed by SIGKILL",
    ]


def test_memory_of_a_node_is_shared_and_of_a_device_is_not(plan):
    """2 GiB a rank beside the context: a host with 3 GiB has too little for its two."""
    shared = all_found(free_bytes=3 * GIB)
    assert [line.split(" free")[0] for line in problems(judge_ranks(plan, HOSTS, shared, {}))] == [
        "a has 3.00 GiB", "b has 3.00 GiB"
    ]  # fmt: skip
    own = all_found(free_bytes=3 * GIB, shares_memory=False)
    assert not problems(judge_ranks(plan, HOSTS, own, {}))
    own[3].free_bytes = GIB
    (line,) = problems(judge_ranks(plan, HOSTS, own, {}))
    assert line.startswith("rank 3 on b has 1.00 GiB free and the plan needs 2.00 GiB")


def test_a_clock_that_is_off_is_named(plan):
    found = all_found()
    for rank in (2, 3):
        found[rank].clocks = [97.5, 98.4, 99.6]
    (line,) = problems(judge_ranks(plan, HOSTS, found, {}))
    assert line.startswith("the clock of b is 2.5 s behind that of a")


def timed(rates):
    """Findings with pairs of nodes at these bytes per second."""
    pairs = {
        Exchange(axis="nodes", kind="send_recv", ranks=ranks): (MIB, MIB / rate)
        for ranks, rate in rates.items()
    }
    return {0: finding(timed=[(each, *told) for each, told in pairs.items()])}


def test_a_node_whose_links_are_all_slow_is_named(plan):
    hosts = ["a", "b", "c", "d"]
    slow = timed({(0, 1): 1e9, (0, 2): 1e8, (1, 2): 1.1e8, (0, 3): 9e8, (1, 3): 1e9, (2, 3): 1e8})
    planned = PlannedRates(source="p", seconds=lambda _, num_bytes: num_bytes / 8e8)
    for rates in (planned, None):
        told = judge_rates(plan, hosts, rates_of(hosts, slow, rates))
        lines = [line for line in problems(told) if "links" in line]
        assert len(lines) == 1
        assert lines[0].startswith("all links of c to other nodes are slow: send_recv of 1 MiB")
        assert ("0.8 GB/s planned, 8.0 times less" in lines[0]) == (rates is planned)
    two = timed({(0, 1): 1e8})
    (line,) = problems(judge_rates(plan, hosts, rates_of(hosts, two, planned)))[:1]
    assert line.startswith("slow link between nodes, ranks 0, 1 on a, b: ")


def test_a_group_slower_than_planned_is_named_with_ranks_and_nodes(plan):
    found = {
        ranks[0]: finding(timed=[(Exchange(axis="data", kind="all_reduce", ranks=ranks), MIB, s)])
        for ranks, s in (((0, 1), 0.001), ((2, 3), 0.25))
    }
    planned = PlannedRates(source="p", seconds=lambda exchange, num_bytes: 0.001)
    told = judge_rates(plan, HOSTS, rates_of(HOSTS, found, planned))
    (line,) = problems(told)
    assert line.startswith("slow data group, ranks 2, 3 on b: all_reduce of 1 MiB at 0.00419 GB/s")
    assert line.endswith("1.05 GB/s planned, 250.0 times less")


def test_groups_on_more_nodes_than_planned_are_named(plan):
    hosts = ["a", "b", "a", "b"]
    (line,) = problems(judge_rates(plan, hosts, ()))
    assert line.startswith("data group of ranks 0, 1 lies on a, b, and the plan is for nodes of 2")


def test_no_node_stands_out_where_all_links_are_slow():
    every = [("a", "b"), ("a", "c"), ("b", "c")]
    assert slow_nodes(every, every) == ()
    assert slow_nodes(every, [("c", "a")]) == ()
    assert slow_nodes(every, [("c", "a"), ("b", "c")]) == ("c",)
    assert slow_nodes([("a", "b")], [("a", "b")]) == ()


def test_a_finding_goes_through_the_store_as_it_is():
    whole = finding(
        unreached=[Unreached(rank=2, why="refused")],
        stuck=Stuck(round=1, to_rank=1, from_rank=3, why="timed out"),
        timed=[(Exchange(axis="tp", kind="all_reduce", ranks=(0, 1)), MIB, 0.5)],
    )
    assert Finding.of(whole.to_json()) == whole
