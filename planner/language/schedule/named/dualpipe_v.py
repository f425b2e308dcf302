"""DualPipe-V (half of DeepSeek's DualPipe, arXiv 2412.19437): F and B of two chunks in pairs."""

from __future__ import annotations

from planner.language.schedule.jobs import Job
from planner.language.schedule.named.v_rows import VRow, v_warmup
from planner.language.schedule.placements import fold_placement
from planner.language.schedule.registry import register_schedule


def _limit(pp: int, vpp: int, num_microbatches: int) -> tuple[int, ...]:
    return (min(2 * num_microbatches, 2 * pp + 1),) * pp


@register_schedule(
    "dualpipe_v",
    summary="two chunks in a V; each steady F stands beside a B so their sends can overlap",
    placement=fold_placement,
    min_vpp=2,
    max_vpp=2,
    splits_backward=True,
    in_flight_limit=_limit,
    warmup=v_warmup,
    search_rank=4,
)
def dualpipe_v(pp: int, vpp: int, num_microbatches: int) -> list[list[Job]]:
    """Return the DualPipe-V table.

    In the steady phase a forward of one chunk is next to a backward of the other, so while
    one waits for its collectives the other computes. W is split off only where its time is
    needed: in the fill of the upward chunk, and in the drain.
    """
    table = []
    total = max(num_microbatches, 2 * pp)  # what the fill needs; see VRow on the surplus
    for rank in range(pp):
        after = pp - rank - 1
        row = VRow(pp=pp, pp_rank=rank, num_microbatches=num_microbatches)
        row.add(2 * after, "F0")
        row.add(rank + 1, "F0 F1")
        row.add(after, "I1 W1 F1")
        row.add(total - 2 * pp + rank + 1, "F0 B1 F1 B0")
        row.add(after, "B1 F1 B0")
        # 2(rank+1) gradients remain before the drain; the later half of them leaves W behind.
        drain = ["B1", "B0"] * (rank + 1)
        drain[rank + 1 :] = [step.replace("B", "I") for step in drain[rank + 1 :]]
        row.add(1, " ".join(drain))
        row.add(after, "W I0")
        row.add(rank + 1, "W")
        table.append(row.jobs)
    return table
