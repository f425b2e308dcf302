"""How a tensor lies on all axes that blocks are lowered on, and how to change it step by step.

Where two axes cut one dim of a tensor, the inner axis cuts the coarse pieces and the outer axis
cuts each of those (`axes.lowered_axes`). So the coarse cut can change only while nothing finer
cuts that dim: finer pieces are gathered first, and cut again at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from planner.language.layout.axes import EXPERT_DATA, EXPERT_SHARDS, FOLDED, lowered_axes
from planner.language.layout.placement import Placement, Replicate, Shard

_WHOLE = Replicate()
_FOLDED = tuple(axis.name for axis in reversed(FOLDED))


@dataclass(frozen=True, slots=True)
class Placements:
    """A placement for each lowered axis; an axis that is not in `pairs` has whole tensors.

    A tensor that lies on the experts' mesh has placements on its axes (`axes.FOLDED`) and on no
    other. Prints as ``S(1)@tp R@cp``.
    """

    pairs: tuple[tuple[str, Placement], ...] = ()

    @classmethod
    def of(cls, by_axis: Mapping[str, Placement]) -> Placements:
        """Return the placements by axis name."""
        order = (*(axis.name for axis in lowered_axes()), *_FOLDED)
        return cls(tuple((a, by_axis[a]) for a in order if by_axis.get(a, _WHOLE) != _WHOLE))

    def __getitem__(self, axis: str) -> Placement:
        for name, placement in self.pairs:
            if name == axis:
                return placement
        return _WHOLE

    @property
    def are_of_experts(self) -> bool:
        """Whether they are on the experts' mesh."""
        return any(axis in _FOLDED for axis, _ in self.pairs)

    @property
    def replicas(self) -> str:
        """The name of the ranks with the same piece and other samples: gradients are summed over
        these (`axes.members`).
        """
        return EXPERT_DATA if self.are_of_experts else "data"

    @property
    def shards(self) -> str:
        """The name of those of them that ZeRO shards over."""
        return EXPERT_SHARDS if self.are_of_experts else "shards"

    def __str__(self) -> str:
        if self.are_of_experts:
            return " ".join(f"{placement}@{axis}" for axis, placement in self.pairs)
        return " ".join(f"{self[axis.name]}@{axis.name}" for axis in lowered_axes())

    def on(self, axis: str, placement: Placement) -> Placements:
        """Return these placements with the one on an axis changed."""
        return Placements.of({**dict(self.pairs), axis: placement})

    def parts(self, sizes: Mapping[str, int]) -> int:
        """Return how many different pieces a tensor is in, on a mesh of these sizes."""
        count = 1
        for axis, placement in self.pairs:
            count *= sizes[axis] if isinstance(placement, Shard) else 1
        return count


WHOLE = Placements()
"""The whole tensor on every rank."""


class Move(NamedTuple):
    """One redistribution: from which placement to which, on one axis."""

    axis: str
    src: Placement
    dst: Placement


@lru_cache(maxsize=4096)
def moves_between(src: Placements, dst: Placements) -> tuple[Move, ...]:
    """Return the redistributions that bring a tensor from one place to another, in order."""
    names = [axis.name for axis in lowered_axes()]
    now = {name: src[name] for name in names}
    found = []
    for at, name in enumerate(names):
        # From the coarse cut (innermost axis) to the fine: a finer cut of the same dim must not be
        # in the way.
        if now[name] == dst[name]:
            continue
        # Finest first: each gather must find contiguous pieces. (The loop over names cuts again
        # later.)
        for finer in reversed(names[at + 1 :]):
            cuts = now[finer]
            if cut_one_dim(now[name], cuts) or cut_one_dim(dst[name], cuts):
                found.append(Move(finer, cuts, _WHOLE))
                now[finer] = _WHOLE
        found.append(Move(name, now[name], dst[name]))
        now[name] = dst[name]
    return tuple(found)


def cut_one_dim(a: Placement, b: Placement) -> bool:
    """Whether both placements cut the same dim of a tensor."""
    return isinstance(a, Shard) and isinstance(b, Shard) and a.dim == b.dim
