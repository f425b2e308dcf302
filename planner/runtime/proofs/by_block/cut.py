"""What is cut down to run blocks of a plan here: samples, the sequence and the dtype; no width."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import lcm, prod
from typing import Any

from torch import Tensor

from planner.capture import capture_source
from planner.capture.source.model_file import ModelSource
from planner.errors import LayoutError, PlannerError
from planner.language.across.cut.whole_batch import graph_under
from planner.language.graph import Affine, ModelGraph, Program
from planner.language.graph.batch import flatten_batch, unflatten_batch
from planner.language.graph.tables import with_table_lookups
from planner.language.layout.axes import Degrees, lowered_axes
from planner.language.layout.sequences import longest_sequence
from planner.language.lowering.lowering import local_program
from planner.language.lowering.wiring import block_placements
from planner.language.plan import Plan
from planner.language.plan.buckets import check_bucket
from planner.runtime.proofs.promote import promote_graph
from planner.units import DTYPE_BYTES

_LEAST_POSITIONS = 16
_TRIES = 3
_ENOUGH_SAMPLES = 2

_QUICK_BYTES = 2**32
"""Of that in fp64, as much as takes seconds; of more, fp32 is run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A plan's model as it is run here.

    Attributes:
        graph: with shorter sequences, in fp64 or fp32, without dropout.
        planned_length: positions of the plan's own sequences; 0 for none.
        length: positions of those run.
        dtype: "float64" or "float32".
        memory_bytes: that was free.
        too_large: block classes that do not fit in it, with the bytes they need.
    """

    graph: ModelGraph
    planned_length: int
    length: int
    dtype: str
    memory_bytes: int
    too_large: tuple[tuple[int, int], ...]


def cut_down(
    graph: ModelGraph, plan: Plan, source: ModelSource, *, memory_bytes: int | None = None
) -> Cut:
    """Return the model of a plan, cut down as little as this machine asks for.

    `memory_bytes` are those that may be used; None: three quarters of those free.
    """
    free = _free_bytes() * 3 // 4 if memory_bytes is None else memory_bytes
    planned = longest_sequence(graph)
    shorter, length = _shortest(graph, plan, source, planned)
    needed = _needed(graph, plan)
    wide = max(needed.values(), default=0) * DTYPE_BYTES["float64"]
    dtype = "float64" if wide <= min(free, _QUICK_BYTES) else "float32"
    size = DTYPE_BYTES[dtype]
    return Cut(
        graph=promote_graph(with_table_lookups(shorter), to=dtype),
        planned_length=planned,
        length=length,
        dtype=dtype,
        memory_bytes=free,
        too_large=tuple(
            (index, numel * size) for index, numel in needed.items() if numel * size > free
        ),
    )


def samples_of(graph: ModelGraph, plan: Plan, stage: int, class_index: int) -> int:
    """Return how many samples of a microbatch a stage's class is run on, of a graph as cut.

    Two, so that they can be mixed up, or as many more as the layout needs to divide. Raises
    LayoutError where it does not even suit those planned.
    """
    planned = plan.stage_microbatch_size(stage)
    for size in range(min(planned, _ENOUGH_SAMPLES), planned + 1):
        try:
            program_of_one_replica(graph, plan, class_index, plan.stage_degrees(stage), size)
        except LayoutError:
            if size == planned:
                raise
        else:
            break
    return size


def of_one_replica(graph: ModelGraph, plan: Plan, num_samples: int) -> ModelGraph:
    """Return the graph as a replica runs it that has the whole batch, of so many samples."""
    return graph_under(graph, plan, (num_samples,))


def program_of_one_replica(
    graph: ModelGraph, plan: Plan, class_index: int, degrees: Degrees, num_samples: int
) -> Program:
    """Return what a rank of such a replica runs for a class."""
    run, planned = of_one_replica(graph, plan, num_samples), graph_under(graph, plan)
    return local_program(
        run,
        plan,
        class_index,
        degrees=degrees,
        microbatch_size=num_samples,
        planned=None if planned is graph else planned,
    )


def _shortest(
    graph: ModelGraph, plan: Plan, source: ModelSource, planned: int
) -> tuple[ModelGraph, int]:
    """Return a capture on shorter sequences that the plan's layouts fit, or the graph itself."""
    stages = range(len(plan.stages))
    metas = (graph.tensor[name] for name in graph.batch_inputs)
    if not any(planned in meta.shape for meta in metas):
        return graph, planned  # the batch does not have the sequence
    parts = lcm(*(_parts(plan, stage) for stage in stages))
    for length in list(_lengths(planned, parts))[:_TRIES]:
        try:
            ends_early = _with_length(graph, source, planned, length)
            found = capture_source(ends_early, precision=plan.precision)
            check_bucket(graph, found)
            if longest_sequence(found) != length:
                continue  # another dim of the batch is as long
            for stage in stages:
                for index in {graph.blocks[b].class_index for b in plan.stages[stage].blocks}:
                    samples_of(found, plan, stage, index)
        except PlannerError:
            continue
        return replace(found, name=graph.name), length
    return graph, planned


def _parts(plan: Plan, stage: int) -> int:
    degrees = plan.stage_degrees(stage)
    return prod(degrees[axis.name] for axis in lowered_axes())


def _lengths(planned: int, parts: int) -> Iterator[int]:
    """Yield lengths to try, the shortest first: divisors of the planned one."""
    for length in range(_LEAST_POSITIONS, planned):
        if planned % length == 0 and length % parts == 0:
            yield length


def _with_length(graph: ModelGraph, source: ModelSource, planned: int, length: int) -> ModelSource:
    """Return the source with batches whose sequences end early."""
    metas = {graph.tensor[name].fqn: graph.tensor[name] for name in graph.batch_inputs}

    def shorter(path: str, tensor: Tensor) -> Tensor:
        for dim, size in enumerate(metas[path].shape):
            if not isinstance(size, Affine) and size == planned:
                tensor = tensor.narrow(dim, 0, length)
        return tensor

    def batch(size: int) -> Any:
        leaves, tree = flatten_batch(source.batch(size))
        return unflatten_batch(tree, {path: shorter(path, t) for path, t in leaves.items()})

    return replace(source, batch=batch)


def batch_of(graph: ModelGraph, source: ModelSource, cut: Cut, size: int) -> dict[str, Tensor]:
    """Return the leaves of a batch of `size` samples, or units of them, as short as the cut, by
    graph names.
    """
    if cut.length != cut.planned_length:
        source = _with_length(graph, source, cut.planned_length, cut.length)
    leaves, _ = flatten_batch(source.batch(size * graph.unit.size))
    return {name: leaves[graph.tensor[name].fqn] for name in graph.batch_inputs}


def _needed(graph: ModelGraph, plan: Plan) -> dict[int, int]:
    """Return the entries in memory at once when a class is run, for the parameter with most.

    Its gradient (or a copy that a kernel multiplies by), and two pieces of a rank.
    """
    found: dict[int, int] = {}
    seen = set()
    for stage, planned in enumerate(plan.stages):
        degrees = plan.stage_degrees(stage)
        for index in planned.blocks:
            block = graph.blocks[index]
            if (block.class_index, degrees) in seen:
                continue
            seen.add((block.class_index, degrees))
            _, placements, _ = block_placements(graph, plan, index, stage)
            for name, placed in zip(block.params, placements, strict=True):
                numel = graph.tensor[name].numel_at(1)
                # (Gradients of parameters are made one after the other.)
                entries = numel + 2 * numel // placed.parts(degrees)
                found[block.class_index] = max(found.get(block.class_index, 0), entries)
    return found


def _free_bytes() -> int:
    """Return the memory that is free, or could be; where that is not told, all of it."""
    try:
        with open("/proc/meminfo") as file:
            line = next(line for line in file if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
