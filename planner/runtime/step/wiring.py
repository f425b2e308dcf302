"""Which tensor goes from which stage to which, and how it lies on both ends.

A value that a stage makes is sent straight to every stage that uses it, once each, so a
skip connection does not travel through the stages between. Batch inputs and preamble
values are not sent: every stage has or computes those it needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from planner.errors import LayoutError
from planner.graph import Affine, ModelGraph, Size, TensorMeta
from planner.layout.placement import Partial, Placement, Replicate, Shard, parse_placement
from planner.plan import Plan


class Placements(NamedTuple):
    """How a tensor lies on the tp and cp axes; where both cut one dim, tp cuts first."""

    tp: Placement = Replicate()
    cp: Placement = Replicate()

    def __str__(self) -> str:
        return f"{self.tp}@tp {self.cp}@cp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One tensor on its way from the stage that makes it to one stage that uses it.

    `sent` is how it lies when it leaves, `taken` when it arrives: the same where the two
    stages have meshes of one shape. `shape` is whole on tp and cp; its first size that
    depends on the number of samples, at `batch_dim`, is divided over dp (None: no such).
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

    `side_inputs` are batch inputs and preamble values; `outputs` the distinct (tensor,
    placements) pairs its outgoing edges carry, `output_of` the position of each edge's pair
    among them. `has_loss` tells that one more output follows: the loss.
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

    `stage` is the one that holds the block: who knows it spares the search for it.
    """
    block = graph.blocks[block_index]
    stage_tp = plan.stage_tp(stage_of(plan, block_index) if stage is None else stage)
    tp, cp = (plan.layout(block.class_index, axis=axis, tp=stage_tp) for axis in ("tp", "cp"))
    return (
        _pairs(len(block.inputs), tp.inputs if tp else None, cp.inputs if cp else None),
        _pairs(len(block.params), tp.params if tp else None, cp.params if cp else None),
        _pairs(len(block.outputs), tp.outputs if tp else None, cp.outputs if cp else None),
    )


@lru_cache(maxsize=4096)
def _pairs(
    count: int, tp: tuple[str, ...] | None, cp: tuple[str, ...] | None
) -> tuple[Placements, ...]:
    whole = ("R",) * count
    pairs = zip(tp or whole, cp or whole, strict=True)
    return tuple(
        Placements(parse_placement(on_tp), parse_placement(on_cp)) for on_tp, on_cp in pairs
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


def param_placements(graph: ModelGraph, plan: Plan, pp_rank: int) -> dict[str, Placement]:
    """Return the tp placement of each parameter, buffer and constant that a pp rank holds.

    Raises LayoutError when two of its blocks that share one want it placed differently.
    """
    found: dict[str, tuple[Placement, str]] = {}
    for s, stage in enumerate(plan.stages):
        for index in stage.blocks if stage.pp_rank == pp_rank else ():
            block = graph.blocks[index]
            _, params, _ = block_placements(graph, plan, index, s)
            for name, placed in zip(block.params, params, strict=True):
                before, owner = found.setdefault(name, (placed.tp, block.name))
                if before != placed.tp:
                    raise LayoutError(
                        f"{graph.tensor[name].fqn or name} is {before} on tp in block {owner} and "
                        f"{placed.tp} in block {block.name}; blocks that share a parameter must "
                        "agree"
                    )
    return {name: placement for name, (placement, _) in found.items()}


def build_edges(graph: ModelGraph, plan: Plan) -> tuple[Edge, ...]:
    """Return every edge between two different stages, in order of consumer, then use.

    Raises LayoutError for a tensor that stages of different dp can't hand over, because it
    is not known which part of it belongs to which samples.
    """
    edges: dict[tuple[str, int], Edge] = {}
    home = {block: s for s, stage in enumerate(plan.stages) for block in stage.blocks}
    uses = ((b.index, at, name) for b in graph.blocks for at, name in enumerate(b.inputs))
    for block, position, name in uses:
        if name not in graph.producer:
            continue
        producer, consumer = home[graph.producer[name]], home[block]
        if producer == consumer or (name, consumer) in edges:
            continue
        meta = graph.tensor[name]
        made = _made_as(graph, plan, name, producer)
        wanted = block_placements(graph, plan, block, consumer)[0][position]
        if plan.stage_tp(producer) == plan.stage_tp(consumer):
            sent = taken = Placements(
                _on_the_wire(made.tp, wanted.tp), _on_the_wire(made.cp, wanted.cp)
            )
        else:
            _check_samples(graph, plan, name, block)
            sent, taken = _between_meshes(made), _between_meshes(wanted)
        if sent.tp == taken.tp == Replicate() and sends_pieces(plan, producer, consumer):
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


def sends_pieces(plan: Plan, producer: int, consumer: int) -> bool:
    """Whether what all tp ranks of both stages hold goes in tp pieces, gathered on arrival.

    Each rank then sends 1/tp of it instead of all. That pays where the way between the
    stages is slower than the one inside a tp group: when it leaves the node and the
    groups do not. On one node the gather costs as much as is saved.
    """
    per_node = plan.cluster.devices_per_node
    if plan.stage_tp(producer) == plan.stage_tp(consumer) == 1:
        return False
    ends = [plan.mesh(plan.stages[s].pp_rank) for s in (producer, consumer)]
    stays = all(
        len({rank // per_node for rank in group}) == 1 for m in ends for group in m.groups("tp")
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


def local_shape(shape: tuple[int, ...], placement: Placement, parts: int) -> tuple[int, ...]:
    """Return the shape of one rank's piece."""
    if not isinstance(placement, Shard):
        return shape
    return tuple(s // parts if d == placement.dim else s for d, s in enumerate(shape))


def _made_as(graph: ModelGraph, plan: Plan, name: str, stage: int) -> Placements:
    producer = graph.producer[name]
    _, _, outputs = block_placements(graph, plan, producer, stage)
    return outputs[graph.blocks[producer].outputs.index(name)]


def _on_the_wire(made: Placement, wanted: Placement) -> Placement:
    """Where to redistribute: after the send when that sends a shard, else before it."""
    if isinstance(made, Shard):
        return made
    return Replicate() if isinstance(wanted, Partial) else wanted


def _between_meshes(placed: Placements) -> Placements:
    """How a value lies at an end of its way to or from a mesh of another shape.

    Contiguous pieces go as they are, each to who needs them; sums are taken before, and
    pieces of segments put together.
    """
    return Placements(
        *(p if isinstance(p, Shard) and p.segments == 1 else Replicate() for p in placed)
    )


def _in_pieces(
    plan: Plan, meta: TensorMeta, sent: Placements, taken: Placements, producer: int, consumer: int
) -> tuple[Placements, Placements]:
    """Cut both ends along the first dim that divides and that nothing else cuts."""
    tps = plan.stage_tp(producer), plan.stage_tp(consumer)
    for dim, size in enumerate(meta.shape):
        if isinstance(size, Affine) or Shard(dim) in (sent.cp, taken.cp):
            continue
        if all(size % tp == 0 for tp in tps):
            pieces = [Shard(dim) if tp > 1 else Replicate() for tp in tps]
            return sent._replace(tp=pieces[0]), taken._replace(tp=pieces[1])
    return sent, taken


def _check_samples(graph: ModelGraph, plan: Plan, name: str, block: int) -> None:
    """Refuse a tensor whose samples can't be told apart, between stages of different dp."""
    meta = graph.tensor[name]
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
        f"another dp, and {why}; give the stages of both blocks the same tp"
    )
