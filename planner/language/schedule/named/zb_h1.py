"""ZB-H1 and ZB-H2 (Zero Bubble, Qi et al. 2023, arXiv 2401.10241, section 2): 1F1B with W moved
into the bubble, at 1F1B's memory; and with so many forwards ahead that ranks never wait between.
"""

from __future__ import annotations

from planner.language.schedule.job_order import RoundTrips
from planner.language.schedule.jobs import Job, backward_input, backward_weight, forward
from planner.language.schedule.registry import register_schedule


def _limit(pp: int, vpp: int, num_microbatches: int) -> tuple[int, ...]:
    return (min(num_microbatches, pp),) * pp


def _warmup(pp: int, vpp: int, num_microbatches: int) -> tuple[int, ...]:
    return tuple(min(num_microbatches, pp - rank) for rank in range(pp))


def _late_weights(pp: int, vpp: int, num_microbatches: int) -> tuple[int, ...]:
    # Behind the last I job come the W whose turn it is, and the r that were held back.
    return tuple(rank + 1 for rank in range(pp))


@register_schedule(
    "zb_h1",
    summary="1f1b with the weight gradients in the bubble; every rank holds pp microbatches",
    splits_backward=True,
    in_flight_limit=_limit,
    round_trips=RoundTrips.FIRST_AND_LAST,
    warmup=_warmup,
    late_weights=_late_weights,
    search_rank=2,
)
def zb_h1(pp: int, vpp: int, num_microbatches: int) -> list[list[Job]]:
    """Return the ZB-H1 table: rank r starts with pp-r forwards and keeps W r jobs behind I.

    The input gradient reaches rank 0 sooner, as no W is on its way, and the late ranks have
    W jobs left for the end. 1F1B gives rank r room for pp-r microbatches; the r that W holds
    back bring every rank to pp, what rank 0 of 1F1B needs. The bubble of rank 0 falls from
    (pp-1)(F+I+W) to (pp-1)(F+I-W) where W is no longer than F and I.
    """
    warmup = _warmup(pp, vpp, num_microbatches)
    return [_row(rank, num_microbatches, warmup[rank], late=rank) for rank in range(pp)]


def _row(rank: int, num_microbatches: int, num_warmup: int, *, late: int) -> list[Job]:
    """Return the jobs of a rank that starts with so many forwards, and keeps W so many microbatches
    behind I: those that are left fill its wait at the end.
    """
    row = [forward(rank, i) for i in range(num_warmup)]
    for i in range(num_microbatches):
        row.append(backward_input(rank, i))
        if i >= late:
            row.append(backward_weight(rank, i - late))
        if i + num_warmup < num_microbatches:
            row.append(forward(rank, i + num_warmup))
    left = range(max(0, num_microbatches - late), num_microbatches)
    return row + [backward_weight(rank, i) for i in left]


def _more_limit(pp: int, vpp: int, num_microbatches: int) -> tuple[int, ...]:
    return (min(num_microbatches, 2 * pp - 1),) * pp


def _more_warmup(pp: int, vpp: int, num_microbatches: int) -> tuple[int, ...]:
    return tuple(min(num_microbatches, 2 * (pp - rank) - 1) for rank in range(pp))


def _more_late_weights(pp: int, vpp: int, num_microbatches: int) -> tuple[int, ...]:
    return tuple(min(num_microbatches, 2 * rank + 1) for rank in range(pp))


@register_schedule(
    "zb_h2",
    summary="zb_h1 with twice the microbatches in flight, so that ranks wait at the ends alone",
    splits_backward=True,
    in_flight_limit=_more_limit,
    round_trips=RoundTrips.FIRST_AND_LAST,
    warmup=_more_warmup,
    late_weights=_more_late_weights,
)
def zb_h2(pp: int, vpp: int, num_microbatches: int) -> list[list[Job]]:
    """Return the ZB-H2 table: rank r starts with 2(pp-r)-1 forwards and keeps W 2r jobs behind I.

    All ranks hold 2 pp - 1 microbatches, and work without a break from their first forward to their
    last job where F, I and W take as long: what a step of it gains on ZB-H1 is that ranks begin and
    end at different times, which a step that all ranks end together does not show.
    """
    warmup = _more_warmup(pp, vpp, num_microbatches)
    return [_row(rank, num_microbatches, warmup[rank], late=2 * rank) for rank in range(pp)]
