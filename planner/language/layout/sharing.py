"""Which ranks of a mesh share a parameter: who holds other pieces of it, and who holds the same.

The gradient's norm counts each element once, checkpoints write each once, ties add pieces of other
stages, and an optimizer that needs a parameter whole collects its pieces: all of them read the
same answer. A tensor that lies on the experts' mesh is shared along its sides, any other along the
axes of the mesh of all.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.language.layout.axes import EXPERT_SHARDS, EXPERTS_MESH, axis_names, members
from planner.language.layout.placement import Shard
from planner.language.layout.placements import Placements


@dataclass(frozen=True, slots=True)
class Sharing:
    """Mesh axes, by what ranks along them hold of a tensor.

    Attributes:
        cut: pieces, by its placements; the coarse cut first.
        chunked: chunks of such a piece, as FSDP2 cuts dim 0; the axes "shards", or none.
        alike: the same.
    """

    cut: tuple[str, ...]
    chunked: tuple[str, ...]
    alike: tuple[str, ...]


def sharing(placements: Placements, *, is_sharded: bool) -> Sharing:
    """Return which axes' ranks share a tensor; `is_sharded` says that FSDP2 cuts it."""
    cut = tuple(axis for axis, placement in placements.pairs if isinstance(placement, Shard))
    axes, shards = (
        (EXPERTS_MESH, EXPERT_SHARDS) if placements.are_of_experts else (axis_names(), "shards")
    )
    chunked = members(shards) if is_sharded else ()
    return Sharing(
        cut=cut,
        chunked=chunked,
        alike=tuple(axis for axis in axes if axis not in (*cut, *chunked)),
    )
