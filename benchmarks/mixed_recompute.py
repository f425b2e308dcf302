"""Plans whose blocks recompute apart, beside what they take on this machine: bytes and seconds.

    OMP_NUM_THREADS=1 python -m benchmarks.mixed_recompute [--profile DIR] [--turns N] [--steps N]

A GPT of six layers on one rank, ten mixes of none, selective and full by block. Memory: the tensor
bytes of the estimate beside the highest of a dry run. Time: how many times as long a step is as
that of the plan that recomputes nothing, predicted from the profile of the machine (`planner
profile`) and measured. What is measured is the CPU time of the process, with one thread: other work
on the machine disturbs it least. Each turn of a plan is a process that has run nothing else, and
plans take turns; a plan's time is the median of its turns.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.predict_cpu import MODEL_FILE
from costmodel import CostCache, estimate
from planner.capture import capture_source, load_model_file
from planner.capture.source.model_file import ModelSource
from planner.errors import PlannerError
from planner.language.graph import ModelGraph
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
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


def measured_steps(
    source: ModelSource, graph: ModelGraph, plan: Plan, meeting: Path, steps: int
) -> list[float]:
    """Run a plan's steps in a forked process; return the CPU seconds of each after the warm-up."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            seconds = _steps(source, graph, plan, meeting, steps)
            os.write(write, " ".join(map(repr, seconds)).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    if os.waitpid(child, 0)[1]:
        raise PlannerError("a plan failed; see above")
    return [float(each) for each in text.split()]


def _steps(
    source: ModelSource, graph: ModelGraph, plan: Plan, meeting: Path, steps: int
) -> list[float]:
    import torch
    import torch.distributed as dist

    from planner.runtime.process.groups.mesh import build_mesh
    from planner.runtime.step.engine import Engine

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meeting}", rank=0, world_size=1)
    torch.manual_seed(0)
    engine = Engine(plan, graph, source.build(), build_mesh(plan, torch.device("cpu")))
    data = source.batch(plan.global_batch)
    seconds = []
    for step in range(WARM_UP_STEPS + steps):
        start = time.process_time()
        float(engine.step(data))
        if step >= WARM_UP_STEPS:
            seconds.append(time.process_time() - start)
    return seconds


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", help="of this machine; without it, times are not predicted")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=2)
    options = parser.parse_args()
    from planner.runtime.proofs.dryrun import dry_run

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model.py").write_text(MODEL_FILE.format(**MODEL))
        source = load_model_file(folder / "model.py")
        graph = capture_source(source)
        mixes = {"none": [NONE] * MODEL["layers"], **MIXES}
        plans = {
            text: plan_of(graph, mix, num_microbatches=options.microbatches)
            for text, mix in mixes.items()
        }
        try:
            profile = load_profile(options.profile or "h100-sxm5-80gb")
            costs = CostCache(graph, profile)
            answers = {text: estimate(graph, profile, plan, costs=costs)
                       for text, plan in plans.items()}  # fmt: skip
            turns: dict[str, list[float]] = {text: [] for text in plans}
            for turn in range(options.turns):
                for at, (text, plan) in enumerate(plans.items()):
                    took = measured_steps(
                        source, graph, plan, folder / f"meeting-{turn}-{at}", options.steps
                    )
                    turns[text].append(median(took))
        except PlannerError as error:
            print(error, file=sys.stderr)
            return 2
        print("recomputed layers              bytes: predicted   dry run   off"
              "    seconds: predicted  measured   off")  # fmt: skip
        for text, plan in plans.items():
            run = dry_run(plan, graph, source.build, on_gloo=True)
            num_bytes = float(answers[text].memory[0].tensor_bytes)
            measured = median(turns[text]) / median(turns["none"])
            line = (f"{text:30}{num_bytes / 2**20:13.2f} MiB{run.peak_bytes / 2**20:10.2f}"
                    f"{num_bytes / run.peak_bytes - 1:+8.2%}")  # fmt: skip
            predicted = answers[text].step_s / answers["none"].step_s
            told = f"{predicted:17.3f}" if options.profile else f"{'-':>17}"
            off = f"{predicted / measured - 1:+8.1%}" if options.profile else ""
            print(f"{line}{told}{measured:10.3f}{off}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
