"""A term of a loss times what a part of the batch counts for in it
(`planner.language.across.whole`).
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.language.layout.placement import OpSharding, Shard
from planner.language.ops.call import Call, P, R
from planner.language.ops.kernel import KernelCall, Saved
from planner.language.ops.record import OpFamily, ShardRule, register
from planner.language.ops.samples.state import SCALED, State
from planner.language.ops.samples.step import Across, Step


def part_of(call: Call) -> Iterator[OpSharding]:
    """Linear in the term, entry by entry; the share is one number."""
    yield OpSharding(inputs=(P, R), outputs=(P,))
    for dim in range(len(call.inputs[0])):
        yield OpSharding(inputs=(Shard(dim), R), outputs=(Shard(dim),))


def _share(call: KernelCall) -> Saved:
    return Saved(tensors=call.op.inputs[1:2])


def _share_of_a_part(step: Step) -> tuple[State, ...] | None:
    """A term times its share (`planner.language.across.whole`), which is in the graph already."""
    state, share = step.states
    if not share.whole or not (state.sums or state.is_whole):
        return None
    sums = state.sums or (step.op.name,)
    return (State(sums=sums, share=SCALED, terms=(share.whole,)),)


register(
    OpFamily(
        name="part of a term",
        targets=("planner.part_of",),
        shard=(ShardRule(part_of),),
        saved=_share,
        kernels=lambda call: (3, 2),
        across=Across(handlers=(_share_of_a_part,)),
    )
)
