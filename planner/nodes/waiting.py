"""Processes that wait for others at an address say so, while they wait and when they give up."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from planner.errors import PlannerError

TOLD_AFTER_S = 20.0
"""Seconds of waiting until it is told: processes of one job start within a few of each other."""

REACHED_S = 50.0
"""Seconds in which the address of other nodes must answer: what is wrong is told in a minute."""
_RETRY_S = 0.5


@contextmanager
def waiting_at(meeting: str, who: str, *, told_after_s: float | None = None) -> Iterator[None]:
    """Inside, `who` ("rank 3") meets the others at `meeting`, a host:port.

    Says on stderr which address it tries when that takes longer than `told_after_s`. Raises
    PlannerError with the address in place of what torch's stores raise.
    """
    after_s = TOLD_AFTER_S if told_after_s is None else told_after_s
    timer = threading.Timer(after_s, _tell, (meeting, who, after_s))
    timer.daemon = True
    timer.start()
    try:
        yield
    except (RuntimeError, TimeoutError, OSError) as error:  # (of torch: DistError is the first)
        if isinstance(error, PlannerError):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise PlannerError(
            f"{who} can't meet the others at {described(meeting)}: {reason}; start the process of "
            "that host too, give all the same address, and let its port through the firewall"
        ) from error
    finally:
        timer.cancel()


def is_here(host: str) -> bool:
    """Whether an address is one of this machine: nothing can be bound to another's."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def reach(meeting: str, within_s: float) -> None:
    """Wait until something listens at a host:port, as torch's stores do, but without their noise.

    Raises OSError after so many seconds.
    """
    host, _, port = meeting.rpartition(":")
    deadline = time.monotonic() + within_s
    while True:
        left_s = deadline - time.monotonic()
        try:
            socket.create_connection((host, int(port)), timeout=max(0.1, left_s)).close()
        except OSError:
            if left_s <= _RETRY_S:
                raise
            time.sleep(_RETRY_S)
        else:
            return


def described(meeting: str) -> str:
    """Return a host:port with the address that its host has here."""
    host, _, _ = meeting.rpartition(":")
    try:
        address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return f"{meeting} (no address is known for {host})"
    return meeting if address == host else f"{meeting} (address {address})"


def _tell(meeting: str, who: str, after_s: float) -> None:
    print(
        f"planner: {who} still waits for the others at {described(meeting)}, for {after_s:.0f} s "
        "now",
        file=sys.stderr,
        flush=True,
    )
