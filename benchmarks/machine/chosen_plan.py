"""The plan that a search chooses beside all plans there are, measured: two ranks of this machine.

Takes the profile that `python -m benchmarks predict_cpu --keep DIR` measured, searches each of its
models, and runs every configuration of the space, each with the stage boundaries and placements
that a search finds for it; only what recomputes is left out, which is the same work and more
where memory is no matter. One median among dozens is the least by chance too, so the fastest few
are run again beside the chosen plan. Prints by how much the chosen plan is slower than the
fastest. With `--measure K` the chosen plan is that of `planner search --measure K`, the measured
best of so many. Needs a quiet machine; about four minutes a model; what ran is kept in DIR.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Annotated

from benchmarks.harness import ROOT, Result, benchmark, note
from benchmarks.machine.gpt import GLOBAL_BATCH, TOLD, write_model
from benchmarks.machine.plan_runs import Runs, describe, run_plans
from benchmarks.machine.predict_cpu import H100, profiled
from planner.language.graph import ModelGraph
from planner.language.plan import Plan, load_plan
from profiles import Profile
from search import SearchRequest, find_plan
from search.candidates import Candidates
from search.find_plan import search_among


@dataclass(frozen=True, kw_only=True)
class Asked:
    """How plans are chosen and run."""

    measure: int | None
    """The chosen plan is the measured best of so many; None: the predicted best."""
    plans: int
    """Configurations that are run at most."""
    steps: int
    """Steps of a plan in a turn."""
    turns: int
    """Turns through the fastest plans."""
    finalists: int
    """How many of the fastest run again."""


def plans_of_configurations(graph: ModelGraph, profile: Profile, model_file: str) -> Iterator[Plan]:
    """Yield the best plan of each configuration without recomputation."""
    request = SearchRequest(
        num_devices=2, global_batch=GLOBAL_BATCH, recompute="none", model_file=model_file
    )
    candidates = Candidates.of(graph, profile, request)
    for shape in candidates.shapes(request):
        for configuration in shape.configurations():
            fixed = replace(
                request,
                dp=configuration.degrees["dp"],
                cp=configuration.cp,
                tp=configuration.tp,
                pp=configuration.pp,
                vpp=configuration.vpp,
                microbatch_size=configuration.microbatch_size,
                schedule=configuration.schedule if configuration.pp > 1 else None,
                zero=configuration.zero,
            )
            plan = search_among(candidates, fixed, runners_up=False).plan
            if plan is not None:
                yield plan


def measured_plan(model_file: str, keep: Path, count: int) -> Plan:
    """Return what `planner search --measure` writes, run as a user runs it."""
    out = Path(model_file).with_name(f"measured-best-of-{count}.json")
    if not out.exists():
        command = [sys.executable, "-m", "cli", "search", model_file, "--gpus", "2",
                   "--global-batch", str(GLOBAL_BATCH), "--profile", str(keep / "profile"),
                   "--measure", str(count), "--out", str(out)]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run(command, check=True, env=environment)
    return load_plan(out)


def predicted_plan(graph: ModelGraph, profile: Profile, model_file: str) -> Plan:
    """Return the answer of a search in which nothing is fixed."""
    request = SearchRequest(num_devices=2, global_batch=GLOBAL_BATCH, model_file=model_file)
    plan = find_plan(graph, profile, request).plan
    assert plan is not None, "the models are small"
    return plan


def decisions(plan: Plan) -> Plan:
    """Return a plan without what was predicted of it."""
    return plan.model_copy(update={"estimate": {}})


def compare(model: str, profile: Profile, folder: Path, asked: Asked) -> dict:
    """Return measured seconds of the chosen plan of one model and of the fastest ones."""
    path, graph = write_model(model, folder)
    file = str(path)
    if asked.measure:
        chosen = measured_plan(file, folder.parents[1], asked.measure)
    else:
        chosen = predicted_plan(graph, profile, file)
    plans = list(islice(plans_of_configurations(graph, profile, file), asked.plans))
    if not any(decisions(plan) == decisions(chosen) for plan in plans):
        plans.insert(0, chosen)
    seconds = _seconds(plans, folder / "every", asked, turns=2)
    ranked = [plans[index] for index in sorted(seconds, key=seconds.__getitem__)]
    others = [plan for plan in ranked if decisions(plan) != decisions(chosen)]
    finalists = [chosen, *others[: asked.finalists]]
    together = sha256("".join(map(_name, finalists)).encode()).hexdigest()[:16]
    again = _seconds(finalists, folder / together, asked, turns=asked.turns)
    fastest = min(again, key=again.__getitem__)
    for index, measured in again.items():
        plan = finalists[index]
        note(
            f"{model:6}{describe(plan):60}{plan.estimate['step_s'] * 1e3:9.1f} ms"
            f"{measured * 1e3:9.1f} ms{' chosen' if index == 0 else ''}"
        )
    return {
        "model": model,
        "plans": len(seconds),
        "chosen": describe(chosen),
        "chosen_rank": 1
        + next(i for i, p in enumerate(ranked) if decisions(p) == decisions(chosen)),
        "chosen_s": again[0],
        "fastest": describe(finalists[fastest]),
        "fastest_s": again[fastest],
        "slower_pct": 100 * (again[0] / again[fastest] - 1),
    }


def _seconds(plans: list[Plan], folder: Path, asked: Asked, *, turns: int) -> dict[int, float]:
    """Return each plan's median step by its place in the list: kept ones, the others run now."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "seconds.json"
    known: dict[str, float] = json.loads(kept.read_text()) if kept.exists() else {}
    missing = [plan for plan in plans if _name(plan) not in known]
    if missing:
        for old in folder.glob("plan-*.json"):
            old.unlink()
        shutil.copy(plans[0].model.file, folder / "model.py")
        run_plans(missing, folder, steps=asked.steps, turns=turns)
        found = Runs.read(folder).step_s
        known |= {_name(missing[index]): seconds for index, seconds in found.items()}
        kept.write_text(json.dumps(known))
    return {index: known[_name(plan)] for index, plan in enumerate(plans) if _name(plan) in known}


def _name(plan: Plan) -> str:
    """Name a plan by what it decides."""
    return sha256(decisions(plan).model_dump_json().encode()).hexdigest()[:16]


@benchmark(
    "chosen_plan",
    quick={
        "models": ("tiny",),
        "plans": 2,
        "steps": 1,
        "turns": 1,
        "finalists": 1,
        "profile": H100,
    },
)
def chosen_plan(
    *,
    models: tuple[str, ...] = TOLD,
    keep: Annotated[Path | None, "where predict_cpu keeps its own"] = None,
    measure: Annotated[int | None, "choose the measured best of so many plans"] = None,
    plans: Annotated[int, "configurations to run at most"] = 1000,
    steps: Annotated[int, "steps of a plan in each turn"] = 5,
    turns: Annotated[int, "turns through the fastest plans"] = 6,
    finalists: Annotated[int, "how many run again"] = 5,
    budget: Annotated[float, "seconds for the profile, where none is kept"] = 200.0,
    profile: Annotated[str | None, "a profile in the place of this machine's"] = None,
) -> Result:
    asked = Asked(measure=measure, plans=plans, steps=steps, turns=turns, finalists=finalists)
    with profiled(keep, models, budget, profile) as (folder, measured):
        rows = [compare(name, measured, folder / "chosen" / name, asked) for name in models]
    return Result(rows)
