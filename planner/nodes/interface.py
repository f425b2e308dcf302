"""Which interface of this node leads to the others.

gloo takes connections at the address that the host's own name stands for. Where that is the
loopback, as some installers write it into /etc/hosts, no other node reaches it. So ranks that meet
at an address take the interface on the way there (`take_interface`), unless GLOO_SOCKET_IFNAME
names one.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import suppress
from ipaddress import ip_address
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""The variable by which gloo is told its interface."""

_GET_ADDRESS = 0x8915
"""SIOCGIFADDR of Linux: the address of an interface."""


def address_towards(host: str) -> str:
    """Return the address of this node from which packets to a host go; empty where none do, or
    they stay on the node (a loopback address).
    """
    with suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # sends nothing
                found = str(probe.getsockname()[0])
                return "" if ip_address(found.partition("%")[0]).is_loopback else found
    return ""


def address_of(interface: str) -> str:
    """Return the IPv4 address of an interface (Linux). Raises OSError where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        asked = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _GET_ADDRESS, asked)[20:24])


def interface_of(address: str) -> str:
    """Return the interface that has an IPv4 address; empty where none has it."""
    for _, name in socket.if_nameindex():
        with suppress(OSError):
            if address_of(name) == address:
                return name
    return ""


def take_interface(store: Store, *, rank: int, count: int, towards: str) -> None:
    """Let gloo take the interface on the way to the other nodes, in this process.

    All `count` ranks call it over the store where they met, at the host `towards`. The way to it
    tells a rank's address; on the node of that host itself, whose name may stand for the loopback
    there, the way to any other node does. Ranks that all meet at the loopback keep gloo's own
    choice, and so does a process whose environment names an interface.
    """
    own = address_towards(towards)
    store.set(f"planner/address/{rank}", own)
    if os.environ.get(GLOO_INTERFACE):
        return
    if not own:
        # (A node's ranks are some of all: the first address of another one is enough.)
        others = (store.get(f"planner/address/{each}").decode() for each in range(count))
        own = next(filter(None, map(address_towards, filter(None, others))), "")
    if own and (name := interface_of(own)):
        os.environ[GLOO_INTERFACE] = name
