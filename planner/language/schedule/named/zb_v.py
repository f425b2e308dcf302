"""ZB-V (Zero Bubble, arXiv 2401.10241, section 6): two chunks in a V, all backwards split."""

from __future__ import annotations

from planner.language.schedule.jobs import Job
from planner.language.schedule.named.v_rows import VRow, v_warmup
from planner.language.schedule.placements import fold_placement
from planner.language.schedule.registry import register_schedule


def _limit(pp: int, vpp: int, num_microbatches: int) -> tuple[int, ...]:
    return (min(2 * num_microbatches, 2 * pp),) * pp


@register_schedule(
    "zb_v",
    summary="two chunks in a V without bubble when F, I and W are equal, at 1f1b's memory",
    placement=fold_placement,
    min_vpp=2,
    max_vpp=2,
    splits_backward=True,
    in_flight_limit=_limit,
    warmup=v_warmup,
    search_rank=3,
)
def zb_v(pp: int, vpp: int, num_microbatches: int) -> list[list[Job]]:
    """Return the ZB-V table; every rank holds 2 * pp half-size stages, as rank 0 of 1F1B does.

    The phases of rank r, chunk 0 down the V and chunk 1 up:

    - fill: 2(pp-r)-1 forwards until the first microbatch is back at r on its way up, then
      both chunks in turn while the ranks after r turn round;
    - from the first microbatch's return, backward of chunk 1 at once, W with it;
    - steady: F I W of chunk 0, F I W of chunk 1;
    - drain: input gradients first, for others wait for them, then what is left of W.
    """
    table = []
    total = max(num_microbatches, 2 * pp - 1)  # what the fill needs; see VRow on the surplus
    for rank in range(pp):
        row = VRow(pp=pp, pp_rank=rank, num_microbatches=num_microbatches)
        row.add(2 * (pp - rank) - 1, "F0")
        row.add(rank, "F1 F0")
        row.add(pp - rank, "F1 I1 W1")
        row.add(total - (2 * pp - rank - 1), "F0 I0 W0 F1 I1 W1")
        row.add(pp - rank - 1, "I0 W0 F1 I1 W1")
        row.add(rank, "I0 I1")
        row.add(pp - rank, "I0 W0")
        row.add(rank, "W1")
        row.add(rank, "W0")
        table.append(row.jobs)
    return table
