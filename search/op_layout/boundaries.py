"""What ties placements of several blocks: what they hand to each other, and shared parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from planner.language.graph import ModelGraph
from planner.language.layout.placement import Placement, Shard


def boundary_options(graph: ModelGraph, tp: int) -> list[dict[tuple[int, str], Placement]]:
    """Return placements of what blocks hand to each other: all whole, or split along one dim.

    The dim is the first one that does not grow with the microbatch and that tp divides: the
    sequence, in a transformer. Tensors that cannot be split along it stay whole, and so do
    batch inputs, preamble values and the loss. A class takes its inputs one way only, so an
    input that is a block's output in some uses and not in others stays whole.
    """
    dim = _boundary_dim(graph, tp)
    if dim is None:
        return [{}]
    split: dict[tuple[int, str], Placement] = {}
    whole: set[tuple[int, str]] = set()
    for block in graph.blocks:
        program = graph.classes[block.class_index]
        pairs = (*zip(program.inputs, block.inputs, strict=True),
                 *zip(program.outputs, block.outputs, strict=True))  # fmt: skip
        for own, name in pairs:
            key = (block.class_index, own)
            shape = graph.tensor[name].shape
            size = shape[dim] if len(shape) > dim else None
            fits = isinstance(size, int) and size % tp == 0
            if name in graph.producer and name != graph.loss and fits:
                split[key] = Shard(dim)
            else:
                whole.add(key)
    return [{}, {key: place for key, place in split.items() if key not in whole}]


def _boundary_dim(graph: ModelGraph, tp: int) -> int | None:
    """Return the first fixed dim of the most common boundary tensor that tp divides."""
    shapes = Counter(
        graph.tensor[name].shape
        for block in graph.blocks
        for name in block.inputs
        if name in graph.producer
    )
    if not shapes:
        return None
    shape = shapes.most_common(1)[0][0]
    return next(
        (
            d
            for d, size in enumerate(shape)
            if isinstance(size, int) and size > 1 and size % tp == 0
        ),
        None,
    )


def shared_params(graph: ModelGraph) -> tuple[tuple[tuple[int, str], ...], ...]:
    """Return groups of (class, param) names that are one parameter of the model somewhere.

    A parameter used by blocks of two classes ties those classes' parameters; so does one
    used twice by the same class under two names.
    """
    members: dict[str, set[tuple[int, str]]] = {}
    for block in graph.blocks:
        names = graph.classes[block.class_index].params
        for own, model_name in zip(names, block.params, strict=True):
            if graph.tensor[model_name].kind == "param":
                members.setdefault(model_name, set()).add((block.class_index, own))
    merged: list[set[tuple[int, str]]] = []
    for group in members.values():
        # Groups that have a member in common lie alike: they become a single group.
        touching = [other for other in merged if other & group]
        merged = [other for other in merged if not other & group]
        merged.append(group.union(*touching))
    return tuple(tuple(sorted(group)) for group in merged if len(group) > 1)


def class_groups(
    graph: ModelGraph, shared: Sequence[Sequence[tuple[int, str]]]
) -> tuple[tuple[int, ...], ...]:
    """Return the classes to solve together: those tied by a shared parameter."""
    groups = [{index} for index in range(len(graph.classes))]
    for members in shared:
        classes = {class_index for class_index, _ in members}
        # Classes that share a parameter directly, or through other classes, end in a single group.
        touching = [g for g in groups if g & classes]
        groups = [g for g in groups if not g & classes] + [set().union(*touching)]
    return tuple(sorted(tuple(sorted(group)) for group in groups))
