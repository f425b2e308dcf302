"""What the ops of a block take on one rank, gradient sums and bytes apart."""

from __future__ import annotations

from typing import NamedTuple


class Spent(NamedTuple):
    """Seconds a device computes, and those it waits for the host on top."""

    device_s: float
    host_s: float


class ProgramTimes(NamedTuple):
    """Seconds and flop of a program, gradient sums apart; fields as in `ProgramCost`."""

    forward: Spent
    backward: Spent
    recomputed: Spent
    weight_s: float
    forward_comm_s: float
    backward_comm_s: float
    forward_flop: float
    backward_flop: float
