"""Timing inside one rank of compute and communication that run together."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from profiles.measure.timing.clock import HEAD_START_CYCLES, Clock

OVERLAP_BYTES = 8 * 2**20
OVERLAP_WIDTH = {"cpu": 256, "cuda": 4096}
OVERLAP_ROUNDS = 7


def measure_overlap(clock: Clock) -> dict[str, float]:
    """Return by how much compute and an all-reduce slow each other: two factors from 1 up.

    Compute is made to take as long as the all-reduce alone (T). Started together, the one
    that ends first, after t, was slowed t / T; the other had done T - (its end - t) of its
    work by then.
    """
    device = clock.device
    message = torch.ones(OVERLAP_BYTES // 4, device=device)
    width = OVERLAP_WIDTH[device.type]
    a = torch.randn(width, width, device=device)
    product = partial(torch.mm, a, a)
    reduce = partial(dist.all_reduce, message)
    communication = _median_of(clock, reduce)
    single = _median_of(clock, product)
    # The same count everywhere, so that the ranks stay in step.
    count_here = torch.tensor([max(4.0, communication / single)], device=device)
    dist.all_reduce(count_here)
    count = round(float(count_here) / dist.get_world_size())
    compute = _median_of(clock, lambda: [product() for _ in range(count)])
    slowed = [
        _slowed(clock, product, count, message, compute, communication)
        for _ in range(OVERLAP_ROUNDS)
    ]
    middle = OVERLAP_ROUNDS // 2
    return {
        "compute": sorted(pair[0] for pair in slowed)[middle],
        "communication": sorted(pair[1] for pair in slowed)[middle],
    }


def _median_of(clock: Clock, work: Callable[[], Any]) -> float:
    work()
    times = []
    for _ in range(OVERLAP_ROUNDS):
        dist.barrier()
        times.append(clock.time(work)[0])
    return sorted(times)[OVERLAP_ROUNDS // 2]


def _slowed(
    clock: Clock,
    product: Callable[[], Any],
    count: int,
    message: torch.Tensor,
    compute: float,
    communication: float,
) -> tuple[float, float]:
    dist.barrier()
    compute_end, communication_end = (
        _together_on_gpu(product, count, message)
        if clock.device.type == "cuda"
        else _together_on_cpu(product, count, message)
    )
    first = min(compute_end, communication_end)
    # What each had done when the first ended: all of its work but what it then did alone.
    compute_done = compute - max(0.0, compute_end - first)
    communication_done = communication - max(0.0, communication_end - first)
    return (
        # A tenth of the work at least, so that a disturbed round gives no huge factor.
        max(1.0, first / max(compute_done, 0.1 * compute)),
        max(1.0, first / max(communication_done, 0.1 * communication)),
    )


def _together_on_cpu(
    product: Callable[[], Any], count: int, message: torch.Tensor
) -> tuple[float, float]:
    began = time.perf_counter()
    work = dist.all_reduce(message, async_op=True)
    communication_end = 0.0
    for _ in range(count):
        product()
        # Looked at after each product, so the end is known to within the length of one.
        if not communication_end and work.is_completed():
            communication_end = time.perf_counter() - began
    compute_end = time.perf_counter() - began
    work.wait()
    return compute_end, communication_end or time.perf_counter() - began


def _together_on_gpu(
    product: Callable[[], Any], count: int, message: torch.Tensor
) -> tuple[float, float]:
    start, computed, reduced = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    side = torch.cuda.Stream()
    torch.cuda._sleep(HEAD_START_CYCLES)
    start.record()
    # Both streams start at the event, whatever the host issues first.
    side.wait_event(start)
    with torch.cuda.stream(side):
        work = dist.all_reduce(message, async_op=True)
        work.wait()  # makes this stream wait, not the host
        reduced.record()
    for _ in range(count):
        product()
    computed.record()
    torch.cuda.synchronize()
    return start.elapsed_time(computed) / 1e3, start.elapsed_time(reduced) / 1e3
