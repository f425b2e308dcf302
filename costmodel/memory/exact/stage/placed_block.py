"""A block as its stage calls it: names of what it takes and makes, and copies in other placements.

All that is not a name is the same for many blocks of a stage, and found once (`BlockKind`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from costmodel.memory.block.block_bytes import BlockBytes


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
