"""Which ops a stage of recompute "selective" runs again: those cheap beside what they free.

Products, convolutions and attention do many operations for each byte they make, and
collectives wait for other ranks; their results are kept. Everything else is bound by
memory: running it again costs about as much as reading its result back (Korthikanti et
al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 5).
"""

from __future__ import annotations

from collections.abc import Iterable

from planner.language.graph import Op, Program
from planner.language.ops.record import family_of, op_inside


def default_ops(program: Program) -> tuple[str, ...]:
    """Return the names of the ops whose results are made again, in program order.

    `program` is a class's or a lowered one, bound or not. Ops of libraries other than ATen
    without a record are kept: nothing is known of what they cost.
    """
    return tuple(op.name for op in program.ops if is_cheap(op))


def ops_made_again(
    program: Program, lowered: Program, chosen: Iterable[str] | None
) -> frozenset[str]:
    """Return the ops of a class's lowered program that run again in the backward.

    `chosen` are names of ops of the class's own `program`, None for the default choice.
    What lowering added follows the default: a collective's result is kept. Where all ops are
    chosen nothing is: the class keeps its inputs alone, as under "full".
    """
    if chosen is None:
        return frozenset(default_ops(lowered))
    own, again = {op.name for op in program.ops}, frozenset(chosen)
    if own <= again:
        return frozenset(op.name for op in lowered.ops)
    return again | {op.name for op in lowered.ops if op.name not in own and is_cheap(op)}


def is_cheap(op: Op) -> bool:
    """Whether running an op again costs little: time in proportion to the bytes it touches."""
    return family_of(op_inside(op).target).recomputed
