"""Which tensors of a rank take first values, and where each lies."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from planner.language.layout.pieces import Piece
from planner.runtime.checkpoint.parts import model_parts
from planner.runtime.initial.values import FirstValues, Place

if TYPE_CHECKING:
    from planner.runtime.state.rank_state import RankState


def take_first_values(
    state: RankState,
    values: FirstValues,
) -> None:
    """Bring first values to all that this rank holds; each rank does so for all tensors."""
    places: dict[str, list[Place]] = defaultdict(list)
    for part in model_parts(state):
        for tensor in part.tensors:
            places[part.holding.meta.fqn].append(Place(part.piece, tensor))
    for stage in state.stages.values():
        for name, tensor in stage.passed.items():
            meta = state.graph.tensor[name]
            if meta.kind == "constant" and meta.data is None:
                places[meta.fqn].append(Place(Piece.whole(tensor.shape), tensor))
    for graph, reader in state.readers:
        for name, tensor in reader.tensors.items():
            meta = graph.tensor[name]
            if meta.data is None:
                places[meta.fqn].append(Place(Piece.whole(tensor.shape), tensor))
    kinds = ("param", "buffer", "constant")
    tensors_held = (t for g in state.captured for t in g.tensors if t.kind in kinds)
    held = (tensor.fqn for tensor in tensors_held if tensor.data is None)
    aliases = {alias for tensor in state.graph.tensors for alias in tensor.aliases}
    stored = (name for name in state.outside.dtypes if name not in aliases)
    names = dict.fromkeys((*held, *stored))
    values.fill(places, [name for name in names if name not in state.outside.empty])
