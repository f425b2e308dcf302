"""A stage's blocks one after the other, and its forward job.

A value between two blocks lives while a block still needs it, or keeps it for its backward. One
that a block takes in another placement is copied for that block first. The backward job is in
`backward`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from costmodel.memory.block.copies import Copy
from costmodel.memory.block.deferred_weights import DeferredWeight
from costmodel.memory.block.placed_block import PlacedBlock


class BlockSample(NamedTuple):
    """A block's part of a job, in bytes alive above the job's start."""

    start_bytes: int
    """When the block is called."""
    peak_bytes: int
    """At its height."""
    end_bytes: int
    """When it has returned."""
    beside_bytes: int
    """At the height outside the block, where its inputs or their gradients change placement."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardBytes:
    """A forward job of one microbatch. At its start, the values that arrived are alive."""

    samples: tuple[BlockSample, ...]
    """Each block's part, first block first."""
    last_bytes: int
    """The height when all blocks have run: what is sent is brought to its placement."""
    kept_bytes: int
    """What the job keeps for its backward that has no other holder."""
    kept: Mapping[str, int]
    """What it keeps that others may hold too, by name: values of other stages and of the batch."""

    @property
    def rise_bytes(self) -> int:
        """The job's height."""
        return max([self.last_bytes, *(max(t.peak_bytes, t.beside_bytes) for t in self.samples)])


class BackwardVariant(NamedTuple):
    """How a backward job runs. Jobs of one variant on one walk are simulated once."""

    received: tuple[str, ...]
    """Values whose gradients other stages sent. The executor holds these gradients, and the values
    that arrived, to the end of the job."""
    first: bool
    """Whether gradients of parameters have no buffer yet, so that those the job makes stay."""
    num_deferred: int = 0
    """So many blocks, from the first, defer their weight gradients."""
    flush: bool = False
    """Whether what is deferred is computed at the end of this job, not in another job."""
    kept_by_others: frozenset[str] = frozenset()
    """Values that others keep alive."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BackwardBytes:
    """A backward job of one microbatch. At its start, all that its forward kept and the gradients
    that arrived are alive.
    """

    samples: tuple[BlockSample, ...]
    """Each block's part, last block first."""
    rise_bytes: int
    """The job's height."""
    new_gradient_bytes: int
    """Gradients of parameters that it leaves and that were not there before."""
    deferred: tuple[DeferredWeight, ...]
    """The weight gradients it leaves to another job."""


@dataclass(frozen=True, kw_only=True)
class StageWalk:
    """A stage's blocks under one choice of recomputation; what its jobs need is found once."""

    blocks: Sequence[PlacedBlock]
    """In forward order."""
    arriving: Mapping[str, int]
    """Bytes of the values that other stages send here."""
    side: Mapping[str, int]
    """Bytes of the values that the preamble makes of the batch for every microbatch."""
    leaving: frozenset[str]
    """Values sent on to other stages."""
    sent_copies: Mapping[str, Copy]
    """Those of them that are sent as copies in another placement."""
    gradient_factor: int = 1
    """Bytes of a gradient's sum per byte of its parameter: 2 in bf16."""
    is_sharded: bool = False
    """Whether FSDP2 takes a block's gradients when the block has made them (`fsdp_walk` counts
    them then): they are in the parameters' dtype, and never added to by a product."""
    adds_late: bool = False
    """Whether gradients of parameters stay until the backward has ended, and are added to their
    sums then (`Execution.adds_late`)."""
    params_are_dtensors: bool = False
    """Whether parameters are sharded on tp and dp: what makes them plain tensors runs before a
    block, so autograd's engine handles their gradients when all else of the block has run."""

    @cached_property
    def roots(self) -> dict[str, str]:
        """The value whose memory each edge lies in: a block's output may be a view of an input."""
        root: dict[str, str] = {}
        for block in self.blocks:
            for name in block.inputs:
                root.setdefault(name, name)
            for name, viewed in zip(block.outputs, block.kind.viewed, strict=True):
                root[name] = name if viewed is None else root[block.inputs[viewed]]
        return root

    @cached_property
    def keepers(self) -> dict[str, int]:
        """The first block that keeps each value: backward runs it last, so it frees the value."""
        keepers: dict[str, int] = {}
        for index, block in enumerate(self.blocks):
            for at in block.kind.kept_inputs:
                keepers.setdefault(self.roots[block.inputs[at]], index)
            for name, edge in zip(block.outputs, block.kind.bytes.outputs, strict=True):
                if edge.is_kept:
                    keepers.setdefault(self.roots[name], index)
        return keepers

    @cached_property
    def leaves(self) -> tuple[frozenset[str], ...]:
        """For each block, the inputs that arrived and no block before it takes: leaves of
        autograd's graph.
        """
        seen: set[str] = set()
        leaves = []
        for block in self.blocks:
            found = [
                local
                for at, local in block.kind.uncopied
                if block.inputs[at] in self.arriving and block.inputs[at] not in seen
            ]
            leaves.append(frozenset(found))
            seen.update(block.inputs)
        return tuple(leaves)

    @cached_property
    def users(self) -> dict[str, list[int]]:
        """The blocks that use each trained parameter of several blocks, in order."""
        users: dict[str, list[int]] = {}
        for index, block in enumerate(self.blocks):
            for name in block.params.values():
                users.setdefault(name, []).append(index)
        return {name: blocks for name, blocks in users.items() if len(blocks) > 1}

    @cached_property
    def shared(self) -> tuple[frozenset[str], ...]:
        """For each block, those of its trained parameters that other blocks use too."""
        users = self.users
        return tuple(
            frozenset(local for local, name in block.params.items() if name in users)
            for block in self.blocks
        )

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of each value at a block's edge, as its maker leaves it."""
        sizes = {**self.side, **self.arriving}
        for block in self.blocks:
            for name, edge in zip(block.inputs, block.kind.bytes.inputs, strict=True):
                sizes.setdefault(name, edge.num_bytes)
            for name, edge in zip(block.outputs, block.kind.bytes.outputs, strict=True):
                sizes[name] = edge.num_bytes
        return sizes

    @cached_property
    def forward(self) -> ForwardBytes:
        """The forward job of one microbatch."""
        root, keepers = self.roots, self.keepers
        # The last block that needs each value; what leaves is needed after all blocks.
        last = {root[name]: len(self.blocks) for name in self.leaving if name in root}
        for index, block in enumerate(self.blocks):
            for name in (*block.inputs, *block.outputs):
                last[root[name]] = max(last.get(root[name], 0), index)
        # Values made of the batch are there before the first block.
        alive = dict(self.side)
        live = sum(alive.values())
        own = 0
        samples = []
        for index, block in enumerate(self.blocks):
            kind = block.kind
            # Inputs are brought to their placements one after the other, ahead of the block.
            start = beside = live
            for copy in kind.copies:
                if copy is not None:
                    beside = max(beside, start + copy.making_bytes)
                    start += copy.num_bytes
            peak = start + kind.bytes.forward_rise_bytes
            # Only the graph of this block refers to it, so it is counted without a name.
            own += kind.kept_bytes
            live += kind.kept_bytes
            for name, edge in zip(block.outputs, kind.bytes.outputs, strict=True):
                # An output that is a view of an input has that input's memory.
                if root[name] == name and name not in alive:
                    alive[name] = edge.num_bytes
                    live += edge.num_bytes
            # Python frees a value after its last reader, unless autograd keeps it.
            for name in {root[n] for n in (*block.inputs, *block.outputs)}:
                if last[name] == index and name not in keepers:
                    live -= alive.pop(name, 0)
            samples.append(BlockSample(start, peak, live, beside))
        last_bytes, made = live, live
        for copy in self.sent_copies.values():
            last_bytes = max(last_bytes, made + copy.making_bytes)
            made += copy.num_bytes
        # What only this stage's graph refers to needs no name. What arrived, leaves, or is made of
        # the batch may have other holders: the rank's walk counts it by name.
        inside = [n for n in alive if n in keepers and n not in self.leaving]
        own += sum(alive.pop(n) for n in inside if n not in self.side)
        kept = {n: size for n, size in {**alive, **self.arriving}.items() if n in keepers}
        return ForwardBytes(
            samples=tuple(samples), last_bytes=last_bytes, kept_bytes=own, kept=kept
        )

    @cached_property
    def backwards(self) -> dict[BackwardVariant, BackwardBytes]:
        """Backward jobs simulated so far (`backward.backward_job`)."""
        return {}
