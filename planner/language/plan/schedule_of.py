"""The table a plan runs: built by its schedule's name, or the plan's own where it has one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.errors import ScheduleError
from planner.language.schedule.jobs import Schedule
from planner.language.schedule.registry import build_schedule
from planner.language.schedule.validate import validate_schedule

if TYPE_CHECKING:
    from planner.language.plan import Plan


def schedule_of(plan: Plan) -> Schedule:
    """Return the plan's job table, checked by `validate_schedule`.

    A synthesised table is a decision, so it is in the plan (`Plan.table`); a named one
    follows from pp, vpp and the number of microbatches. Raises ScheduleError when the table
    is not valid, or a named schedule places stages on other ranks than the plan does.
    """
    if plan.table:
        schedule = Schedule.from_json(
            {
                "name": plan.schedule,
                "stage_to_pp_rank": plan.stage_to_pp_rank,
                "num_microbatches": plan.num_microbatches,
                "jobs": plan.table,
            }
        )
        if schedule.pp != plan.pp:
            raise ScheduleError(
                f"the plan's table has {schedule.pp} rows for pp={plan.pp}; search again"
            )
    else:
        schedule = build_schedule(
            plan.schedule, pp=plan.pp, vpp=plan.vpp, num_microbatches=plan.num_microbatches
        )
        if schedule.stage_to_pp_rank != plan.stage_to_pp_rank:
            raise ScheduleError(
                f"the plan has stages on pp ranks {list(plan.stage_to_pp_rank)}, but schedule "
                f"{plan.schedule!r} places them on {list(schedule.stage_to_pp_rank)}; "
                "use a schedule with that placement or search again"
            )
    validate_schedule(schedule)
    return schedule
