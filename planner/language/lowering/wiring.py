"""Which tensor goes from which stage to which, and how it lies on both ends.

A value that a stage makes is sent straight to every stage that uses it, once each, so a
skip connection does not travel through the stages between. Batch inputs and preamble
values are not sent: every stage has or computes those it needs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from planner.errors import LayoutError
from planner.language.graph import Affine, ModelGraph, Size, TensorMeta
from planner.language.layout.axes import lowered_axes, own_axes, rest_axis
from planner.language.layout.placement import Partial, Placement, Replicate, Shard, parse_placement
from planner.language.layout.placements import Placements
from planner.language.lowering.experts import on_experts_mesh
from planner.language.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One tensor on its way from the stage that makes it to one stage that uses it.

    Attributes:
        index: position among the edges of the plan.
        tensor: name of the tensor in the graph.
        producer: index of the stage that makes it.
        consumer: index of the stage that uses it.
        shape: sizes in each part of the batch, whole on all axes that blocks are lowered on.
        batch_dim: the first dim whose size depends on the number of samples, None for none; the
            batch axes divide it.
        dtype: of its elements.
        sent: how it lies when it leaves.
        taken: how it lies when it arrives: as `sent` where the two stages have meshes of one shape.
        requires_grad: whether a gradient goes back.
    """

    index: int
    tensor: str
    producer: int
    consumer: int
    shape: tuple[Size, ...]
    batch_dim: int | None
    dtype: str
    sent: Placements
    taken: Placements
    requires_grad: bool


@dataclass(frozen=True, kw_only=True)
class StageWiring:
    """What one stage takes and hands on.

    Attributes:
        stage_index: the stage.
        incoming: edges from other stages.
        outgoing: edges to other stages.
        side_inputs: names of the batch inputs and preamble values that its blocks use.
        outputs: the distinct (tensor, placements) pairs that its outgoing edges carry.
        output_of: for each outgoing edge the position of its pair in `outputs`.
        has_loss: whether one more output follows, the loss.
    """

    stage_index: int
    incoming: tuple[Edge, ...]
    outgoing: tuple[Edge, ...]
    side_inputs: tuple[str, ...]
    outputs: tuple[tuple[str, Placements], ...]
    output_of: tuple[int, ...]
    has_loss: bool


BlockPlacements = tuple[tuple[Placements, ...], tuple[Placements, ...], tuple[Placements, ...]]


def block_placements(
    graph: ModelGraph, plan: Plan, block_index: int, stage: int | None = None
) -> BlockPlacements:
    """Return the placements of a block's inputs, params and outputs.

    `stage` is the stage that holds the block; it is looked up where it is not given.
    """
    block = graph.blocks[block_index]
    stage = stage_of(plan, block_index) if stage is None else stage
    degrees = plan.stage_degrees(stage)
    found = [
        (axis.name, plan.layout(block.class_index, axis=axis.name, degrees=degrees))
        for axis in lowered_axes()
    ]
    layouts = [(axis, layout) for axis, layout in found if layout is not None]
    params = _joined(len(block.params), tuple((axis, layout.params) for axis, layout in layouts))
    if degrees["ep"] > 1:
        program = graph.classes[block.class_index]
        params = on_experts_mesh(program, params, ep=degrees["ep"], etp=degrees["etp"])
    return (
        _joined(len(block.inputs), tuple((axis, layout.inputs) for axis, layout in layouts)),
        params,
        _joined(len(block.outputs), tuple((axis, layout.outputs) for axis, layout in layouts)),
    )


@lru_cache(maxsize=4096)
def _joined(count: int, by_axis: tuple[tuple[str, tuple[str, ...]], ...]) -> tuple[Placements, ...]:
    """Return the placements of `count` tensors, given in text for each axis with a layout."""
    if any(len(texts) != count for _, texts in by_axis):
        raise LayoutError(f"a layout places another number of tensors than {count}")
    return tuple(
        Placements.of({axis: parse_placement(texts[at]) for axis, texts in by_axis})
        for at in range(count)
    )


def stage_of(plan: Plan, block_index: int) -> int:
    """Return the stage that holds a block."""
    return next(s for s, stage in enumerate(plan.stages) if block_index in stage.blocks)


def stage_params(graph: ModelGraph, plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Return, for each stage, the params, buffers and constants its blocks use, each once."""
    return tuple(
        tuple(dict.fromkeys(name for b in stage.blocks for name in graph.blocks[b].params))
        for stage in plan.stages
    )


def param_placements(graph: ModelGraph, plan: Plan, pp_rank: int) -> dict[str, Placements]:
    """Return how each parameter, buffer and constant that a pp rank holds lies on its mesh.

    Raises LayoutError when two of its blocks that share one want it placed differently.
    """
    # A rank holds a parameter once for all blocks that share it, so it lies in a single way.
    found: dict[str, tuple[Placements, str]] = {}
    for s, stage in enumerate(plan.stages):
        for index in stage.blocks if stage.pp_rank == pp_rank else ():
            block = graph.blocks[index]
            _, params, _ = block_placements(graph, plan, index, s)
            for name, placed in zip(block.params, params, strict=True):
                before, owner = found.setdefault(name, (placed, block.name))
                if before != placed:
                    pairs = (*before.pairs, *placed.pairs)
                    axis = next(axis for axis, _ in pairs if before[axis] != placed[axis])
                    raise LayoutError(
                        f"{graph.tensor[name].fqn or name} is {before[axis]} on {axis} in block "
                        f"{owner} and {placed[axis]} in block {block.name}; blocks that share a "
                        "parameter must agree"
                    )
    return {name: placement for name, (placement, _) in found.items()}


def build_edges(graph: ModelGraph, plan: Plan) -> tuple[Edge, ...]:
    """Return every edge between two different stages, in order of consumer, then use.

    Raises LayoutError for a tensor that stages which cut the batch differently can't hand over,
    because it is not known which part of it belongs to which samples.
    """
    edges: dict[tuple[str, int], Edge] = {}
    home = {block: s for s, stage in enumerate(plan.stages) for block in stage.blocks}
    uses = ((b.index, at, name) for b in graph.blocks for at, name in enumerate(b.inputs))
    for block, position, name in uses:
        # Batch inputs and preamble values: every stage has or computes its own.
        if name not in graph.producer:
            continue
        producer, consumer = home[graph.producer[name]], home[block]
        # Once for each stage that uses it, however many of its blocks do.
        if producer == consumer or (name, consumer) in edges:
            continue
        meta = graph.tensor[name]
        made = _made_as(graph, plan, name, producer)
        wanted = block_placements(graph, plan, block, consumer)[0][position]
        if plan.stage_degrees(producer) == plan.stage_degrees(consumer):
            # Equal meshes: ranks at one place exchange, so what leaves is what arrives. A change of
            # placement is done before or after, on one side.
            sent = taken = Placements.of(
                {a.name: _on_the_wire(made[a.name], wanted[a.name]) for a in lowered_axes()}
            )
        else:
            _check_samples(graph, plan, name, block)
            # Other meshes: each rank gets the boxes it needs from whoever has them, as each end has
            # its own cut.
            sent, taken = _between_meshes(made), _between_meshes(wanted)
        # On the innermost axis (tp) all ranks hold the same values; each can then send a part of
        # them.
        inner = lowered_axes()[0].name
        is_whole = sent[inner] == taken[inner] == Replicate()
        if is_whole and sends_pieces(plan, producer, consumer):
            sent, taken = _in_pieces(plan, meta, sent, taken, producer, consumer)
        edges[name, consumer] = Edge(
            index=len(edges),
            tensor=name,
            producer=producer,
            consumer=consumer,
            shape=meta.shape,
            batch_dim=next((d for d, s in enumerate(meta.shape) if isinstance(s, Affine)), None),
            dtype=meta.dtype,
            sent=sent,
            taken=taken,
            requires_grad=meta.requires_grad,
        )
    return tuple(edges.values())


def shaped_edges(edges: tuple[Edge, ...], graph: ModelGraph) -> tuple[Edge, ...]:
    """Return edges with the shapes that their tensors have in another capture of the model."""
    return tuple(replace(edge, shape=graph.tensor[edge.tensor].shape) for edge in edges)


def sends_pieces(plan: Plan, producer: int, consumer: int) -> bool:
    """Whether what all ranks of the inner axis hold goes in pieces, gathered on arrival.

    Each of the n ranks then sends 1/n of it instead of all. That pays where the way between the
    stages is slower than the one inside a group of the axis: when it leaves the node and the
    groups do not. On one node the gather costs as much as is saved.
    """
    # It pays where links inside a node are faster than links between nodes.
    per_node = plan.cluster.devices_per_node
    inner = lowered_axes()[0].name
    if plan.stage_degrees(producer)[inner] == plan.stage_degrees(consumer)[inner] == 1:
        return False
    ends = [plan.mesh(plan.stages[s].pp_rank) for s in (producer, consumer)]
    stays = all(
        len({rank // per_node for rank in group}) == 1 for m in ends for group in m.groups(inner)
    )
    leaves = any(
        a // per_node != b // per_node for a, b in zip(ends[0].ranks, ends[1].ranks, strict=True)
    )
    return stays and leaves


def wire_stage(
    graph: ModelGraph, plan: Plan, edges: tuple[Edge, ...], stage_index: int
) -> StageWiring:
    """Return what one stage takes and hands on."""
    blocks = plan.stages[stage_index].blocks
    outgoing = tuple(e for e in edges if e.producer == stage_index)
    pairs = tuple(dict.fromkeys((e.tensor, e.sent) for e in outgoing))
    # (A dict, not a set: the order of side inputs is the order in which the stage takes them.)
    used = dict.fromkeys(name for b in blocks for name in graph.blocks[b].inputs)
    return StageWiring(
        stage_index=stage_index,
        incoming=tuple(e for e in edges if e.consumer == stage_index),
        outgoing=outgoing,
        side_inputs=tuple(name for name in used if name not in graph.producer),
        outputs=pairs,
        output_of=tuple(pairs.index((e.tensor, e.sent)) for e in outgoing),
        has_loss=graph.producer[graph.loss] in blocks,
    )


def _made_as(graph: ModelGraph, plan: Plan, name: str, stage: int) -> Placements:
    producer = graph.producer[name]
    _, _, outputs = block_placements(graph, plan, producer, stage)
    return outputs[graph.blocks[producer].outputs.index(name)]


def _on_the_wire(made: Placement, wanted: Placement) -> Placement:
    """Where to redistribute: after the send when that sends a shard, else before it."""
    # A shard is the smallest form: 1/n of the tensor from each rank. A Partial must be summed
    # before it leaves (its terms lie on the sender's ranks), at best right into the shards that the
    # consumer takes.
    if isinstance(made, Shard):
        return made
    return Replicate() if isinstance(wanted, Partial) else wanted


def _between_meshes(placed: Placements) -> Placements:
    """How a value lies at an end of its way to or from a mesh of another shape.

    Contiguous pieces go as they are, each to who needs them; sums are taken before, and
    pieces of segments put together.
    """
    return Placements(
        tuple((a, p) for a, p in placed.pairs if isinstance(p, Shard) and p.segments == 1)
    )


def _in_pieces(
    plan: Plan, meta: TensorMeta, sent: Placements, taken: Placements, producer: int, consumer: int
) -> tuple[Placements, Placements]:
    """Cut both ends on the inner axis along the first dim that divides and nothing else cuts."""
    inner = lowered_axes()[0].name
    # Both ends must cut the same dim evenly, into as many pieces as each has ranks on the axis.
    sizes = [plan.stage_degrees(stage)[inner] for stage in (producer, consumer)]
    cut = [placement for end in (sent, taken) for _, placement in end.pairs]
    # Not a dim of samples, which the batch axes cut, nor one that another axis cuts.
    for dim, length in enumerate(meta.shape):
        if isinstance(length, Affine) or Shard(dim) in cut:
            continue
        if all(length % size == 0 for size in sizes):
            ends = zip((sent, taken), sizes, strict=True)
            sent, taken = (end.on(inner, Shard(dim)) if n > 1 else end for end, n in ends)
            return sent, taken
    return sent, taken


def _check_samples(graph: ModelGraph, plan: Plan, name: str, block: int) -> None:
    """Refuse a tensor whose samples can't be told apart, where stages cut the batch differently."""
    meta = graph.tensor[name]
    # Which rows belong to which samples is plain for a dim of exactly one row a sample.
    sizes = [size for size in meta.shape if isinstance(size, Affine)]
    if len(sizes) == 1 and sizes[0] == Affine(1):
        return
    producer = graph.blocks[graph.producer[name]].name
    why = (
        "no dim counts samples"
        if not sizes
        else "it has no dim of exactly one entry for each sample"
    )
    raise LayoutError(
        f"block {producer} hands {name} to block {graph.blocks[block].name}, whose stage has "
        f"another {rest_axis().name}, and {why}; give the stages of both blocks the same "
        f"{' and '.join(axis.name for axis in own_axes())}"
    )
