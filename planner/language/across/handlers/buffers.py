"""Statistics over the batch and buffers that a forward writes."""

from __future__ import annotations

from dataclasses import replace

from planner.language.across.state import IN_ORDER, WHOLE, State
from planner.language.across.step import Step, handles
from planner.language.graph import Op, Program
from planner.language.ops.record import is_random


@handles("batch_norm")
def _batch_norm(step: Step) -> tuple[State, ...] | None:
    """In training it computes across samples, of which
    `planner.language.across.cut.batch_statistics` tells.
    """
    if not step.arg(5, "training", True):
        return None
    step.blame_sums()
    return (replace(step.states[0], points=None, equal=False, order=IN_ORDER),)


@handles("instance_norm")
def _instance_norm(step: Step) -> tuple[State, ...] | None:
    """Running statistics are means over samples, written to buffers."""
    if step.arg(3, "running_mean") is None or not step.arg(5, "use_input_stats", True):
        return None
    step.blame("buffer")
    return (replace(step.states[0], equal=False),)


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
