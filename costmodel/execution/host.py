"""What the host adds to a phase of a step: device and host work beside each other."""

from __future__ import annotations

from costmodel.execution.execution import Execution

HOST_SHARPNESS = 4
"""How sharply a phase turns from waiting for the device to waiting for the host: where both are
as slow, it takes 2 ** (1/4) times as long as either."""


def host_seconds(execution: Execution, busy_s: float, needed_s: float) -> float:
    """Return what the host adds to a phase in which the device is busy and the host is needed.

    Some kernels last longer than the launch of the next, others do not, and only so much can be
    queued: near the point where both take as long, device and host wait for each other in turn.
    """
    if execution.launches_block:
        return needed_s
    slower = max(busy_s, needed_s)
    if not slower:
        return 0.0
    parts = (busy_s / slower) ** HOST_SHARPNESS + (needed_s / slower) ** HOST_SHARPNESS
    return slower * parts ** (1 / HOST_SHARPNESS) - busy_s
