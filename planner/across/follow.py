"""Follows the samples through the ops of a program, in order."""

from __future__ import annotations

from planner.across import losses, order, rows, take_and_put  # noqa: F401 - importing a module registers its handlers
from planner.across.buffers import written
from planner.across.by_rules import by_rules
from planner.across.state import State
from planner.across.step import Step, Walk, handlers_of
from planner.ops.record import mutates


def follow_program(walk: Walk) -> None:
    """Add the states of all tensors that a program makes, and the faults of its ops."""
    for op in walk.program.ops:
        step = Step(walk=walk, op=op, states=[walk.states[n] for n in op.inputs])
        walk.states.update(zip(op.outputs, _follow(step), strict=True))


def _follow(step: Step) -> tuple[State, ...]:
    op = step.op
    if step.compares(op.outputs) and not step.compares(op.inputs):
        step.blame("pairs")
        return step.anything()
    if mutates(op) and step.packet != "aten.batch_norm":
        return written(step)
    for handler in handlers_of(step.packet):
        found = handler(step)
        if found is not None:
            return found
    return by_rules(step)
