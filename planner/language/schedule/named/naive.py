"""Naive: one microbatch at a time goes up and down the stages; one rank works, the rest wait."""

from __future__ import annotations

from planner.language.schedule.job_order import RoundTrips
from planner.language.schedule.jobs import Job, forward, full_backward
from planner.language.schedule.registry import register_schedule


def _limit(pp: int, vpp: int, num_microbatches: int) -> tuple[int, ...]:
    return (1,) * pp


@register_schedule(
    "naive",
    summary="one microbatch at a time; the baseline without overlap",
    fills_pipeline=False,
    in_flight_limit=_limit,
    round_trips=RoundTrips.EVERY,
)
def naive(pp: int, vpp: int, num_microbatches: int) -> list[list[Job]]:
    """Return F0 B0 F1 B1 … on every rank."""
    return [
        [job(rank, i) for i in range(num_microbatches) for job in (forward, full_backward)]
        for rank in range(pp)
    ]
