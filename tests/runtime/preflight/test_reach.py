"""Issue 19, 7: each rank reaches each rank; who does not answer is named, with the reason."""

from __future__ import annotations

import socket
import threading

import pytest

from planner.runtime.preflight import reach
from planner.runtime.preflight.reach import listen, own_address, reach_all


def reached_by_all(addresses, servers):
    """What `reach_all` returns on each rank, all at once in threads of this process."""
    found = {}
    barrier = threading.Barrier(len(servers))

    def run(rank: int) -> None:
        found[rank] = reach_all(
            servers[rank],
            addresses,
            rank=rank,
            sends_long=lambda peer: True,
            all_done=lambda: barrier.wait(20) and None,
        )

    threads = [threading.Thread(target=run, args=(rank,)) for rank in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.fixture
def two():
    servers = [listen("127.0.0.1") for _ in range(2)]
    return dict(enumerate(servers)), [server.getsockname()[:2] for server in servers]


def test_ranks_that_answer_are_reached(two):
    servers, addresses = two
    assert reached_by_all(addresses, servers) == {0: [], 1: []}


def test_a_rank_that_nobody_is_at_is_refused(two):
    servers, addresses = two
    with socket.create_server(("127.0.0.1", 0)) as unused:
        gone = unused.getsockname()[:2]
    found = reached_by_all([*addresses, gone], servers)
    for rank in (0, 1):
        assert [(each.rank, each.why) for each in found[rank]] == [(2, "connection refused")]


def test_another_rank_at_the_address_is_no_answer(two):
    """A loopback address leads each node to itself."""
    servers, addresses = two
    found = reached_by_all([*addresses, addresses[0]], servers)
    assert [(each.rank, each.why) for each in found[1]] == [(2, "rank 0 answered in its place")]


def test_a_path_that_takes_nothing_is_told(two, monkeypatch):
    monkeypatch.setattr(reach, "REACH_S", 0.5)
    servers, addresses = two
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = reached_by_all([*addresses, silent.getsockname()[:2]], servers)
    (unreached,) = found[0]
    assert unreached.rank == 2
    assert "connected, and 64 KiB did not come back" in unreached.why


def test_the_address_is_that_of_the_backend(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert own_address("gloo", "localhost") == "127.0.0.1"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(socket, "gethostname", lambda: "no.such.host.invalid")
    assert own_address("gloo", "localhost") == "127.0.0.1"  # as gloo does
    assert own_address("nccl", "127.0.0.1") == "127.0.0.1"
