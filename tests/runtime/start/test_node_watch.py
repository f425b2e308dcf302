"""Issue 19, 1: launchers see which node gives no sign any more."""

from __future__ import annotations

import os
import socket
import time

import torch.distributed as dist

from planner.runtime.start.node_watch import LOST_S, NodeWatch, end_dead_connections
from tests.spawn import until


def test_a_node_that_stops_is_lost_to_the_others(monkeypatch):
    monkeypatch.setenv(LOST_S, "3")
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    meeting = f"127.0.0.1:{store.port}"
    watches = [NodeWatch(meeting, "room", number=number, count=3) for number in range(2)]
    for watch in watches:
        watch.start()
    time.sleep(1)
    # Node 2 has never come, and node 1 stops.
    until(lambda: watches[0].lost)
    assert watches[0].lost == "node 2 gave no sign for 3 s"
    for watch in watches:
        watch.stop()
        assert not watch.is_alive()
    alone = NodeWatch(meeting, "later", number=0, count=2)
    other = NodeWatch(meeting, "later", number=1, count=2)
    alone.start()
    other.start()
    time.sleep(1)
    other.stop()
    until(lambda: alone.lost)
    assert alone.lost == f"{socket.gethostname()} gave no sign for 3 s"
    alone.stop()


def test_a_store_that_ends_is_the_node_that_all_meet_at(monkeypatch):
    monkeypatch.setenv(LOST_S, "3")
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    meeting = f"127.0.0.1:{store.port}"
    watch = NodeWatch(meeting, "room", number=0, count=1)
    watch.start()
    time.sleep(0.5)
    del store
    until(lambda: watch.lost)
    assert watch.lost == f"the node that all meet at, {meeting}, does not answer"
    watch.stop()


def test_no_descriptor_is_left():
    """One of a pipe would keep whoever reads it waiting: a process that starts another one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            read, write = os.pipe()
            before = set(os.listdir("/proc/self/fd"))
            end_dead_connections(port, 7.0)
            assert set(os.listdir("/proc/self/fd")) == before
            os.close(write)
            assert os.read(read, 1) == b""
            os.close(read)


def test_connections_to_a_port_fail_with_a_silent_end():
    """Of this process's connections those to the port alone have the limit."""
    limits = {}
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as two,
    ):
        ports = [server.getsockname()[1] for server in (one, two)]
        clients = [socket.create_connection(("127.0.0.1", port)) for port in ports]
        end_dead_connections(ports[0], 7.0)
        for port, client in zip(ports, clients, strict=True):
            limits[port] = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            client.close()
    assert limits == {ports[0]: 7000, ports[1]: 0}
