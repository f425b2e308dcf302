"""A process that captures models of the matrix as each command does, under its own hash seed.

``python -m tests.capture.fingerprints FOLDER WAY,WAY… NAME…`` prints, for every model and way,
a line of JSON: the name, the way, and the fingerprint or what went wrong. A fingerprint is a
digest of the whole graph, so equal ones mean equal graphs. The way "search" leaves a plan in the
folder, and the others use it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from commands.common.inputs import graph_of_plan
from planner.capture.source.capture_cache import load_graph
from planner.capture.source.model_file import load_model_file
from planner.language.graph.batch import call_with_batch, loss_of
from planner.language.lowering.defaults import default_plan
from planner.language.plan import load_plan, save_plan
from planner.runtime.apply import shared_capture
from planner.runtime.process.groups.mesh import build_mesh

MODEL_FILE = """
from tests.model_matrix import model_matrix
tiny = model_matrix()[{name!r}]
model, batch, loss = tiny.build, tiny.batch, tiny.loss
"""


def search(model: Path, plan: Path) -> str:
    """Capture what is built without values, and save a plan for it."""
    graph = load_graph(model, use_cache=False)
    if not plan.exists():
        save_plan(default_plan(graph, microbatch_size=2), plan)
    return graph.fingerprint


def dryrun(model: Path, plan: Path) -> str:
    """As `planner dryrun`, and the other commands that take a plan and a model."""
    return graph_of_plan(load_plan(plan), model).fingerprint


def verify(model: Path, plan: Path) -> str:
    """As a rank of `planner verify`: what is built for real, on a batch from the plan."""
    loaded, source = load_plan(plan), load_model_file(model)
    mesh = build_mesh(loaded, torch.device("cpu"))
    return shared_capture(loaded, source.build(), source.loss, mesh).fingerprint


def launch(model: Path, plan: Path) -> str:
    """As `planner.apply` on a module that was captured before, and trained in between."""
    loaded, source = load_plan(plan), load_model_file(model)
    mesh = build_mesh(loaded, torch.device("cpu"))
    module, batch = source.build(), source.batch(4)
    first = shared_capture(loaded, module, source.loss, mesh)
    optimizer = torch.optim.AdamW(module.parameters())
    loss_of(call_with_batch(module, batch), batch, source.loss).backward()
    optimizer.step()
    assert shared_capture(loaded, module, source.loss, mesh) == first
    return first.fingerprint


WAYS: dict[str, Callable[[Path, Path], str]] = {
    "search": search,
    "dryrun": dryrun,
    "verify": verify,
    "launch": launch,
}


def main(folder: Path, ways: list[str], names: list[str]) -> None:
    """Capture each model in each way."""
    torch.set_num_threads(1)
    store = folder / f"store-{os.getpid()}"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    for name in names:
        model, plan = folder / f"{name}.py", folder / f"{name}.json"
        for way in ways:
            try:
                found = WAYS[way](model, plan)
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
            print(json.dumps([name, way, found]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:])
