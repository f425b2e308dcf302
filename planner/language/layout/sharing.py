"""Which ranks of a mesh share a parameter: who holds other pieces of it, and who holds the same.

The gradient's norm counts each element once, checkpoints write each once, ties add pieces of other
stages, and an optimizer that needs a parameter whole collects its pieces: all of them read the
same answer. Of a tensor that a rank of an axis holds alone (`Held`) the others have nothing, and
share nothing. A tensor that lies on the experts' mesh is shared along its sides, any other along
the axes of the mesh of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.language.layout.axes import EXPERTS_MESH, axis_names, members
from planner.language.layout.placement import Held, Shard
from planner.language.layout.placements import Placements
from planner.language.layout.process_mesh import ProcessMesh


@dataclass(frozen=True, slots=True)
class Sharing:
    """Mesh axes, by what ranks along them hold of a tensor.

    Attributes:
        cut: pieces, by its placements; the coarse cut first.
        chunked: chunks of such a piece, as ZeRO cuts it along `shard_dim`; the axes "shards", or
            none.
        alike: the same.
    """

    cut: tuple[str, ...]
    chunked: tuple[str, ...]
    alike: tuple[str, ...]


MOST_PADDING = 1 / 16
"""Of a parameter, what dim 0 may be filled up by: another dim costs a copy of the whole parameter
at each gather and each sum, which takes a memory's rate where the message takes a link's.
"""


def shard_dim(shape: Sequence[int], shards: int) -> int:
    """Return the dim along which ZeRO cuts a rank's piece of a parameter into equal shards.

    Dim 0, filled up to a multiple of the shards, where that adds little (`MOST_PADDING`): FSDP2
    copies these shards in runs. Else the first dim that divides evenly, as FSDP2 fills up no other:
    8 experts' matrices [8, 4096, 14336] lie on 64 ranks as [8, 64, 14336] each, where dim 0 would
    give 8 of the ranks a whole expert, and the others a message as large. Dim 0 where none divides.
    """
    rows = shape[0]
    padding = -rows % shards
    if padding <= MOST_PADDING * rows:
        return 0
    return next((dim for dim, size in enumerate(shape) if size % shards == 0), 0)


def sharing(placements: Placements, *, is_sharded: bool) -> Sharing:
    """Return which axes' ranks share a tensor; `is_sharded` says that FSDP2 cuts it."""
    cut = tuple(axis for axis, placement in placements.pairs if isinstance(placement, Shard))
    alone = tuple(axis for axis, placement in placements.pairs if isinstance(placement, Held))
    axes = EXPERTS_MESH if placements.are_of_experts else axis_names()
    chunked = members(placements.shards) if is_sharded else ()
    return Sharing(
        cut=cut,
        chunked=chunked,
        alike=tuple(axis for axis in axes if axis not in (*cut, *chunked, *alone)),
    )


def holds(placements: Placements, mesh: ProcessMesh, rank: int) -> bool:
    """Whether a rank of a mesh has some of a tensor: not where another holds it alone."""
    return all(
        mesh.number(rank, axis) == placement.number
        for axis, placement in placements.pairs
        if isinstance(placement, Held)
    )
