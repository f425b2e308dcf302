"""Wiring: every tensor a block takes is made before, comes once, and is what was sent.

On the plan's own sizes and all its ranks, in numbers of elements. What values do on their way is
`hand_over`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from planner.language.graph import ModelGraph
from planner.language.layout.boxes import Box, box_numel, intersection, sizes
from planner.language.layout.placement import Shard
from planner.language.lowering.routes import Part, Routes
from planner.language.lowering.wiring import Edge, StageWiring
from planner.language.plan import Plan


def check_wires(
    graph: ModelGraph, plan: Plan, edges: Sequence[Edge], wirings: Sequence[StageWiring]
) -> Iterator[str]:
    """Yield what is wrong with how stages are wired (`build_edges`, `wire_stage`)."""
    homes = {block: s for s, stage in enumerate(plan.stages) for block in stage.blocks}
    yield from _check_blocks(graph)
    needed: set[tuple[str, int, int]] = set()
    for block in graph.blocks:
        home = homes[block.index]
        for name in block.inputs:
            maker = graph.producer.get(name)
            if maker is None:
                if name not in wirings[home].side_inputs:
                    yield f"stage {home} does not get {name}, which block {block.name} takes"
            elif maker >= block.index:
                yield f"block {block.name} takes {name} before block {maker} makes it"
            elif homes[maker] != home:
                needed.add((name, homes[maker], home))
    found = Counter((edge.tensor, edge.producer, edge.consumer) for edge in edges)
    for name, producer, consumer in sorted(needed - found.keys()):
        yield f"{name} does not go from stage {producer} to stage {consumer}, where it is taken"
    for key in sorted(found.keys() - needed):
        yield f"{key[0]} goes from stage {key[1]} to stage {key[2]}, which does not take it there"
    for key, times in found.items():
        if times > 1:
            yield f"{key[0]} goes {times} times from stage {key[1]} to stage {key[2]}"
    for edge in edges:
        yield from _check_edge(graph, edge, wirings)
    losses = [w.stage_index for w in wirings if w.has_loss]
    if losses != [homes[graph.producer[graph.loss]]]:
        yield f"stages {losses} have the loss; stage {homes[graph.producer[graph.loss]]} makes it"


def _check_blocks(graph: ModelGraph) -> Iterator[str]:
    """What a class makes is what the next one takes: shapes, dtypes and whether it is trained."""
    for block in graph.blocks:
        program = graph.classes[block.class_index]
        for ends, own in ((block.inputs, program.inputs), (block.outputs, program.outputs)):
            for name, local in zip(ends, own, strict=True):
                whole, meta = graph.tensor[name], program.tensor[local]
                if (whole.shape, whole.dtype) != (meta.shape, meta.dtype):
                    yield (
                        f"block {block.name} has {name} as {meta.dtype} {list(meta.shape)}; "
                        f"it is {whole.dtype} {list(whole.shape)}"
                    )


def _check_edge(graph: ModelGraph, edge: Edge, wirings: Sequence[StageWiring]) -> Iterator[str]:
    meta = graph.tensor[edge.tensor]
    way = f"{edge.tensor} from stage {edge.producer} to stage {edge.consumer}"
    ours = (edge.shape, edge.dtype, edge.requires_grad)
    if ours != (meta.shape, meta.dtype, meta.requires_grad):
        yield f"{way} is sent as {edge.dtype} {list(edge.shape)}; it is {meta.dtype} {meta.shape}"
    if wirings[edge.consumer].incoming.count(edge) != 1:
        yield f"stage {edge.consumer} does not take {way}"
    outgoing = wirings[edge.producer]
    places = [at for at, each in enumerate(outgoing.outgoing) if each == edge]
    if len(places) != 1:
        yield f"stage {edge.producer} does not send {way}"
        return
    pair = outgoing.outputs[outgoing.output_of[places[0]]]
    if pair != (edge.tensor, edge.sent):
        yield f"stage {edge.producer} sends {pair[0]} ({pair[1]}) as {way} ({edge.sent})"


def check_routes(plan: Plan, edges: Sequence[Edge], routes: Routes) -> Iterator[str]:
    """Yield what is wrong with who sends which part of a message to whom, in both directions."""
    cut = plan.split.sizes[0]
    for edge in edges:
        for is_grad in (False, True) if edge.requires_grad else (False,):
            ends = (edge.producer, edge.consumer)[:: -1 if is_grad else 1]
            meshes = [plan.mesh(plan.stages[stage].pp_rank) for stage in ends]
            parts = routes.parts(edge, cut, is_grad=is_grad)
            held, needed = (
                {rank: routes.box(edge, cut, rank) for rank in mesh.ranks} for mesh in meshes
            )
            # Pieces of segments are no boxes: they go as they are, between equal places.
            in_segments = any(
                isinstance(p, Shard) and p.segments > 1
                for placed in (edge.sent, edge.taken)
                for _, p in placed.pairs
            )
            what = f"{'the gradient of ' if is_grad else ''}{edge.tensor}"
            if in_segments:
                pairs = dict(zip(*(mesh.ranks for mesh in meshes), strict=True))
                for part in parts:
                    if pairs.get(part.source) != part.target:
                        yield f"{what}: rank {part.source} sends to rank {part.target}"
            yield from _check_parts(what, parts, held, needed, in_segments=in_segments)


def _check_parts(
    what: str,
    parts: Sequence[Part],
    held: dict[int, Box],
    needed: dict[int, Box],
    *,
    in_segments: bool,
) -> Iterator[str]:
    got: dict[int, list[Part]] = {}
    for part in parts:
        got.setdefault(part.target, []).append(part)
        own = held.get(part.source)
        if own is None or (intersection(own, part.box) != part.box and not in_segments):
            yield f"{what}: rank {part.source} sends {part.box} to rank {part.target}; it has {own}"
    for rank, box in needed.items():
        mine = got.get(rank, [])
        if in_segments:
            if [sizes(part.box) for part in mine] != [sizes(box)]:
                yield f"{what}: rank {rank} needs {sizes(box)} and gets {len(mine)} parts"
            continue
        # Parts lie inside what is needed, do not overlap, and have as many elements: so each comes
        # once.
        clipped = [intersection(part.box, box) for part in mine]
        total = sum(box_numel(part) for part in clipped if part is not None)
        twice = any(
            a is not None and b is not None and intersection(a, b) is not None
            for at, a in enumerate(clipped)
            for b in clipped[:at]
        )
        if (
            total != box_numel(box)
            or twice
            or any(part.box != own for part, own in zip(mine, clipped, strict=True))
        ):
            yield (
                f"{what}: rank {rank} needs {box} and gets {[part.box for part in mine][:3]}; each "
                "element must come once"
            )
