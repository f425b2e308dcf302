"""Timing of the exchanges of planned groups, all groups of a round at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from planner.runtime.preflight.exchanges import SIZES, Exchange, Round
from planner.runtime.preflight.pairs import reason_of
from planner.runtime.process import device as devices
from planner.runtime.process.groups.mesh import Mesh

LONG_S = 0.02
"""A size that takes so long is the last: the link's rate is what it took."""

REPEATS = 4
"""Timed calls of a size. The least is taken: what else the machine does adds to the others."""


def time_round(exchanges: Round, mesh: Mesh) -> list[tuple[Exchange, int, float]]:
    """Return this rank's exchange of a round with the bytes and seconds of its longest message.

    All ranks call this with the same rounds; a rank without an exchange gets nothing.
    """
    mine = [exchange for exchange in exchanges if mesh.global_rank in exchange.ranks]
    dist.barrier(group=mesh.control)  # so that the groups of a round run at once
    timed = []
    for exchange in mine:
        try:
            timed.append((exchange, *_time(exchange, mesh)))
        except RuntimeError as error:
            ranks = ", ".join(map(str, exchange.ranks))
            raise RuntimeError(
                f"{exchange.kind} of the {exchange.axis} group of ranks {ranks}: {reason_of(error)}"
            ) from error
    return timed


def _time(exchange: Exchange, mesh: Mesh) -> tuple[int, float]:
    found = (0, 0.0)
    for num_bytes in SIZES:
        once, passes = _exchange(exchange, num_bytes, mesh)
        once()  # connects, and takes memory
        taken = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            once()
            devices.synchronize(mesh.device)
            taken.append((time.perf_counter() - began) / passes)
        found = num_bytes, _least_of_slowest(taken, exchange, mesh)
        if found[1] > LONG_S:
            break
    return found


def _exchange(exchange: Exchange, num_bytes: int, mesh: Mesh) -> tuple[Callable[[], None], int]:
    """Return what does an exchange, and how often it crosses the link."""
    ranks = exchange.ranks
    # fp32 entries of each rank's part.
    count = max(1, num_bytes // 4 // len(ranks))
    whole = torch.ones(count * len(ranks), device=mesh.device)
    group = mesh.group(exchange.axis)
    if exchange.kind == "all_reduce":
        zeros = torch.zeros_like(whole)  # sums of zeros stay finite
        return lambda: _done(dist.all_reduce(zeros, group=group)), 1
    if exchange.kind == "all_gather":
        piece = whole[:count].clone()
        return lambda: _done(dist.all_gather_into_tensor(whole, piece, group=group)), 1
    if exchange.kind == "all_to_all":
        parts = torch.empty_like(whole)
        return lambda: _done(dist.all_to_all_single(parts, whole, group=group)), 1
    if exchange.kind == "send_recv":
        return lambda: _there_and_back(whole, ranks, mesh.global_rank), 2
    raise ValueError(f"exchange {exchange.kind!r} is unknown")


def _there_and_back(whole: torch.Tensor, ranks: Sequence[int], own: int) -> None:
    first, second = ranks
    if own == first:
        dist.send(whole, second)
        dist.recv(whole, second)
    else:
        dist.recv(whole, first)
        dist.send(whole, first)


def _least_of_slowest(taken: Sequence[float], exchange: Exchange, mesh: Mesh) -> float:
    """Return the least time of a call by which all ranks were done, the same on all of them."""
    times = torch.tensor(taken, dtype=torch.float64, device=mesh.device)
    if exchange.kind == "send_recv":  # the first has its message back: it knows
        first, second = exchange.ranks
        if mesh.global_rank == first:
            dist.send(times, second)
        else:
            dist.recv(times, first)
    else:
        dist.all_reduce(times, dist.ReduceOp.MAX, group=mesh.group(exchange.axis))
    return float(times.min())


def _done(work: object) -> None:
    """A collective that was not asked to run beside others returns nothing."""
    assert work is None
