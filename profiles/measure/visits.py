"""One number out of several visits to a probe.

A machine's own speed drifts: other tenants of its host, heat. On the CPUs this was written
on, a matmul timed every second varied by 8%, two measurements minutes apart by 5%, and most
ops varied in step with it, light ones in step with each other. So a visit is set beside a
fixed piece of work of its kind, whose time is the *pace*, taken in the same moment on the
same core (`clock.Pace`), and its time is scaled to the pace of the undisturbed
machine, which is the same in every measurement. How much slower the machine typically was is
kept beside: a step takes that much longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np

UNDISTURBED_PERCENTILE = 25.0
"""Of all paces. The fastest are a matter of luck: between measurements minutes apart the 5th
percentile differed by up to 9%, this one by up to 5%."""


def midmean(values: Sequence[float]) -> float:
    """Return the mean of the middle half: nearly as steady as the mean of all, and a few
    disturbed values do not count. Of up to three values it is the mean, of four the median.
    """
    outer = len(values) // 4
    return fmean(sorted(values)[outer : len(values) - outer])


def undisturbed_pace(paces: Sequence[float]) -> float | None:
    """Return the pace of a machine that nothing slows; None if none was taken."""
    return float(np.percentile(paces, UNDISTURBED_PERCENTILE)) if len(paces) else None


def at_pace(
    visits: Sequence[float], paces: Sequence[float], undisturbed_s: float | None
) -> tuple[float, ...]:
    """Return the visits' seconds as they would be on the undisturbed machine.

    Without `paces` (GPUs keep their clocks) visits stay as they are.
    """
    if undisturbed_s is None or len(paces) != len(visits):
        return tuple(visits)
    return tuple(visit * undisturbed_s / pace for visit, pace in zip(visits, paces, strict=True))


def over_ranks(seconds: Sequence[float], paces: Sequence[float]) -> tuple[float, float | None]:
    """Return one visit's seconds and pace from those of its ranks.

    Seconds are the mean over ranks. The pace is the one that leaves the mean of seconds in
    units of each rank's own pace: ranks on different cores drift apart; any does for no time, the
    mean is taken. None without paces.
    """
    visit = fmean(seconds)
    if len(paces) != len(seconds):
        return visit, None
    if visit == 0.0:  # a difference of two times that the machine's disturbance swallowed
        return visit, fmean(paces)
    # The pace p with visit / p = mean of seconds over pace.
    return visit, visit / fmean(s / pace for s, pace in zip(seconds, paces, strict=True))
