"""What kernels hold only while they run, beside their inputs, outputs and what they save.

The bytes follow from the record of the op's family (`planner.ops.record`).
"""

from __future__ import annotations

from collections.abc import Sequence

from costmodel.memory.ops.saved import SavedTensors
from planner.graph import Op, Program
from planner.ops.kernel import KernelCall
from planner.ops.record import family_of


def scratch_bytes(op: Op, program: Program, saved: SavedTensors, *, forward: bool) -> int:
    """Bytes a kernel holds only while it runs, beside its inputs, outputs and what it saves; below
    zero where it frees some of those before all of them exist.
    """
    rule = family_of(op.target).scratch
    if rule is None:
        return 0
    call = KernelCall(op, program.tensor, saved.storages.strides, saved.device_type)
    return rule(call, forward=forward)


def unreduced_bytes(op: Op, needing: Sequence[str], program: Program, saved: SavedTensors) -> int:
    """Bytes by which a backward is higher than its inputs' gradients, before those are summed or
    cast to their inputs' shapes and dtypes.
    """
    rule = family_of(op.target).unreduced
    if rule is None:
        return 0
    call = KernelCall(op, program.tensor, saved.storages.strides, saved.device_type)
    return rule(call, needing)
