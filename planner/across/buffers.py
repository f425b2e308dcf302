"""Statistics over the batch and buffers that a forward writes."""

from __future__ import annotations

from dataclasses import replace

from planner.across.state import IN_ORDER, WHOLE, State
from planner.across.step import Step, handles


@handles("batch_norm")
def _batch_norm(step: Step) -> tuple[State, ...] | None:
    """In training it computes across samples, of which `planner.plan.batch_statistics` tells."""
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
    """A buffer written: from samples, or once for each part of the batch."""
    op = step.op
    if any(not state.is_whole for state in step.states[1:]) or step.batch_sizes():
        step.blame("buffer")
    elif not _is_counter(step) and not _sets_the_same(step):
        step.blame("repeated")
    return (WHOLE,) * len(op.outputs)


def _is_counter(step: Step) -> bool:
    tensor = step.walk.program.tensor[step.op.inputs[0]]
    return len(step.op.inputs) == 1 and tensor.dtype.startswith("int") and not tensor.shape


def _sets_the_same(step: Step) -> bool:
    """Whether a buffer gets a value in which no buffer that is written has a part."""
    if step.packet in ("aten.zero_", "aten.fill_"):
        return True
    return step.packet == "aten.copy_" and not step.walk.written.intersection(step.op.inputs[1:])
