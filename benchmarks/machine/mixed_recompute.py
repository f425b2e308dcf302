"""Plans whose blocks recompute apart, beside what they take on this machine: bytes and seconds.

A GPT of six layers on one rank, ten mixes of none, selective and full by block. Memory: the tensor
bytes of the estimate beside the highest of a dry run. Time: how many times as long a step is as
that of the plan that recomputes nothing, predicted from the profile of the machine (`planner
profile`) and measured. What is measured is the CPU time of the process, with one thread: other work
on the machine disturbs it least. Each turn of a plan is a process that has run nothing else, and
plans take turns; a plan's time is the median of its turns.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import torch

from benchmarks.harness import Result, benchmark, in_turns, on_ranks
from benchmarks.machine.gpt import file_of
from costmodel import CostCache, estimate
from planner.capture import capture_source, load_model_file
from planner.capture.source.model_file import ModelSource
from planner.language.graph import ModelGraph
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.process.groups.mesh import build_mesh
from planner.runtime.proofs.dryrun import dry_run
from planner.runtime.step.engine import Engine
from profiles import load_profile

MODEL = {"hidden": 192, "layers": 6, "sequence": 128}
MICROBATCH = 8
WARM_UP_STEPS = 2

FULL, SELECTIVE, NONE = "full", "selective", "none"
MIXES = {
    "1 full, rest none": [FULL] * 1 + [NONE] * 5,
    "2 full, rest none": [FULL] * 2 + [NONE] * 4,
    "3 full, rest none": [FULL] * 3 + [NONE] * 3,
    "4 full, rest none": [FULL] * 4 + [NONE] * 2,
    "5 full, rest none": [FULL] * 5 + [NONE] * 1,
    "3 selective, rest none": [SELECTIVE] * 3 + [NONE] * 3,
    "2 full, rest selective": [FULL] * 2 + [SELECTIVE] * 4,
    "4 full, rest selective": [FULL] * 4 + [SELECTIVE] * 2,
    "last 3 full, rest none": [NONE] * 3 + [FULL] * 3,
    "2 full, 2 selective, 2 none": [FULL] * 2 + [SELECTIVE] * 2 + [NONE] * 2,
}
"""What each layer recomputes, first to last."""


def plan_of(graph: ModelGraph, mix: list[str], *, num_microbatches: int) -> Plan:
    """Return the plan of one rank whose layers recompute so; its other blocks nothing."""
    layers = [block.index for block in graph.blocks if ".layers." in f".{block.name}."]
    assert len(layers) == len(mix)
    by_block = [NONE] * len(graph.blocks)
    for layer, recompute in zip(layers, mix, strict=True):
        by_block[layer] = recompute
    return default_plan(
        graph,
        recompute=by_block,  # type: ignore[arg-type]
        microbatch_size=MICROBATCH,
        num_microbatches=num_microbatches,
    )


def cpu_seconds(source: ModelSource, graph: ModelGraph, plan: Plan, steps: int) -> float:
    """Run a plan's steps on one rank; return the median CPU seconds of those after the warm-up."""
    torch.manual_seed(0)
    engine = Engine(plan, graph, source.build(), build_mesh(plan, torch.device("cpu")))
    data = source.batch(plan.global_batch)
    seconds = []
    for _ in range(WARM_UP_STEPS + steps):
        start_s = time.process_time()
        float(engine.step(data))
        seconds.append(time.process_time() - start_s)
    return median(seconds[WARM_UP_STEPS:])


@benchmark("mixed_recompute", quick={"count": 1, "turns": 1, "steps": 1, "microbatches": 1})
def mixed_recompute(
    *,
    profile: Annotated[str | None, "of this machine; without it, times are not predicted"] = None,
    count: Annotated[int, "of the mixes, the first"] = len(MIXES),
    turns: int = 5,
    steps: int = 4,
    microbatches: int = 2,
) -> Result:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.py"
        path.write_text(file_of(MODEL))
        source = load_model_file(path)
        graph = capture_source(source)
        mixes = {"none": [NONE] * MODEL["layers"], **dict(list(MIXES.items())[:count])}
        plans = {
            text: plan_of(graph, mix, num_microbatches=microbatches) for text, mix in mixes.items()
        }
        costs = CostCache(graph, load_profile(profile or "h100-sxm5-80gb"))
        answers = {
            text: estimate(graph, costs.profile, plan, costs=costs) for text, plan in plans.items()
        }
        sides = {
            text: partial(on_ranks, 1, cpu_seconds, source, graph, plan, steps)
            for text, plan in plans.items()
        }
        taken = {
            text: median(s for (s,) in found) for text, found in in_turns(sides, turns).items()
        }
        rows = []
        for text, plan in plans.items():
            run = dry_run(plan, graph, source.build, on_gloo=True)
            num_bytes = float(answers[text].memory[0].tensor_bytes)
            measured = taken[text] / taken["none"]
            predicted = answers[text].step_s / answers["none"].step_s if profile else None
            rows.append(
                {
                    "recomputed layers": text,
                    "predicted_bytes": num_bytes,
                    "dry_run_bytes": run.peak_bytes,
                    "bytes_off_pct": 100 * (num_bytes / run.peak_bytes - 1),
                    "predicted_times": predicted,
                    "measured_times": measured,
                    "times_off_pct": predicted and 100 * (predicted / measured - 1),
                }
            )
    return Result(rows)
