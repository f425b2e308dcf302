"""Launchers of a run's nodes tell each other that they are there.

A machine that loses its power or its network sends nothing, not even an end of its connections: the
ranks of other nodes would wait for its messages for as long as the backend allows, ten minutes.
Each launcher counts up in the store where all met, and sees whether the others' counts go up.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from planner.nodes.meeting import host_and_port
from planner.nodes.waiting import described

LOST_S = "PLANNER_NODE_S"
"""Environment variable: seconds without a sign after which a node is lost; 0: it never is."""

_DEFAULT_LOST_S = 30.0
_BEAT_S = 2.0
_PROBE_S = 5
"""Seconds of silence after which the kernel asks the other end of a connection, again and again."""


def lost_after_s() -> float:
    """Return the seconds without a sign after which a node is lost."""
    return float(os.environ.get(LOST_S, _DEFAULT_LOST_S))


def end_dead_connections(port: int, after_s: float) -> None:
    """Let connections of this process to a port fail when the other end is silent for so long.

    A store's own time limit does not: when it is over, torch tells the other end that it no longer
    waits, and waits without a limit for the answer to that (`TCPStore::doWait`, torch 2.13). The
    kernel by itself gives up after 15 minutes. Linux only; elsewhere nothing is done.
    """
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    for entry in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):  # it is closed by now, or connected to nothing
            if not os.readlink(entry).startswith("socket:"):
                continue  # a copy of a pipe's end would keep its reader waiting
            with socket.socket(fileno=os.dup(int(entry.name))) as found:
                if found.getpeername()[1] != port:
                    continue
                found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
                limit_ms = int(after_s * 1000)
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)


class NodeWatch(threading.Thread):
    """Counts for this node and watches the others, in one round. Mutable: a thread.

    `lost` says which node is gone, and is empty until one is.
    """

    def __init__(self, meeting: str, room: str, *, number: int, count: int) -> None:
        """`meeting` is the host:port of the store, `room` the round's own part of it; this is node
        `number` of `count`.
        """
        super().__init__(name="planner-node-watch", daemon=True)
        self._meeting, self._room = meeting, room
        self._number, self._count = number, count
        self._lost_s = lost_after_s()
        self._stopped = threading.Event()
        self.lost = ""

    def stop(self) -> None:
        """End the thread: one that is inside the store when the interpreter ends aborts it."""
        self._stopped.set()
        if self.is_alive():
            self.join(timeout=2 * self._lost_s)

    def run(self) -> None:
        """Count and compare until a node is lost, or `stop`."""
        from torch.distributed import PrefixStore, TCPStore

        keys = [str(number) for number in range(self._count)]
        names = {key: f"node {key}" for key in keys}
        counts = dict.fromkeys(keys, "")
        since = dict.fromkeys(keys, time.monotonic())
        host, port = host_and_port(self._meeting)
        beat = 0
        try:
            # A connection of its own: who waits for the agent's would count as lost.
            limit = timedelta(seconds=self._lost_s)
            store = PrefixStore(
                self._room,
                TCPStore(host, port, None, is_master=False, timeout=limit, wait_for_workers=False),
            )
            end_dead_connections(port, self._lost_s)  # this one, and the agent's
            while not self._stopped.is_set():
                beat += 1
                store.set(str(self._number), f"{beat} {socket.gethostname()}")
                known = [key for key in keys if counts[key] or store.check([key])]
                for key, value in zip(known, store.multi_get(known), strict=True):
                    count, names[key] = value.decode().split(" ", 1)
                    if count != counts[key]:
                        counts[key], since[key] = count, time.monotonic()
                silent = [key for key in keys if time.monotonic() - since[key] > self._lost_s]
                if silent:
                    who = ", ".join(names[key] for key in silent)
                    self.lost = f"{who} gave no sign for {self._lost_s:.0f} s"
                    return
                self._stopped.wait(_BEAT_S)
        except RuntimeError:  # torch's: the store does not answer, or its node has ended
            if not self._stopped.is_set():
                self.lost = (
                    f"the node that all meet at, {described(self._meeting)}, does not answer"
                )
