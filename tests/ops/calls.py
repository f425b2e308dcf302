"""Questions that tests put to the record of an op's family, of one call on real tensors."""

from __future__ import annotations

from planner.language.layout.placement import OpSharding
from planner.language.ops.kernel import KernelCall, Saved, View
from planner.language.ops.record import family_of
from planner.language.ops.registry import local_ops, strategies
from tests.sharding.programs import OneOp


def offered(single: OneOp, axis_size: int = 2, segments: tuple[int, ...] = ()) -> set[str]:
    """The shardings offered beside "all of it on every rank", as ``S(0),R->S(0)``."""
    found = strategies(single.op, single.program.tensor, axis_size, segments=segments)
    return {str(sharding) for sharding in found[1:]}


def on_shard(single: OneOp, sharding: str, axis_size: int = 2) -> list[tuple[str, tuple]]:
    """What runs on each rank under a sharding: targets and arguments, in order."""
    form = local_ops(
        single.op,
        OpSharding.parse(sharding),
        single.program.tensor,
        axis="tp",
        axis_size=axis_size,
    )
    return [(op.target, op.args) for op in form.ops]


def kernel_call(single: OneOp, device_type: str = "cuda") -> KernelCall:
    """The call as a device runs it, with the strides of its tensors."""
    strides = {
        name: tensor.stride()
        for name, tensor in zip(single.program.inputs, single.inputs, strict=True)
    }
    return KernelCall(single.op, single.program.tensor, strides, device_type)


def saved(single: OneOp, device_type: str = "cuda") -> Saved:
    """What the op saves for its backward."""
    return family_of(single.op.target).saved(kernel_call(single, device_type))


def view(single: OneOp, position: int = 0) -> View | None:
    """The memory that an output shares with an input."""
    rule = family_of(single.op.target).view
    return None if rule is None else rule(kernel_call(single), position)
