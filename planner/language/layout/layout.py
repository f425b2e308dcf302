"""Layout: how one tensor lies on a mesh of any dimension; torch-free.

A layout is a *device matrix* (the mesh: named axes and the rank at each coordinate) and a
placement for each axis. Two axes may shard one tensor dim: they then apply in mesh order,
the first axis cutting the coarse pieces and the next cutting each of those.

    mesh [[2, 4, 5], [0, 1, 3]] with axes x (2) and y (3), tensor (4, 3), Shard(0) on x and
    Shard(1) on y: rank 4 sits at (0, 1) and holds rows 0-1 of column 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from planner.errors import LayoutError
from planner.language.layout.placement import Partial, Placement, Replicate, Shard

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMesh:
    """Ranks in a box with named axes, in any order: `ranks` lists them row by row."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raise LayoutError when axes, sizes and ranks do not go together."""
        if len(self.axes) != len(self.shape) or len(set(self.axes)) != len(self.axes):
            raise LayoutError(
                f"mesh axes {self.axes} with sizes {self.shape}: each axis needs one size and "
                "a name of its own, so give as many of both"
            )
        if prod(self.shape) != len(self.ranks) or len(set(self.ranks)) != len(self.ranks):
            raise LayoutError(
                f"a mesh of sizes {self.shape} needs {prod(self.shape)} different ranks; "
                f"{len(self.ranks)} given: {list(self.ranks)}"
            )

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return where a rank sits; raise LayoutError if it is not in the mesh."""
        if rank not in self.ranks:
            raise LayoutError(f"rank {rank} is not in the mesh of ranks {list(self.ranks)}")
        # Ranks are listed row by row: the last axis counts fastest.
        index = self.ranks.index(rank)
        found = []
        for size in reversed(self.shape):
            index, position = divmod(index, size)
            found.append(position)
        return tuple(reversed(found))

    def rank_at(self, coordinate: tuple[int, ...]) -> int:
        """Return the rank that sits at a place."""
        index = 0
        for size, position in zip(self.shape, coordinate, strict=True):
            index = index * size + position
        return self.ranks[index]

    def groups(self, *axes: str) -> Iterator[tuple[int, ...]]:
        """Yield the ranks of each group along one axis or several, row by row."""
        by_coordinate = dict(zip(product(*map(range, self.shape)), self.ranks, strict=True))
        sides = list(zip(self.axes, self.shape, strict=True))
        # A coordinate is the sum of a place along the other axes and a place inside the group.
        inside = [range(size) if axis in axes else range(1) for axis, size in sides]
        others = [range(1) if axis in axes else range(size) for axis, size in sides]
        for fixed in product(*others):
            yield tuple(
                by_coordinate[tuple(a + b for a, b in zip(fixed, moved, strict=True))]
                for moved in product(*inside)
            )

    def size(self, *axes: str) -> int:
        """Return the number of ranks along one axis or several."""
        return prod(size for axis, size in zip(self.axes, self.shape, strict=True) if axis in axes)

    def number(self, rank: int, *axes: str) -> int:
        """Return a rank's number among those along one axis or several, counted row by row."""
        number = 0
        sides = zip(self.axes, self.shape, self.coordinate(rank), strict=True)
        for axis, size, position in sides:
            if axis in axes:
                number = number * size + position
        return number


Box = tuple[tuple[int, int], ...]
"""A part of a tensor: (start, stop) of each dim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A mesh and the placement of a tensor on each of its axes."""

    mesh: ProcessMesh
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        """Raise LayoutError unless each axis has one placement."""
        if len(self.placements) != len(self.mesh.axes):
            raise LayoutError(
                f"{len(self.placements)} placements given for the mesh axes {self.mesh.axes}; "
                "give one for each axis"
            )

    def __str__(self) -> str:
        pairs = zip(self.mesh.axes, self.placements, strict=True)
        return " ".join(f"{axis}:{placement}" for axis, placement in pairs)

    @property
    def is_partial(self) -> bool:
        """Whether ranks hold terms of a sum along some axis."""
        return any(isinstance(p, Partial) for p in self.placements)

    def shards_of(self, dim: int) -> tuple[int, ...]:
        """Return the mesh axes (as positions) that cut a tensor dim, coarse cut first."""
        return tuple(i for i, p in enumerate(self.placements) if p == Shard(dim))

    def local_shape(self, shape: Shape) -> Shape:
        """Return the shape of each rank's part; raise LayoutError where it does not divide."""
        for placement in self.placements:
            if isinstance(placement, Shard) and placement.dim >= len(shape):
                raise LayoutError(
                    f"{placement} needs a tensor of more than {len(shape)} dims; use R or a dim "
                    "that there is"
                )
        found = []
        for dim, size in enumerate(shape):
            parts = prod(self.mesh.shape[axis] for axis in self.shards_of(dim))
            if size % parts:
                fitting = [n for n in range(1, size + 1) if size % n == 0]
                raise LayoutError(
                    f"dim {dim} of size {size} can't be sharded {parts} ways ({self}); "
                    f"use {', '.join(map(str, fitting))}"
                )
            found.append(size // parts)
        return tuple(found)

    def box(self, shape: Shape, rank: int) -> Box:
        """Return the part of the tensor a rank holds (all of it along other dims)."""
        coordinate = self.mesh.coordinate(rank)
        found = []
        for dim, local in enumerate(self.local_shape(shape)):
            index = 0
            # The number of the piece, the coarse cut counting most.
            for axis in self.shards_of(dim):
                index = index * self.mesh.shape[axis] + coordinate[axis]
            found.append((index * local, (index + 1) * local))
        return tuple(found)

    def gradient(self) -> Layout:
        """Return the layout of this value's gradient: whole where the value is a sum."""
        whole = tuple(Replicate() if isinstance(p, Partial) else p for p in self.placements)
        return Layout(mesh=self.mesh, placements=whole)


def intersection(a: Box, b: Box) -> Box | None:
    """Return the common part of two boxes, or None."""
    found = tuple((max(s, t), min(e, f)) for (s, e), (t, f) in zip(a, b, strict=True))
    return found if all(start < stop for start, stop in found) else None


def box_numel(box: Box) -> int:
    """Return the number of elements in a box."""
    return prod(sizes(box))


def sizes(box: Box) -> Shape:
    """Return the shape of a box."""
    return tuple(stop - start for start, stop in box)


def slices(box: Box, held: Box) -> tuple[slice, ...]:
    """Return where a box lies inside another one that holds it."""
    return tuple(
        slice(start - first, stop - first)
        for (start, stop), (first, _) in zip(box, held, strict=True)
    )
