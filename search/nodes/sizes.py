"""Nodes of the bound phase: degrees, their microbatch sizes, and the layouts of each size.

    DegreesNode    all shapes without cp and ep (or all with one of them)
      SizesNode    the microbatch sizes of one (ep, cp, tp), ascending: layouts are found and priced
        ShapeNode  one shape with one layout (`configurations`)

A layout is looked at only as closely as it takes to prune it (`layout_candidates`).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from planner.deadline import is_late
from search.branch_and_bound import BEATEN, Node, Wave
from search.nodes.configurations import ShapeNode
from search.search_state import (
    OfBlocks,
    Outcomes,
    SearchState,
    degrees_wave,
    shapes_wave,
    sizes_wave,
)
from search.space.configuration import Shape
from search.stages.either_table import with_both
from search.stages.layout_candidates import LayoutCandidate
from search.stages.stage_table import StageTable
from search.stages.worth_trying import worth_trying

TOO_LARGE = "memory: a smaller microbatch does not fit either"
NO_FASTER = "microbatch: a smaller one is as fast per sample"
NO_LAYOUT = "layout: cp or ep cannot divide what blocks do"
NO_ZERO_STAGE = "memory: parameters or one block alone"

Sizes = tuple[tuple[Shape, ...], ...]
"""Shapes of equal ep, cp and tp: a tuple for each microbatch size, ascending."""


def push_degrees(search: SearchState, shapes: Sequence[Shape]) -> None:
    """Push the roots of a search: shapes without cp and ep, then shapes with one of them."""
    groups: dict[Wave, list[Shape]] = {}
    for shape in shapes:
        groups.setdefault(degrees_wave(shape.block_sizes), []).append(shape)
    for wave in sorted(groups):
        node = DegreesNode(bound=0.0, wave=wave, shapes=tuple(groups[wave]))
        search.num_considered += node.num_configurations
        search.push(node)


@dataclass(frozen=True, kw_only=True, eq=False)
class DegreesNode(Node[SearchState]):
    """Shapes of all degrees."""

    shapes: tuple[Shape, ...]

    @property
    def num_configurations(self) -> int:
        """Of all shapes, each with one layout."""
        return _count([self.shapes])

    def refine(self, search: SearchState) -> Outcomes:
        """Yield the microbatch sizes of each (ep, cp, tp)."""
        groups: dict[OfBlocks, dict[int, list[Shape]]] = {}
        for shape in self.shapes:
            of_degrees = groups.setdefault(shape.block_sizes.degrees, {})
            of_degrees.setdefault(shape.microbatch_size, []).append(shape)
        for (ep, cp, hp, tp, etp), by_size in sorted(groups.items()):
            sizes = tuple(tuple(by_size[size]) for size in sorted(by_size))
            # cp divides at best all that blocks do without it. (ep also spares a rank the reading
            # of other experts' matrices: what it leaves is not known from the work without it.)
            is_known = cp * hp > 1 and ep == 1 and not search.candidates.across_samples
            without = 1, 1, 1, tp, etp
            per_sample_s = search.least_per_sample_s.get(without, 0.0) if is_known else 0.0
            bounds = tuple(_least_step_s(shapes, per_sample_s) for shapes in sizes)
            wave = sizes_wave(sizes[0][0].block_sizes)
            yield SizesNode(bound=min(bounds), wave=wave, sizes=sizes, bounds=bounds)


@dataclass(frozen=True, kw_only=True, eq=False)
class SizesNode(Node[SearchState]):
    """Microbatch sizes of one (ep, cp, tp), ascending, with the bound of each.

    They are priced in this order, and no further once a size cannot fit however its blocks are
    split, or is no faster per sample than a smaller one (larger ones only fill the pipeline less).
    """

    sizes: Sizes
    bounds: tuple[float, ...]

    @property
    def num_configurations(self) -> int:
        """Of all sizes, each with one layout."""
        return _count(self.sizes)

    @property
    def label(self) -> str:
        """What is priced."""
        shape = self.sizes[0][0]
        ep = f"ep={shape.ep}, " if shape.ep > 1 else ""
        return f"pricing {ep}tp={shape.tp}, microbatch size {shape.microbatch_size * shape.unit}"

    def refine(self, search: SearchState) -> Outcomes:
        """Yield the shapes of the smallest size with each layout, and the larger sizes."""
        shapes, rest = self.sizes[0], self.sizes[1:]
        rule = ""
        if self.bounds[0] >= search.to_beat_s:
            search.prune(BEATEN, _count([shapes]))
        else:
            rule = yield from _shape_nodes(search, shapes)
        if not rest:
            return
        if rule:
            search.prune(rule, _count(rest))
            # Mixes of meshes leave out the same sizes.
            search.skipped_sizes |= {some[0].block_sizes for some in rest}
        else:
            bounds = self.bounds[1:]
            yield replace(self, sizes=rest, bounds=bounds, bound=min(bounds))


def _shape_nodes(search: SearchState, shapes: Sequence[Shape]) -> Generator[ShapeNode, None, str]:
    """Find layouts of shapes of equal sizes of blocks; yield each shape with each layout
    that may fit. Return the rule by which no larger size need be tried, empty if one must.
    """
    sizes = shapes[0].block_sizes
    degrees, size = sizes.degrees, sizes.microbatch_size
    shapes = _may_win(search, shapes)
    if not shapes:
        return ""
    count = _count([shapes])
    layouts = _layouts(search, shapes)
    if not layouts:
        search.prune(NO_LAYOUT, count)
        return ""
    beaten = [layout for layout in layouts if _is_enough(search, shapes, layout)]
    tables = worth_trying(layout.table for layout in layouts if layout not in beaten)
    # Each shape was counted with one layout; each further layout is a configuration of its own.
    search.num_considered += count * (len(beaten) + len(tables) - 1)
    for layout in beaten:
        for shape in shapes:
            bound = layout.least_step_s(shape)
            wave = shapes_wave(sizes, shape.pp)
            yield ShapeNode(bound=bound, wave=wave, shape=shape, find_table=layout.find_table)
    # Bounds of bisection are none, and integer programs are too slow to ask them once more.
    if search.request.solver == "dp":
        tables = tuple(with_both(tables))
    if sizes.cp * sizes.hp == 1:
        search.without_cp[sizes] = *beaten, *tables
    fits, seconds = bool(beaten), float("inf")
    for table in tables:
        for own in table.members:
            seconds = min(seconds, search.bounds(own).chain_s(shapes[0].recompute) / size)
        for shape in shapes:
            node = _shape_node(search, shape, table)
            if node is not None:
                fits = True
                yield node
    # Bounds of shapes with cp stand on it, so layouts that
    # were pruned unpriced count by their bound.
    least = min([seconds, *(layout.least_s / size for layout in beaten)])
    least_before = search.least_per_sample_s.get(degrees, float("inf"))
    search.least_per_sample_s[degrees] = min(least, least_before)
    before = search.per_sample_s.get(degrees, float("inf"))
    search.per_sample_s[degrees] = min(seconds, before)
    if search.candidates.across_samples:
        # A batch of one microbatch has a size for each dp: no size stands for another.
        return ""
    if not fits and not _larger_may_fit(search, shapes):
        return TOO_LARGE
    # A larger microbatch pays off by work per sample alone: with fewer of them the pipeline is
    # filled less. A pruned layout has no price of a sample to compare.
    if not search.every_size and not beaten and seconds >= before:
        return NO_FASTER
    return ""


def _may_win(search: SearchState, shapes: Sequence[Shape]) -> Sequence[Shape]:
    """Return the shapes that may win with cp, by what their blocks take without it."""
    if shapes[0].sequence_parts == 1 or search.candidates.across_samples:
        return shapes
    left = [shape for shape in shapes if search.least_with_cp_s(shape) < search.to_beat_s]
    search.prune(BEATEN, _count([shapes]) - _count([left]))
    return left


def _layouts(search: SearchState, shapes: Sequence[Shape]) -> tuple[LayoutCandidate, ...]:
    """Return layout candidates, each kind more costly to find than the one before.

    A kind whose first candidate is beaten stands for the kinds after it. So does the first kind
    once the time limit has passed: it is quick, and has a bound that tells what is left open.
    """
    layouts: tuple[LayoutCandidate, ...] = ()
    for layouts in search.candidates.layouts.at(*shapes[0].block_sizes).kinds():
        if layouts and _is_enough(search, shapes, layouts[0]):
            break
    return layouts


def _is_enough(search: SearchState, shapes: Sequence[Shape], layout: LayoutCandidate) -> bool:
    """Whether a layout's bound is all that is needed of it: it is beaten, or there is a plan and no
    time left to look at others.
    """
    return _is_beaten(search, shapes, layout) or (search.best is not None and is_late())


def _is_beaten(search: SearchState, shapes: Sequence[Shape], layout: LayoutCandidate) -> bool:
    """Whether the best plan is as fast as any of the shapes can be with a layout."""
    return all(layout.least_step_s(shape) >= search.to_beat_s for shape in shapes)


def _shape_node(search: SearchState, shape: Shape, table: StageTable) -> ShapeNode | None:
    """Return a shape without the ZeRO stages that cannot fit; None if none can."""
    bounds = search.bounds(table)
    plain = replace(shape, options=shape.options[:1])
    # All schedules share the bound of memory, so one of each ZeRO stage is looked at.
    zeros = tuple(
        configuration.zero
        for configuration in plain.configurations()
        if bounds.least_peak_bytes(configuration) <= search.memory_limit_bytes
    )
    num_tables = len(table.members)
    too_large = (len(shape.zeros) - len(zeros)) * len(shape.options)
    search.prune(NO_ZERO_STAGE, too_large * num_tables)
    if not zeros:
        return None
    return ShapeNode(
        bound=bounds.least_step_of_shape(shape),
        wave=shapes_wave(shape.block_sizes, shape.pp),
        shape=replace(shape, zeros=zeros),
        find_table=lambda: table,
        num_tables=num_tables,
    )


def _larger_may_fit(search: SearchState, shapes: Sequence[Shape]) -> bool:
    """Whether a larger microbatch may fit though this one does not.

    Its layouts may lie otherwise. So it may where the layout of fewest bytes would fit here or,
    once nothing has fitted at all, where this size is not more than twice too large.
    """
    first = shapes[0]
    if search.every_size:
        tables, enough = search.candidates.tables(*first.block_sizes), 2 * search.memory_limit_bytes
    else:
        tables = search.candidates.layouts.at(*first.block_sizes).leanest if first.tp > 1 else ()
        enough = search.memory_limit_bytes
    return any(
        search.bounds(table).least_peak_bytes(configuration) <= enough
        for table in tables
        for shape in shapes
        for configuration in replace(shape, options=shape.options[:1]).configurations()
    )


def _least_step_s(shapes: Sequence[Shape], per_sample_s: float) -> float:
    """Return a step time that shapes cannot beat, from a sample's seconds without cp.

    samples of a replica * seconds of a sample / (cp * hp * pp): the work, dealt evenly.
    """
    return min(
        shape.num_microbatches
        * shape.microbatch_size
        * per_sample_s
        / (shape.sequence_parts * shape.pp)
        for shape in shapes
    )


def _count(sizes: Sequence[Sequence[Shape]]) -> int:
    return sum(shape.num_configurations for shapes in sizes for shape in shapes)
