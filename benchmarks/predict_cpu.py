"""Predictions against runs on this machine: two gloo ranks, many plans of small models.

    python -m benchmarks.predict_cpu [--json] [--steps N] [--turns N] [--models gpt,deep,wide]

Profiles this machine as two ranks, predicts every plan, runs each for a few steps, and prints
predicted against measured step time: the median error, the regret of the plan predicted
fastest, and whether the truly fastest is among the predicted top three. Both the profile's
workers and the runs are two processes of one thread each, all at work. A virtual machine's
speed drifts over minutes: the profile's two fixed works are timed beside each run, too, and
what was predicted is told as well for the machine as slow as it was beside that very run.
Needs a quiet machine and about ten minutes; in shorter parts, of which each keeps what it
found:

    python -m benchmarks.predict_cpu --keep DIR --profile-only
    python -m benchmarks.predict_cpu --keep DIR --models gpt        # and deep, and wide
    python -m benchmarks.predict_cpu --keep DIR                     # all three, from DIR

`--jobs` records every job, and prints predicted over measured seconds by kind of job.
`--calibrate N` learns from the records of N plans of each model, as `planner compare --calibrate`
does, and tells the errors of the others before and after.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from planner.errors import PlannerError
from planner.language.graph import ModelGraph
from planner.language.plan import Plan, save_plan
from profiles import Profile
from profiles.lookup.families import pace_kind
from profiles.measure.visits import undisturbed_pace
from profiles.records import PaceKind

ROOT = Path(__file__).resolve().parents[1]
MODELS = {
    "gpt": {"hidden": 192, "layers": 4, "sequence": 128},
    "deep": {"hidden": 96, "layers": 8, "sequence": 64},
    "wide": {"hidden": 384, "layers": 2, "sequence": 64},
}
GLOBAL_BATCH = 16
MODEL_FILE = """import torch
from torch import nn
from torch.nn import functional as F

HIDDEN, LAYERS, SEQUENCE, VOCABULARY, HEADS = {hidden}, {layers}, {sequence}, 256, 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        b, s, h = x.shape
        y = self.norm1(x)
        q, k, v = (p(y).view(b, s, HEADS, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids, labels):
        x = self.token(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def model():
    return Model()


def batch(size):
    ids = torch.randint(VOCABULARY, (size, SEQUENCE))
    return {{"ids": ids, "labels": ids}}
"""


def plans_of(graph, model_file: Path) -> list[Plan]:
    """Return plans over dp, tp, pp, ZeRO, recompute, microbatch and schedule for two ranks."""
    from planner.language.lowering.defaults import default_plan

    choices = []
    for size in (2, 4, 8):
        for zero, recompute in itertools.product((0, 1, 3), ("none", "full")):
            choices.append({"dp": 2, "zero_stage": zero, "recompute": recompute, "size": size})
        for schedule in ("1f1b", "fthenb"):
            choices.append({"pp": 2, "schedule": schedule, "size": size})
        choices.append({"tp": 2, "size": size})
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


def describe(plan: Plan) -> str:
    """Name a plan by its choices."""
    return (
        f"dp{plan.dp} tp{plan.tp} pp{plan.pp} vpp{plan.vpp} zero{plan.zero_stage} "
        f"micro{plan.microbatch_size} {plan.schedule} {plan.stages[0].recompute_spelled}"
    )


def run_plans(plans: list[Plan], folder: Path, options: argparse.Namespace) -> None:
    """Run every plan in turns, as `planner launch` does: see `predict_cpu_rank`. Leaves each
    step's seconds in the folder.
    """
    for index, plan in enumerate(plans):
        save_plan(plan, folder / f"plan-{index:03}.json")
    script = ROOT / "benchmarks" / "predict_cpu_rank.py"
    command = [sys.executable, "-m", "cli", "launch", "--device", "cpu",
               str(folder / "plan-000.json"), str(script), str(folder),
               str(options.steps), str(options.turns), str(int(options.jobs))]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode:
        print(f"stopped early: {done.stderr[-2000:]}", file=sys.stderr)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """What a model's runs took, by plan and turn."""

    turns: dict[int, list[Turn]]

    @classmethod
    def read(cls, folder: Path) -> Runs:
        """Read the first rank's steps, as a step ends at once on both, and both ranks' paces."""
        ranks = [(folder / f"seconds-{rank}.jsonl").read_text().splitlines() for rank in (0, 1)]
        runs = cls(turns={})
        for lines in zip(*map(sorted_turns, ranks), strict=True):
            index = lines[0]["plan"]
            paces = {
                kind: statistics.fmean(p for line in lines for p in line["paces"][kind])
                for kind in lines[0]["paces"]
            }
            turn = Turn(step_s=statistics.fmean(lines[0]["seconds"]), paces=paces)
            runs.turns.setdefault(index, []).append(turn)
        return runs

    @property
    def step_s(self) -> dict[int, float]:
        """Each plan's step time: the median of its turns."""
        return {
            index: statistics.median(turn.step_s for turn in turns)
            for index, turns in self.turns.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The mean step of a plan's turn, and the mean seconds of the fixed works beside it, by kind.

    Means, as a machine that is disturbed part of the time is slower by the share of it: medians
    of the two, which are taken at different moments, would fall on different sides.
    """

    step_s: float
    paces: dict[PaceKind, float]

    def slowed(self, profile: Profile) -> Profile:
        """Return the profile of the machine as slow as it was beside this turn, which is told
        as the profile tells how slow it was beside its own visits.
        """
        slowdowns = {}
        for kind, figure in profile.file.typical_slowdown.items():
            own = [p for r in profile.ops if pace_kind(r.target) == kind for p in r.paces]
            value = self.paces[kind] / undisturbed_pace(own)
            slowdowns[kind] = figure.model_copy(update={"value": value})
        file = profile.file.model_copy(update={"typical_slowdown": slowdowns})
        return Profile(file, profile.ops, profile.collectives)


def sorted_turns(lines: list[str]) -> list[dict]:
    """Return a rank's turns, plan by plan in the order in which they ran."""
    return sorted(map(json.loads, lines), key=lambda turn: turn["plan"])


def job_ratios(folder: Path, index: int, answer) -> dict[str, float]:
    """Return predicted over measured seconds by kind of job of one plan; {} if not recorded."""
    from costmodel.compare import compare_run
    from planner.timeline import load_timeline

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
    from costmodel.calibrate import calibrated
    from planner.timeline import load_timeline

    recorded = [index for index in sorted(runs.turns) if (folder / f"jobs-{index:03}").exists()]
    chosen = {recorded[round((at + 0.5) * len(recorded) / count - 0.5)] for at in range(count)}
    for index in sorted(chosen):
        lines = load_timeline(folder / f"jobs-{index:03}")
        slowed = runs.turns[index][-1].slowed(profile)
        profile = calibrated(slowed, graph, plans[index], lines)
    return profile, chosen


def judge(model: str, profile: Profile, folder: Path, options: argparse.Namespace) -> list[dict]:
    """Return predicted and measured step time of each plan of one model, run if need be.

    `measured_s` is the median of all turns: a profile answers for the machine as it usually is.
    `least_s` is of the least disturbed turn. `error_then_pct` is the median over turns of the
    error for the machine as slow as it was beside that turn.
    """
    from costmodel import CostCache, estimate
    from planner.capture import capture_source, load_model_file

    folder.mkdir(exist_ok=True)
    (folder / "model.py").write_text(MODEL_FILE.format(**MODELS[model]))
    graph = capture_source(load_model_file(folder / "model.py"))
    plans = plans_of(graph, folder / "model.py")
    if not (folder / "seconds-0.jsonl").exists():
        run_plans(plans, folder, options)
    runs = Runs.read(folder)
    costs = CostCache(graph, profile)
    taught, learned = learn(profile, graph, plans, folder, runs, options.calibrate)
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
            f"{model:6}{line['plan']:57}{1e3 * line['predicted_s']:8.1f} ms"
            f"{1e3 * line['measured_s']:8.1f} ms{line['error_pct']:+7.1f}%"
            f"{line['error_then_pct']:+7.1f}%"
            f"{1e3 * line['least_s']:8.1f} ms{line['least_error_pct']:+7.1f}%{ratios}"
        )
    return lines


def error_pct(graph: ModelGraph, profile: Profile, plan: Plan, turn: Turn) -> float:
    """Return the error of a plan's predicted step, in %, for the machine as slow as beside a
    turn. Both times are taken in the same seconds, so the error has none of the machine's drift.
    """
    from costmodel import estimate

    return 100 * (estimate(graph, turn.slowed(profile), plan).step_s / turn.step_s - 1)


def note(text: str) -> None:
    """Say how far it is."""
    print(text, file=sys.stderr, flush=True)


ERRORS = ("error_pct", "error_then_pct", "least_error_pct")


def summarise(lines: list[dict]) -> dict:
    """Return the figures by which the cost model is judged on this machine, over all models and
    of each.
    """
    models = {}
    for model in dict.fromkeys(line["model"] for line in lines):
        mine = sorted(
            (line for line in lines if line["model"] == model), key=lambda x: x["predicted_s"]
        )
        fastest = min(mine, key=lambda x: x["measured_s"])
        models[model] = {
            **{f"median_{name}": _median_size(mine, name) for name in ERRORS},
            "regret_pct": 100 * (mine[0]["measured_s"] / fastest["measured_s"] - 1),
            "best_in_top3": fastest in mine[:3],
        }
    return {
        "plans": lines,
        "models": models,
        **{f"median_{name}": _median_size(lines, name) for name in ERRORS},
        "mean_regret_pct": statistics.mean(found["regret_pct"] for found in models.values()),
        "best_in_top3": all(found["best_in_top3"] for found in models.values()),
    }


def _median_size(lines: list[dict], name: str) -> float:
    return statistics.median(abs(line[name]) for line in lines)


def measured_profile(folder: Path, budget_s: float):
    """Measure this machine for all the models into a folder, or go on with what is there."""
    from planner.capture import capture_source, load_model_file
    from profiles import measure_profile

    graphs = []
    for sizes in MODELS.values():
        (folder / "model.py").write_text(MODEL_FILE.format(**sizes))
        graphs.append(capture_source(load_model_file(folder / "model.py")))
    return measure_profile(
        folder / "profile",
        nproc=2,
        device="cpu",
        models=graphs,
        budget_s=budget_s,
        progress=lambda part, what: note(f"profile {part:4.0%} {what}"),
    )


def main() -> int:
    """Profile, predict, run, compare."""
    from profiles import load_profile

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--steps", type=int, default=5, help="steps of a plan in each turn")
    parser.add_argument("--turns", type=int, default=3, help="turns through all plans of a model")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds for the profile")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--keep", type=Path, help="keep the profile and all runs here, for later")
    parser.add_argument("--profile-only", action="store_true", help="measure the profile and stop")
    parser.add_argument("--jobs", action="store_true", help="record and compare single jobs")
    parser.add_argument("--calibrate", type=int, default=0, help="learn from so many plans' jobs")
    options = parser.parse_args()
    options.jobs |= options.calibrate > 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends the launched ranks, too
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "profile" / "profile.json").exists():
            profile = load_profile(folder / "profile")
        else:
            profile = measured_profile(folder, options.budget)
        if options.profile_only:
            return 0
        lines = []
        for name in options.models.split(","):
            lines += judge(name, profile, folder / name, options)
    if not lines:
        note("no plan ran; see above why")
        return 1
    summary = summarise(lines)
    if options.json:
        print(json.dumps(summary, indent=1))
    else:
        judged = [line for line in lines if "calibrated_error_pct" in line]
        if judged:
            print(
                f"{len(judged)} plans not learned from: median error "
                f"{_median_size(judged, 'error_pct'):.1f}% before calibration, "
                f"{_median_size(judged, 'calibrated_error_pct'):.1f}% after; at the machine's "
                f"pace then {_median_size(judged, 'error_then_pct'):.1f}% and "
                f"{_median_size(judged, 'calibrated_error_then_pct'):.1f}%"
            )
        for name, found in (*summary["models"].items(), ("all", summary)):
            regret = found.get("regret_pct", found.get("mean_regret_pct"))
            print(
                f"{name:5} median error {found['median_error_pct']:.1f}%, "
                f"{found['median_error_then_pct']:.1f}% at the machine's pace then, "
                f"{found['median_least_error_pct']:.1f}% of the least disturbed turn; "
                f"regret {regret:.1f}%, fastest among predicted top 3: {found['best_in_top3']}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
