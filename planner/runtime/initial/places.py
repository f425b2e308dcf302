"""Which tensors of a rank's engine take first values, and where each lies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from planner.runtime.checkpoint.parts import model_parts
from planner.runtime.checkpoint.pieces import Piece
from planner.runtime.initial.values import FirstValues, Place

if TYPE_CHECKING:
    from planner.graph import ModelGraph
    from planner.runtime.step.engine import Engine
    from planner.runtime.step.inputs.feed import Preamble


def take_first_values(
    engine: Engine,
    values: FirstValues,
    preambles: Iterable[tuple[ModelGraph, Mapping[int, Preamble]]],
) -> None:
    """Bring first values to all that this rank holds; each rank does so for all tensors.

    `preambles` are those of each captured shape, by stage.
    """
    preambles = tuple(preambles)
    places: dict[str, list[Place]] = defaultdict(list)
    for part in model_parts(engine):
        for tensor in part.tensors:
            places[part.holding.meta.fqn].append(Place(part.piece, tensor))
    for stage in engine.stages.values():
        for name, tensor in stage.passed.items():
            meta = engine.graph.tensor[name]
            if meta.kind == "constant" and meta.data is None:
                places[meta.fqn].append(Place(Piece.whole(tensor.shape), tensor))
    for graph, by_stage in preambles:
        for preamble in by_stage.values():
            for name, tensor in preamble.tensors.items():
                meta = graph.tensor[name]
                if meta.data is None:
                    places[meta.fqn].append(Place(Piece.whole(tensor.shape), tensor))
    kinds = ("param", "buffer", "constant")
    held = (t.fqn for g, _ in preambles for t in g.tensors if t.kind in kinds and t.data is None)
    aliases = {alias for tensor in engine.graph.tensors for alias in tensor.aliases}
    stored = (name for name in engine.outside.dtypes if name not in aliases)
    names = dict.fromkeys((*held, *stored))
    values.fill(places, [name for name in names if name not in engine.outside.empty])
