"""Products of runs of rows, seen from the samples: rows that were sorted, each with its expert."""

from __future__ import annotations

from dataclasses import replace

from planner.language.graph import Op
from planner.language.layout.placement import Shard
from planner.language.ops.call import Call
from planner.language.ops.record import Numbers, family_of
from planner.language.ops.samples.state import ANY_ORDER, IN_ORDER, State
from planner.language.ops.samples.step import Step

ROWS_BY_VALUES = "how many rows experts get follows from their values"
"""Why blocks of experts are not compiled (`OpFamily.eager`)."""


def ends_of_runs(call: Call, name: str) -> Numbers:
    """Ends of runs of the rows that come first."""
    return Numbers("ends", call.inputs[0][0])


def of_runs(step: Step) -> tuple[State, ...] | None:
    """Rows in the order of their experts, matrices or biases, the last row of each expert's run."""
    rows, weights, ends = step.states[:3]
    is_sorted = rows.rows == Shard(0) and rows.order not in (IN_ORDER, ANY_ORDER)
    if not is_sorted or weights.rows or weights.sums or not ends.sums:
        return None
    by, counted = _sorted_by(step, rows.order), _counted(step, step.op.inputs[2])
    if by and counted and by != counted:
        return None  # runs of other experts than the rows'
    return (replace(rows, points=None, equal=False),)


def _sorted_by(step: Step, order: str) -> str:
    """The tensor in whose order rows are; empty where another block sorted them."""
    sort = next((op for op in step.walk.program.ops if op.name == order), None)
    return _root(step, sort.inputs[0]) if sort is not None and sort.inputs else ""


def _counted(step: Step, ends: str) -> str:
    """The tensor that ends of runs were counted in; empty where another block did."""
    maker = step.walk.maker.get(_root(step, ends))
    return _root(step, maker.inputs[0]) if maker is not None and maker.inputs else ""


def _root(step: Step, name: str) -> str:
    """A tensor behind others of the same numbers: other shapes, dtypes and orders, run ends."""
    maker = step.walk.maker.get(name)
    while maker is not None and _has_same_numbers(maker):
        if name != maker.outputs[0]:
            break  # indices of a sort
        name = maker.inputs[0]
        maker = step.walk.maker.get(name)
    return name


def _has_same_numbers(op: Op) -> bool:
    packet = op.target.rpartition(".")[0]
    if packet in ("aten.to", "aten.sort", "aten.index", "aten.cumsum"):
        return True
    return family_of(op.target).across.algebra == "rearrangement"
