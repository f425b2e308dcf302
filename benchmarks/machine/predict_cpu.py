"""Predictions against runs on this machine: two gloo ranks, many plans of small models.

Profiles this machine as two ranks, predicts every plan, runs each for a few steps, and prints
predicted against measured step time: the median error, the regret of the plan predicted
fastest, and whether the truly fastest is among the predicted top three. Both the profile's
workers and the runs are two processes of one thread each, all at work. A virtual machine's
speed drifts over minutes: the profile's two fixed works are timed beside each run, too, and
what was predicted is told as well for the machine as slow as it was beside that very run.
Needs a quiet machine and about ten minutes; in shorter parts, of which each keeps what it
found:

    python -m benchmarks predict_cpu --keep DIR --profile-only
    python -m benchmarks predict_cpu --keep DIR --models gpt        # and deep, and wide
    python -m benchmarks predict_cpu --keep DIR                     # all three, from DIR

`--models routed` is of experts (with transformers), over ep too.

`--jobs` records every job, and prints predicted over measured seconds by kind of job.
`--calibrate N` learns from the records of N plans of each model, as `planner compare --calibrate`
does, and tells the errors of the others before and after.
"""

from __future__ import annotations

import itertools
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from benchmarks.harness import Result, benchmark, note
from benchmarks.machine.gpt import GLOBAL_BATCH, TOLD, write_model
from benchmarks.machine.plan_runs import Runs, Turn, describe, run_plans
from costmodel import CostCache, estimate
from costmodel.calibrate import calibrated
from costmodel.compare import compare_run
from planner.errors import PlannerError
from planner.language.graph import ModelGraph
from planner.language.lowering.defaults import default_plan
from planner.language.lowering.experts import experts_of
from planner.language.plan import Plan
from planner.timeline import load_timeline
from profiles import Profile, load_profile, measure_profile


def plans_of(graph, model_file: Path) -> list[Plan]:
    """Return plans over dp, tp, ep, pp, ZeRO, recompute, microbatch and schedule for two ranks."""
    choices = []
    for size in (2, 4, 8):
        for zero, recompute in itertools.product((0, 1, 3), ("none", "full")):
            choices.append({"dp": 2, "zero_stage": zero, "recompute": recompute, "size": size})
        for schedule in ("1f1b", "fthenb"):
            choices.append({"pp": 2, "schedule": schedule, "size": size})
        choices.append({"tp": 2, "size": size})
        if experts_of(graph) > 1:
            choices.append({"dp": 2, "ep": 2, "size": size})
        choices.append({"pp": 2, "vpp": 2, "schedule": "interleaved_1f1b", "size": size})
    plans = []
    for choice in choices:
        size = choice.pop("size")
        microbatches = GLOBAL_BATCH // size // choice.get("dp", 1)
        if microbatches < 1:
            continue
        try:
            plan = default_plan(
                graph,
                microbatch_size=size,
                num_microbatches=microbatches,
                file=str(model_file),
                **choice,
            )
        except PlannerError:
            continue
        plans.append(plan)
    return plans


def job_ratios(folder: Path, index: int, answer) -> dict[str, float]:
    """Return predicted over measured seconds by kind of job of one plan; {} if not recorded."""
    recorded = folder / f"jobs-{index:03}"
    if not recorded.exists():
        return {}
    found = compare_run(answer.timeline, answer.step_s, load_timeline(recorded))
    by_kind: dict[str, list[float]] = {}
    for job in found.jobs:
        predicted_s, measured_s = by_kind.setdefault(job.jobs.kind, [0.0, 0.0])
        by_kind[job.jobs.kind] = [predicted_s + job.predicted_s, measured_s + job.measured_s]
    return {kind: predicted_s / measured_s for kind, (predicted_s, measured_s) in by_kind.items()}


def learn(
    profile: Profile, graph: ModelGraph, plans: list[Plan], folder: Path, runs: Runs, count: int
) -> tuple[Profile, set[int]]:
    """Return the profile calibrated with the records of so many plans, spread over those that
    ran, and which those are. A record is of a plan's last turn, and is held against the machine
    as slow as it was then.
    """
    recorded = [index for index in sorted(runs.turns) if (folder / f"jobs-{index:03}").exists()]
    chosen = {recorded[round((at + 0.5) * len(recorded) / count - 0.5)] for at in range(count)}
    for index in sorted(chosen):
        lines = load_timeline(folder / f"jobs-{index:03}")
        slowed = runs.turns[index][-1].slowed(profile)
        profile = calibrated(slowed, graph, plans[index], lines)
    return profile, chosen


@dataclass(frozen=True, kw_only=True)
class Asked:
    """How plans are run: how many of a model, steps of a turn, turns; what is learned from jobs."""

    plans: int
    steps: int
    turns: int
    jobs: bool
    calibrate: int


def judge(model: str, profile: Profile, folder: Path, asked: Asked) -> list[dict]:
    """Return predicted and measured step time of each plan of one model, run if need be.

    `measured_s` is the median of all turns: a profile answers for the machine as it usually is.
    `least_s` is of the least disturbed turn. `error_then_pct` is the median over turns of the
    error for the machine as slow as it was beside that turn.
    """
    file, graph = write_model(model, folder)
    plans = plans_of(graph, file)[: asked.plans]
    if not (folder / "seconds-0.jsonl").exists():
        run_plans(plans, folder, steps=asked.steps, turns=asked.turns, jobs=asked.jobs)
    runs = Runs.read(folder)
    costs = CostCache(graph, profile)
    taught, learned = learn(profile, graph, plans, folder, runs, asked.calibrate)
    costs_taught = CostCache(graph, taught)
    lines = []
    for index, measured_s in sorted(runs.step_s.items()):
        turns = runs.turns[index]
        least_s = min(turn.step_s for turn in turns)
        answer = estimate(graph, profile, plans[index], costs=costs)
        errors_then = [error_pct(graph, profile, plans[index], turn) for turn in turns]
        line = {
            "model": model,
            "plan": describe(plans[index]),
            "predicted_s": answer.step_s,
            "measured_s": measured_s,
            "least_s": least_s,
            "error_pct": 100 * (answer.step_s / measured_s - 1),
            "error_then_pct": statistics.median(errors_then),
            "least_error_pct": 100 * (answer.step_s / least_s - 1),
            "parts_s": answer.to_dict()["time"],
            "job_ratios": job_ratios(folder, index, answer),
        }
        if learned and index not in learned:
            taught_s = estimate(graph, taught, plans[index], costs=costs_taught).step_s
            line["calibrated_error_pct"] = 100 * (taught_s / measured_s - 1)
            taught_then = [error_pct(graph, taught, plans[index], turn) for turn in turns]
            line["calibrated_error_then_pct"] = statistics.median(taught_then)
        lines.append(line)
        ratios = "".join(f" {k} {ratio:.2f}" for k, ratio in line["job_ratios"].items())
        note(
            f"{model:7}{line['plan']:57}{1e3 * line['predicted_s']:8.1f} ms"
            f"{1e3 * line['measured_s']:8.1f} ms{line['error_pct']:+7.1f}%"
            f"{line['error_then_pct']:+7.1f}%"
            f"{1e3 * line['least_s']:8.1f} ms{line['least_error_pct']:+7.1f}%{ratios}"
        )
    return lines


def error_pct(graph: ModelGraph, profile: Profile, plan: Plan, turn: Turn) -> float:
    """Return the error of a plan's predicted step, in %, for the machine as slow as beside a
    turn. Both times are taken in the same seconds, so the error has none of the machine's drift.
    """
    return 100 * (estimate(graph, turn.slowed(profile), plan).step_s / turn.step_s - 1)


ERRORS = ("error_pct", "error_then_pct", "least_error_pct")


def summarise(lines: list[dict]) -> dict[str, dict]:
    """Return the figures by which the cost model is judged on this machine, of each model and over
    all.
    """
    found = {}
    for model in dict.fromkeys(line["model"] for line in lines):
        mine = sorted(
            (line for line in lines if line["model"] == model), key=lambda x: x["predicted_s"]
        )
        fastest = min(mine, key=lambda x: x["measured_s"])
        found[model] = {
            **{f"median_{name}": _median_size(mine, name) for name in ERRORS},
            "regret_pct": 100 * (mine[0]["measured_s"] / fastest["measured_s"] - 1),
            "best_in_top3": fastest in mine[:3],
        }
    return found | {
        "all": {
            **{f"median_{name}": _median_size(lines, name) for name in ERRORS},
            "regret_pct": statistics.mean(each["regret_pct"] for each in found.values()),
            "best_in_top3": all(each["best_in_top3"] for each in found.values()),
        }
    }


def _median_size(lines: list[dict], name: str) -> float:
    return statistics.median(abs(line[name]) for line in lines)


H100 = "h100-sxm5-80gb"
"""A profile for quick runs, which do not measure one."""


@contextmanager
def profiled(
    keep: Path | None, models: Sequence[str], budget_s: float, name: str | None
) -> Iterator[tuple[Path, Profile]]:
    """Yield a folder, kept or not, and the profile of this machine in it, measured if need be; or
    the profile of a name in its place.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if name or (folder / "profile" / "profile.json").exists():
            yield folder, load_profile(name or folder / "profile")
            return
        graphs = [write_model(name, folder)[1] for name in models]
        profile = measure_profile(
            folder / "profile",
            nproc=2,
            device="cpu",
            models=graphs,
            budget_s=budget_s,
            progress=lambda part, what: note(f"profile {part:4.0%} {what}"),
        )
        yield folder, profile


@benchmark(
    "predict_cpu",
    quick={"models": ("tiny",), "plans": 2, "steps": 1, "turns": 1, "profile": H100},
)
def predict_cpu(
    *,
    models: tuple[str, ...] = TOLD,
    plans: Annotated[int, "of a model, the first"] = 1000,
    steps: Annotated[int, "steps of a plan in each turn"] = 5,
    turns: Annotated[int, "turns through all plans of a model"] = 3,
    budget: Annotated[float, "seconds for the profile"] = 200.0,
    profile: Annotated[str | None, "a profile in the place of this machine's"] = None,
    keep: Annotated[Path | None, "keep the profile and all runs here, for later"] = None,
    profile_only: Annotated[bool, "measure the profile and stop"] = False,
    jobs: Annotated[bool, "record and compare single jobs"] = False,
    calibrate: Annotated[int, "learn from so many plans' jobs"] = 0,
) -> Result:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends the launched ranks, too
    asked = Asked(
        plans=plans, steps=steps, turns=turns, jobs=jobs or calibrate > 0, calibrate=calibrate
    )
    # A profile that is kept is of all models, whichever are run first.
    everything = tuple(dict.fromkeys((*TOLD, *models))) if keep else models
    with profiled(keep, everything, budget, profile) as (folder, measured):
        if profile_only:
            return Result([], [f"the profile is in {folder / 'profile'}"])
        lines = [line for name in models for line in judge(name, measured, folder / name, asked)]
    if not lines:
        return Result([], ["no plan ran; see above why"], failed=True)
    summary = summarise(lines)
    notes = []
    judged = [line for line in lines if "calibrated_error_pct" in line]
    if judged:
        notes.append(
            f"{len(judged)} plans not learned from: median error "
            f"{_median_size(judged, 'error_pct'):.1f}% before calibration, "
            f"{_median_size(judged, 'calibrated_error_pct'):.1f}% after; at the machine's "
            f"pace then {_median_size(judged, 'error_then_pct'):.1f}% and "
            f"{_median_size(judged, 'calibrated_error_then_pct'):.1f}%"
        )
    notes += [
        f"{name:5} median error {found['median_error_pct']:.1f}%, "
        f"{found['median_error_then_pct']:.1f}% at the machine's pace then, "
        f"{found['median_least_error_pct']:.1f}% of the least disturbed turn; "
        f"regret {found['regret_pct']:.1f}%, fastest among predicted top 3: {found['best_in_top3']}"
        for name, found in summary.items()
    ]
    return Result(lines, notes)
