"""One rank of `plan_runs`: runs every plan of a folder, in turns.

    planner launch --device cpu PLAN benchmarks/machine/plan_runs_rank.py FOLDER STEPS TURNS JOBS

Each plan's turn is a process of its own that has run nothing else, as when a user launches it;
it is forked by one that has loaded what all need. (After many engines a process is a third
slower, by what they left in its memory.) Leaves a line for each turn in seconds-RANK.jsonl:
the plan's number, seconds of the steps after the warm-up, and of the profile's two fixed works
before and after them. JOBS 1 records every job.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from planner.capture import capture_source, load_model_file
from planner.language.plan import load_plan
from planner.runtime.process.environment import TIMELINE_DIR
from planner.runtime.process.groups.mesh import build_mesh
from planner.runtime.step.engine import Engine
from profiles.measure.timing.clock import Clock, Pace

WARM_UP_STEPS = 3
"""So many steps a new process takes until it has the memory it needs."""


def main() -> None:
    """Fork a process for each plan's turn, forwards and backwards through the list: the machine's
    speed drifts over minutes, so a plan's steps are spread over the whole run.
    """
    folder, steps, turns, jobs = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    torch.set_num_threads(1)
    source = load_model_file(folder / "model.py")
    graph = capture_source(source)
    plans = [load_plan(path) for path in sorted(folder.glob("plan-*.json"))]
    order = list(range(len(plans)))
    for turn in range(turns):
        for index in order if turn % 2 == 0 else order[::-1]:
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    if jobs:
                        os.environ[TIMELINE_DIR] = str(folder / f"jobs-{index:03}")
                    meeting = f"file://{folder}/meeting-{turn}-{index}"
                    found = run(source, graph, plans[index], meeting=meeting, steps=steps)
                    with (folder / f"seconds-{os.environ['RANK']}.jsonl").open("a") as log:
                        log.write(json.dumps({"plan": index, **found}) + "\n")
                    code = 0
                finally:
                    os._exit(code)
            if os.waitpid(child, 0)[1]:
                sys.exit(f"plan {index} failed")


def run(source, graph, plan, *, meeting: str, steps: int) -> dict:
    """Run a plan's steps; return their seconds, and those of the fixed works beside them."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", meeting, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    engine = Engine(plan, graph, source.build(), build_mesh(plan, torch.device("cpu")))
    data = source.batch(plan.global_batch)
    pace = Pace(Clock(torch.device("cpu")))
    for _ in range(WARM_UP_STEPS):
        float(engine.step(data))
    dist.barrier()
    paces = pace.take()
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        float(engine.step(data))
        seconds.append(time.perf_counter() - start)
    dist.barrier()
    for kind, more in pace.take().items():
        paces[kind] += more
    engine.close()
    return {"seconds": seconds, "paces": paces}


if __name__ == "__main__":
    main()
