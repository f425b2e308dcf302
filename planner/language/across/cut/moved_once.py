"""Buffers that one run of the model moves and no sample decides: counters, power iterations.

One process runs the model once on a whole batch, so what it computes of buffers and parameters
alone (a warm-up that counts steps, the power iteration of spectral norm, an average of weights)
moves once. A plan runs it once for each microbatch: each begins with the buffers as they were
when the batch came and makes the same of them, and the last one's are kept
(`planner.runtime.stage.stage`).
"""

from __future__ import annotations

from planner.language.across import across_samples
from planner.language.across.cut.batch_statistics import batch_norms
from planner.language.across.written import is_drawn
from planner.language.graph import Affine, ModelGraph, Op, Program
from planner.language.ops.record import mutates


def moved_once(graph: ModelGraph) -> frozenset[str]:
    """Return the buffers, by their names in the graph, that move once for a batch however it is
    cut: all that are written but for those that samples, or numbers drawn, have a part in.

    Counts of a BatchNorm stay with its running statistics, which each microbatch moves.
    """
    writes: dict[str, list[tuple[int, str]]] = {}
    apart: set[str] = set()
    for block in graph.blocks:
        program = graph.classes[block.class_index]
        names = dict(zip(program.params, block.params, strict=True))
        for op in filter(mutates, program.ops):
            written = names.get(op.inputs[0])
            if written is None:
                continue
            writes.setdefault(written, []).append((block.index, op.name))
            if is_drawn(program, op) or _follows_from_samples(program, op):
                apart.add(written)
    norms = batch_norms(graph)
    apart.update(norm.num_batches_tracked for norm in norms if norm.num_batches_tracked)
    if not writes.keys() - apart:
        return frozenset()
    moved = {
        (found.block_index, found.name)
        for found in across_samples(graph)
        if found.kind in ("buffer", "repeated")
    }
    return frozenset(
        name for name, places in writes.items() if name not in apart and not moved & set(places)
    )


def _follows_from_samples(program: Program, op: Op) -> bool:
    """Whether an op writes what is made of samples, also by an op that has a fault of its own: a
    sign of counts is the same for all of a part, and another for each part.
    """
    made = program.only(op.inputs[1:])
    return any(
        isinstance(size, Affine) for name in made.inputs for size in program.tensor[name].shape
    )
