"""Whether a plan is for a model: its fingerprint, its batch, its blocks, its layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.errors import PlanError
from planner.language.layout.axes import lowered_axes
from planner.language.layout.class_layout import ClassLayout
from planner.language.plan import batch_spec
from planner.language.plan.plan import Plan

if TYPE_CHECKING:
    from planner.language.graph import ModelGraph, Program


def validate_model(plan: Plan, graph: ModelGraph) -> None:
    """Raise PlanError when a graph is not of the model that the plan was made for.

    Also when the stages do not hold every block (`Plan` itself checks that none is in two), or a
    layout is of no block class of it.
    """
    if graph.fingerprint != plan.model.fingerprint:
        raise PlanError(
            f"the plan is for {plan.model.name} from {plan.model.file} "
            f"({plan.model.fingerprint[:12]}) and the model given is {graph.name} "
            f"({graph.fingerprint[:12]}); search again for this model, or give the plan's own "
            "(if it is: an earlier planner made the plan and named models otherwise, its forward "
            "does not do the same in every process, or a call changed it)"
        )
    if plan.model.inputs != batch_spec(graph) or plan.model.unit != graph.unit:
        raise PlanError(
            "the plan's inputs are not those of the model's batch; the plan is damaged, so search "
            "again"
        )
    num_planned = plan.stages[-1].last_block + 1
    if num_planned != len(graph.blocks):
        raise PlanError(
            f"the plan's stages hold blocks 0..{num_planned - 1} and the model has "
            f"{len(graph.blocks)} blocks; each must be in exactly one stage, so search again"
        )
    from planner.language.across.cut.whole_batch import (
        graph_under,  # which loads the rules of all ops
    )

    run = graph_under(graph, plan) if plan.layouts else graph
    for layout in plan.layouts:
        _check_layout(layout, run)
    for choice in plan.recomputed:
        _program_of(choice.class_index, graph)


def _program_of(class_index: int, graph: ModelGraph) -> Program:
    if class_index >= len(graph.classes):
        raise PlanError(
            f"the plan names block class {class_index} and the model has {len(graph.classes)} "
            "classes; the plan is damaged, so search again"
        )
    return graph.classes[class_index]


def _check_layout(layout: ClassLayout, graph: ModelGraph) -> None:
    """Raise PlanError where a layout is not one of the class that it names."""
    program = _program_of(layout.class_index, graph)
    for what in ("inputs", "params", "outputs"):
        given, has = len(getattr(layout, what)), len(getattr(program, what))
        if given != has:
            raise PlanError(
                f"the plan places {given} {what} of block class {program.name!r} on "
                f"{layout.axis} and it has {has}; the plan is damaged, so search again"
            )
    if layout.axis not in (lowered_axes()[0].name, "ep"):
        return  # of the program as lowered on axes before, which has more ops
    ops = {op.name: op for op in program.ops}
    for name, sharding in layout.op_shardings.items():
        op = ops.get(name)
        if op is None or (len(op.inputs), len(op.outputs)) != (
            len(sharding.inputs),
            len(sharding.outputs),
        ):
            raise PlanError(
                f"the plan splits op {name} of block class {program.name!r} as {sharding} and the "
                "model has no such op; the plan is damaged, so search again"
            )
