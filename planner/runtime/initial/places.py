"""Which tensors of a rank's engine take first values, and where each lies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from planner.language.lowering.pieces import Piece
from planner.runtime.checkpoint.parts import model_parts
from planner.runtime.initial.values import FirstValues, Place

if TYPE_CHECKING:
    from torch import Tensor

    from planner.language.graph import ModelGraph
    from planner.runtime.step.engine import Engine


def take_first_values(
    engine: Engine,
    values: FirstValues,
    read: Iterable[tuple[ModelGraph, Mapping[str, Tensor]]],
) -> None:
    """Bring first values to all that this rank holds; each rank does so for all tensors.

    `read` has, by the names of a captured graph, what is read beside stages: by preambles, and to
    count labels.
    """
    places: dict[str, list[Place]] = defaultdict(list)
    for part in model_parts(engine):
        for tensor in part.tensors:
            places[part.holding.meta.fqn].append(Place(part.piece, tensor))
    for stage in engine.stages.values():
        for name, tensor in stage.passed.items():
            meta = engine.graph.tensor[name]
            if meta.kind == "constant" and meta.data is None:
                places[meta.fqn].append(Place(Piece.whole(tensor.shape), tensor))
    for graph, tensors in read:
        for name, tensor in tensors.items():
            meta = graph.tensor[name]
            if meta.data is None:
                places[meta.fqn].append(Place(Piece.whole(tensor.shape), tensor))
    kinds = ("param", "buffer", "constant")
    tensors_held = (t for g in engine.captured for t in g.tensors if t.kind in kinds)
    held = (tensor.fqn for tensor in tensors_held if tensor.data is None)
    aliases = {alias for tensor in engine.graph.tensors for alias in tensor.aliases}
    stored = (name for name in engine.outside.dtypes if name not in aliases)
    names = dict.fromkeys((*held, *stored))
    values.fill(places, [name for name in names if name not in engine.outside.empty])
