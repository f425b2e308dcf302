"""Timing inside one rank of products for so long that a GPU's clocks follow its power and heat.

A visit to a probe is short, with gaps while the host prepares the next: the GPU runs at its boost
clock. A training step keeps it busy for hours at its power limit, where an H100 is 5% to 15%
slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean, median
from typing import Any

import torch

from profiles.measure.timing.clock import Clock

WIDTH = {"cpu": 192, "cuda": 8192}
SHORT_SAMPLES = 12
GAP_S = 0.02
"""Between short samples: about what lies between two visits."""

CHAIN = 8
"""Products of a sample under load: the host issues the next while they run."""


def time_sustained(clock: Clock, *, seconds: float) -> dict[str, list[float]]:
    """Return seconds of a bfloat16 product: `short` after gaps, `sustained` at the end of so many
    seconds without any.
    """
    width = WIDTH[clock.device.type]
    a = torch.randn(width, width, device=clock.device).to(torch.bfloat16)
    product: Callable[[], Any] = lambda: torch.mm(a, a)  # noqa: E731
    product()
    short = []
    for _ in range(SHORT_SAMPLES):
        time.sleep(GAP_S)
        short.append(clock.time(product)[0])
    found: list[float] = []
    began = time.monotonic()
    while time.monotonic() - began < seconds or len(found) < 2:
        found.append(clock.time(lambda: [product() for _ in range(CHAIN)])[0] / CHAIN)
    # Heat takes seconds: the last quarter is as a step that goes on.
    return {"short": [median(short)], "sustained": [fmean(found[-max(1, len(found) // 4) :])]}
