"""A block as its stage calls it: names of what it takes and makes, and copies in other placements.

All that is not a name is the same for many blocks of a stage, and found once (`BlockKind`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from costmodel.memory.block.block_bytes import BlockBytes
from planner.layout.axes import Degrees
from planner.layout.placement import Shard
from planner.layout.placements import Placements, moves_between
from planner.ops.families.lowered import is_view_slice, staging_bytes


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
        held = 0 if before == lies else source
        size = max(source, target)
        making = max(making, held + target + staging_bytes(src, dst, size, forward=True))
        if isinstance(src, Shard) or isinstance(dst, Shard):
            passes_on = False
            staged = staging_bytes(src, dst, size, forward=False)
            returning = max(returning, target + source + staged - start)
        before = after
    if len(moves) == 1 and is_view_slice(moves[0].src, moves[0].dst, shape):
        return Copy(0, 0, returning, passes_on, is_view=True)
    return Copy(num_bytes, making, returning, passes_on) if moves else None


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockKind:
    """What blocks hold that differ in names only. Inputs and outputs go by position and local
    name.
    """

    bytes: BlockBytes
    """What the block holds itself."""
    copies: tuple[Copy | None, ...]
    """For each input, its copy if it is brought to another placement for the block."""

    @cached_property
    def kept_bytes(self) -> int:
        """Bytes kept beside what lies at the edges, copies of inputs counted."""
        edges = zip(self.bytes.inputs, self.copies, strict=True)
        copied = sum(c.num_bytes for edge, c in edges if edge.is_kept and c is not None)
        return self.bytes.kept_bytes + copied

    @cached_property
    def copied(self) -> frozenset[str]:
        """Inputs that the block has in copies of its own."""
        edges = zip(self.bytes.inputs, self.copies, strict=True)
        return frozenset(edge.name for edge, c in edges if c is not None and not c.is_view)

    @cached_property
    def uncopied(self) -> tuple[tuple[int, str], ...]:
        """Inputs that the block takes as they lie."""
        edges = enumerate(self.bytes.inputs)
        return tuple((at, edge.name) for at, edge in edges if self.copies[at] is None)

    @cached_property
    def kept_inputs(self) -> tuple[int, ...]:
        """Inputs that the block keeps for its backward, where they are no copies."""
        edges = enumerate(self.bytes.inputs)
        return tuple(at for at, edge in edges if edge.is_kept and edge.name not in self.copied)

    @cached_property
    def viewed(self) -> tuple[int | None, ...]:
        """For each output, the input in whose memory it lies, if any: a copy is the block's own."""
        own = {at for at, edge in enumerate(self.bytes.inputs) if edge.name in self.copied}
        return tuple(None if e.viewed in own else e.viewed for e in self.bytes.outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedBlock:
    """A block of a stage."""

    kind: BlockKind
    """All of it but names."""
    inputs: tuple[str, ...]
    """What it takes, by name in the stage."""
    outputs: tuple[str, ...]
    """What it makes, by name in the stage."""
    params: Mapping[str, str]
    """Its trained parameters: local name to name in the model."""
    frozen: Mapping[str, str]
    """Its frozen parameters, in the same way."""
