"""Timing inside one rank of what the host does beside a GPU: it issues work that runs later.

An op without autograd is the least it does (`step_timing.time_launch`). With autograd it records a
node for the backward and walks it there; the runtime's products with weights and its
redistributions are Python functions of autograd, and take several times as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import get_args

import torch
from torch import Tensor

from planner.language.ops.kernel import LARGE_BYTES
from planner.runtime.process.collectives import redistribute
from planner.runtime.stage.weight_grads import WeightProduct, WeightQueue
from profiles.records import HostWork

CALLS = 50
"""In a chain: fewer than the queue of a GPU holds, so that the host never waits."""

ROUNDS = 5

WIDTH = 512
"""Of a weight as small as one that the runtime multiplies by with a function of its own: the
device is then done long before the host."""

assert 4 * WIDTH * WIDTH >= LARGE_BYTES


def time_host_work(device: torch.device, group: str) -> dict[HostWork, list[float]]:
    """Return samples of host seconds for each kind of work; `group` is of all ranks, by name."""
    x = torch.ones(1, WIDTH, device=device, requires_grad=True)
    weight = torch.zeros(WIDTH, WIDTH, device=device, requires_grad=True)
    product = WeightProduct(WeightQueue(), transposed=True)
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "op": torch.sin,
        "product": partial(_product, product, weight),
        "redistribute": lambda y: redistribute(y, group, "P", "R", True),
    }
    samples: dict[HostWork, list[float]] = {kind: [] for kind in get_args(HostWork)}
    for name, call in calls.items():
        of_op = name == "op"
        forward: HostWork = "forward_op" if of_op else f"{name}_forward"  # type: ignore[assignment]
        backward: HostWork = "backward_op" if of_op else f"{name}_backward"  # type: ignore[assignment]
        for round_index in range(1 + ROUNDS):
            there, back = _chain(call, x, device)
            if round_index:  # the first loads kernels and makes the weight's gradient
                samples[forward].append(there)
                samples[backward].append(back)
    return samples


def _product(product: WeightProduct, weight: Tensor, x: Tensor) -> Tensor:
    return product(x, weight)


def _chain(
    call: Callable[[Tensor], Tensor], x: Tensor, device: torch.device
) -> tuple[float, float]:
    """Return the host's seconds of a call and of its backward, in a chain of them."""
    _wait(device)
    began = time.perf_counter()
    y = x
    for _ in range(CALLS):
        y = call(y)
    forward_s = time.perf_counter() - began
    gradient = torch.ones_like(y)
    _wait(device)
    began = time.perf_counter()
    y.backward(gradient)
    return forward_s / CALLS, (time.perf_counter() - began) / CALLS


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
