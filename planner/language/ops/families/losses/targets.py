"""Targets of losses of classes: which a shard can count, and the mean over those of all ranks."""

from __future__ import annotations

from dataclasses import replace

from planner.language.graph import Op, Ref
from planner.language.ops.call import Call, LocalForm, Placed
from planner.language.ops.kernel import Saved
from planner.language.ops.record import OpFamily, register

NONE, MEAN, SUM = 0, 1, 2
"""ATen's numbers for a loss's `reduction`."""


def has_plain_targets(call: Call) -> bool:
    """Whether targets are indices and classes have no weights."""
    return not call.is_floating(call.op.inputs[1]) and not isinstance(call.arg(2, "weight"), Ref)


def divided_by_count(placed: Placed, summed: Op, ignore_index: int) -> LocalForm:
    """Divide one rank's sum of losses by the number of targets counted on all ranks."""
    name = placed.op.outputs[0]
    part = f"{name}_of_shard"
    mean = Op(
        name=f"{placed.op.name}_mean",
        target="planner.divide_by_count",
        args=(Ref(part), placed.op.args[1], ignore_index, placed.axis),
        outputs=(name,),
        module=placed.op.module,
    )
    meta = placed.call.tensor[name]
    return LocalForm((replace(summed, outputs=(part,)), mean), (replace(meta, name=part),))


register(
    OpFamily(
        name="mean over targets of all ranks",
        targets=("planner.divide_by_count",),
        saved=lambda call: Saved(extra_bytes=8),  # the count, one int64
        recomputed=False,
    )
)
