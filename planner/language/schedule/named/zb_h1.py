"""ZB-H1 (Zero Bubble, arXiv 2401.10241): 1F1B with W moved into the bubble, at 1F1B's memory."""

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
    table = []
    for rank, num_warmup in enumerate(_warmup(pp, vpp, num_microbatches)):
        row = [forward(rank, i) for i in range(num_warmup)]
        for i in range(num_microbatches):
            row.append(backward_input(rank, i))
            # W stays r microbatches behind I: the r that are left fill the rank's wait at the end.
            if i >= rank:
                row.append(backward_weight(rank, i - rank))
            if i + num_warmup < num_microbatches:
                row.append(forward(rank, i + num_warmup))
        row += [backward_weight(rank, i) for i in range(num_microbatches - rank, num_microbatches)]
        table.append(row)
    return table
