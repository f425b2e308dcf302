"""N14, D1: processes of several nodes find one store, tell each other, and say who is missing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore

from planner.errors import PlannerError
from planner.nodes import meeting
from planner.nodes.launchers import Started
from planner.nodes.meeting import host_and_port, meet_as_nodes, meet_as_started, tell_all
from tests.spawn import free_port

SOON = timedelta(seconds=20)
PLACE = Started(
    launcher="srun", number=0, count=2, local_number=0, local_count=1, address="127.0.0.1",
    port=0, is_rank=False,
)  # fmt: skip


def at_once(work: Callable[[int], Any], count: int) -> list[Any]:
    """What `work` returns or raises of each number, all at once in threads of this process."""
    found: dict[int, Any] = {}

    def run(number: int) -> None:
        try:
            found[number] = work(number)
        except PlannerError as error:
            found[number] = str(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in range(count)]


def assert_one_store(stores) -> None:
    """What any of them is told the others have."""
    for number, store in enumerate(stores):
        store.set(f"of {number}", str(number))
    for store in stores:
        assert [int(store.get(f"of {number}")) for number in range(len(stores))] == [
            *range(len(stores))
        ]


# ---- where


@pytest.mark.parametrize(
    ("given", "parts"),
    [("a:1", ("a", 1)), ("n1.x:65535", ("n1.x", 65535)), ("::1:80", ("::1", 80))],
)
def test_an_address_is_a_host_and_a_port(given, parts):
    assert host_and_port(given) == parts


@pytest.mark.parametrize("given", ["", "a", "a:", ":80", "a:b", "a:0", "a:65536", "a:-1", "a: 1"])
def test_what_is_no_address_is_told(given):
    with pytest.raises(PlannerError, match=r"`rendezvous` .* was given; it is HOST:PORT"):
        host_and_port(given)


def test_of_the_nodes_at_their_own_address_the_first_has_the_store():
    rendezvous = f"127.0.0.1:{free_port()}"
    met = at_once(lambda number: meet_as_nodes(rendezvous, SOON), 3)
    assert sorted(is_first for _, is_first in met) == [False, False, True]
    assert_one_store([store for store, _ in met])


def test_a_node_at_the_address_of_another_never_has_the_store(monkeypatch):
    port = free_port()
    monkeypatch.setattr(meeting, "is_here", lambda host: False)
    there = TCPStore("127.0.0.1", port, None, is_master=True, wait_for_workers=False)
    store, is_first = meet_as_nodes(f"127.0.0.1:{port}", SOON)
    assert not is_first
    assert_one_store([there, store])
    monkeypatch.setattr(meeting, "REACHED_S", 0.1)
    with pytest.raises(OSError, match="refused"):
        meet_as_nodes(f"127.0.0.1:{free_port()}", SOON)


def test_a_port_that_cannot_be_had_is_not_taken_for_another_node_s(monkeypatch):
    def refuse(*args, **options):
        raise RuntimeError("permission denied")

    monkeypatch.setattr(meeting, "_store", refuse)
    with pytest.raises(RuntimeError, match="permission denied"):
        meet_as_nodes(f"127.0.0.1:{free_port()}", SOON)


def test_of_processes_that_a_launcher_started_number_0_has_the_store():
    place = replace(PLACE, count=3, port=free_port())
    stores = at_once(lambda number: meet_as_started(replace(place, number=number), SOON), 3)
    assert_one_store(stores)


def test_ranks_of_torchrun_meet_in_the_store_that_it_has(monkeypatch):
    port = free_port()
    launcher = TCPStore("127.0.0.1", port, None, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    place = replace(PLACE, launcher="torchrun", port=port, is_rank=True)
    ranks = at_once(lambda number: meet_as_started(replace(place, number=number), SOON), 2)
    assert_one_store([launcher, *ranks])


# ---- what


def told(store, number: int, count: int, *, within_s: float = 20.0, room: str = "room"):
    name = "ab"[number % 2]
    return tell_all(
        store, room, f"text {number}", number=number, count=count, name=name, within_s=within_s
    )


def test_each_process_gets_what_all_tell_by_their_numbers():
    store = HashStore()
    expected = [f"text {number}" for number in range(4)]
    assert at_once(lambda number: told(store, number, 4), 4) == [expected] * 4
    with pytest.raises(PlannerError, match="1 of 4 have come"):
        told(store, 0, 4, room="another", within_s=0.1)


def test_those_who_came_are_named_and_the_others_counted():
    store = HashStore()
    lines = at_once(lambda number: told(store, number, 5, within_s=0.3), 3)
    assert len(set(lines)) == 1
    assert lines[0].startswith("3 of 5 have come (a, b; not number 3, 4) after 0 s; start the same")


def test_who_is_missing_is_said_once_while_that_takes_long(monkeypatch, capfd):
    monkeypatch.setattr(meeting, "TOLD_AFTER_S", 0.1)
    with pytest.raises(PlannerError, match="1 of 2 have come"):
        told(HashStore(), 0, 2, within_s=0.5)
    assert capfd.readouterr().err.splitlines() == [
        "planner: a still waits: 1 of 2 have come (a; not number 1)"
    ]


def test_a_number_that_is_not_among_those_that_meet_is_told_at_once():
    store = HashStore()
    with pytest.raises(PlannerError, match="a is number 2 of processes that count from 0, and 2"):
        told(store, 2, 2)
    assert not store.check(["planner/room/2"])


def test_a_store_that_is_gone_is_one_line():
    class Gone(HashStore):
        def check(self, keys):
            raise RuntimeError("Connection reset by peer\nat TCPStore.cpp:1")

    with pytest.raises(PlannerError) as raised:
        told(Gone(), 1, 2)
    assert str(raised.value) == (
        "b has lost the process that all meet at: Connection reset by peer; see what that one wrote"
    )
