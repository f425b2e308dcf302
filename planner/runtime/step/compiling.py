"""Compiling the blocks of a rank's stages before they train, and saying which stay eager."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

import torch.distributed as dist

from planner.errors import PlanError
from planner.language.graph import ModelGraph
from planner.language.plan import Plan
from planner.runtime.process.environment import KERNELS
from planner.runtime.process.groups.mesh import Mesh
from planner.runtime.stage.compiled.graphs import Capture, CudaCapture
from planner.runtime.stage.compiled.kernels import Compiler, CompilerFailed
from planner.runtime.stage.compiled.trace import NotCompilable
from planner.runtime.stage.programs import Programs

_QUIET_S = 2.0
"""Compiling that takes no longer is not told of."""


def compile_blocks(
    programs: Programs,
    graph: ModelGraph,
    plan: Plan,
    mesh: Mesh,
    stages: Sequence[int],
    compiler: Compiler,
    capture: Capture | None = None,
) -> None:
    """Compile the classes of a rank's `stages`; all ranks call it. With a `capture` those that CUDA
    graphs hold run in them, each from its first run on.

    A class that one rank can't compile runs eagerly on all: ranks of a block exchange messages in
    one order. Raises PlanError where the compiler fails and the launch asked for compiled kernels.
    """
    forms = _forms(plan, graph, stages)
    is_first = mesh.global_rank == 0
    failed: dict[int, tuple[str, bool]] = {}
    apart: dict[int, tuple[str, bool]] = {}
    began = time.monotonic()
    for number, (class_index, recomputes) in enumerate(forms, start=1):
        if class_index in failed:
            continue
        if is_first and time.monotonic() - began > _QUIET_S:
            name = graph.classes[class_index].name
            _tell(f"compiling blocks, {number} of {len(forms)}: {name}")
        try:
            launched = programs.compile(
                class_index, compiler, recomputes=recomputes, capture=capture
            )
            if launched is not None:
                apart[class_index] = launched, False
        except (NotCompilable, CompilerFailed) as error:
            failed[class_index] = str(error), isinstance(error, CompilerFailed)
    everywhere: list[dict[int, tuple[str, bool]]] = [{}] * dist.get_world_size(mesh.control)
    dist.all_gather_object(everywhere, failed, group=mesh.control)
    found = {index: why for each in everywhere for index, why in each.items()}
    for class_index in found:
        programs.run_eagerly(class_index)
    is_asked = os.environ.get(KERNELS) in ("compiled", "graphs")
    broken = [why for why, is_compilers in found.values() if is_compilers]
    if is_asked and broken:
        raise PlanError(
            f"compiled `kernels` were asked for, and the compiler fails here: {broken[0]}; install "
            "what it lacks, or launch with eager `kernels`"
        )
    if is_first and found:
        _tell(f"eager kernels run in {_spelled(graph, found)}")
    apart = {index: why for index, why in apart.items() if index not in found}
    if is_first and apart:
        _tell(f"no CUDA graphs hold {_spelled(graph, apart)}")


def capture_of(plan: Plan, mesh: Mesh) -> Capture | None:
    """Return what captures a plan's blocks on this rank; None where its kernels are no graphs.

    Raises PlanError where there is no CUDA device.
    """
    if plan.kernels != "graphs":
        return None
    if mesh.device.type != "cuda":
        raise PlanError(
            f"the plan's `kernels` are graphs, which CUDA devices have, and this is "
            f"{mesh.device.type}; launch with compiled `kernels`"
        )
    return CudaCapture(mesh.device)


def _forms(plan: Plan, graph: ModelGraph, stages: Sequence[int]) -> list[tuple[int, bool]]:
    """Return (class, whether it makes cheap ops again in its backward) of what stages run."""
    forms: dict[tuple[int, bool], None] = {}
    for stage in (plan.stages[index] for index in stages):
        for block, choice in zip(stage.blocks, stage.recompute_by_block, strict=True):
            class_index = graph.blocks[block].class_index
            if choice == "selective":
                forms[class_index, True] = None
            if choice != "selective" or not stage.recompute_last:
                forms[class_index, False] = None
    return list(forms)


def _spelled(graph: ModelGraph, found: dict[int, tuple[str, bool]]) -> str:
    """Classes by the reason for which they stay eager, in words."""
    by_reason: dict[str, list[str]] = {}
    for class_index, (why, _) in sorted(found.items()):
        by_reason.setdefault(why, []).append(graph.classes[class_index].name)
    return "; ".join(f"{', '.join(names)} ({why})" for why, names in by_reason.items())


def _tell(text: str) -> None:
    print(f"planner: {text}", file=sys.stderr, flush=True)
