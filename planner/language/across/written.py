"""Buffers that a forward writes."""

from __future__ import annotations

from planner.language.graph import Op, Program
from planner.language.ops.record import is_random
from planner.language.ops.samples.state import WHOLE, State
from planner.language.ops.samples.step import Step


def written(step: Step) -> tuple[State, ...]:
    """A buffer written: from samples, or from numbers that each part of the batch draws anew.

    What follows from buffers and parameters alone is the same in every part: no fault, as each
    begins with the buffers that the step began with (`planner.language.across.cut.moved_once`).
    """
    op = step.op
    if any(not state.is_whole for state in step.states[1:]) or step.batch_sizes():
        step.blame("buffer")
    elif is_drawn(step.walk.program, op) and not _sets_anew(step):
        step.blame("repeated")
    return (WHOLE,) * len(op.outputs)


def is_drawn(program: Program, op: Op) -> bool:
    """Whether what an op writes follows from random numbers."""
    made = program.only(op.inputs[1:])
    return is_random(op) or any(is_random(each) for each in made.ops)


def _sets_anew(step: Step) -> bool:
    """Whether a buffer gets a value in which no buffer that is written has a part."""
    anew = not step.walk.written.intersection(step.op.inputs[1:])
    return step.packet == "aten.copy_" and anew
