"""A term of a loss times what a part of the batch counts for in it
(`planner.language.across.whole`).
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.language.layout.placement import OpSharding, Shard
from planner.language.ops.call import Call, P, R
from planner.language.ops.kernel import KernelCall, Saved
from planner.language.ops.record import OpFamily, ShardRule, register


def part_of(call: Call) -> Iterator[OpSharding]:
    """Linear in the term, entry by entry; the share is one number."""
    yield OpSharding(inputs=(P, R), outputs=(P,))
    for dim in range(len(call.inputs[0])):
        yield OpSharding(inputs=(Shard(dim), R), outputs=(Shard(dim),))


def _share(call: KernelCall) -> Saved:
    return Saved(tensors=call.op.inputs[1:2])


register(
    OpFamily(
        name="part of a term",
        targets=("planner.part_of",),
        shard=(ShardRule(part_of),),
        saved=_share,
        kernels=lambda call: (3, 2),
    )
)
