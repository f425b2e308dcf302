"""Which products of a graph a plan of precision fp8 has in 8 bits.

Those of blocks that repeat, of a weight whose dims are whole tiles of 16. Kept in 16 bits are what
stands once (embedding, head and loss), routers, whose results choose experts, attention, and
products of a bias that is added to more than rows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from planner.errors import CaptureError
from planner.language.graph import ModelGraph, Op, Program
from planner.language.lowering.routed_experts import router_weights
from planner.language.ops.families.products.narrow import TILE, narrow_op
from planner.language.ops.record import family_of
from planner.language.plan.parts import Precision, low_dtype, scaling_named


def with_narrow_products(graph: ModelGraph, precision: Precision) -> ModelGraph:
    """Return a graph with its products in 8 bits where a precision has them; raise CaptureError
    where none may be.
    """
    scaling = scaling_named(precision)
    if not scaling:
        return graph
    uses = Counter(block.class_index for block in graph.blocks)
    dtype = low_dtype(precision)
    classes = tuple(
        _with_narrow_products(program, scaling, dtype) if uses[index] > 1 else program
        for index, program in enumerate(graph.classes)
    )
    if classes == graph.classes:
        raise CaptureError(
            f"{graph.name} has no product that `precision` {precision} casts: it casts linear "
            f"layers of repeated blocks with inputs and outputs in multiples of {TILE}; use bf16"
        )
    return replace(graph, classes=classes)


def _with_narrow_products(program: Program, scaling: str, dtype: str) -> Program:
    routers = router_weights(program)

    def changed(op: Op) -> Op:
        narrow = narrow_op(op, scaling)
        return op if narrow is None or not _may_be_narrow(op, program, routers, dtype) else narrow

    return replace(program, ops=tuple(map(changed, program.ops)))


def _may_be_narrow(op: Op, program: Program, routers: frozenset[str], dtype: str) -> bool:
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
        and all(type(size) is int and size % TILE == 0 for size in shape)
        and (bias is None or len(tensor[bias.name].shape) == 1)
        and {tensor[name].dtype for name in (*op.inputs, *op.outputs)} == {dtype}
    )
