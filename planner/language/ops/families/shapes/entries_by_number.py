"""Entries taken by numbers that no sharding rule follows: of the whole, or of runs."""

from __future__ import annotations

from dataclasses import replace

from planner.language.ops.call import normal_dim
from planner.language.ops.families.shapes.rows_by_number import dim_of
from planner.language.ops.record import OpFamily, aten, register
from planner.language.ops.samples.state import State
from planner.language.ops.samples.step import Across, Step


def _take_along(step: Step) -> tuple[State, ...] | None:
    """Tensor, a number for each entry of the result: places inside each row, or of rows."""
    source, index = step.states[:2]
    if source.rows is None:
        return None
    dim, rank = step.arg(2, "dim"), len(step.shape(step.op.inputs[0]))
    inside = dim is not None and normal_dim(dim, rank) != source.rows.dim
    if inside and (index.rows, index.order) == (source.rows, source.order) and not index.sums:
        return (replace(source, equal=False),) if index.points is None else None
    return _mixed(step)


def _by_any_numbers(step: Step) -> tuple[State, ...] | None:
    """Entries or rows by numbers, or by where runs of rows begin: of whichever samples they are."""
    rows = step.states[0].rows
    if rows is None:
        return None
    if (
        step.packet == "aten.index_reduce"
        and dim_of(step, step.op.args[0], step.op.args[1]) != rows.dim
    ):
        return None
    return _mixed(step)


def _mixed(step: Step) -> tuple[State, ...]:
    step.blame("mixed")
    return step.anything()


register(
    OpFamily(
        name="entries along a dim, each by its number",
        targets=aten("take_along_dim"),
        across=Across(handlers=(_take_along,)),
    )
)
register(
    OpFamily(
        name="entries by any numbers",
        targets=aten("take index_reduce segment_reduce"),
        across=Across(handlers=(_by_any_numbers,)),
    )
)
