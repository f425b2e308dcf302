"""Pipeline schedules as data.

A schedule is a table of jobs, one row for each pipeline rank. The same table is checked
(`validate_schedule`), drawn (`draw_schedule`), timed (`simulate`) and run
(`planner.runtime`), so none of them names a schedule. What a search may rely on before there is a
table (memory, waits, where weight gradients go) stands on the schedule's `ScheduleSpec`, so a
schedule is one file. Torch-free.

Comes in: a name, pp, vpp and the number of microbatches. Goes out: a `Schedule`, the rows of jobs.
Read in this order: `jobs` (Job, Schedule), `named.one_f_one_b` (a builder), `registry`
(ScheduleSpec), `job_order` (what bounds rely on), `validate`, `timing` (when jobs run),
`step_jobs` (what follows the rows in a whole step), `synthesis`.
"""

from planner.language.schedule import named  # noqa: F401  (each module registers its schedules)
from planner.language.schedule.jobs import (
    Job,
    JobKind,
    Schedule,
    backward_input,
    backward_weight,
    forward,
    full_backward,
)
from planner.language.schedule.registry import build_schedule, find_schedule, register_schedule

__all__ = [
    "Job",
    "JobKind",
    "Schedule",
    "backward_input",
    "backward_weight",
    "build_schedule",
    "find_schedule",
    "forward",
    "full_backward",
    "register_schedule",
]
