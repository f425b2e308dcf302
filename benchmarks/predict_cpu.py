"""Predicted against measured step time of many plans of three models on two CPU ranks.

    python benchmarks/predict_cpu.py [--json] [--folder DIR] [--budget 120s]

Profiles this machine as two gloo ranks for the three models, prices every plan below with
the cost model, then trains each for a few steps, all plans of a model in one launch and in
turns, so that a machine whose speed drifts treats them alike. Printed per model: each plan's
predicted and measured step, the median error, whether the measured-fastest plan is among the
three predicted fastest, and the regret: how much slower the plan predicted fastest measured
than the fastest. An earlier run's profile in the folder is used again.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODELS = (HERE.parent / "examples" / "gpt.py", HERE / "models/gated.py", HERE / "models/vision.py")
GLOBAL_BATCH = 8
RANKS = 2
TURNS, WARM_UP, STEPS = 2, 2, 5


def layouts():
    """Yield the keyword arguments of `default_plan` for every plan that is tried."""

    def batches(dp, size):
        return {"microbatch_size": size, "num_microbatches": GLOBAL_BATCH // dp // size}

    for zero in (0, 1, 2, 3):
        for size in (1, 4):
            yield {"dp": 2, "zero_stage": zero, **batches(2, size)}
    yield {"dp": 2, "recompute": "full", **batches(2, 4)}
    for size in (1, 4, 8):
        yield {"tp": 2, **batches(1, size)}
    yield {"tp": 2, "recompute": "full", **batches(1, 8)}
    for size in (1, 2, 4):
        yield {"pp": 2, "schedule": "1f1b", **batches(1, size)}
    for schedule in ("fthenb", "zb_h1", "eager_1f1b"):
        yield {"pp": 2, "schedule": schedule, **batches(1, 2)}
    for schedule in ("interleaved_1f1b", "looped_breadth_first", "zb_v"):
        yield {"pp": 2, "vpp": 2, "schedule": schedule, **batches(1, 1)}
    yield {"pp": 2, "schedule": "1f1b", "recompute": "full", **batches(1, 2)}


def label(layout):
    """Return a short text for a layout, such as ``tp=2 mbs=4x2``."""
    rest = {k: v for k, v in layout.items() if k not in ("microbatch_size", "num_microbatches")}
    words = [f"{k.removesuffix('_stage')}={v}" for k, v in rest.items()]
    return " ".join([*words, f"mbs={layout['microbatch_size']}x{layout['num_microbatches']}"])


def predict(folder, budget):
    """Profile (or load), and return {model path: [(label, plan, predicted seconds)]}."""
    from costmodel import CostCache, estimate
    from planner.capture_cache import load_graph
    from planner.plan_defaults import default_plan
    from profiles import load_profile

    profile_dir = folder / "profile"
    if not (profile_dir / "profile.json").exists():
        command = [str(Path(sys.executable).with_name("planner")), "profile", *map(str, MODELS)]
        command += ["--gpus", str(RANKS), "--device", "cpu", "--budget", budget]
        subprocess.run([*command, "--out", str(profile_dir)], check=True, stdout=sys.stderr)
    profile = load_profile(str(profile_dir))
    predicted = {}
    for path in MODELS:
        graph = load_graph(path)
        costs = CostCache(graph, profile)
        rows = []
        for layout in layouts():
            plan = default_plan(graph, file=str(path), **layout)
            seconds = estimate(graph, profile, plan, costs=costs).to_dict()["step_s"]
            rows.append((label(layout), plan, seconds))
        predicted[path] = rows
    return predicted


def measure(path, plans, folder):
    """Train each plan of a model in one launch and return median step seconds, in order."""
    request = folder / f"request-{path.stem}.json"
    answer = folder / f"answer-{path.stem}.json"
    request.write_text(
        json.dumps(
            {
                "model": str(path),
                "answer": str(answer),
                "plans": [plan.model_dump(mode="json") for plan in plans],
            }
        )
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", "--nproc-per-node", str(RANKS)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command += [__file__, "--worker", str(request)]
    subprocess.run(command, check=True, env=environment, stdout=sys.stderr)
    return json.loads(answer.read_text())


def worker(request):
    """On each rank: train every plan in turns; rank 0 writes the medians."""
    import torch
    import torch.distributed as dist

    from planner.capture import capture_source, load_model_file
    from planner.plan import Plan
    from planner.runtime.device import choose_device
    from planner.runtime.engine import Engine
    from planner.runtime.mesh import build_mesh

    asked = json.loads(Path(request).read_text())
    source = load_model_file(asked["model"])
    graph = capture_source(source)
    plans = [Plan.model_validate(data) for data in asked["plans"]]
    times = [[] for _ in plans]
    meshes = {}
    for turn in range(TURNS):
        for index, plan in enumerate(plans):
            shape = (plan.dp, plan.tp, plan.pp)
            if shape not in meshes:
                meshes[shape] = build_mesh(plan, choose_device())
            torch.manual_seed(0)
            engine = Engine(plan, graph, source.build(), meshes[shape], optimizer=torch.optim.AdamW)
            batch = source.batch(GLOBAL_BATCH)
            for step in range(WARM_UP + STEPS):
                dist.barrier()
                began = time.perf_counter()
                engine.step(batch)
                dist.barrier()
                if step >= WARM_UP:
                    times[index].append(time.perf_counter() - began)
        if dist.get_rank() == 0:
            print(f"{source.name}: turn {turn + 1} of {TURNS} done", flush=True)
    if dist.get_rank() == 0:
        Path(asked["answer"]).write_text(json.dumps([statistics.median(t) for t in times]))
    dist.barrier()
    # Groups of many plans are open, and gloo may abort when a process tears them down while
    # its peers still do; everything is written, so leave without.
    os._exit(0)


def compare(rows, measured):
    """Return the figures of one model."""
    predicted = [seconds for _, _, seconds in rows]
    order = sorted(range(len(rows)), key=predicted.__getitem__)
    fastest = min(range(len(rows)), key=measured.__getitem__)
    errors = [abs(p - m) / m * 100 for p, m in zip(predicted, measured, strict=True)]
    return {
        "plans": [
            {"plan": name, "predicted_s": p, "measured_s": m}
            for (name, _, p), m in zip(rows, measured, strict=True)
        ],
        "median_error_pct": statistics.median(errors),
        "regret_pct": (measured[order[0]] / measured[fastest] - 1) * 100,
        "best_in_top3": fastest in order[:3],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--folder", type=Path, default=Path("predict-out"))
    parser.add_argument("--budget", default="120s", help="time for the profile")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options.worker)
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    results = {}
    for path, rows in predict(folder, options.budget).items():
        measured = measure(path, [plan for _, plan, _ in rows], folder)
        results[path.stem] = compare(rows, measured)
    figures = list(results.values())
    total = {
        "models": results,
        "plans": sum(len(f["plans"]) for f in figures),
        "median_error_pct": statistics.median(
            abs(p["predicted_s"] / p["measured_s"] - 1) * 100 for f in figures for p in f["plans"]
        ),
        "mean_regret_pct": statistics.mean(f["regret_pct"] for f in figures),
        "best_in_top3": all(f["best_in_top3"] for f in figures),
    }
    if options.json:
        print(json.dumps(total, indent=1))
        return None
    for name, found in results.items():
        print(f"\n{name}")
        for p in sorted(found["plans"], key=lambda p: p["measured_s"]):
            print(
                f"  {p['plan']:<58} predicted {p['predicted_s'] * 1e3:7.1f} ms  "
                f"measured {p['measured_s'] * 1e3:7.1f} ms  "
                f"{(p['predicted_s'] / p['measured_s'] - 1) * 100:+6.1f}%"
            )
        print(
            f"  median error {found['median_error_pct']:.1f}%, regret {found['regret_pct']:.1f}%, "
            f"fastest in the predicted top 3: {'yes' if found['best_in_top3'] else 'no'}"
        )
    print(
        f"\n{total['plans']} plans: median error {total['median_error_pct']:.1f}%, "
        f"mean regret {total['mean_regret_pct']:.1f}%, "
        f"fastest always in the predicted top 3: {'yes' if total['best_in_top3'] else 'no'}"
    )
    return None


if __name__ == "__main__":
    main()
