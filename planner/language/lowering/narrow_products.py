"""What a user is told of products that a plan of precision fp8 has in 8-bit floats."""

from __future__ import annotations

from collections import Counter

from planner.language.graph import ModelGraph
from planner.language.ops.families.products.narrow import TILE, scaling_of

_SCALES = {"rowwise": "a scale for each row of a factor", "tensorwise": "one scale for a factor"}
_SHOWN = 8


class EmulatedWarning(UserWarning):
    """Products in 8 bits run on a device without such products, by others of the same numbers."""


def narrow_messages(graph: ModelGraph) -> tuple[str, ...]:
    """Return which products of a graph are in 8 bits, and how they are scaled; nothing if none."""
    uses = Counter(block.class_index for block in graph.blocks)
    names: dict[str, None] = {}
    count, scaling = 0, ""
    for index, program in enumerate(graph.classes):
        for op in program.ops:
            if found := scaling_of(op):
                count, scaling = count + uses[index], found
                names[op.module or op.name] = None
    if not count:
        return ()
    shown = ", ".join(list(names)[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (
        f"{count} products are in 8-bit floats, {_SCALES[scaling]}: {shown}{more} of blocks that "
        f"repeat, with dims in multiples of {TILE}; all else is in bfloat16",
    )
