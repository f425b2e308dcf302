"""Links between ranks and between nodes: latency and rate come back from messages of two sizes."""

from __future__ import annotations

from itertools import combinations

import pytest

from profiles.lookup.topology import PAIR_LATENCY_BYTES, PAIR_RATE_BYTES
from profiles.measure.session import Ranks, Session
from profiles.measure.timing.link_timing import measure_node_links, measure_pairs, time_groups
from profiles.measure.workers import ProbeFailed

LATENCY_S, BYTES_PER_S = 3e-5, 2e9


class Links:
    """Workers whose messages take a latency and a rate; `hosts` has the node of each rank.

    Links of `slow_host` have a tenth of the rate. Of each message there and back the way there ends
    early by `handed_on_s`, as the sender has handed it on, and the way back takes as much longer;
    the first of them are disturbed.
    """

    def __init__(self, hosts, *, slow_host="", handed_on_s=0.0, refused=frozenset()):
        self.hosts, self.slow_host, self.refused = hosts, slow_host, refused
        self.handed_on_s = handed_on_s
        self.asked = []

    def call(self, task, *, timeout_s):
        assert (task["task"], task["kind"]) == ("collective", "send_recv")
        groups = [tuple(group) for group in task["groups"]]
        self.asked.append(groups)
        ranks = [rank for group in groups for rank in group]
        assert len(ranks) == len(set(ranks)), "a rank is in one group at a time"
        if self.refused & set(ranks):
            raise ProbeFailed("no route to host")
        answers = [None] * len(self.hosts)
        for group in groups:
            slow = self.slow_host in {self.hosts[rank] for rank in group}
            seconds = LATENCY_S + task["num_bytes"] / (BYTES_PER_S / (10 if slow else 1))
            there, back = seconds - self.handed_on_s, seconds + self.handed_on_s
            for rank in group:
                answers[rank] = {"seconds": [5 * there, 5 * back, there, back, there, 2 * back]}
        return answers


def session(tmp_path, hosts):
    about = {"device": "test", "memory_bytes": 1e9, "driver": "none", "torch": "2.13",
             "shares_memory": True}  # fmt: skip
    ranks = Ranks(about=tuple({**about, "node": host} for host in hosts))
    return Session.open(tmp_path, ranks, device_type="cpu")


def test_every_two_nodes_meet_and_the_quickest_message_there_and_back_counts(tmp_path):
    hosts = ("a", "a", "b", "c", "c")
    workers, told = Links(hosts, slow_host="b", handed_on_s=1e-5), []
    found = measure_node_links(workers, session(tmp_path, hosts), told.append)
    assert sorted(tuple(sorted(link.nodes)) for link in found) == list(combinations("abc", 2))
    for link in found:
        rate = BYTES_PER_S / 10 if "b" in link.nodes else BYTES_PER_S
        assert link.latency_s == pytest.approx(LATENCY_S + PAIR_LATENCY_BYTES / rate)
        assert link.bytes_per_s == pytest.approx(rate, rel=0.01)
    # The first rank of each node speaks for it.
    assert {rank for groups in workers.asked for group in groups for rank in group} == {0, 2, 3}
    assert told == [f"links between nodes, round {at} of 3" for at in (1, 2, 3)]


def test_nodes_that_share_no_node_send_at_once(tmp_path):
    hosts = tuple("abcd")
    workers = Links(hosts)
    found = measure_node_links(workers, session(tmp_path, hosts), lambda told: None)
    assert len(found) == 6
    assert [len(groups) for groups in workers.asked] == [2] * 6  # two sizes in three rounds


def test_a_node_that_is_out_of_reach_is_noted_and_the_others_are_measured(tmp_path):
    hosts = ("a", "b", "c")
    opened = session(tmp_path, hosts)
    found = measure_node_links(Links(hosts, refused=frozenset({2})), opened, lambda told: None)
    assert [link.nodes for link in found] == [("a", "b")]
    assert sorted(skipped.probe for skipped in opened.skipped) == [
        "links between nodes: a to c", "links between nodes: b to c"
    ]  # fmt: skip
    assert {skipped.reason for skipped in opened.skipped} == {"no route to host"}


def test_pairs_of_ranks_are_measured_each_alone(tmp_path):
    """Of a rank the mean of all samples counts, disturbed ones too, as in training."""
    hosts = ("a", "a", "b")
    workers, told = Links(hosts, slow_host="b"), []
    opened = session(tmp_path, hosts)
    found = {pair.ranks: pair for pair in measure_pairs(workers, opened, told.append)}
    assert list(found) == [(0, 1), (0, 2), (1, 2)]
    assert all(len(groups) == 1 for groups in workers.asked)
    mean = (5 + 5 + 1 + 1 + 1 + 2) / 6
    assert found[0, 1].latency_s == pytest.approx(mean * LATENCY_S, rel=0.1)
    assert found[0, 1].bytes_per_s == pytest.approx(BYTES_PER_S / mean, rel=0.01)
    assert found[0, 2].bytes_per_s == pytest.approx(found[0, 1].bytes_per_s / 10, rel=0.01)
    assert told == [f"link between ranks {a} and {b}" for a, b in found]
    refused = Links(hosts, refused=frozenset({2}))
    assert [pair.ranks for pair in measure_pairs(refused, opened, told.append)] == [(0, 1)]
    assert [skipped.probe for skipped in opened.skipped] == told[1:3]


def test_groups_that_exchange_at_once_have_a_time_each():
    workers = Links(tuple("abcd"), slow_host="d")
    found = time_groups(workers, "send_recv", PAIR_RATE_BYTES, [[0, 1], [2, 3]], of=min)
    assert found == pytest.approx(
        {(0, 1): LATENCY_S + PAIR_RATE_BYTES / BYTES_PER_S,
         (2, 3): LATENCY_S + 10 * PAIR_RATE_BYTES / BYTES_PER_S}
    )  # fmt: skip
    assert len(workers.asked) == 1
