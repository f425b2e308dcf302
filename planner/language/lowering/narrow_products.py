"""Which products may be in 8-bit floats, and what a user is told of those that are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from planner.language.graph import ModelGraph, Op, Program, TensorMeta
from planner.language.ops.families.products.narrow import BLOCK, TILES, scaling_of
from planner.language.ops.record import family_of

_SCALES = {
    "rowwise": "a scale for each row of a factor",
    "tensorwise": "one scale for a factor",
    "blocks": f"a scale for {BLOCK} neighbours in a row of a factor",
}
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
        f"repeat, with dims in multiples of {TILES[scaling]}; all else is in bfloat16",
    )


def may_be_narrow(
    op: Op, program: Program, routers: Collection[str], dtype: str, tile: int
) -> bool:
    """Whether an op of a block is a product that is cast to 8 bits, where its block's are: one in
    `dtype` with a parameter whose dims are multiples of `tile`, and no more than rows added to it;
    or with matrices of experts of such dims; not a router's, whose result chooses experts.
    """
    if family_of(op.target).deals_rows:
        dtypes = {program.tensor[name].dtype for name in (*op.inputs[:2], *op.outputs)}
        return dtypes == {dtype} and in_tiles(program.tensor[op.inputs[1]], tile)
    taken = family_of(op.target).weight_product
    found = None if taken is None else taken(op)
    if found is None:
        return False
    _, weight, bias, _ = found
    tensor = program.tensor
    shape = tensor[weight.name].shape
    return (
        weight.name not in routers
        and tensor[weight.name].kind == "param"
        and len(shape) == 2
        and in_tiles(tensor[weight.name], tile)
        and (bias is None or len(tensor[bias.name].shape) == 1)
        and {tensor[name].dtype for name in (*op.inputs, *op.outputs)} == {dtype}
    )


def in_tiles(weight: TensorMeta, tile: int) -> bool:
    """Whether the dims of a matrix, or of several in one tensor, are multiples of `tile`."""
    return all(type(size) is int and size % tile == 0 for size in weight.shape[-2:])


def gathered_narrow(program: Program) -> frozenset[str]:
    """Return the trained parameters of a rank's program that ZeRO may gather in 8 bits with nothing
    changed: all that takes them are products that cast them, with one scale for all of one.
    """
    taken: set[str] = set()
    otherwise = set(program.outputs)
    for op in program.ops:
        weight = family_of(op.target).first_factor + 1
        for position, name in enumerate(op.inputs):
            is_cast = scaling_of(op) == "tensorwise" and position == weight
            (taken if is_cast else otherwise).add(name)
    own = {name for name in program.params if program.tensor[name].kind == "param"}
    return frozenset(n for n in own & taken - otherwise if program.tensor[n].requires_grad)
