"""Attention over a ring (Liu et al. 2023, arXiv 2310.01889), as other runtimes divide sequences.

Where a plan gathers keys and values, each rank keeps its own part of them, and the others' pass by:
nothing whole exists. Positions of causal attention are dealt so that all ranks meet as many keys.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from planner.language.graph import Op, Program, Ref
from planner.language.layout.redistribute import REDISTRIBUTE
from planner.language.ops.families.products.rings import RING

GATHERED = "planner.causal_attention"
EVENLY = 0
"""In place of a number of segments: all ranks meet as many keys (`RING`)."""


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
            query, scale, grouped = op.args[0], *op.args[4:6]
            sight = (0, None, None, scale, grouped, None, None)
            args = (query, *parts, *sight, EVENLY, tuple(range(cp)), cp, "cp")
            op = replace(op, target=RING, args=args)
        elif op.target == RING and op.args[3:6] == (0, None, None):
            op = replace(op, args=(*op.args[:10], EVENLY, *op.args[11:]))
        ops.append(op)
    return replace(
        program,
        ops=tuple(op for op in ops if op.outputs[0] not in gone),
        tensors=tuple(meta for meta in program.tensors if meta.name not in gone),
    )
