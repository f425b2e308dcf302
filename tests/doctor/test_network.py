"""The doctor on the address that other ranks are told."""

from __future__ import annotations

import socket

import pytest

from planner.doctor.network import check_network


def entry(address: str) -> tuple:
    return (socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0))


@pytest.mark.parametrize(
    ("addresses", "state", "says"),
    [
        (["127.0.0.1"], "warning", "the loopback"),
        (["192.0.2.7"], "warning", "which is no address of this node"),
        ([], "warning", "stands for no address"),
    ],
)
def test_a_host_name_that_others_can_t_use(monkeypatch, addresses, state, says):
    def getaddrinfo(*args, **options):
        if not addresses:
            raise socket.gaierror(-2, "Name or service not known")
        return [entry(address) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    first, *_ = check_network()
    assert first.state == state
    assert says in first.found
    assert "for several nodes" in first.advice


def test_an_interface_that_is_not_here_is_a_problem(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=lo")
    told = {finding.name: finding for finding in check_network()}
    assert told["GLOO_SOCKET_IFNAME"].state == "problem"
    assert "nope0, not among" in told["GLOO_SOCKET_IFNAME"].found
    assert told["NCCL_SOCKET_IFNAME"].state == "ok"
