"""`planner simulate`: a plan's timetable, job by job."""

from __future__ import annotations

from commands.common.models import GivenModel
from commands.common.options import (
    ClusterOption,
    JsonOption,
    PlanFile,
    ProfileOption,
    TraceOption,
    spread,
)
from commands.common.prediction import predict
from commands.render.console import (
    check_writable,
    show_json,
    show_note,
    show_results,
    write_trace,
)


@spread(GivenModel)
def simulate(
    plan: PlanFile,
    given: GivenModel,
    profile: ProfileOption = None,
    cluster: ClusterOption = None,
    trace: TraceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Play a plan's timetable: who works and waits when.

    Example: planner simulate plan.json model.py --trace step.json
    """
    from commands.render.data import timeline_data
    from commands.render.lanes import describe_lanes
    from commands.render.run import describe_timeline
    from costmodel.estimate import plan_job_seconds
    from costmodel.lanes import timeline_with_lanes

    model = given.file_of(plan)
    check_writable(trace, "the trace", (plan, model))
    predicted = predict(plan, model, profile, cluster=cluster, doing="simulating")
    seconds = plan_job_seconds(predicted.plan, predicted.costs)
    show_note(predicted.note)
    timeline = predicted.estimate.timeline
    lines = timeline_with_lanes(predicted.plan, predicted.costs)
    if as_json:
        show_json(timeline_data(timeline, predicted.estimate.step_s, lines))
    else:
        show_results(*describe_timeline(timeline, seconds), *describe_lanes(lines))
    write_trace(trace, as_json=as_json, predicted=lines)
