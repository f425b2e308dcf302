"""What is sent between pp ranks, in an order that can't deadlock: `communication_order`.

Two kinds of channel have to be safe. With tags (gloo, MPI), any order will do as long as
receives are posted. With ordered blocking channels (NCCL), a rank's sends and receives form
a queue, each blocks the next until its peer has come to it as well, and two queues in
conflicting orders hang for ever.

Claim: sort all transfers by when their producer ends in one valid simulation of the table, and
give each rank its part of that one order. Then even a single blocking queue per rank, for
all peers and both directions, can't hang.
Proof: number a job by when it ends, and a transfer by when its producer ends but after it. A
job waits for earlier jobs of its rank and for transfers whose producers ended before it began,
a transfer for its producer and for transfers before it in the order. All have lower numbers,
so no ring of waiting can close. (Jobs take some time, or the numbers would tie.)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from planner.errors import ScheduleError
from planner.language.schedule.draw import draw_table
from planner.language.schedule.jobs import Job, JobKind, Schedule
from planner.language.schedule.timing.job_seconds import JobSeconds
from planner.language.schedule.timing.simulate import simulate

Edge = tuple[int, int]
"""(source stage, destination stage) of an activation; its gradient goes the other way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The tensors one job hands to a job of another pp rank; prints as ``2F0>3F0``."""

    producer: Job
    consumer: Job
    src_pp_rank: int
    dst_pp_rank: int

    def __str__(self) -> str:
        return f"{self.producer}>{self.consumer}"

    @property
    def is_gradient(self) -> bool:
        """Whether it carries gradients, from a later stage to an earlier one."""
        return self.producer.kind is not JobKind.FORWARD


def chain_edges(num_stages: int) -> tuple[Edge, ...]:
    """Return the edges of a model in which each stage feeds the next only."""
    return tuple((stage, stage + 1) for stage in range(num_stages - 1))


def communication_order(
    schedule: Schedule,
    edges: Collection[Edge] | None = None,
    *,
    gradient_edges: Collection[Edge] | None = None,
    times: JobSeconds | None = None,
) -> tuple[tuple[Transfer, ...], ...]:
    """Return for each pp rank its sends and receives, in an order that can't deadlock.

    `edges` are the (source, destination) stages between which activations pass, by default
    each stage and the next; a skip connection adds its own. Those that carry a gradient back
    are `gradient_edges`, by default the same. Edges within a rank need no transfer. With
    `times` near the real ones, the order is the one in which results will appear, so a queue
    rarely waits for a late entry.
    """
    edges = chain_edges(schedule.num_stages) if edges is None else edges
    gradient_edges = edges if gradient_edges is None else gradient_edges
    _check_edges(schedule, [*edges, *gradient_edges])
    if times is not None and min((*times.forward_s, *times.backward_input_s)) <= 0:
        raise ScheduleError("communication_order needs positive F and I times; leave times out")
    consumers: dict[int, list[int]] = {}
    for source, destination in dict.fromkeys(edges):
        consumers.setdefault(source, []).append(destination)
    producers: dict[int, list[int]] = {}
    # Gradients go against the edges: a stage's backward sends to the stages that it received from.
    for source, destination in dict.fromkeys(gradient_edges):
        producers.setdefault(destination, []).append(source)
    gradient_job = {
        (job.stage_index, job.microbatch_index): job
        for row in schedule.jobs
        for job in row
        if job.kind in (JobKind.FULL_BACKWARD, JobKind.BACKWARD_INPUT)
    }
    placed = schedule.stage_to_pp_rank
    timed = sorted(
        ((end, rank, job) for rank, job, _, end in simulate(schedule, times, links="free")),
        key=lambda entry: entry[:2],  # a rank's jobs are in order already, and sorting is stable
    )
    # In the order in which producers end: the one order of the claim, of which a rank has a part.
    queues: list[list[Transfer]] = [[] for _ in schedule.jobs]
    for _, rank, job in timed:
        microbatch = job.microbatch_index
        if job.kind is JobKind.FORWARD:
            receiving = [
                Job(kind=job.kind, stage_index=stage, microbatch_index=microbatch)
                for stage in consumers.get(job.stage_index, ())
            ]
        elif job.kind is JobKind.BACKWARD_WEIGHT:
            continue
        else:
            receiving = [
                gradient_job[stage, microbatch] for stage in producers.get(job.stage_index, ())
            ]
        for consumer in receiving:
            peer = placed[consumer.stage_index]
            if peer != rank:
                transfer = Transfer(
                    producer=job, consumer=consumer, src_pp_rank=rank, dst_pp_rank=peer
                )
                # Both ends at once, so that the two queues
                # have their common transfers in one order.
                queues[rank].append(transfer)
                queues[peer].append(transfer)
    return tuple(map(tuple, queues))


def _check_edges(schedule: Schedule, edges: Collection[Edge]) -> None:
    for source, destination in edges:
        if not 0 <= source < destination < schedule.num_stages:
            raise ScheduleError(
                f"edge ({source}, {destination}) is not from a stage to a later one of "
                f"0..{schedule.num_stages - 1}"
            )


def validate_communication(schedule: Schedule, order: Sequence[Sequence[Transfer]]) -> None:
    """Raise ScheduleError unless this order of sends and receives is sure to end.

    The order may come from anywhere. It is simulated under the strictest rules: a rank has one
    queue; its head happens only when the producer has run and the transfer is at the head of
    the peer's queue too; a job runs only when all transfers to it have happened.
    """
    pending = _check_both_ends(schedule, order)
    job_at = [0] * schedule.pp
    queue_at = [0] * schedule.pp
    done: set[Job] = set()
    runnable = set(range(schedule.pp))
    while runnable:
        rank = runnable.pop()
        row, queue = schedule.jobs[rank], order[rank]
        # Jobs come first: they wait for transfers alone, and free the transfers that they produce.
        while job_at[rank] < len(row) and not pending.get(row[job_at[rank]]):
            done.add(row[job_at[rank]])
            job_at[rank] += 1
        while queue_at[rank] < len(queue):
            transfer = queue[queue_at[rank]]
            peer = transfer.dst_pp_rank if transfer.src_pp_rank == rank else transfer.src_pp_rank
            # Blocking channels: a transfer happens only when both ranks have come to it.
            at_head = queue_at[peer] < len(order[peer]) and order[peer][queue_at[peer]] == transfer
            if not at_head or transfer.producer not in done:
                break  # the rank whose progress ends this wait looks at its own head then
            queue_at[rank] += 1
            queue_at[peer] += 1
            pending[transfer.consumer] -= 1
            runnable.update((rank, peer))
    blocked = [rank for rank in range(schedule.pp) if queue_at[rank] < len(order[rank])]
    if blocked:
        heads = "; ".join(f"pp rank {rank} at {order[rank][queue_at[rank]]}" for rank in blocked)
        marked = [(rank, job_at[rank]) for rank in blocked]
        raise ScheduleError(
            f"schedule {schedule.name!r}: sends and receives deadlock: {heads}\n"
            + draw_table(schedule.jobs, marked=marked)
        )


def _check_both_ends(schedule: Schedule, order: Sequence[Sequence[Transfer]]) -> dict[Job, int]:
    """Check that each transfer is once in both queues; return how many each job waits for."""
    if len(order) != schedule.pp:
        raise ScheduleError(f"{len(order)} queues given for pp={schedule.pp}; give one per rank")
    ends: dict[Transfer, list[int]] = {}
    for rank, queue in enumerate(order):
        for transfer in queue:
            ends.setdefault(transfer, []).append(rank)
    pending: dict[Job, int] = {}
    for transfer, ranks in ends.items():
        wanted = sorted((transfer.src_pp_rank, transfer.dst_pp_rank))
        if sorted(ranks) != wanted:
            raise ScheduleError(
                f"transfer {transfer} is in the queues of pp ranks {ranks}; "
                f"it must be once in those of {wanted}"
            )
        pending[transfer.consumer] = pending.get(transfer.consumer, 0) + 1
    return pending
