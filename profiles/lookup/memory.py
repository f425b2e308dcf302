"""Memory beside the tensors themselves: what a process holds before any, and the allocator."""

from __future__ import annotations

import os
import random

import torch

LIVE_BYTES = {"cpu": 96 * 2**20, "cuda": 4 * 2**30}
"""How much the allocator is made to hold: enough that page and segment sizes do not show."""

ROUNDS = 3


def load_training(device: torch.device) -> None:
    """Load what a training rank has loaded before its own model: the runtime, the exporter
    that captures the model, the optimizer, and the libraries a first step pulls in.
    """
    import planner.runtime.step.engine  # noqa: F401
    from planner.capture import capture_module
    from planner.runtime.stage.program_fx import to_graph_module

    model = _Tiny().to(device)
    captured = capture_module(
        model, (torch.ones(2, 4, device=device),), (torch.ones(3, 4, device=device),), name="tiny"
    )
    program = captured.classes[0].bind(2)
    to_graph_module(program, {}, device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4, device=device)).backward()
    optimizer.step()


class _Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean()


def used_bytes(device: torch.device) -> float:
    """Return the bytes this process holds: resident memory, or memory taken from the GPU.

    On a GPU other processes count too, so a device must be this process's own. What the
    caching allocator holds in reserve counts: give it back first where it should not.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return float(total - free)
    with open("/proc/self/statm") as file:
        return float(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))


def allocator_overheads(device: torch.device) -> list[float]:
    """Return, for a few rounds, peak memory held over peak bytes of live tensors, minus 1.

    The pattern is that of training: a forward that keeps some tensors and drops others, a
    backward that frees the kept ones from the last to the first. Sizes differ by round, so
    what a round leaves in the allocator fits the next only in part.
    """
    chance = random.Random(0)
    before = used_bytes(device)
    overheads = []
    for _ in range(ROUNDS):
        kept: list[torch.Tensor] = []
        live = peak_live = peak_used = 0.0
        while live < LIVE_BYTES[device.type]:
            # 4 KiB to 8 MiB, evenly in the logarithm: small and large pools of the allocator are
            # used.
            num_bytes = int(2 ** chance.uniform(12, 23))
            tensor = torch.ones(num_bytes, dtype=torch.uint8, device=device)
            # Half of what a forward makes is dropped at once, and leaves holes between what is
            # kept.
            scratch = torch.ones(num_bytes, dtype=torch.uint8, device=device)
            peak_live = max(peak_live, live + 2 * num_bytes)
            peak_used = max(peak_used, used_bytes(device) - before)
            kept.append(tensor)
            live += num_bytes
            del scratch
        overheads.append(max(0.0, peak_used / peak_live - 1))
        while kept:
            tensor = kept.pop()
            # The gradient of a kept tensor is there before the tensor is freed.
            gradient = tensor.clone()
            del tensor, gradient
    return overheads
