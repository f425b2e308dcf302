"""What a proof by blocks was cut down to, and what it does not show, in words."""

from __future__ import annotations

from collections.abc import Iterator

from planner.language.across.cut.whole_batch import graph_under
from planner.language.graph import ModelGraph
from planner.language.plan import Plan, low_dtype
from planner.runtime.proofs.by_block.cut import Cut
from planner.runtime.proofs.promote import has_dropout
from planner.units import format_bytes


def cuts(plan: Plan, graph: ModelGraph, cut: Cut) -> Iterator[str]:
    """Yield what blocks were run on instead of what is planned, as sentences."""
    planned = max(plan.stage_microbatch_size(stage) for stage in range(len(plan.stages)))
    if planned > 2:
        yield (
            f"microbatches were cut from {planned} {plan.unit.spelled} to as few as two where "
            "layouts allow"
        )
    if cut.length != cut.planned_length:
        yield (
            f"sequences were cut from {cut.planned_length} to {cut.length} positions, in a capture "
            "of their own that is the plan's block for block"
        )
    elif cut.planned_length:
        yield f"sequences have the planned {cut.planned_length} positions"
    yield (
        f"values are {'fp64' if cut.dtype == 'float64' else 'fp32'} "
        f"({format_bytes(cut.memory_bytes)} of memory could be used); widths, heads and "
        "vocabulary are as planned, parameters random"
    )
    if has_dropout(graph):
        yield "dropout was switched off"


def unproven(plan: Plan, graph: ModelGraph, cut: Cut) -> Iterator[str]:
    """Yield what a proof by blocks does not show of a plan, as sentences."""
    for index, num_bytes in cut.too_large:
        yield (
            f"block class {graph.classes[index].name} was not run: it takes "
            f"{format_bytes(num_bytes)} in fp32, more than the {format_bytes(cut.memory_bytes)} of "
            "memory that could be used"
        )
    yield (
        "that the captured blocks are the model: they were run against themselves, whole; verify "
        "a small model of the same code without `by_block` for that"
    )
    yield "the whole step in numbers: losses, the optimizer's update, learning rates, clipping"
    if low_dtype(plan.precision):
        yield f"what rounding to {plan.precision} does"
    if graph_under(graph, plan) is not graph and plan.batch_parts > 1:
        yield (
            "that replicas put their samples together for ops that compute across them: these were "
            "run as on one replica"
        )
    yield "other sequence lengths than the one run, where an op branches on them"
    parts = ["the network and the devices' own kernels", "loading of data", "checkpoints"]
    if any(stage.is_recomputed for stage in plan.stages):
        parts.insert(0, "recomputation in the backward")
    if plan.on_host:
        parts.insert(0, "copies to and from the host")
    if plan.is_compiled:
        parts.insert(0, "the graphs that blocks are compiled as")
    yield f"what runs around the blocks: {', '.join(parts)}"
    yield "that it fits in memory, and how fast it is (`planner dryrun`, `planner estimate`)"
