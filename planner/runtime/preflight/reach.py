"""Every rank connects to every other one at once, and gets back what it sends.

This goes ahead of the backend, which connects all ranks when it starts: if a single pair fails,
it ends on every rank without the names of the two. A message of `PAYLOAD` crosses what connecting
alone does not show: a path that loses long packets.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

REACH_S = 5.0
"""Seconds in which another rank must answer."""

PAYLOAD = 64 * 2**10

_GET_ADDRESS = 0x8915
"""SIOCGIFADDR of Linux (linux/sockios.h)."""

_HEADER = struct.Struct("!II")
"""The rank that speaks, and the one it means to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreached:
    """A rank that did not answer this one: its number, and why, in a few words."""

    rank: int
    why: str


def own_address(backend: str, towards: str) -> str:
    """Return the address under which a backend takes connections on this node.

    `towards` is a host that this node reaches. The rules are those of the backends: the interface
    that the environment names (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME); without it gloo takes what
    this host's name stands for, if that is an address here, else the loopback
    (`ProcessGroupGloo::createDefaultDevice`), and others are taken to use the way to `towards`.
    """
    listed = os.environ.get(f"{backend.upper()}_SOCKET_IFNAME", "")
    for name in listed.lstrip("=").split(","):
        with suppress(OSError, ValueError):
            return _address_of(name)
    if backend == "gloo":
        with suppress(OSError):
            for found in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
                with suppress(OSError), socket.socket(found[0], found[1]) as probe:
                    probe.bind(found[4])
                    return str(found[4][0])
        return "127.0.0.1"
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))  # sends nothing
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def listen(address: str) -> socket.socket:
    """Return a socket that takes connections at an address of this node, on a free port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    server.bind((address, 0))
    server.listen(1024)
    return server


def reach_all(
    server: socket.socket,
    addresses: Sequence[tuple[str, int]],
    *,
    rank: int,
    all_done: Callable[[], None],
) -> list[Unreached]:
    """Return the ranks that did not answer at their addresses; answer all meanwhile.

    `all_done` returns, or raises, when no other rank can be about to ask any more.
    """

    async def run() -> list[Unreached]:
        answering = await asyncio.start_server(_answer(rank), sock=server)
        others = [(peer, at) for peer, at in enumerate(addresses) if peer != rank]
        asked = await asyncio.gather(*(_ask(rank, peer, at) for peer, at in others))
        await asyncio.to_thread(all_done)
        answering.close()
        return [
            Unreached(rank=peer, why=why)
            for (peer, _), why in zip(others, asked, strict=True)
            if why
        ]

    return asyncio.run(run())


def _answer(
    rank: int,
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            asking, _ = _HEADER.unpack(await reader.readexactly(_HEADER.size))
            payload = await reader.readexactly(PAYLOAD)
            writer.write(_HEADER.pack(rank, asking) + payload)
            await writer.drain()
        writer.close()

    return answer


async def _ask(rank: int, peer: int, address: tuple[str, int]) -> str:
    """Return why a rank did not answer, or nothing."""
    is_connected = False

    async def ask() -> str:
        nonlocal is_connected
        reader, writer = await asyncio.open_connection(*address)
        is_connected = True
        try:
            writer.write(_HEADER.pack(rank, peer) + bytes(PAYLOAD))
            await writer.drain()
            answering, _ = _HEADER.unpack(await reader.readexactly(_HEADER.size))
            if answering != peer:
                return f"rank {answering} answered in its place"
            await reader.readexactly(PAYLOAD)
        finally:
            writer.close()
        return ""

    try:
        return await asyncio.wait_for(ask(), REACH_S)
    except TimeoutError:
        if is_connected:
            return (
                f"connected, and {PAYLOAD // 2**10} KiB did not come back in {REACH_S:.0f} s; "
                "often the path takes shorter packets than the interface (MTU)"
            )
        return f"no answer in {REACH_S:.0f} s"
    except asyncio.IncompleteReadError:
        return "hung up"
    except OSError as error:
        return (os.strerror(error.errno) if error.errno else str(error)).lower()


def _address_of(interface: str) -> str:
    """Return the IPv4 address of an interface (Linux). Raises OSError where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        asked = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _GET_ADDRESS, asked)[20:24])
