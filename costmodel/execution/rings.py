"""Attention over a ring (Liu et al. 2023, arXiv 2310.01889), as other runtimes divide sequences.

Our runtime gathers keys and values. On a ring each rank keeps its own part of them, and the others'
pass by: nothing whole exists.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from planner.language.graph import Op, Program, Ref
from planner.language.layout.redistribute import REDISTRIBUTE
from planner.language.ops.families.products.attention import RING

GATHERED = "planner.causal_attention"


def with_rings(program: Program, cp: int) -> Program:
    """Return a local program whose attention takes keys and values from a ring of `cp` ranks."""
    # Keys that are whole without a gather over cp, or that tp ranks put together, stay as they are.
    gathers = {
        op.outputs[0]: op for op in program.ops if op.target == REDISTRIBUTE and op.args[1] == "cp"
    }
    users = Counter(name for op in program.ops for name in op.inputs)
    gone: set[str] = set()
    ops: list[Op] = []
    for op in program.ops:
        if op.target == GATHERED and gathers.keys() >= set(op.inputs[1:3]):
            gone |= {name for name in op.inputs[1:3] if users[name] == op.inputs.count(name)}
            parts = (Ref(gathers[name].inputs[0]) for name in op.inputs[1:3])
            query, dropout, scale, grouped = op.args[0], *op.args[3:6]
            op = replace(op, target=RING, args=(query, *parts, dropout, scale, grouped, cp))
        ops.append(op)
    return replace(
        program,
        ops=tuple(op for op in ops if op.outputs[0] not in gone),
        tensors=tuple(meta for meta in program.tensors if meta.name not in gone),
    )
