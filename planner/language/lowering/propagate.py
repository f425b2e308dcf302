"""Propagation: layouts of whole blocks and models, chosen without a solver.

Fixed placements (pins of the user, shared parameters, block boundaries) are given; the
rest follows with the least redistribution and the least replicated work (`beam`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from planner.errors import LayoutError
from planner.language.graph import Affine, ModelGraph, Program
from planner.language.layout.axes import Axis
from planner.language.layout.class_layout import ClassLayout
from planner.language.layout.pins import Pin, class_pins
from planner.language.layout.placement import Placement, Replicate, Shard
from planner.language.lowering.attention_cut import (
    AttentionBy,
    MayLie,
    anyhow,
    attends_by,
    over_ring,
)
from planner.language.lowering.beam import BeamSearch
from planner.language.ops.call import divides


def propagate_layout(
    class_index: int,
    program: Program,
    axis_size: int,
    *,
    pins: Mapping[str, Placement] | None = None,
    at_rest: Mapping[str, Placement] | None = None,
    inputs: Sequence[Placement] | None = None,
    outputs: Sequence[Placement] | None = None,
    whole_params: bool = False,
    may_lie: MayLie = anyhow,
) -> ClassLayout:
    """Choose the layout of a bound block program on an axis of `axis_size` ranks.

    `pins` fixes tensors of the program by name: every op they touch must take or yield them
    so. `at_rest` only fixes where params lie, from where they may be redistributed. `inputs`
    and `outputs` are the placements at the block's boundary, Replicate by default.
    `whole_params` pins every param Replicate: the axis divides the data only, and gradients
    are summed over it once a step (`lower` with `sum_later`). `may_lie` says of tensors of
    the program which placements to consider. Raises
    LayoutError when a pin names nothing, does not divide, or no op can honour it.
    """
    replicated = Replicate()
    pins = dict(pins or {})
    if whole_params:
        # (cp) Each rank has other positions of every sequence, and needs every weight.
        pins |= dict.fromkeys(program.params, replicated)
    fixed = dict(at_rest or {}) | pins
    _check_fits(program, fixed, axis_size)
    inputs = tuple(inputs or (replicated,) * len(program.inputs))
    outputs = tuple(outputs or (replicated,) * len(program.outputs))
    _check_fits(program, dict(zip(program.inputs, inputs, strict=True)), axis_size)
    _check_fits(program, dict(zip(program.outputs, outputs, strict=True)), axis_size)
    # What is fixed before the search: inputs at the boundary, pinned parameters, buffers whole.
    placement: dict[str, Placement] = dict(zip(program.inputs, inputs, strict=True))
    # Parameters that are not fixed are left out: the search places each at its first use.
    for name in program.params:
        if name in fixed or program.tensor[name].kind != "param":
            placement[name] = fixed.get(name, replicated)
    handed = [p for p in (*inputs, *outputs) if isinstance(p, Shard)]
    search = BeamSearch(
        program=program,
        axis_size=axis_size,
        pins=pins,
        sum_later=whole_params,
        may_lie=may_lie,
        segments=max((p.segments for p in handed), default=1),
        mirrored=any(p.mirrored for p in handed),
    )
    best = search.run(placement, dict(zip(program.outputs, outputs, strict=True)))
    placement |= dict(best.params)
    return ClassLayout(
        class_index=class_index,
        inputs=tuple(map(str, inputs)),
        params=tuple(str(placement.get(name, replicated)) for name in program.params),
        outputs=tuple(map(str, outputs)),
        ops=tuple(
            (name, str(sharding))
            for name, sharding in best.history()
            if any(p != replicated for p in (*sharding.inputs, *sharding.outputs))
        ),
    )


def propagate_graph(
    graph: ModelGraph,
    *,
    microbatch_size: int,
    axis_size: int,
    pins: Sequence[Pin] = (),
    boundary: Placement | None = None,
    programs: Sequence[Program] | None = None,
    whole_params: bool = False,
    attention: AttentionBy | None = None,
) -> tuple[ClassLayout, ...]:
    """Choose a layout for every block class.

    Tensors between blocks are Replicate, or placed `boundary` where their sizes divide: with
    Shard(1) the residual stream is sharded along the sequence (sequence parallelism). A
    parameter shared by several classes (a tied embedding), or by several places of a class, has one
    placement at rest: the class nearest the loss, which multiplies by it, decides, and of its
    places the last.

    `programs` are the classes' programs where they are not the graph's own, for example
    already lowered on another axis. With `whole_params` every rank has all weights and a part of
    every sample; with a Shard(1) boundary that is context parallelism, whose `attention` then runs
    as given, or as is cheapest. Raises LayoutError where it can't run so.
    """
    shared = _shared_places(graph)
    pinned = class_pins(graph, pins)
    decided: dict[_Place, Placement] = {}
    layouts: dict[int, ClassLayout] = {}
    # From the loss back: a tied head is a product, worth a cut; the embedding takes what is left.
    for block in reversed(graph.blocks):
        index = block.class_index
        if index in layouts:
            continue
        program = programs[index] if programs else graph.classes[index].bind(microbatch_size)
        # Parameters that other places use too, with the place that stands for all of these.
        of_local = {local: shared.get((index, i)) for i, local in enumerate(program.params)}
        # Places of a class that were chosen apart are chosen anew, where the last of them lies.
        for _ in range(2):
            layouts[index] = propagate_layout(
                index,
                program,
                axis_size,
                whole_params=whole_params,
                may_lie=(
                    _all_of(
                        _keeps_samples(graph.classes[index], microbatch_size),
                        attends_by(program, attention),
                    )
                    if whole_params
                    else anyhow
                ),
                pins=pinned.get(index),
                at_rest={
                    local: decided[first]
                    for local, first in of_local.items()
                    if first is not None and first in decided
                },
                inputs=_at_boundary(
                    graph, program, block.inputs, program.inputs, boundary, axis_size
                ),
                outputs=_at_boundary(
                    graph, program, block.outputs, program.outputs, boundary, axis_size
                ),
            )
            # Where a class has such a parameter at several places, they must lie alike: the last
            # decides.
            found = zip(of_local.values(), layouts[index].param_placements, strict=True)
            lie: dict[_Place, list[Placement]] = {}
            for first, placement in found:
                if first is not None:
                    lie.setdefault(first, []).append(placement)
            decided |= {first: places[-1] for first, places in lie.items()}
            if all(len(set(places)) == 1 for places in lie.values()):
                break
    return tuple(layouts[index] for index in sorted(layouts))


_Place = tuple[int, int]
"""A class, and the position of one of its params."""


def _shared_places(graph: ModelGraph) -> dict[_Place, _Place]:
    """Return, for each place that shares parameters with others, the first of all these.

    Blocks of a class have one layout, so places are alike that share a parameter with a third.
    """
    first: dict[_Place, _Place] = {}
    together: dict[_Place, list[_Place]] = {}
    place_of: dict[str, _Place] = {}
    for block in graph.blocks:
        for position, name in enumerate(block.params):
            place = (block.class_index, position)
            # Union of two sets of places, each named by its first.
            known, own = (first.get(p, p) for p in (place_of.setdefault(name, place), place))
            if known == own:
                continue
            together[known] = together.pop(known, [known]) + together.pop(own, [own])
            first |= dict.fromkeys(together[known], known)
    return first


def propagate_on(
    graph: ModelGraph,
    axis: Axis,
    *,
    size: int,
    microbatch_size: int,
    programs: Sequence[Program] | None = None,
    segments: int = 1,
    mirrored: bool = False,
    attention: AttentionBy | None = None,
) -> tuple[ClassLayout, ...]:
    """Return a layout of every class on an axis of `size` ranks.

    `programs` are those of the classes as lowered on the axes before it, bound; None where there
    are none. Where the axis cuts sequences, these lie between blocks in `segments` (striped: a rank
    has a piece of each), `mirrored` or not (`Shard`), and `attention` runs as given, or as is
    cheapest; where the axis divides it by heads, so and in one piece. Raises LayoutError for a
    model that can't be divided so.
    """
    boundary = axis.boundary
    if isinstance(boundary, Shard):
        # Whole sequences of some heads are the same, in whatever pieces they came.
        if axis.by_heads:
            attention, segments, mirrored = "heads", 1, False
        boundary = replace(boundary, segments=segments, mirrored=mirrored)
    else:
        attention = None
    axis.check(graph, axis.name, size)
    layouts = propagate_graph(
        graph,
        microbatch_size=microbatch_size,
        axis_size=size,
        boundary=boundary,
        programs=programs,
        whole_params=axis.whole_params,
        # A ring moves nothing that a beam could weigh: it takes the place of gathers.
        attention="queries" if attention == "ring" else attention,
    )
    if attention == "ring":
        layouts = tuple(
            over_ring(
                layout,
                programs[layout.class_index]
                if programs
                else graph.classes[layout.class_index].bind(microbatch_size),
                size,
            )
            for layout in layouts
        )
    return tuple(layout.model_copy(update={"axis": axis.name}) for layout in layouts)


def _all_of(*rules: MayLie) -> MayLie:
    return lambda name, placement: all(rule(name, placement) for rule in rules)


def _keeps_samples(program: Program, microbatch_size: int) -> MayLie:
    """Tell placements that give every rank a part of every sample from those that don't.

    `program` still has sizes that depend on the microbatch size: a cut of such a dim must
    fall inside the samples, so each of its segments is (a part of) one.
    """

    def keeps(name: str, placement: Placement) -> bool:
        meta = program.tensor.get(name)
        if meta is None or not isinstance(placement, Shard) or placement.dim >= len(meta.shape):
            return True
        counts_samples = isinstance(meta.shape[placement.dim], Affine)
        return not counts_samples or placement.segments % microbatch_size == 0

    return keeps


def _at_boundary(
    graph: ModelGraph,
    program: Program,
    names: tuple[str, ...],
    local_names: tuple[str, ...],
    boundary: Placement | None,
    axis_size: int,
) -> tuple[Placement, ...]:
    """Place what one block hands to another; batch inputs and side inputs stay replicated."""
    placed: list[Placement] = []
    for name, local in zip(names, local_names, strict=True):
        meta = program.tensor[local]
        # Of classes used several times, what one block hands on must suit every other.
        # Batch inputs and side inputs are whole on every rank; so is the loss.
        fits = name in graph.producer and name != graph.loss and meta.requires_grad
        if fits and isinstance(boundary, Shard):
            shape = meta.shape_at(1)
            fits = divides(Shard(boundary.dim), shape, axis_size)
            if fits and not divides(boundary, shape, axis_size):
                raise LayoutError(
                    f"{name} of shape {list(shape)} can't lie {boundary} on {axis_size} ranks; use "
                    f"fewer pieces, or sequences that {axis_size * boundary.segments} divides"
                )
        placed.append(boundary if fits and boundary is not None else Replicate())
    return tuple(placed)


def _check_fits(program: Program, fixed: Mapping[str, Placement], axis_size: int) -> None:
    for name, placement in fixed.items():
        if name not in program.tensor:
            raise LayoutError(f"pin {name}: {placement} names no tensor of {program.name}")
        meta = program.tensor[name]
        if not divides(placement, meta.shape_at(1), axis_size):
            shape = list(meta.shape_at(1))
            fitting = [f"S({d})" for d, size in enumerate(shape) if size % axis_size == 0]
            raise LayoutError(
                f"{meta.fqn or name} of shape {shape} can't be placed {placement} on {axis_size} "
                f"ranks; use {' or '.join([*fitting, 'R'])}"
            )
