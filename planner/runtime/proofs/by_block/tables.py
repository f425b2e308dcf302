"""The job table, and the messages that its jobs send and take, in orders that end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from planner.errors import ScheduleError
from planner.language.lowering.wiring import Edge, StageWiring
from planner.language.plan import Plan
from planner.language.schedule import Schedule
from planner.language.schedule.timing.communication import (
    Transfer,
    communication_order,
    validate_communication,
)
from planner.language.schedule.validate import validate_schedule
from planner.runtime.step.messages.p2p import Message, messages

Queues = Callable[[Schedule, Sequence[Edge]], Sequence[Sequence[Transfer]]]


def queues_of(schedule: Schedule, edges: Sequence[Edge]) -> Sequence[Sequence[Transfer]]:
    """Return each pp rank's sends and receives, in order."""
    return communication_order(
        schedule,
        [(edge.producer, edge.consumer) for edge in edges],
        gradient_edges=[(e.producer, e.consumer) for e in edges if e.requires_grad],
    )


def check_table(plan: Plan, schedule: Schedule) -> Iterator[str]:
    """Yield what is wrong with a job table: each job once, on its rank, and it ends."""
    if schedule.stage_to_pp_rank != plan.stage_to_pp_rank:
        yield (
            f"the table has stages on pp ranks {list(schedule.stage_to_pp_rank)} and the plan on "
            f"{list(plan.stage_to_pp_rank)}"
        )
    if schedule.num_microbatches != plan.num_microbatches:
        yield (
            f"the table has {schedule.num_microbatches} microbatches and the plan "
            f"{plan.num_microbatches}"
        )
    try:
        validate_schedule(schedule)
    except ScheduleError as error:
        yield str(error).splitlines()[0]


def check_messages(
    schedule: Schedule,
    edges: Sequence[Edge],
    wirings: Sequence[StageWiring],
    queues: Queues = queues_of,
) -> Iterator[str]:
    """Yield what is wrong with messages: each is sent once and taken once, and no order hangs.

    What a job sends and takes is by the wiring of its own stage, so that both ends are looked at.
    """
    sent, taken = Counter[Message](), Counter[Message]()
    for row in schedule.jobs:
        for job in row:
            wiring = wirings[job.stage_index]
            for edges_here, made in ((wiring.outgoing, sent), (wiring.incoming, taken)):
                # Values leave by outgoing edges, gradients by incoming ones.
                is_out = made is sent
                made.update(
                    m for m in messages(job, edges_here, incoming=not is_out) if not m.is_grad
                )
                back = taken if is_out else sent
                back.update(m for m in messages(job, edges_here, incoming=is_out) if m.is_grad)
    names = {edge.index: edge.tensor for edge in edges}
    for message in sorted(sent.keys() | taken.keys()):
        if sent[message] != 1 or taken[message] != 1:
            what = f"{'the gradient of ' if message.is_grad else ''}{names.get(message.edge)}"
            yield (
                f"{what} of microbatch {message.microbatch} is sent {sent[message]} times and "
                f"taken {taken[message]} times; each once"
            )
            return
    try:
        validate_communication(schedule, queues(schedule, edges))
    except ScheduleError as error:
        yield str(error).splitlines()[0]
