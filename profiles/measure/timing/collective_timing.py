"""Timing of collectives inside one rank, issued as the runtime issues them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from profiles.measure.timing.clock import Clock

SAMPLES = 10
MOST_CALLS_PER_SAMPLE = 100

TRIAL_CALLS = 8
LONG_S = 5e-3
"""What takes longer than this is tried once, else several times: short calls vary more."""


HEAD_START = 1.5
"""Over what the host needs to issue calls, which varies from call to call."""


def time_collective(
    kind: str, num_bytes: int, group: dist.ProcessGroup, *, clock: Clock, seconds: float
) -> dict[str, list[float]]:
    """Return samples of seconds per collective; every rank of the group must call.

    Each sample is the mean of equally many calls back to back, about `seconds` in all.
    """
    work = _collective(kind, num_bytes, group, clock.device)
    once = _agreed(clock.time(work)[0], group, clock.device)
    if once < LONG_S:
        several = clock.time(lambda: [work() for _ in range(TRIAL_CALLS)])[0]
        once = _agreed(several / TRIAL_CALLS, group, clock.device)
    # From a number that all ranks agree on: a rank that calls once more waits for ever.
    calls = max(1, round(seconds / max(once, 1e-7)))
    count = min(SAMPLES, calls)
    per_sample = min(MOST_CALLS_PER_SAMPLE, calls // count)
    # A call takes the host longer than a short message takes the device: the host issues them all
    # before the first begins. As long on all ranks, or one would wait for another.
    head_start_s = 0.0
    if clock.device.type == "cuda":
        issue_s = clock.issue_seconds(lambda: [work() for _ in range(TRIAL_CALLS)]) / TRIAL_CALLS
        head_start_s = HEAD_START * per_sample * _agreed(issue_s, group, clock.device)
    samples = []
    for _ in range(count):
        spent, _ = clock.time(
            lambda: [work() for _ in range(per_sample)], head_start_s=head_start_s
        )
        samples.append(spent / per_sample)
    return {"seconds": samples}


def _agreed(seconds: float, group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the first rank's number, so that all ranks repeat equally often."""
    told = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.broadcast(told, dist.get_global_rank(group, 0), group=group)
    return float(told)


def _collective(
    kind: str, num_bytes: int, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], Any]:
    """Return a function that runs one collective, as the runtime issues it.

    `num_bytes` is the full tensor's size; results are fresh tensors where the runtime's
    functional collectives make them.
    """
    parts, name = group.size(), group.group_name
    # float32, in a whole number of equal pieces.
    whole = torch.ones(max(1, num_bytes // 4 // parts) * parts, device=device)
    piece = whole[: whole.numel() // parts].clone()
    functional = torch.ops._c10d_functional
    wait = functional.wait_tensor
    match kind:
        case "all_reduce":
            return lambda: dist.all_reduce(whole, group=group)
        case "all_gather":
            return lambda: wait(functional.all_gather_into_tensor(piece, parts, name))
        case "reduce_scatter":
            return lambda: wait(functional.reduce_scatter_tensor(whole, "sum", parts, name))
        case "all_to_all":
            sizes = [whole.numel() // parts] * parts
            return lambda: wait(functional.all_to_all_single(whole, sizes, sizes, name))
        case "broadcast":
            return _Broadcast(whole, group)
        case "send_recv":
            return _PingPong(whole, group)
    raise ValueError(f"collective {kind!r} is unknown")


class _Broadcast:
    """Broadcasts from each rank in turn, so that none can run ahead of the others."""

    def __init__(self, whole: Tensor, group: dist.ProcessGroup) -> None:
        self._whole, self._group, self._root = whole, group, 0

    def __call__(self) -> None:
        source = dist.get_global_rank(self._group, self._root)
        dist.broadcast(self._whole, source, group=self._group)
        self._root = (self._root + 1) % self._group.size()


class _PingPong:
    """One message from the first rank to the second, answered by the next call.

    Ranks beyond the second do nothing.
    """

    def __init__(self, whole: Tensor, group: dist.ProcessGroup) -> None:
        self._whole, self._group, self._turn = whole, group, 0
        self._rank = group.rank()

    def __call__(self) -> None:
        sender = self._turn % 2
        self._turn += 1
        if self._rank > 1:
            return
        peer = dist.get_global_rank(self._group, 1 - self._rank)
        if self._rank == sender:
            dist.send(self._whole, peer, group=self._group)
        else:
            dist.recv(self._whole, peer, group=self._group)
