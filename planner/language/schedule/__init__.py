"""Pipeline schedules as data.

A schedule is a table of jobs, one row for each pipeline rank. The same table is checked
(`validate_schedule`), drawn (`draw_schedule`), timed (`simulate`) and run
(`planner.runtime`), so none of them names a schedule. What a search may rely on before there is a
table (memory, waits, where weight gradients go) stands on the schedule's `ScheduleSpec`, so a
schedule is one file. Torch-free.

Comes in: a name, pp, vpp and the number of microbatches. Goes out: a `Schedule`, the rows of jobs.
Read in this order: `jobs` (Job, Schedule), `named.one_f_one_b` (a builder), `registry`
(ScheduleSpec), `job_order` (what bounds rely on), `validate`, `timing` (when jobs run),
`step_jobs` (what follows the rows in a whole step), `captured_ops` (which job runs which op of a
model), `synthesis`.
"""

from planner.language.schedule import named  # noqa: F401  (each module registers its schedules)
from planner.language.schedule.draw import draw_schedule, draw_table
from planner.language.schedule.job_order import JobOrder, RoundTrips
from planner.language.schedule.jobs import (
    Job,
    JobKind,
    Schedule,
    backward_input,
    backward_weight,
    forward,
    full_backward,
)
from planner.language.schedule.placements import fold_placement, loop_placement
from planner.language.schedule.registry import (
    DEFAULT_SCHEDULE,
    SCHEDULES,
    ScheduleSpec,
    build_schedule,
    find_schedule,
    register_schedule,
    searched_schedules,
    stage_to_pp_rank,
)
from planner.language.schedule.step_jobs import (
    Role,
    StepJob,
    StepJobKind,
    find_role,
    jobs_of_role,
    step_jobs,
)
from planner.language.schedule.synthesis.synthesize import (
    Pipeline,
    Synthesis,
    lower_bound_s,
    synthesize_schedule,
)
from planner.language.schedule.timing.communication import (
    Transfer,
    chain_edges,
    communication_order,
    validate_communication,
)
from planner.language.schedule.timing.in_flight import (
    in_flight,
    in_flight_at_rank_peak,
    in_flight_per_stage,
    most_kept,
)
from planner.language.schedule.timing.job_seconds import JobSeconds
from planner.language.schedule.timing.job_table import JobTable, build_job_table, job_table
from planner.language.schedule.timing.simulate import Timeline, simulate
from planner.language.schedule.timing.steady import SteadySchedule, steady_schedule
from planner.language.schedule.validate import validate_schedule

__all__ = [
    "DEFAULT_SCHEDULE",
    "SCHEDULES",
    "Job",
    "JobKind",
    "JobOrder",
    "JobSeconds",
    "JobTable",
    "Pipeline",
    "Role",
    "RoundTrips",
    "Schedule",
    "ScheduleSpec",
    "SteadySchedule",
    "StepJob",
    "StepJobKind",
    "Synthesis",
    "Timeline",
    "Transfer",
    "backward_input",
    "backward_weight",
    "build_job_table",
    "build_schedule",
    "chain_edges",
    "communication_order",
    "draw_schedule",
    "draw_table",
    "find_role",
    "find_schedule",
    "fold_placement",
    "forward",
    "full_backward",
    "in_flight",
    "in_flight_at_rank_peak",
    "in_flight_per_stage",
    "job_table",
    "jobs_of_role",
    "loop_placement",
    "lower_bound_s",
    "most_kept",
    "register_schedule",
    "searched_schedules",
    "simulate",
    "stage_to_pp_rank",
    "steady_schedule",
    "step_jobs",
    "synthesize_schedule",
    "validate_communication",
    "validate_schedule",
]
