"""Runs of other stacks beside their prices, and what they taught a profile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from costmodel.runtime_calibration import ComparedRun
    from profiles import Profile
    from profiles.records import Calibration

SAME = 0.03
"""Measured times within this of the prediction differ by no more than runs do."""


def describe_runs(runs: Sequence[ComparedRun]) -> tuple[Any, ...]:
    """Return rich renderables: each run's step, its parts and its memory, priced and measured."""
    from rich.text import Text

    from commands.render.tables import light_table

    shown: list[Any] = []
    for run in runs:
        numbers = ("predicted", "measured", "measured / predicted")
        table = light_table(
            *("part", *numbers),
            title=f"{run.name}: {run.stack}, priced as {run.runtime}",
            numbers=numbers,
        )
        table.add_row("step", *_seconds(run.predicted_s, run.steady.seconds))
        for part, (predicted_s, measured_s) in run.parts_s.items():
            table.add_row(part, *_seconds(predicted_s, measured_s))
        memory = f"memory, {run.memory_is}"
        table.add_row(memory, *_bytes(run.predicted_bytes, run.measured_bytes))
        shown += [table, Text(_differs(run))]
    return tuple(shown)


def _seconds(predicted_s: float, measured_s: float | None) -> tuple[str, str, str]:
    if measured_s is None:
        return format_seconds(predicted_s), "-", "-"
    return format_seconds(predicted_s), format_seconds(measured_s), _ratio(predicted_s, measured_s)


def _bytes(predicted: float, measured: float | None) -> tuple[str, str, str]:
    if measured is None:
        return format_bytes(predicted), "-", "-"
    return format_bytes(predicted), format_bytes(measured), _ratio(predicted, measured)


def _ratio(predicted: float, measured: float) -> str:
    return f"{measured / predicted:.2f}" if predicted > 0 else "-"


def _differs(run: ComparedRun) -> str:
    """Say which part of a run differs most, and from how many readings its step is."""
    steady = run.steady
    left_out = [
        f"{number} {what}"
        for number, what in ((steady.warm_up, "that warm up"), (steady.outliers, "far from others"))
        if number
    ]
    used = f"{steady.used} reading{'s' * (steady.used > 1)} of its step"
    used += f" (without {' and '.join(left_out)})" if left_out else ""
    told = {
        part: measured_s - predicted_s
        for part, (predicted_s, measured_s) in run.parts_s.items()
        if measured_s is not None
    }
    if abs(steady.seconds / run.predicted_s - 1) <= SAME:
        return f"from {used}; its step is as predicted"
    if not told:
        return f"from {used}; a trace of torch.profiler would tell which part differs"
    part = max(told, key=lambda name: abs(told[name]))
    more = "more" if told[part] > 0 else "less"
    return (
        f"from {used}; {part} differ most: {format_seconds(abs(told[part]))} {more} than predicted"
    )


def runs_data(runs: Sequence[ComparedRun], profile: Profile, folder: Path) -> dict[str, Any]:
    """Return the same as JSON data."""
    return {
        "profile_folder": str(folder),
        "runs": [
            {
                "run": run.name,
                "stack": run.stack,
                "runtime": run.runtime,
                "predicted_step_s": run.predicted_s,
                "measured_step_s": run.steady.seconds,
                "standard_error_fraction": run.steady.standard_error,
                "num_readings": run.steady.used,
                "num_warm_up": run.steady.warm_up,
                "num_outliers": run.steady.outliers,
                "parts": {
                    part: {"predicted_s": predicted_s, "measured_s": measured_s}
                    for part, (predicted_s, measured_s) in run.parts_s.items()
                },
                "kinds_s": dict(run.by_kind_s),
                "memory": {
                    "of": run.memory_is,
                    "predicted_bytes": round(run.predicted_bytes),
                    "measured_bytes": None
                    if run.measured_bytes is None
                    else round(run.measured_bytes),
                },
                "evidence": [
                    {
                        "file": each.file,
                        "stack": each.stack,
                        "digest": each.digest,
                        "num_readings": each.readings,
                    }
                    for each in run.run.evidence
                ],
            }
            for run in runs
        ],
        "runtimes": [
            _runtime_data(runtime, known)
            for runtime, known in profile.file.runtime_calibrations.items()
        ],
    }


def _runtime_data(runtime: str, known: Calibration) -> dict[str, Any]:
    """Return what logs of a runtime taught a profile."""
    from costmodel.runtime_calibration import next_run

    before, after = next_run(runtime, known)
    return {
        "runtime": runtime,
        "num_runs": len(known.runs),
        "factors": {
            term: {"value": factor.value, "sigma": factor.sigma}
            for term, factor in known.factors.items()
        },
        "error_before": known.error_before,
        "error_after": known.error_after,
        "next_run_before_fraction": before,
        "next_run_after_fraction": after,
    }
