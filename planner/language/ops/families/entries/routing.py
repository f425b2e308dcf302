"""Rows in the order of their experts, and back: one call each, as libraries of layers have them.

    sort_rows    rows [r, h], experts of each row [r, k], number of experts e
                 -> a copy of a row for each of its experts [r k, h], their order [r k], ends [e]
    grouped_mm   rows [r k, m], matrices [e, m, n], ends [e] -> products [r k, n]
    unsort_rows  rows [r k, h], their order [r k], their weights [r, k] -> weighted sums [r, h]

(`moe_permute`, `GroupedLinear` and `moe_unpermute` of Transformer Engine.) Ranks that have a part
of the rows each put theirs in order: the whole is then runs of every rank's own, and the ends of
runs are terms of a sum. In what order rows lie matters to nobody between the first call and the
last. Templates are written with these; nothing captured has them, and they are only priced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.language.layout.placement import OpSharding, Replicate, Shard
from planner.language.ops.call import Call, P
from planner.language.ops.families.products.matmul import GROUPED
from planner.language.ops.kernel import KernelCall, Saved, saves_nothing
from planner.language.ops.record import OpFamily, ShardRule, register

SORT_ROWS = "moe.sort_rows.default"
UNSORT_ROWS = "moe.unsort_rows.default"
GROUPED_MM = "moe.grouped_mm.default"


def sort_rows(call: Call) -> Iterator[OpSharding]:
    """Rows alone; or columns, each with all rows."""
    rows, whole = Shard(0), Replicate()
    yield OpSharding(inputs=(rows, rows), outputs=(rows, rows, P))
    yield OpSharding(inputs=(Shard(1), whole), outputs=(Shard(1), whole, whole))


def grouped_mm(call: Call) -> Iterator[OpSharding]:
    """Each rank with all matrices and runs of rows of its own."""
    yield OpSharding(inputs=(Shard(0), Replicate(), P), outputs=(Shard(0),))


def unsort_rows(call: Call) -> Iterator[OpSharding]:
    """Rows alone; or columns, each with all rows."""
    rows, whole = Shard(0), Replicate()
    yield OpSharding(inputs=(rows, rows, rows), outputs=(rows,))
    yield OpSharding(inputs=(Shard(1), whole, whole), outputs=(Shard(1),))


def _for_weights(call: KernelCall) -> Saved:
    """The rows, for the gradients of their weights, and what says where they were."""
    return Saved(tensors=call.op.inputs)


register(
    OpFamily(
        name="rows in the order of their experts",
        targets=(SORT_ROWS,),
        shard=(ShardRule(sort_rows),),
        saved=saves_nothing,  # its backward needs the order, which `unsort_rows` saves
    )
)
register(
    replace(
        GROUPED,
        name="products of runs of rows of each rank's own",
        targets=(GROUPED_MM,),
        shard=(*GROUPED.shard, ShardRule(grouped_mm)),
    )
)
register(
    OpFamily(
        name="rows back from their experts",
        targets=(UNSORT_ROWS,),
        shard=(ShardRule(unsort_rows),),
        saved=_for_weights,
    )
)
