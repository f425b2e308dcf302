"""The clock of one rank, and the GPU clocks it needs to be steady."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from profiles.records import PaceKind

OWN_CORE_SHARE = 0.95
"""Work that had its core for less than this share of the time was disturbed by others."""

HEAD_START_CYCLES = 200_000
"""A GPU is kept busy at least this long (about 0.1 ms) before timed work, so that the host has
issued the start of it by then: the host's delay would otherwise lie between the two events."""

CYCLES_PER_S = 3e9
"""At least the clock of any GPU of today: a head start in cycles is never too short."""

MOST_HEAD_START_S = 0.05
"""Of work that takes the host longer, a part is timed at the host's pace: a longer wait would cost
more than the sample."""

PRODUCT_WIDTH = 192
NORMS, NORM_ROWS, NORM_WIDTH = 3, 64, 256
PACE_CALLS = 4
"""A fraction of a millisecond each, within a core's own cache."""

SETTLE_S, MOST_SETTLE_S = 1.0, 5.0
SETTLED = 0.02


class Clock:
    """Seconds of a piece of work on a device: by events on a GPU, else by the wall.

    `own_core` says that every rank has a core to itself.
    """

    def __init__(self, device: torch.device, *, own_core: bool = False) -> None:
        self.device = device
        self._own_core = own_core and device.type == "cpu"

    def issue_seconds(self, work: Callable[[], Any]) -> float:
        """Return the seconds until the host has issued work to a GPU; 0 on a CPU, which has done
        it by then. The work is run.
        """
        if self.device.type != "cuda":
            work()
            return 0.0
        torch.cuda.synchronize(self.device)
        began = time.perf_counter()
        work()
        issued_s = time.perf_counter() - began
        torch.cuda.synchronize(self.device)
        return issued_s

    def time(self, work: Callable[[], Any], *, head_start_s: float = 0.0) -> tuple[float, Any]:
        """Return (seconds, result of work). On a GPU, the time between two events.

        The host has `head_start_s` at least to issue the work before the device begins with it
        (`issue_seconds`): many short kernels are else timed at the pace at which the host issues
        them.
        """
        if self.device.type == "cuda":
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            # Events lie in the stream, so they time the device whatever the host does; in
            # milliseconds.
            wanted = round(min(head_start_s, MOST_HEAD_START_S) * CYCLES_PER_S)
            torch.cuda._sleep(max(HEAD_START_CYCLES, wanted))
            start.record()
            result = work()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3, result
        began = time.perf_counter()
        result = work()
        return time.perf_counter() - began, result

    def time_compute(
        self, work: Callable[[], Any], *, head_start_s: float = 0.0
    ) -> tuple[float, Any]:
        """Return the same of work that waits for no rank and runs in this thread alone.

        If other processes took the core meanwhile, it is the time on the core: what the work
        takes on a machine that only trains.
        """
        if not self._own_core:
            return self.time(work, head_start_s=head_start_s)
        began = time.thread_time()
        seconds, result = self.time(work)
        on_core = time.thread_time() - began
        return (on_core if on_core < OWN_CORE_SHARE * seconds else seconds), result


class Pace:
    """How fast a rank's core is in this moment, by the time of two fixed small works.

    `product`, a matmul, is arithmetic alone; `light`, forward and backward of a norm, is what
    light ops are: dispatch, allocation, autograd and little data. What shares the core slows
    the two by different factors. A GPU's pace is not taken: its clocks are settled.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._operand = torch.full((PRODUCT_WIDTH, PRODUCT_WIDTH), 1.0 / PRODUCT_WIDTH)
        self._rows = torch.randn(NORM_ROWS, NORM_WIDTH).requires_grad_()

    def take(self) -> dict[PaceKind, list[float]]:
        """Return a few samples of seconds of each; none on a GPU."""
        if self._clock.device.type != "cpu":
            return {"product": [], "light": []}
        return {"product": self._samples(self._product), "light": self._samples(self._light)}

    def _samples(self, work: Callable[[], Any]) -> list[float]:
        # What ran before has filled the core's caches with data of its own.
        work()
        return [self._clock.time_compute(work)[0] for _ in range(PACE_CALLS)]

    def _product(self) -> None:
        torch.mm(self._operand, self._operand)

    def _light(self) -> None:
        for _ in range(NORMS):
            result = torch.nn.functional.layer_norm(self._rows, (NORM_WIDTH,))
            torch.autograd.grad(result, self._rows, self._rows.detach())


def settle_clocks(device: torch.device) -> None:
    """Keep a GPU busy until it has left its idle clocks and its speed no longer changes.

    With products of bfloat16, as training has: the tensor cores draw more power than products of
    float32 do, and clocks follow the power.
    """
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    clock = Clock(device)
    began = time.monotonic()
    before = float("inf")
    while time.monotonic() - began < MOST_SETTLE_S:
        seconds, _ = clock.time(lambda: [torch.mm(a, a) for _ in range(16)])
        steady = abs(seconds / before - 1) < SETTLED
        if steady and time.monotonic() - began > SETTLE_S:
            return
        before = seconds
