"""`planner timeline`: what each rank of a recorded run did."""

from __future__ import annotations

from commands.common.options import JsonOption, RunFolder, TraceOption
from commands.render.console import check_writable, show_json, show_results, write_trace


def timeline(folder: RunFolder, trace: TraceOption = None, as_json: JsonOption = False) -> None:
    """Report a recorded run, and make one trace of it.

    Example: planner timeline run --trace run.json
    """
    from commands.render.data import recording_data
    from commands.render.lanes import describe_lanes
    from commands.render.run import describe_recording
    from planner.timeline import load_timeline

    check_writable(trace, "the trace")
    measured = load_timeline(folder)
    if as_json:
        show_json(recording_data(folder, measured))
    else:
        show_results(*describe_recording(measured), *describe_lanes(measured))
    write_trace(trace, as_json=as_json, measured=measured)
