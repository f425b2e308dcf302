"""Predictions against runs on this machine: two gloo ranks, many plans of small models.

    python -m benchmarks.predict_cpu [--json] [--steps N] [--turns N] [--models gpt,deep,wide]

Profiles this machine as two ranks, predicts every plan, runs each for a few steps, and prints
predicted against measured step time: the median error, the regret of the plan predicted
fastest, and whether the truly fastest is among the predicted top three. Both the profile's
workers and the runs are two processes of one thread each, all at work. Needs a quiet machine
and about ten minutes; in shorter parts, of which each keeps what it found:

    python -m benchmarks.predict_cpu --keep DIR --profile-only
    python -m benchmarks.predict_cpu --keep DIR --models gpt        # and deep, and wide
    python -m benchmarks.predict_cpu --keep DIR                     # all three, from DIR

`--jobs` records every job, and prints predicted over measured seconds by kind of job.
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
from pathlib import Path

from planner.errors import PlannerError
from planner.plan import Plan, save_plan

ROOT = Path(__file__).resolve().parents[1]
MODELS = {
    "gpt": {"hidden": 192, "layers": 4, "sequence": 128},
    "deep": {"hidden": 96, "layers": 8, "sequence": 64},
    "wide": {"hidden": 384, "layers": 2, "sequence": 64},
}
GLOBAL_BATCH = 16
WARM_UP_STEPS = 4
"""So many steps a new process takes until it has the memory it needs."""

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

RUN_FILE = """import json, os, sys, time
from pathlib import Path

import torch
import torch.distributed as dist

from planner.capture import capture_source, load_model_file
from planner.plan import load_plan
from planner.runtime.engine import Engine
from planner.runtime.mesh import build_mesh
from planner.runtime.workers import TIMELINE_DIR

folder, steps, turns, jobs = Path(sys.argv[1]), *map(int, sys.argv[2:5])
torch.set_num_threads(1)
source = load_model_file(folder / "model.py")
graph = capture_source(source)
plans = [load_plan(path) for path in sorted(folder.glob("plan-*.json"))]
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def run(turn, index):
    plan = plans[index]
    meeting = f"file://{folder}/meeting-{turn}-{index}"
    dist.init_process_group("gloo", meeting, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    mesh = build_mesh(plan, torch.device("cpu"))
    if jobs:
        os.environ[TIMELINE_DIR] = str(folder / f"jobs-{index:03}")
    engine = Engine(plan, graph, source.build(), mesh)
    data = source.batch(plan.global_batch)
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        float(engine.step(data))
        seconds.append(time.perf_counter() - start)
    with (folder / f"seconds-{rank}.jsonl").open("a") as log:
        log.write(json.dumps([index, seconds]) + "\\n")
    engine.close()


order = list(range(len(plans)))
for turn in range(turns):
    for index in order if turn % 2 == 0 else order[::-1]:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                run(turn, index)
                code = 0
            finally:
                os._exit(code)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"plan {index} failed")
"""


def plans_of(graph, model_file: Path) -> list[Plan]:
    """Return plans over dp, tp, pp, ZeRO, recompute, microbatch and schedule for two ranks."""
    from planner.plan_defaults import default_plan

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
        f"micro{plan.microbatch_size} {plan.schedule} {plan.stages[0].recompute}"
    )


def run_plans(plans: list[Plan], folder: Path, options: argparse.Namespace) -> None:
    """Run every plan in turns, forwards and backwards through the list, as `planner launch`
    does: every rank in a process of its own that has run nothing else. (After many engines a
    process is a third slower, by what they left in its memory.) These are forked by two ranks
    that have loaded what all need. The machine's speed drifts over minutes, so a plan's steps
    are spread over the whole run. Leaves each step's seconds in the folder.
    """
    for index, plan in enumerate(plans):
        save_plan(plan, folder / f"plan-{index:03}.json")
    (folder / "run.py").write_text(RUN_FILE)
    command = [sys.executable, "-m", "cli", "launch", "--device", "cpu",
               str(folder / "plan-000.json"), str(folder / "run.py"), str(folder),
               str(options.steps), str(options.turns), str(int(options.jobs))]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode:
        print(f"stopped early: {done.stderr[-2000:]}", file=sys.stderr)


def measured_step_s(folder: Path) -> dict[int, float]:
    """Return each plan's step time, by its number: the median step of its least disturbed turn,
    as what else happens on a machine only adds. The first steps of each turn are left out.
    """
    turns: dict[int, list[float]] = {}
    for line in (folder / "seconds-0.jsonl").read_text().splitlines():
        index, seconds = json.loads(line)
        turns.setdefault(index, []).append(statistics.median(seconds[WARM_UP_STEPS:]))
    return {index: min(medians) for index, medians in turns.items()}


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
        predicted_s, measured_s = by_kind.setdefault(job.kind, [0.0, 0.0])
        by_kind[job.kind] = [predicted_s + job.predicted_s, measured_s + job.measured_s]
    return {kind: predicted_s / measured_s for kind, (predicted_s, measured_s) in by_kind.items()}


def judge(model: str, profile, folder: Path, options: argparse.Namespace) -> list[dict]:
    """Return predicted and measured step time of each plan of one model, run if need be."""
    from costmodel import CostCache, estimate
    from planner.capture import capture_source, load_model_file

    folder.mkdir(exist_ok=True)
    (folder / "model.py").write_text(MODEL_FILE.format(**MODELS[model]))
    graph = capture_source(load_model_file(folder / "model.py"))
    costs = CostCache(graph, profile)
    plans = plans_of(graph, folder / "model.py")
    if not (folder / "seconds-0.jsonl").exists():
        run_plans(plans, folder, options)
    lines = []
    for index, measured in sorted(measured_step_s(folder).items()):
        answer = estimate(graph, profile, plans[index], costs=costs)
        lines.append(
            {
                "model": model,
                "plan": describe(plans[index]),
                "predicted_s": answer.step_s,
                "measured_s": measured,
                "error_pct": 100 * (answer.step_s / measured - 1),
                "parts_s": answer.to_dict()["time"],
                "job_ratios": job_ratios(folder, index, answer),
            }
        )
        ratios = "".join(f" {k} {ratio:.2f}" for k, ratio in lines[-1]["job_ratios"].items())
        note(
            f"{model:6}{describe(plans[index]):60}{answer.step_s * 1e3:9.1f} ms"
            f"{measured * 1e3:9.1f} ms{lines[-1]['error_pct']:+8.1f}%{ratios}"
        )
    return lines


def note(text: str) -> None:
    """Say how far it is."""
    print(text, file=sys.stderr, flush=True)


def summarise(lines: list[dict]) -> dict:
    """Return the figures by which the cost model is judged on this machine."""
    regrets, top3 = [], []
    for model in {line["model"] for line in lines}:
        mine = sorted(
            (line for line in lines if line["model"] == model), key=lambda x: x["predicted_s"]
        )
        fastest = min(mine, key=lambda x: x["measured_s"])
        regrets.append(100 * (mine[0]["measured_s"] / fastest["measured_s"] - 1))
        top3.append(fastest in mine[:3])
    return {
        "plans": lines,
        "median_error_pct": statistics.median(abs(line["error_pct"]) for line in lines),
        "mean_regret_pct": statistics.mean(regrets),
        "best_in_top3": all(top3),
    }


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
    parser.add_argument("--steps", type=int, default=8, help="steps of a plan in each turn")
    parser.add_argument("--turns", type=int, default=2, help="turns through all plans of a model")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds for the profile")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--keep", type=Path, help="keep the profile and all runs here, for later")
    parser.add_argument("--profile-only", action="store_true", help="measure the profile and stop")
    parser.add_argument("--jobs", action="store_true", help="record and compare single jobs")
    options = parser.parse_args()
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
        print(
            f"median error {summary['median_error_pct']:.1f}%, "
            f"mean regret {summary['mean_regret_pct']:.1f}%, "
            f"fastest among predicted top 3: {summary['best_in_top3']}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
