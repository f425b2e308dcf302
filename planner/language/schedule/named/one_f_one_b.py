"""1F1B and Eager-1F1B: a warm-up of forwards, pairs of one backward and one forward, a drain."""

from __future__ import annotations

from planner.language.schedule.job_order import RoundTrips
from planner.language.schedule.jobs import Job, forward, full_backward
from planner.language.schedule.registry import register_schedule


def _limit_1f1b(pp: int, vpp: int, num_microbatches: int) -> tuple[int, ...]:
    return tuple(min(num_microbatches, pp - rank) for rank in range(pp))


@register_schedule(
    "1f1b",
    summary="backward as soon as possible; rank r holds pp-r microbatches",
    in_flight_limit=_limit_1f1b,
    round_trips=RoundTrips.FIRST_AND_LAST,
    warmup=_limit_1f1b,
    search_rank=0,
)
def one_f_one_b(pp: int, vpp: int, num_microbatches: int) -> list[list[Job]]:
    """Return the 1F1B table (PipeDream-flush, arXiv 2006.09503): pp - rank forwards first.

    That many forwards fit in a microbatch's round trip to the last rank and back, so the
    fewest microbatches are live that still keep every rank busy when sending is free.
    """
    return _pairs_after_warmup(_limit_1f1b(pp, vpp, num_microbatches), num_microbatches)


def _limit_eager(pp: int, vpp: int, num_microbatches: int) -> tuple[int, ...]:
    return tuple(min(num_microbatches, 2 * (pp - rank) - 1) for rank in range(pp))


@register_schedule(
    "eager_1f1b",
    summary="1f1b with a longer warm-up that hides sends; rank r holds 2(pp-r)-1 microbatches",
    in_flight_limit=_limit_eager,
    round_trips=RoundTrips.FIRST_AND_LAST,
    warmup=_limit_eager,
    search_rank=5,
)
def eager_1f1b(pp: int, vpp: int, num_microbatches: int) -> list[list[Job]]:
    """Return the Eager-1F1B table (arXiv 2211.05322): 2(pp - rank) - 1 forwards first.

    Each transfer between ranks gets a whole job of slack in either direction, so one no
    longer than a job costs nothing in the steady phase, paid for with activation memory.
    """
    return _pairs_after_warmup(_limit_eager(pp, vpp, num_microbatches), num_microbatches)


def _pairs_after_warmup(warmup: tuple[int, ...], num_microbatches: int) -> list[list[Job]]:
    """Return for each rank its warm-up forwards, then B and F in turn, then the last Bs."""
    table = []
    for rank, num_warmup in enumerate(warmup):
        row = [forward(rank, i) for i in range(num_warmup)]
        for i in range(num_microbatches):
            # B frees a microbatch before F takes its place: no more are live than in the warm-up.
            row.append(full_backward(rank, i))
            if i + num_warmup < num_microbatches:
                row.append(forward(rank, i + num_warmup))
        table.append(row)
    return table
