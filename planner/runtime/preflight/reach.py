"""Every rank connects to every other one, many at once, and gets back what it sends.

This goes ahead of the backend, which connects all ranks when it starts: if a single pair fails,
it ends on every rank without the names of the two. Between two nodes some ranks send a message of
`PAYLOAD`, which shows what connecting alone does not: a path that loses long packets.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from planner.nodes.interface import address_of, address_towards

REACH_S = 5.0
"""Seconds in which another rank must answer."""

PAYLOAD = 64 * 2**10
"""Bytes of a long message."""

_AT_ONCE = 64
"""Ranks that a rank asks at a time: those that do not answer take `REACH_S` each."""


_HEADER = struct.Struct("!II")
"""The rank that speaks, and the bytes that follow."""


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
            return address_of(name)
    if backend == "gloo":
        with suppress(OSError):
            for found in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
                with suppress(OSError), socket.socket(found[0], found[1]) as probe:
                    probe.bind(found[4])
                    return str(found[4][0])
        return "127.0.0.1"
    return address_towards(towards) or "127.0.0.1"


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
    sends_long: Callable[[int], bool],
    all_done: Callable[[], None],
) -> list[Unreached]:
    """Return the ranks that did not answer at their addresses; answer all meanwhile.

    A rank that does not answer is asked once more: on a busy machine it may be late. `sends_long`
    says to which ranks a long message goes. `all_done` returns, or raises, when no other rank can
    be about to ask any more.
    """

    async def run() -> list[Unreached]:
        answering = await asyncio.start_server(_answer(rank), sock=server)
        turns = asyncio.Semaphore(_AT_ONCE)

        async def ask(peer: int) -> str:
            async with turns:
                payload = PAYLOAD if sends_long(peer) else 0
                return await _ask(rank, peer, addresses[peer], payload)

        # Each begins with its neighbour, so that not all ask the same one.
        count = len(addresses)
        silent = {(rank + step) % count: "" for step in range(1, count)}
        for _ in range(2):
            answers = await asyncio.gather(*map(ask, silent))
            told = dict(zip(silent, answers, strict=True))
            silent = {peer: why for peer, why in told.items() if why}
        await asyncio.to_thread(all_done)
        answering.close()
        return [Unreached(rank=peer, why=why) for peer, why in sorted(silent.items())]

    return asyncio.run(run())


def _answer(
    rank: int,
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # (Cancelled: where the check ends while somebody is still connected.)
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            _, length = _HEADER.unpack(await reader.readexactly(_HEADER.size))
            payload = await reader.readexactly(min(length, PAYLOAD))
            writer.write(_HEADER.pack(rank, length) + payload)
            await writer.drain()
        writer.close()

    return answer


async def _ask(rank: int, peer: int, address: tuple[str, int], num_bytes: int) -> str:
    """Return why a rank did not answer, or nothing."""
    is_connected = False

    async def ask() -> str:
        nonlocal is_connected
        reader, writer = await asyncio.open_connection(*address)
        is_connected = True
        try:
            writer.write(_HEADER.pack(rank, num_bytes) + bytes(num_bytes))
            await writer.drain()
            answering, _ = _HEADER.unpack(await reader.readexactly(_HEADER.size))
            if answering != peer:
                return f"rank {answering} answered in its place"
            await reader.readexactly(num_bytes)
        finally:
            writer.close()
        return ""

    try:
        return await asyncio.wait_for(ask(), REACH_S)
    except TimeoutError:
        if is_connected and num_bytes:
            return (
                f"connected, and {num_bytes // 2**10} KiB did not come back in {REACH_S:.0f} s; "
                "often the path takes shorter packets than the interface (MTU)"
            )
        return f"no answer in {REACH_S:.0f} s"
    except asyncio.IncompleteReadError:
        return "hung up"
    except OSError as error:
        return (os.strerror(error.errno) if error.errno else str(error)).lower()
