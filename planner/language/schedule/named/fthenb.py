"""FThenB (GPipe, arXiv 1811.06965): every forward, then every backward."""

from __future__ import annotations

from planner.language.schedule.job_order import RoundTrips
from planner.language.schedule.jobs import Job, forward, full_backward
from planner.language.schedule.registry import register_schedule


def _limit(pp: int, vpp: int, num_microbatches: int) -> tuple[int, ...]:
    return (num_microbatches,) * pp


@register_schedule(
    "fthenb",
    summary="every forward, then every backward (GPipe)",
    in_flight_limit=_limit,
    round_trips=RoundTrips.AFTER_LAST_FORWARD,
)
def fthenb(pp: int, vpp: int, num_microbatches: int) -> list[list[Job]]:
    """Return F0 … Fm-1 B0 … Bm-1 on every rank; all m microbatches are live at the turn."""
    microbatches = range(num_microbatches)
    return [
        [forward(rank, i) for i in microbatches] + [full_backward(rank, i) for i in microbatches]
        for rank in range(pp)
    ]
