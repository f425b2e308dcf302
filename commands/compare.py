"""`planner compare`: a prediction beside a recorded run."""

from __future__ import annotations

from commands.common.options import ModelFile, PlanFile, ProfileOption, RunFolder, TraceOption
from commands.common.prediction import predict
from commands.render.console import check_writable, show_note, show_results, write_trace


def compare(
    plan: PlanFile,
    model: ModelFile,
    folder: RunFolder,
    profile: ProfileOption = None,
    trace: TraceOption = None,
) -> None:
    """Set the prediction beside a recorded run."""
    from commands.render.run import describe_run
    from costmodel.compare import as_rank_timelines, compare_run
    from planner.timeline import load_timeline

    check_writable(trace, "the trace", (plan, model))
    measured = load_timeline(folder)
    predicted = predict(plan, model, profile, doing="simulating")
    estimated = predicted.estimate
    show_note(predicted.note)
    show_results(*describe_run(compare_run(estimated.timeline, estimated.step_s, measured)))
    write_trace(trace, predicted=as_rank_timelines(estimated.timeline), measured=measured)
