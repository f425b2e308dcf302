"""How the blocks of a model hang together, whatever their values are called.

Stages of equal links hold the same bytes, so a model that repeats a block has few kinds of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.graph import ModelGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What each block takes from where. Blocks of equal `signatures` are of one class and take
    the same outputs of blocks as far before them, the same values that no block makes, and the
    same parameters as far as others use them too. `makers` has the block that makes each value and
    the value's place among its outputs, `users` the blocks that use each parameter of several.
    """

    signatures: tuple[int, ...]
    makers: Mapping[str, tuple[int, int]]
    users: Mapping[str, tuple[int, ...]]


def find_links(graph: ModelGraph) -> Links:
    """Return the links of a model's blocks."""
    makers = {
        name: (block.index, place)
        for block in graph.blocks
        for place, name in enumerate(block.outputs)
    }
    all_users: dict[str, list[int]] = {}
    for block in graph.blocks:
        for name in dict.fromkeys(block.params):
            all_users.setdefault(name, []).append(block.index)
    users = {name: tuple(blocks) for name, blocks in all_users.items() if len(blocks) > 1}
    known: dict[tuple, int] = {}
    signatures = []
    for block in graph.blocks:
        taken = tuple(
            (block.index - makers[name][0], makers[name][1]) if name in makers else name
            for name in block.inputs
        )
        metas = [(name, graph.tensor[name]) for name in block.params]
        params = tuple(
            (name if name in users else "", meta.kind, meta.requires_grad) for name, meta in metas
        )
        signature = block.class_index, taken, params
        signatures.append(known.setdefault(signature, len(known)))
    return Links(signatures=tuple(signatures), makers=makers, users=users)
