"""Which interface gloo is given: that on the way to the other nodes, unless the user names one."""

from __future__ import annotations

import os
import socket

import pytest
import torch.distributed as dist

from planner.nodes import interface
from planner.nodes.interface import GLOO_INTERFACE, address_of, address_towards, interface_of

ELSEWHERE = {"node-a": "", "node-b": "10.0.0.2", "10.0.0.2": "10.0.0.1"}
"""Addresses towards hosts, on the node that is node-a: its own name stands for its loopback."""


@pytest.fixture
def roads(monkeypatch):
    monkeypatch.delenv(GLOO_INTERFACE, raising=False)
    monkeypatch.setattr(interface, "address_towards", ELSEWHERE.__getitem__)
    monkeypatch.setattr(interface, "interface_of", {"10.0.0.1": "eth1", "10.0.0.2": "eth2"}.get)
    yield
    os.environ.pop(GLOO_INTERFACE, None)


def take(rank, towards, told):
    store = dist.HashStore()
    for other, address in enumerate(told):
        store.set(f"planner/address/{other}", address)
    interface.take_interface(store, rank=rank, count=len(told), towards=towards)
    return store.get(f"planner/address/{rank}").decode(), os.environ.get(GLOO_INTERFACE)


def test_it_is_that_of_the_way_to_where_all_meet(roads):
    assert take(1, "node-b", ["", ""]) == ("10.0.0.2", "eth2")


def test_on_the_node_of_the_meeting_it_is_that_of_the_way_to_another(roads):
    assert take(0, "node-a", ["", "", "10.0.0.2"]) == ("", "eth1")


def test_where_all_meet_at_the_loopback_gloo_chooses(roads):
    assert take(0, "node-a", ["", ""]) == ("", None)


def test_an_interface_that_the_user_names_stays(roads, monkeypatch):
    monkeypatch.setenv(GLOO_INTERFACE, "ib0")
    assert take(1, "node-b", ["", ""]) == ("10.0.0.2", "ib0")


def test_the_loopback_is_no_address_towards_another_node():
    assert address_towards("127.0.0.1") == address_towards("localhost") == ""
    assert address_towards("no.such.host.invalid") == ""


def test_interfaces_have_their_addresses():
    for _, name in socket.if_nameindex():
        try:
            address = address_of(name)
        except OSError:
            continue
        assert address_of(interface_of(address)) == address
    assert address_of("lo") == "127.0.0.1"
    assert interface_of("203.0.113.7") == ""
