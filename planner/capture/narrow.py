"""The graph of a plan of precision fp8: that of bf16, with products of repeated blocks in 8 bits.

Kept in 16 bits are what stands once (embedding, head and loss), and what may not be cast
(`planner.language.lowering.narrow_products.may_be_narrow`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from planner.errors import CaptureError
from planner.language.graph import ModelGraph, Op, Program
from planner.language.lowering.narrow_products import may_be_narrow
from planner.language.lowering.routed_experts import router_weights
from planner.language.ops.families.products.narrow import TILES, narrow_op
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
            "layers and experts of repeated blocks with dims in multiples of "
            f"{TILES[scaling]}; use bf16"
        )
    return replace(graph, classes=classes)


def _with_narrow_products(program: Program, scaling: str, dtype: str) -> Program:
    routers = router_weights(program)

    def changed(op: Op) -> Op:
        narrow = narrow_op(op, scaling)
        is_taken = may_be_narrow(op, program, routers, dtype, TILES[scaling])
        return narrow if narrow is not None and is_taken else op

    return replace(program, ops=tuple(map(changed, program.ops)))
