"""Timing inside one rank of FSDP2's own work: what ZeRO costs a block beside its messages.

FSDP2 runs Python hooks around every block's forward and backward, copies shards into one
message, what was gathered out of it, and gradients into another, and frees and makes whole
weights. Here small blocks are sharded as the runtime shards a stage, and their messages are
left out; what they take beyond the same blocks unsharded is FSDP2's:

    zero_forward    forward of a block whose weights are whole
    zero_backward   backward that keeps weights and gradients whole
    zero_reduce     backward that reduces gradients and gives whole weights up
    zero_gather     weights made whole again, in a forward

The blocks compute a little between FSDP2's parts, as it makes them dearer: Python and its data
have left the core's own caches when their turn comes again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F

from planner.runtime.state import zero
from profiles.measure.timing.clock import Clock
from profiles.measure.timing.timing import LEAST_SAMPLES
from profiles.records import StepWork

BLOCKS = 4
"""What FSDP2 does once for all blocks is small beside what it does for so many."""

ROWS, WIDTH = 64, 192
"""Of a block's compute: half a millisecond, and more data than a core's first cache holds."""


def time_zero_work(
    *, num_tensors: int, numel: int, clock: Clock, seconds: float
) -> dict[StepWork, list[float]]:
    """Return samples of seconds a block of `num_tensors` parameters of `numel` elements."""
    plain = _Blocks(num_tensors, numel)
    sharded = _Blocks(num_tensors, numel)
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(sharded, mesh=mesh, reshard_after_forward=False)
    for module in sharded.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_custom_all_gather(_NoMessage())  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(_NoMessage())  # type: ignore[arg-type]
    samples: dict[StepWork, list[float]] = {
        "zero_forward": [],
        "zero_backward": [],
        "zero_reduce": [],
        "zero_gather": [],
    }
    dist.barrier()
    deadline = time.perf_counter() + seconds
    while len(samples["zero_gather"]) < LEAST_SAMPLES or time.perf_counter() < deadline:
        bare_forward, bare_backward = _passes(plain, clock)
        zero.before_backward(sharded, 1, is_last=False)
        gather, backward = _passes(sharded, clock)  # the last backward gave whole weights up
        zero.before_backward(sharded, 1, is_last=True)
        forward, reduce = _passes(sharded, clock)
        samples["zero_gather"].append(max(0.0, gather - forward) / BLOCKS)
        samples["zero_forward"].append(max(0.0, forward - bare_forward) / BLOCKS)
        samples["zero_backward"].append(max(0.0, backward - bare_backward) / BLOCKS)
        samples["zero_reduce"].append(max(0.0, reduce - bare_backward) / BLOCKS)
    # The first round sets everything up.
    return {work: found[1:] for work, found in samples.items()}


class _Block(nn.Module):
    """A block that computes with none of its parameters, which get gradients all the same."""

    def __init__(self, num_tensors: int, numel: int) -> None:
        super().__init__()
        self.params = nn.ParameterList(nn.Parameter(torch.ones(numel)) for _ in range(num_tensors))
        self.gradients: list[Tensor] = []
        self._up, self._down = torch.randn(4 * WIDTH, WIDTH), torch.randn(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = _GradientsAtHand.apply(x, self, *self.params)
        inner = F.gelu(F.linear(F.layer_norm(x, (WIDTH,)), self._up))
        return x + F.linear(inner, self._down)


class _Blocks(nn.Module):
    def __init__(self, num_tensors: int, numel: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(num_tensors, numel) for _ in range(BLOCKS))
        self.form = num_tensors, numel

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _GradientsAtHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: _Block, *params: Tensor) -> Tensor:
        ctx.block = block
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # Handed over, as a product's gradient is: there is no other reference to them.
        made, ctx.block.gradients = ctx.block.gradients, []
        return (gradients[0], None, *made)


def _passes(model: _Blocks, clock: Clock) -> tuple[float, float]:
    """Return seconds of a forward and of a backward; gradients are made before, and forgotten."""
    num_tensors, numel = model.form
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    for block in model.blocks:
        block.gradients = [torch.ones(numel) for _ in range(num_tensors)]  # type: ignore[assignment]
    forward, y = clock.time_compute(partial(model, x))
    backward, _ = clock.time_compute(partial(y.backward, torch.ones_like(y)))
    for param in model.parameters():
        param.grad = None
    return forward, backward


class _NoMessage:
    """A collective of FSDP2's that makes its buffer and sends nothing."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None
