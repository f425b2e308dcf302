"""How unevenly routers dealt rows to ranks in a run that was recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from costmodel.execution.dispatch.imbalance import imbalance_of
from planner.language.plan import Plan
from planner.timeline import COLLECTIVE, ROWS, RankTimeline


def recorded_imbalance(
    plan: Plan, measured: Sequence[RankTimeline], *, first_step: int
) -> float | None:
    """Return the imbalance under which the fullest rank of an exchange is expected to have what it
    had in the mean of a plan's recorded exchanges; None where no rows were exchanged.
    """
    found = rows_of_fullest(plan, measured, first_step=first_step)
    return imbalance_of(fmean(found), plan.degrees["ep"]) if found else None


def rows_of_fullest(
    plan: Plan, measured: Sequence[RankTimeline], *, first_step: int
) -> tuple[float, ...]:
    """Return, of each exchange that brought rows to experts, the rows of the rank that received
    most over the mean of its ranks.
    """
    if plan.degrees["ep"] == 1:
        return ()
    received = {line.rank: _received(line, first_step) for line in measured}
    found = []
    for pp_rank in range(plan.pp):
        for group in plan.mesh(pp_rank).groups("ep"):
            rows = [received.get(rank, {}) for rank in group]
            # A rank's n-th exchange of a job is the n-th of all ranks of its group.
            for exchange in dict.fromkeys(key for of_rank in rows for key in of_rank):
                came = [of_rank.get(exchange, 0) for of_rank in rows]
                found.append(max(came) / fmean(came))
    return tuple(found)


_Exchange = tuple[int, int, int, int]
"""Step, stage, microbatch, and how many came before in these."""


def _received(line: RankTimeline, first_step: int) -> dict[_Exchange, int]:
    """Return the rows that came to a rank's experts, by exchange."""
    found: dict[_Exchange, int] = {}
    before: dict[tuple[int, int, int], int] = defaultdict(int)
    for span in line.spans:
        # Rows go to experts once in a forward; a backward sends their gradients the same ways.
        if span.kind == COLLECTIVE and span.name == ROWS and span.step >= first_step:
            job = span.step, span.stage, span.microbatch
            found[(*job, before[job])] = span.rows
            before[job] += 1
    return found
