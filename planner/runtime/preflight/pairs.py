"""Every rank sends to every other one through the backend that trains.

    round 1    0 -> 1    1 -> 2    2 -> 3    3 -> 0
    round 2    0 -> 2    1 -> 3    2 -> 0    3 -> 1       each rank sends one and takes one
    round 3    0 -> 3    1 -> 0    2 -> 1    3 -> 2

There are as many rounds as other ranks, each of one short message. A pair that fails holds up the
ranks behind it, so that only the pairs of the first round that failed are the cause.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from planner.runtime.process import device as devices
from planner.runtime.process.groups.exchange import exchange

PAIR_S = 10.0
"""Seconds that a message of a few bytes may take, the backend's connecting included."""

_POLL_S = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """Where a rank's messages did not go through: the round, and the ranks of both messages."""

    round: int
    to_rank: int
    from_rank: int
    why: str


def exchange_with_all(device: torch.device) -> Stuck | None:
    """Send to each rank and take from each; return where that did not go on, if it did not."""
    rank, count = dist.get_rank(), dist.get_world_size()
    sent = torch.full((1,), float(rank), device=device)
    for step in range(1, count):
        # A shift by `step`: each rank sends to one rank and takes from another, all at once.
        to_rank, from_rank = (rank + step) % count, (rank - step) % count
        taken = torch.full((1,), -1.0, device=device)
        try:
            _exchange(sent, taken, to_rank, from_rank)
            _finish(device)
            if int(taken) != from_rank:
                raise RuntimeError(f"{float(taken):g} came")
        except RuntimeError as error:
            return Stuck(round=step, to_rank=to_rank, from_rank=from_rank, why=reason_of(error))
    return None


def reason_of(error: Exception) -> str:
    """Return what a backend says, in one line, without the place in its source."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[[^\]]*:\d+\] ", "", line)


def _exchange(sent: torch.Tensor, taken: torch.Tensor, to_rank: int, from_rank: int) -> None:
    exchange([dist.P2POp(dist.isend, sent, to_rank), dist.P2POp(dist.irecv, taken, from_rank)])


def _finish(device: torch.device) -> None:
    """Wait until a device has done what it was given, but not for ever.

    Raises RuntimeError after `PAIR_S`.
    """
    if not devices.is_accelerator(device):
        return  # the backend has waited, as long as its own time limit says
    event = devices.of(device).Event()
    event.record()
    until = time.monotonic() + PAIR_S
    while not event.query():
        if time.monotonic() > until:
            raise RuntimeError(f"no message came in {PAIR_S:.0f} s")
        time.sleep(_POLL_S)
