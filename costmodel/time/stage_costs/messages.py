"""What reaches a stage from the stages before it: bytes of a microbatch's tensors, and seconds.

Each tensor that an earlier block makes is sent once, straight from its maker, and its gradient
goes back the same way. Most models hand on one tensor from block to block; then what a stage
receives depends on its first block only. Tensors that reach further (an encoder's output, the
skips of a U-Net) are counted for each run by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from costmodel.links import Links
from costmodel.time.block.boundary import Layouts, placement_of
from costmodel.time.communication import boundary_seconds
from costmodel.time.stage_costs.runs import Floats, Indices
from costmodel.topology import axis_group
from planner.language.graph import ModelGraph
from planner.language.layout.axes import Degrees, lowered_axes
from planner.language.layout.placement import Shard
from profiles import Group, Profile


@dataclass(kw_only=True, eq=False)
class Messages:
    """What stages receive under one split. Mutable: it remembers seconds."""

    graph: ModelGraph
    """The model."""
    links: Links
    """How its blocks hang together."""
    profile: Profile
    """The machine."""
    degrees: Degrees
    """Sizes of the mesh of one replica."""
    microbatch_size: int
    """Samples of one microbatch in one dp replica."""
    layouts: Mapping[str, Layouts]
    """Layouts by axis and class."""
    _transfers: dict[tuple[Group, int], tuple[Floats, Floats]] = field(default_factory=dict)

    @cached_property
    def arrivals(self) -> Floats:
        """Bytes a stage that starts at block i receives, and of the gradients it sends back.

        (2, 2, n + 1): forward and back; all, and of tensors that every rank of the inner axis (tp)
        holds whole. 0 at the ends. What block i itself takes from earlier blocks: all that such a
        stage receives in a chain, the least of it where skips reach further (`_skips`).
        """
        entries, makers = self.links.entries, self.links.makers
        found: dict[int, Floats] = {}
        for block, entry in zip(self.graph.blocks, entries, strict=True):
            if entry not in found:
                # What no block makes (the batch, the preamble's values) each rank has itself.
                sent = [name for name in dict.fromkeys(block.inputs) if name in makers]
                found[entry] = sum(map(self._message_bytes, sent), start=np.zeros((2, 2)))
        sizes = [found[entry] for entry in entries]
        return np.stack([*sizes, np.zeros((2, 2))], axis=-1)

    def _message_bytes(self, name: str) -> Floats:
        """Return bytes of a tensor in `arrivals`' order: (forward and back; all and whole)."""
        meta = self.graph.tensor[name]
        size, is_whole = meta.bytes_at(self.microbatch_size), True
        for axis in lowered_axes():
            if isinstance(placement_of(self.graph, name, self.layouts[axis.name]), Shard):
                # Each rank sends its shard to the rank of the same place on the next mesh.
                size //= self.degrees[axis.name]
                is_whole = is_whole and axis.name != self._inner
        whole, back = size * is_whole, meta.requires_grad
        return np.array([[size, whole], [size * back, whole * back]], dtype=float)

    @cached_property
    def _inner(self) -> str:
        """The axis whose ranks gather what they were sent in pieces."""
        return lowered_axes()[0].name

    @cached_property
    def _skips(self) -> tuple[tuple[int, Indices, Floats], ...]:
        """(maker, users, bytes) of the tensors that reach past the next block."""
        users: dict[str, list[int]] = {}
        makers = self.links.makers
        for block in self.graph.blocks:
            for name in dict.fromkeys(block.inputs):
                if name in makers:
                    users.setdefault(name, []).append(block.index)
        return tuple(
            (makers[name][0], np.array(found), self._message_bytes(name))
            for name, found in users.items()
            if found[-1] > makers[name][0] + 1
        )

    def arriving(self, start: Indices, end: Indices) -> Floats:
        """Bytes (2, 2, runs) that runs receive, and of the gradients they send back: each tensor
        once, straight from its maker.
        """
        sizes = self.arrivals[:, :, start]
        for maker, users, num_bytes in self._skips:
            # The first user at or behind the run's start; users are in ascending order.
            at = np.searchsorted(users, start)
            first_use = np.append(users, len(self.graph.blocks))[at]
            # Used in the run, made before it, and not already counted at its first block.
            is_more = (maker < start) & (start < first_use) & (first_use < end)
            sizes = sizes + num_bytes[:, :, None] * is_more
        return sizes

    def transfer_s(self, pp_group: Group, *, to_tp: int | None = None) -> tuple[Floats, Floats]:
        """Return seconds of one transfer into a stage that starts at block i (n + 1), and of the
        gradient's back from it; the least, where skips reach past a stage.

        The stage before, which gathers what came in pieces, may have a tp of its own: `to_tp`.
        """
        key = pp_group, to_tp or self.degrees[self._inner]
        if key not in self._transfers:
            self._transfers[key] = self._message_seconds(self.arrivals, pp_group, key[1])
        return self._transfers[key]

    def run_transfer_s(
        self, start: Indices, end: Indices, pp_group: Group, *, to_tp: int | None = None
    ) -> tuple[Floats, Floats]:
        """Return seconds of one transfer into runs, and of the gradient's back from them."""
        if not self._skips:
            there, back = self.transfer_s(pp_group, to_tp=to_tp)
            return there[start], back[start]
        return self._message_seconds(
            self.arriving(start, end), pp_group, to_tp or self.degrees[self._inner]
        )

    def _message_seconds(self, sizes: Floats, pp_group: Group, tp: int) -> tuple[Floats, Floats]:
        # What all ranks of a node hold whole travels in pieces, and is gathered where it arrives.
        group = axis_group(self.profile.cluster, size=tp, stride=1)
        # Rows (all bytes, bytes of tensors held whole): few differ along a chain, and each is
        # priced once.
        kinds, of_kind = np.unique(
            np.moveaxis(sizes, 1, 2).reshape(-1, 2), axis=0, return_inverse=True
        )
        seconds = [
            boundary_seconds(self.profile, pp_group, group, num_bytes=size, whole_bytes=whole)
            for size, whole in kinds.tolist()
        ]
        there, back = np.array(seconds)[of_kind.reshape(-1)].reshape(2, -1)
        return there, back
