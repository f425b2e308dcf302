"""The plan that a search chooses beside all plans there are, measured: two ranks of this machine.

    python -m benchmarks.chosen_plan --keep DIR [--models gpt,deep,wide] [--measure K] [--json]

Takes the profile that `benchmarks/predict_cpu.py --keep DIR` measured, searches each of its
models, and runs every configuration of the space, each with the stage boundaries and placements
that a search finds for it; only what recomputes is left out, which is the same work and more
where memory is no matter. One median among dozens is the least by chance too, so the fastest few
are run again beside the chosen plan. Prints by how much the chosen plan is slower than the
fastest. With `--measure K` the chosen plan is that of `planner search --measure K`, the measured
best of so many. Needs a quiet machine; about four minutes a model; what ran is kept in DIR.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from benchmarks.predict_cpu import (
    GLOBAL_BATCH,
    MODEL_FILE,
    MODELS,
    ROOT,
    Runs,
    describe,
    note,
    run_plans,
)
from planner.language.graph import ModelGraph
from planner.language.plan import Plan
from profiles import Profile


def plan_of_every_configuration(graph: ModelGraph, profile: Profile, model_file: str) -> list[Plan]:
    """Return the best plan of each configuration without recomputation."""
    from search import SearchRequest
    from search.candidates import Candidates
    from search.find_plan import search_among

    request = SearchRequest(
        num_devices=2, global_batch=GLOBAL_BATCH, recompute="none", model_file=model_file
    )
    candidates = Candidates.of(graph, profile, request)
    plans = []
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
                plans.append(plan)
    return plans


def measured_plan(model_file: str, keep: Path, count: int) -> Plan:
    """Return what `planner search --measure` writes, run as a user runs it."""
    from planner.language.plan import load_plan

    out = Path(model_file).with_name(f"measured-best-of-{count}.json")
    if not out.exists():
        command = [sys.executable, "-m", "cli", "search", model_file, "--gpus", "2",
                   "--global-batch", str(GLOBAL_BATCH), "--profile", str(keep / "profile"),
                   "--measure", str(count), "--out", str(out)]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run(command, check=True, env=environment)
    return load_plan(out)


def chosen_plan(graph: ModelGraph, profile: Profile, model_file: str) -> Plan:
    """Return the answer of a search in which nothing is fixed."""
    from search import SearchRequest, find_plan

    request = SearchRequest(num_devices=2, global_batch=GLOBAL_BATCH, model_file=model_file)
    plan = find_plan(graph, profile, request).plan
    assert plan is not None, "the models are small"
    return plan


def decisions(plan: Plan) -> Plan:
    """Return a plan without what was predicted of it."""
    return plan.model_copy(update={"estimate": {}})


def compare(model: str, profile: Profile, folder: Path, options: argparse.Namespace) -> dict:
    """Return measured seconds of the chosen plan of one model and of the fastest ones."""
    from planner.capture import capture_source, load_model_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(MODEL_FILE.format(**MODELS[model]))
    file = str(folder / "model.py")
    graph = capture_source(load_model_file(folder / "model.py"))
    if options.measure:
        chosen = measured_plan(file, options.keep, options.measure)
    else:
        chosen = chosen_plan(graph, profile, file)
    plans = plan_of_every_configuration(graph, profile, file)
    if not any(decisions(plan) == decisions(chosen) for plan in plans):
        plans.insert(0, chosen)
    seconds = _seconds(plans, folder / "every", options, turns=2)
    ranked = [plans[index] for index in sorted(seconds, key=seconds.__getitem__)]
    others = [plan for plan in ranked if decisions(plan) != decisions(chosen)]
    finalists = [chosen, *others[: options.finalists]]
    together = sha256("".join(map(_name, finalists)).encode()).hexdigest()[:16]
    again = _seconds(finalists, folder / together, options, turns=options.turns)
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


def _seconds(
    plans: list[Plan], folder: Path, options: argparse.Namespace, *, turns: int
) -> dict[int, float]:
    """Return each plan's median step by its place in the list: kept ones, the others run now."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "seconds.json"
    known: dict[str, float] = json.loads(kept.read_text()) if kept.exists() else {}
    missing = [plan for plan in plans if _name(plan) not in known]
    if missing:
        for old in folder.glob("plan-*.json"):
            old.unlink()
        shutil.copy(plans[0].model.file, folder / "model.py")
        asked = argparse.Namespace(steps=options.steps, turns=turns, jobs=False)
        run_plans(missing, folder, asked)
        found = Runs.read(folder).step_s
        known |= {_name(missing[index]): seconds for index, seconds in found.items()}
        kept.write_text(json.dumps(known))
    return {index: known[_name(plan)] for index, plan in enumerate(plans) if _name(plan) in known}


def _name(plan: Plan) -> str:
    """Name a plan by what it decides."""
    return sha256(decisions(plan).model_dump_json().encode()).hexdigest()[:16]


def main() -> int:
    """Search, run, compare."""
    from profiles import load_profile

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, required=True, help="where predict_cpu keeps its own")
    parser.add_argument("--measure", type=int, help="choose the measured best of so many plans")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--steps", type=int, default=5, help="steps of a plan in each turn")
    parser.add_argument("--turns", type=int, default=6, help="turns through the fastest plans")
    parser.add_argument("--finalists", type=int, default=5, help="how many run again")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    profile = load_profile(options.keep / "profile")
    rows = [
        compare(name, profile, options.keep / "chosen" / name, options)
        for name in options.models.split(",")
    ]
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    for row in rows:
        print(
            f"{row['model']:6}{row['plans']} plans; chosen {row['chosen']} "
            f"({row['chosen_s'] * 1e3:.1f} ms), fastest {row['fastest']} "
            f"({row['fastest_s'] * 1e3:.1f} ms): {row['slower_pct']:.1f}% slower"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
