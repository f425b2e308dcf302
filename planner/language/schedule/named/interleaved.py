"""Virtual stages dealt round-robin: interleaved 1F1B, interleaved FThenB, looped breadth-first.

Microbatches go through in groups. A rank runs a whole group through its first chunk, then
the same group through its next chunk, and so on, then takes the next group:

    group of 4, vpp=2, rank 0 of 4:  0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 | 0F4 …

A group needs at least pp microbatches: the first of it comes back to rank 0 for the next
chunk pp jobs after it left, and rank 0 must be busy until then.
"""

from __future__ import annotations

from collections.abc import Callable

from planner.language.schedule.jobs import Job, forward, full_backward
from planner.language.schedule.registry import register_schedule


def group_sizes(pp: int, num_microbatches: int) -> list[int]:
    """Split the microbatches in as many groups of at least pp as there are, larger ones first.

    A multiple of pp gives groups of pp, the published table. Otherwise the rest is spread
    over the groups, which keeps the bubble of the published table; a last group of fewer
    than pp would idle, and can deadlock (Megatron refuses it).
    """
    num_groups = num_microbatches // pp
    size, larger = divmod(num_microbatches, num_groups)
    return [size + 1] * larger + [size] * (num_groups - larger)


def _rank_order(job: Callable[[int, int], Job], stages: list[int], sizes: list[int]) -> list[Job]:
    """Return one kind of job of a rank in order: group by group, stage by stage in each."""
    row, first = [], 0
    for size in sizes:
        row += [job(stage, i) for stage in stages for i in range(first, first + size)]
        first += size
    return row


def _warmup(pp: int, vpp: int, num_microbatches: int) -> list[int]:
    """Return how many forwards each rank runs before its first pair of F and B.

    The first group has to go through all chunks but the last, and each rank before the last
    needs two more for every transfer to it and back (arXiv 2104.04473, section 2.2).
    """
    largest = group_sizes(pp, num_microbatches)[0]
    return [
        min(vpp * num_microbatches, (vpp - 1) * largest + 2 * (pp - rank - 1)) for rank in range(pp)
    ]


def _limit_1f1b(pp: int, vpp: int, num_microbatches: int) -> tuple[int, ...]:
    total = vpp * num_microbatches
    # The steady state begins with a forward, so it holds a microbatch more than the warm-up.
    return tuple(min(total, warmup + 1) for warmup in _warmup(pp, vpp, num_microbatches))


def _forwards_before_backward(pp: int, vpp: int, num_microbatches: int) -> tuple[int, ...]:
    """Return how many forwards of each stage its rank runs before its first backward."""
    left, by_chunk = list(_limit_1f1b(pp, vpp, num_microbatches)), []
    groups = group_sizes(pp, num_microbatches)
    for size in groups:
        for chunk in range(vpp):
            taken = [min(size, of_rank) for of_rank in left]
            left = [of_rank - some for of_rank, some in zip(left, taken, strict=True)]
            by_chunk.append((chunk, taken))
    # Of each chunk the sum over groups, chunk after chunk: stages are dealt round-robin.
    return tuple(
        sum(taken[rank] for of, taken in by_chunk if of == chunk)
        for chunk in range(vpp)
        for rank in range(pp)
    )


def _limit_all(pp: int, vpp: int, num_microbatches: int) -> tuple[int, ...]:
    return (vpp * num_microbatches,) * pp


@register_schedule(
    "interleaved_1f1b",
    summary="1f1b with virtual stages: 1/vpp of the bubble for more memory and vpp times the sends",
    min_vpp=2,
    max_vpp=None,
    in_flight_limit=_limit_1f1b,
    warmup=_forwards_before_backward,
    search_rank=1,
)
def interleaved_1f1b(pp: int, vpp: int, num_microbatches: int) -> list[list[Job]]:
    """Return Megatron's interleaved table (arXiv 2104.04473), for any num_microbatches >= pp."""
    sizes = group_sizes(pp, num_microbatches)
    table = []
    for rank, num_warmup in enumerate(_warmup(pp, vpp, num_microbatches)):
        stages = list(range(rank, pp * vpp, pp))
        forwards = _rank_order(forward, stages, sizes)
        backwards = _rank_order(full_backward, stages[::-1], sizes)
        row = forwards[:num_warmup]
        for position, backward in enumerate(backwards):
            # A forward ahead of each backward while there are any: then the drain.
            row += forwards[num_warmup + position : num_warmup + position + 1]
            row.append(backward)
        table.append(row)
    return table


@register_schedule(
    "interleaved_fthenb",
    summary="virtual stages in groups of microbatches, every forward before any backward",
    min_vpp=2,
    max_vpp=None,
    in_flight_limit=_limit_all,
)
def interleaved_fthenb(pp: int, vpp: int, num_microbatches: int) -> list[list[Job]]:
    """Return the interleaved table with all forwards first; all vpp * m stages are live."""
    return _all_forward_all_backward(pp, vpp, group_sizes(pp, num_microbatches))


@register_schedule(
    "looped_breadth_first",
    summary="every microbatch through a chunk before the next chunk; gradients reduce early",
    min_vpp=2,
    max_vpp=None,
    in_flight_limit=_limit_all,
)
def looped_breadth_first(pp: int, vpp: int, num_microbatches: int) -> list[list[Job]]:
    """Return breadth-first pipelining (arXiv 2211.05953): one group of all microbatches.

    A chunk's parameters are needed, and its gradients complete, in one stretch each, so
    sharded data parallelism gathers and reduces them once a step and overlaps both.
    """
    return _all_forward_all_backward(pp, vpp, [num_microbatches])


def _all_forward_all_backward(pp: int, vpp: int, sizes: list[int]) -> list[list[Job]]:
    table = []
    for rank in range(pp):
        stages = list(range(rank, pp * vpp, pp))
        forwards = _rank_order(forward, stages, sizes)
        table.append(forwards + _rank_order(full_backward, stages[::-1], sizes))
    return table
