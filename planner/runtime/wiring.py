"""Which tensor goes from which stage to which, and in what local shape.

A value that a stage makes is sent straight to every stage that uses it, once each, so a
skip connection does not travel through the stages between. Batch inputs and preamble
values are not sent: every stage has or computes those it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.graph import ModelGraph
from planner.placement import Partial, Placement, Replicate, Shard, parse_placement
from planner.plan import ClassLayout, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One tensor on its way from the stage that makes it to one stage that uses it.

    `shape` is the local shape of one microbatch on the wire, where the tensor lies as
    `placement` on the tp axis.
    """

    index: int
    tensor: str
    producer: int
    consumer: int
    shape: tuple[int, ...]
    dtype: str
    placement: Placement
    requires_grad: bool


@dataclass(frozen=True, kw_only=True)
class StageWiring:
    """What one stage takes and hands on.

    `side_inputs` are batch inputs and preamble values; `outputs` the distinct (tensor,
    placement) pairs its outgoing edges carry, `output_of` the position of each edge's pair
    among them. `has_loss` tells that one more output follows: the loss.
    """

    stage_index: int
    incoming: tuple[Edge, ...]
    outgoing: tuple[Edge, ...]
    side_inputs: tuple[str, ...]
    outputs: tuple[tuple[str, Placement], ...]
    output_of: tuple[int, ...]
    has_loss: bool


def layout_of(plan: Plan, class_index: int) -> ClassLayout | None:
    """Return the plan's layout of a class; None when it runs replicated."""
    if plan.tp == 1:
        return None
    return next((lay for lay in plan.layouts if lay.class_index == class_index), None)


def block_placements(
    graph: ModelGraph, plan: Plan, block_index: int
) -> tuple[tuple[Placement, ...], tuple[Placement, ...], tuple[Placement, ...]]:
    """Return the tp placements of a block's inputs, params and outputs."""
    block = graph.blocks[block_index]
    layout = layout_of(plan, block.class_index)
    if layout is None:
        return tuple(  # type: ignore[return-value]
            tuple(Replicate() for _ in names)
            for names in (block.inputs, block.params, block.outputs)
        )
    return (
        tuple(map(parse_placement, layout.inputs)),
        layout.param_placements,
        tuple(map(parse_placement, layout.outputs)),
    )


def stage_params(graph: ModelGraph, plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Return, for each stage, the params, buffers and constants its blocks use, each once."""
    return tuple(
        tuple(dict.fromkeys(name for b in stage.blocks for name in graph.blocks[b].params))
        for stage in plan.stages
    )


def build_edges(graph: ModelGraph, plan: Plan) -> tuple[Edge, ...]:
    """Return every edge between two different stages, in order of consumer, then use."""
    stage_of = {b: s for s, stage in enumerate(plan.stages) for b in stage.blocks}
    edges: dict[tuple[str, int], Edge] = {}
    for block, name, wanted in _uses(graph, plan):
        if name not in graph.producer:
            continue
        producer, consumer = stage_of[graph.producer[name]], stage_of[block]
        if producer == consumer or (name, consumer) in edges:
            continue
        meta = graph.tensor[name]
        placement = _on_the_wire(_made_as(graph, plan, name), wanted)
        edges[name, consumer] = Edge(
            index=len(edges),
            tensor=name,
            producer=producer,
            consumer=consumer,
            shape=local_shape(meta.shape_at(plan.microbatch_size), placement, plan.tp),
            dtype=meta.dtype,
            placement=placement,
            requires_grad=meta.requires_grad,
        )
    return tuple(edges.values())


def wire_stage(
    graph: ModelGraph, plan: Plan, edges: tuple[Edge, ...], stage_index: int
) -> StageWiring:
    """Return what one stage takes and hands on."""
    blocks = plan.stages[stage_index].blocks
    outgoing = tuple(e for e in edges if e.producer == stage_index)
    pairs = tuple(dict.fromkeys((e.tensor, e.placement) for e in outgoing))
    used = dict.fromkeys(name for b in blocks for name in graph.blocks[b].inputs)
    return StageWiring(
        stage_index=stage_index,
        incoming=tuple(e for e in edges if e.consumer == stage_index),
        outgoing=outgoing,
        side_inputs=tuple(name for name in used if name not in graph.producer),
        outputs=pairs,
        output_of=tuple(pairs.index((e.tensor, e.placement)) for e in outgoing),
        has_loss=graph.producer[graph.loss] in blocks,
    )


def local_shape(shape: tuple[int, ...], placement: Placement, parts: int) -> tuple[int, ...]:
    """Return the shape of one rank's piece."""
    if not isinstance(placement, Shard):
        return shape
    return tuple(s // parts if d == placement.dim else s for d, s in enumerate(shape))


def _uses(graph: ModelGraph, plan: Plan) -> Iterator[tuple[int, str, Placement]]:
    for block in graph.blocks:
        inputs, _, _ = block_placements(graph, plan, block.index)
        for name, placement in zip(block.inputs, inputs, strict=True):
            yield block.index, name, placement


def _made_as(graph: ModelGraph, plan: Plan, name: str) -> Placement:
    producer = graph.producer[name]
    _, _, outputs = block_placements(graph, plan, producer)
    return outputs[graph.blocks[producer].outputs.index(name)]


def _on_the_wire(made: Placement, wanted: Placement) -> Placement:
    """Where to redistribute: after the send when that sends a shard, else before it."""
    if isinstance(made, Shard):
        return made
    return Replicate() if isinstance(wanted, Partial) else wanted
