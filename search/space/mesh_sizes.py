"""Every mesh of a stage that divides the devices: sizes of its axes, and the pipeline's.

    devices = pp * product of the sizes of all axes

Axes that blocks are lowered on come first, innermost first, then those that cut the batch. One
axis is not chosen: it gets the ranks that the others leave (`axes.rest_axis`). What a request
fixed or allowed is honoured exactly; of an axis that it does not name, sizes are tried as the
table of axes says (`Axis.searched`, `Axis.within_node`, `Axis.most`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

from planner.cluster import ClusterSpec
from planner.errors import LayoutError
from planner.graph import ModelGraph
from planner.layout.axes import Axis, Degrees, batch_axes, lowered_axes, rest_axis
from search.request import SearchRequest

Reasons = dict[str, str]
"""Rules that left out meshes or schedules, each with its first example; grows in place."""


@dataclass(frozen=True, kw_only=True)
class MeshSizes:
    """The meshes of a request.

    Attributes:
        request: what is fixed, allowed and forbidden.
        graph: the model, which some axes can't divide.
        cluster: whose nodes some axes stay in.
        can_split: whether any op of the model can be split in so many pieces.
        reasons: what was left out, and why.
    """

    request: SearchRequest
    graph: ModelGraph
    cluster: ClusterSpec
    can_split: Callable[[int], bool]
    reasons: Reasons

    def all(self) -> Iterator[tuple[Degrees, int]]:
        """Yield (sizes of the axes, pipeline ranks)."""
        rest = rest_axis()
        chosen = [axis for axis in (*lowered_axes(), *reversed(batch_axes())) if axis is not rest]
        for sizes in self._of(chosen, {}):
            left = self.request.num_devices // prod(sizes.values())
            for pp in self.request.values("pp", divisors(left)):
                others = left // pp
                fits = left % pp == 0 and others in self.request.values(rest.name, (others,))
                if fits:
                    yield Degrees(**sizes, **{rest.name: others}), pp

    def _of(self, axes: list[Axis], before: dict[str, int]) -> Iterator[dict[str, int]]:
        """Yield the sizes of `axes` in all ways, with those chosen `before` them."""
        if not axes:
            yield before
            return
        axis, *others = axes
        left = self.request.num_devices // prod(before.values())
        for size in self.request.values(axis.name, self._searched(axis)):
            if left % size == 0 and (size == 1 or self._can_have(axis, size)):
                yield from self._of(others, {**before, axis.name: size})

    def _searched(self, axis: Axis) -> list[int]:
        """Return the sizes to try of an axis that the request does not name."""
        spans_nodes = self.request.num_devices > self.cluster.devices_per_node
        if not axis.searched or (axis.between_nodes and not spans_nodes):
            return [1]
        most = self.request.num_devices if axis.most is None else axis.most(self.graph)
        return [n for n in divisors(self.request.num_devices) if n == 1 or n <= most]

    def _can_have(self, axis: Axis, size: int) -> bool:
        """Whether the axis can have a size; if not, why is recorded."""
        given = f"{axis.name}={size}"
        if not self.request.names(axis.name, size):
            if axis.within_node and size > self.cluster.devices_per_node:
                self.reasons.setdefault(
                    f"{axis.name} stays in a node",
                    f"{given} spans nodes, which only a fixed `{axis.name}` may",
                )
                return False
            if not axis.whole_params and not self.can_split(size):
                self.reasons.setdefault(
                    f"{axis.name} splits an op", f"{given} divides no dimension of the model"
                )
                return False
        try:
            axis.check(self.graph, axis.name, size)
        except LayoutError as error:
            self.reasons.setdefault(f"{axis.name} divides {axis.divides}", str(error))
            return False
        return True


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
