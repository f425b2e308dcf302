"""Timing inside one rank of the work of a step that is not a block's: see `StepWork`."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from profiles.measure.timing.clock import Clock
from profiles.measure.timing.timing import LEAST_SAMPLES
from profiles.records import StepWork

ISSUED = 200
"""So many ops are issued at once to see how long the host takes for one: fewer than the
queue of a GPU holds, so that the host never waits."""


def time_step_work(
    work: StepWork, *, num_tensors: int, numel: int, clock: Clock, seconds: float
) -> dict[str, list[float]]:
    """Return samples of one kind of work over `num_tensors` tensors of `numel` elements."""
    run = _WORK[work](num_tensors, numel, clock.device)
    run()  # makes optimizer state, loads kernels
    samples: list[float] = []
    dist.barrier()
    deadline = time.perf_counter() + seconds
    while len(samples) < LEAST_SAMPLES or time.perf_counter() < deadline:
        samples.append(clock.time_compute(run)[0])
    return {"seconds": samples}


def time_launch(device: torch.device) -> dict[str, list[float]]:
    """Return samples of the host time to issue one op on a GPU, which runs it later."""
    x = torch.ones(1, device=device)
    samples = []
    for _ in range(LEAST_SAMPLES + 1):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(ISSUED):
            torch.neg(x)
        samples.append((time.perf_counter() - began) / ISSUED)
    return {"seconds": samples[1:]}


def _adamw(
    num_tensors: int, numel: int, device: torch.device, *, sharded: bool
) -> Callable[[], object]:
    """Over float32 parameters; `sharded` makes them DTensors over all ranks, as ZeRO does."""
    tensors = [torch.randn(numel, device=device) for _ in range(num_tensors)]
    if sharded:
        mesh = DeviceMesh(device.type, list(range(dist.get_world_size())))
        tensors = [DTensor.from_local(t, mesh, [Shard(0)], run_check=False) for t in tensors]
    params = [torch.nn.Parameter(tensor) for tensor in tensors]
    for param in params:
        param.grad = torch.ones_like(param)
    return torch.optim.AdamW(params).step


def _cast(num_tensors: int, numel: int, device: torch.device) -> Callable[[], object]:
    """Write bfloat16 weights from their float32 masters."""
    masters = [torch.randn(numel, device=device) for _ in range(num_tensors)]
    weights = [master.bfloat16() for master in masters]
    return lambda: [w.copy_(m) for w, m in zip(weights, masters, strict=True)]


def _accumulate(num_tensors: int, numel: int, device: torch.device) -> Callable[[], object]:
    """Add a microbatch's bfloat16 gradients to their float32 sums."""
    sums = [torch.zeros(numel, device=device) for _ in range(num_tensors)]
    gradients = [torch.ones(numel, device=device, dtype=torch.bfloat16) for _ in sums]
    return lambda: [s.add_(g) for s, g in zip(sums, gradients, strict=True)]


def _copy(
    num_tensors: int, numel: int, device: torch.device, *, to_host: bool
) -> Callable[[], object]:
    """Copy between the device and pinned memory of the host, as offloading does."""
    there = [torch.ones(numel, device=device) for _ in range(num_tensors)]
    here = [torch.ones(numel).pin_memory() for _ in there]
    pairs = list(zip(here, there, strict=True) if to_host else zip(there, here, strict=True))
    return lambda: [to.copy_(source, non_blocking=True) for to, source in pairs]


_WORK: dict[StepWork, Callable[[int, int, torch.device], Callable[[], object]]] = {
    "adamw": partial(_adamw, sharded=False),
    "sharded_adamw": partial(_adamw, sharded=True),
    "cast": _cast,
    "accumulate": _accumulate,
    "host_to_device": partial(_copy, to_host=False),
    "device_to_host": partial(_copy, to_host=True),
}
