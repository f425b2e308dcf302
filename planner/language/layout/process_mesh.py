"""Ranks in a box with named axes; torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from planner.errors import LayoutError


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMesh:
    """Ranks in a box with named axes, in any order: `ranks` lists them row by row.

    `folded` is a second box of the same ranks, with axes of other names (the experts'): questions
    about these are answered by it.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    folded: ProcessMesh | None = None

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
        box = self._with_axes(axes)
        by_coordinate = dict(zip(product(*map(range, box.shape)), box.ranks, strict=True))
        sides = list(zip(box.axes, box.shape, strict=True))
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
        box = self._with_axes(axes)
        return prod(size for axis, size in zip(box.axes, box.shape, strict=True) if axis in axes)

    def number(self, rank: int, *axes: str) -> int:
        """Return a rank's number among those along one axis or several, counted row by row."""
        box, number = self._with_axes(axes), 0
        sides = zip(box.axes, box.shape, box.coordinate(rank), strict=True)
        for axis, size, position in sides:
            if axis in axes:
                number = number * size + position
        return number

    def _with_axes(self, axes: tuple[str, ...]) -> ProcessMesh:
        """Return the box that has these axes: this one, or the folded one."""
        folded = self.folded
        return folded if folded is not None and set(axes) <= set(folded.axes) else self
