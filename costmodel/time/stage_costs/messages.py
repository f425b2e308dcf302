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

from costmodel.time.communication import boundary_seconds
from costmodel.time.stage_costs.runs import Floats, Indices
from costmodel.topology import axis_group
from planner.graph import ModelGraph
from planner.layout.placement import Placement, Shard
from profiles import Group, Profile


@dataclass(kw_only=True, eq=False)
class Messages:
    """What stages receive under one split. Mutable: it remembers seconds."""

    graph: ModelGraph
    """The model."""
    profile: Profile
    """The machine."""
    tp: int
    """Tensor-parallel degree of the receiving stage."""
    cp: int
    """Context-parallel degree."""
    microbatch_size: int
    """Samples of one microbatch in one dp replica."""
    on_tp: Mapping[str, Placement]
    """How each block's outputs lie on tp."""
    on_cp: Mapping[str, Placement]
    """How each block's outputs lie on cp."""
    _hops: dict[tuple[Group, int], tuple[Floats, Floats]] = field(default_factory=dict)

    @cached_property
    def arrivals(self) -> Floats:
        """Bytes a stage that starts at block i receives, and of the gradients it sends back.

        (2, 2, n + 1): forward and back; all, and of tensors that every tp rank holds whole.
        0 at the ends. What block i itself takes from earlier blocks: all that such a stage
        receives in a chain, the least of it where skips reach further (`_skips`).
        """
        sizes = np.zeros((2, 2, len(self.graph.blocks) + 1))
        for block in self.graph.blocks:
            for name in dict.fromkeys(block.inputs):
                if self.graph.producer.get(name, block.index) < block.index:
                    sizes[:, :, block.index] += self._message_bytes(name)
        return sizes

    def _message_bytes(self, name: str) -> Floats:
        """Return bytes of a tensor in `arrivals`' order: (forward and back; all and whole)."""
        meta = self.graph.tensor[name]
        is_cut = isinstance(self.on_tp[name], Shard)
        size = meta.bytes_at(self.microbatch_size) // (self.tp if is_cut else 1)
        size //= self.cp if isinstance(self.on_cp[name], Shard) else 1
        whole = 0 if is_cut else size
        back = meta.requires_grad
        return np.array([[size, whole], [size * back, whole * back]], dtype=float)

    @cached_property
    def _skips(self) -> tuple[tuple[int, Indices, Floats], ...]:
        """(maker, users, bytes) of the tensors that reach past the next block."""
        users: dict[str, list[int]] = {}
        for block in self.graph.blocks:
            for name in dict.fromkeys(block.inputs):
                if self.graph.producer.get(name, block.index) < block.index:
                    users.setdefault(name, []).append(block.index)
        return tuple(
            (maker, np.array(found), self._message_bytes(name))
            for name, found in users.items()
            if found[-1] > (maker := self.graph.producer[name]) + 1
        )

    def _arriving(self, start: Indices, end: Indices) -> Floats:
        """Bytes (2, 2, runs) that runs receive, and of the gradients they send back: each tensor
        once, straight from its maker.
        """
        sizes = self.arrivals[:, :, start]
        for maker, users, num_bytes in self._skips:
            at = np.searchsorted(users, start)
            first_use = np.append(users, len(self.graph.blocks))[at]
            # Used in the run, made before it, and not already counted at its first block.
            is_more = (maker < start) & (start < first_use) & (first_use < end)
            sizes = sizes + num_bytes[:, :, None] * is_more
        return sizes

    def hop_s(self, hop: Group, *, to_tp: int | None = None) -> tuple[Floats, Floats]:
        """Return seconds of one transfer into a stage that starts at block i (n + 1), and of the
        gradient's back from it; the least, where skips reach past a stage.

        The stage before, which gathers what came in pieces, may have a tp of its own: `to_tp`.
        """
        key = hop, to_tp or self.tp
        if key not in self._hops:
            self._hops[key] = self._message_seconds(self.arrivals, hop, key[1])
        return self._hops[key]

    def run_hop_s(
        self, start: Indices, end: Indices, hop: Group, *, to_tp: int | None = None
    ) -> tuple[Floats, Floats]:
        """Return seconds of one transfer into runs, and of the gradient's back from them."""
        if not self._skips:
            there, back = self.hop_s(hop, to_tp=to_tp)
            return there[start], back[start]
        return self._message_seconds(self._arriving(start, end), hop, to_tp or self.tp)

    def _message_seconds(self, sizes: Floats, hop: Group, tp: int) -> tuple[Floats, Floats]:
        group = axis_group(self.profile.cluster, size=tp, stride=1)
        kinds, of_kind = np.unique(
            np.moveaxis(sizes, 1, 2).reshape(-1, 2), axis=0, return_inverse=True
        )
        seconds = [
            boundary_seconds(self.profile, hop, group, num_bytes=size, whole_bytes=whole)
            for size, whole in kinds.tolist()
        ]
        there, back = np.array(seconds)[of_kind.reshape(-1)].reshape(2, -1)
        return there, back
