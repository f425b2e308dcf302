"""What crosses the boundary of two blocks: placements that are changed, and their seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from costmodel.time.block.moved import BlockMoved, Moved
from planner.language.graph import ModelGraph
from planner.language.layout.placement import Placement, Replicate, Shard, parse_placement
from planner.language.layout.redistribute import collectives
from planner.language.plan import ClassLayout
from planner.units import DTYPE_BYTES
from profiles import Group, Profile

Layouts = Mapping[int, ClassLayout]
"""Layouts by class index; a class without one runs replicated."""


def placement_of(graph: ModelGraph, name: str, layouts: Layouts) -> Placement:
    """Return how a boundary tensor lies on the layouts' axis as its maker leaves it."""
    maker = graph.producer.get(name)
    if maker is None:
        return Replicate()
    block = graph.blocks[maker]
    layout = layouts.get(block.class_index)
    if layout is None:
        return Replicate()
    return parse_placement(layout.outputs[block.outputs.index(name)])


def block_entry(
    graph: ModelGraph,
    block_index: int,
    layouts: Layouts,
    profile: Profile,
    *,
    axis: str,
    group: Group,
    microbatch_size: int,
    others: Sequence[tuple[Layouts, int]] = (),
) -> BlockMoved:
    """Return the collectives that bring a block's inputs to where it takes them on one axis;
    nothing hides them. `others` tell how they lie on the other axes, with the size of each.
    """
    forward: list[Moved] = []
    backward: list[Moved] = []
    if group.size == 1:
        return BlockMoved()
    block = graph.blocks[block_index]
    layout = layouts.get(block.class_index)
    for position, name in enumerate(block.inputs):
        source = placement_of(graph, name, layouts)
        taken = parse_placement(layout.inputs[position]) if layout else Replicate()
        if source == taken:
            continue
        meta = graph.tensor[name]
        num_bytes = meta.numel_at(microbatch_size) * DTYPE_BYTES[meta.dtype]
        for other, size in others:
            # Ranks along this axis exchange what each of them has left of the tensor on other axes.
            if isinstance(placement_of(graph, name, other), Shard):
                num_bytes //= size
        # Blocks end with whole gradients, so none is a partial sum here (`StageModule._as`).
        there, back = collectives(source, taken, False)
        for kind, moved in ((there, forward), (back if meta.requires_grad else None, backward)):
            if kind:
                seconds = profile.collective_seconds(kind, num_bytes, group).seconds
                moved.append(Moved(axis, 1, num_bytes, seconds, seconds))
    return BlockMoved(tuple(forward), tuple(backward))
