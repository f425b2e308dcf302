"""What a block holds, as data: what its walks find, and the block as a stage places it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from costmodel.memory.block.copies import Copy
from costmodel.memory.block.deferred_weights import DeferredWeight
from costmodel.memory.saved import SavedTensors


class Given(NamedTuple):
    """The gradient of a program's input."""

    num_bytes: int
    """Bytes of its buffer."""
    output: str | None
    """The output whose gradient has the same buffer, if one has."""
    gaps: bool
    """Whether it is a view with gaps."""
    is_sum: bool = False
    """Whether it was added to a gradient that was there before."""


class BackwardWalk(NamedTuple):
    """A program's backward. At its start all that it saved, and its outputs' gradients, live."""

    rise_bytes: int
    """Its height above the start."""
    made: frozenset[str]
    """Parameters whose gradients it makes."""
    deferred: tuple[DeferredWeight, ...]
    """Weight gradients it defers, in that order."""
    given: Mapping[str, Given]
    """Gradients of the inputs."""


class Edge(NamedTuple):
    """A value a block takes or makes."""

    name: str
    """Its local name."""
    num_bytes: int
    requires_grad: bool
    """Whether a gradient belongs to it."""
    is_kept: bool
    """Whether the block keeps it for its backward."""
    viewed: int | None = None
    """The position of the input that it is a view of, if any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBytes:
    """One block of a class on one rank, under one choice of recomputation."""

    inputs: tuple[Edge, ...]
    """The activations it takes."""
    outputs: tuple[Edge, ...]
    """The activations it makes."""
    params: Mapping[str, int]
    """Bytes of trained parameters, by local name."""
    frozen: Mapping[str, int]
    """Bytes of frozen parameters, by local name."""
    param_shapes: Mapping[str, tuple[int, ...]]
    """Shapes of both, by local name."""
    kept_bytes: int
    """Kept between forward and backward, values at the edges apart."""
    recomputed_bytes: int
    """What recomputation adds to that at its end."""
    forward_rise_bytes: int
    """Height of the forward: outputs count, inputs do not."""
    recompute_rise_bytes: int
    """Height of the recomputation."""
    backward: Callable[..., BackwardWalk]
    """`backward_walk` of the block; it remembers its results."""
    saved: SavedTensors
    """What autograd saves of its program."""
    is_compiled: bool = False
    """Whether its forward and its backward are a compiled graph each."""
    spread: frozenset[str] = frozenset()
    """Those of its parameters that lie on the experts' mesh."""
    deferred: Callable[[], BlockBytes | None] = lambda: None
    """The block with its weight gradients deferred, if it keeps other things then."""

    def on_host(self) -> BlockBytes:
        """Return the block where all that it saves lies on the host between its two jobs.

        While it runs backward, what the block before it saved arrives; layers save alike.
        """
        inputs = sum(edge.num_bytes for edge in self.inputs if edge.is_kept)
        arriving = self.kept_bytes + self.recomputed_bytes + inputs
        return replace(
            self,
            inputs=tuple(edge._replace(is_kept=False) for edge in self.inputs),
            kept_bytes=0,
            recomputed_bytes=arriving,
            recompute_rise_bytes=max(self.recompute_rise_bytes, 2 * arriving),
        )


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
