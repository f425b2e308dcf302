"""A value brought to another placement for the block that takes it, or to be sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from planner.language.layout.axes import Degrees
from planner.language.layout.placement import Shard
from planner.language.layout.placements import Placements, moves_between
from planner.language.ops.families.lowered import is_view_slice, staging_bytes


class Copy(NamedTuple):
    """A value brought to another placement."""

    num_bytes: int
    """Bytes of the copy."""
    making_bytes: int
    """Alive at most while it is made, itself counted."""
    returning_bytes: int
    """Alive at most beside its gradient while that is brought back."""
    passes_on: bool
    """Whether its gradient is the value's, as it is."""
    is_view: bool = False
    """Whether there is no copy, but a part of the value's own memory."""


def copy_between(
    lies: Placements,
    taken: Placements,
    num_bytes: int,
    shape: Sequence[int],
    *,
    degrees: Degrees,
) -> Copy | None:
    """Return what bringing a value of some whole shape from one placement to another takes,
    None where nothing moves; `num_bytes` are those of the copy.
    """
    # Axes change one after the other: the bytes of each tensor in between follow from the whole's.
    whole = num_bytes * taken.parts(degrees)
    making = returning = 0
    passes_on = True
    start = num_bytes
    # Along an axis of one rank nothing moves.
    moves = [move for move in moves_between(lies, taken) if degrees[move.axis] > 1]
    before = lies
    for axis, src, dst in moves:
        after = before.on(axis, dst)
        source, target = whole // before.parts(degrees), whole // after.parts(degrees)
        # The value itself is the stage's; what lies in between exists only while this is made.
        held = 0 if before == lies else source
        size = max(source, target)
        making = max(making, held + target + staging_bytes(src, dst, size, forward=True))
        # Without a shard at either end a rank's tensor keeps its size, and so its gradient's
        # buffer.
        if isinstance(src, Shard) or isinstance(dst, Shard):
            passes_on = False
            staged = staging_bytes(src, dst, size, forward=False)
            # On the way back the gradients before and after a change are alive together; the
            # copy's own gradient (`start`) is the caller's.
            returning = max(returning, target + source + staged - start)
        before = after
    # A rank's contiguous part of a whole tensor is taken without a copy.
    if len(moves) == 1 and is_view_slice(moves[0].src, moves[0].dst, shape):
        return Copy(0, 0, returning, passes_on, is_view=True)
    return Copy(num_bytes, making, returning, passes_on) if moves else None
