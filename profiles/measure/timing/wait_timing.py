"""Timing inside one rank of how long ranks wait for each other at a collective amid compute.

No two ranks take the same time for the same work: each collective begins when the slowest is
there, and calls that follow each other at once, as `collective_timing` times them, don't show
it. Nor do they show that a thread must be woken which slept while the rank computed, nor what
the runtime does around a collective inside a block, whose Python has left the core's own caches
by then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from planner.runtime.process.collectives import redistribute
from profiles.measure.timing.clock import Clock
from profiles.measure.visits import midmean

MESSAGE_BYTES = 64 * 2**10
WIDTH = {"cpu": 192, "cuda": 4096}
ROWS = {"cpu": (16, 64, 256), "cuda": (256, 1024, 4096)}
"""Sizes of a layer, which is run forward and backward between two collectives."""

CALLS, ROUNDS = 16, 5


def time_waits(clock: Clock) -> list[tuple[float, float, float]]:
    """Return, for compute of several lengths, its seconds; those that a collective after it
    takes longer than one after another collective; and those that one takes longer still as
    the runtime redistributes a tensor inside a block.

    Midmeans over this rank's calls: the rank that is there first waits, the last one does not,
    and each is early as often as late, so the mean over ranks is what a step loses at every call.
    """
    return [_wait(clock, rows) for rows in ROWS[clock.device.type]]


def _wait(clock: Clock, rows: int) -> tuple[float, float, float]:
    """All are timed in turns, so that the machine's drift is in all."""
    forward, backward = _layer(rows, WIDTH[clock.device.type], clock.device)
    message = torch.ones(MESSAGE_BYTES // 4, device=clock.device, requires_grad=True)
    plain, group = message.detach(), dist.group.WORLD
    assert group is not None
    name = group.group_name
    computed, alone, amid, inside = [], [], [], []
    for _ in range(ROUNDS):
        dist.barrier()
        for call in range(1 + CALLS):
            spent, _ = clock.time(lambda: backward(forward()))
            reduced, _ = clock.time(lambda: dist.all_reduce(plain))
            if call:  # the ranks leave the barrier one by one
                computed.append(spent)
                amid.append(reduced)
        for _ in range(CALLS):
            backward(forward())
            inside.append(clock.time(lambda: redistribute(message, name, "P", "R", True))[0])
        for _ in range(CALLS):
            alone.append(clock.time(lambda: dist.all_reduce(plain))[0])
    wait_s = midmean(amid) - midmean(alone)
    return midmean(computed), wait_s, midmean(inside) - midmean(amid)


def _layer(
    rows: int, width: int, device: torch.device
) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return a feed-forward layer and its backward: products, light ops, autograd."""
    x = torch.randn(rows, width, device=device, requires_grad=True)
    up = torch.randn(4 * width, width, device=device, requires_grad=True)
    down = torch.randn(width, 4 * width, device=device, requires_grad=True)
    gradient = torch.ones_like(x)

    def forward() -> Any:
        return x + F.linear(F.gelu(F.linear(F.layer_norm(x, (width,)), up)), down)

    def backward(y: Any) -> Any:
        return torch.autograd.grad(y, (x, up, down), gradient)

    return forward, backward
