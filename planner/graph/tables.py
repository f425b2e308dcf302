"""Tables of rows whose gradient is of the rows that were looked up, and of no others.

A model says so with ``nn.Embedding(sparse=True)``: an optimizer then changes touched rows alone.
In a captured graph the lookup is ATen's, with its argument `sparse`; what runs is an op of ours
(`TABLE_LOOKUP`), which hands the gradients of rows to whoever keeps the table.
"""

from __future__ import annotations

from dataclasses import replace

from planner.graph.model_graph import Arg, ModelGraph, Op, Program, Ref

TABLE_LOOKUP = "planner.table_lookup"
"""Target of a lookup whose gradient is rows; args (Ref of the table, Ref of indices, padding)."""

_LOOKUP = "aten.embedding.default"
_PADDING, _BY_FREQUENCY, _SPARSE = 2, 3, 4


def is_sparse_lookup(op: Op) -> bool:
    """Whether an op is a lookup whose gradient the model has as rows."""
    return op.target == _LOOKUP and bool(_arg(op, _SPARSE, "sparse", False))


def can_have_rows(op: Op, name: str) -> bool:
    """Whether an op reads a table by lookups alone, whose gradients no count scales."""
    is_table = (
        isinstance(op.args[0], Ref) and op.inputs.count(name) == 1 and op.args[0].name == name
    )
    by_frequency = _arg(op, _BY_FREQUENCY, "scale_grad_by_freq", False)
    return is_table and op.target == _LOOKUP and not by_frequency


def sparse_tables(graph: ModelGraph) -> tuple[str, ...]:
    """Return the parameters whose gradients are rows, by their names in the graph."""
    found: dict[str, None] = {}
    for block in graph.blocks:
        program = graph.classes[block.class_index]
        names = dict(zip(program.params, block.params, strict=True))
        for op in program.ops:
            if op.target == TABLE_LOOKUP or is_sparse_lookup(op):
                found[names[op.inputs[0]]] = None
    return tuple(found)


def with_table_lookups(graph: ModelGraph) -> ModelGraph:
    """Return the graph that runs: lookups with a gradient of rows are ops of ours."""
    classes = tuple(_with_lookups(program) for program in graph.classes)
    return graph if classes == graph.classes else replace(graph, classes=classes)


def _with_lookups(program: Program) -> Program:
    if not any(map(is_sparse_lookup, program.ops)):
        return program
    ops = (_own(op) if is_sparse_lookup(op) else op for op in program.ops)
    return replace(program, ops=tuple(ops))


def _own(op: Op) -> Op:
    args = (*op.args[:2], _arg(op, _PADDING, "padding_idx", -1))
    return replace(op, target=TABLE_LOOKUP, args=args, kwargs=())


def _arg(op: Op, index: int, name: str, default: Arg) -> Arg:
    if index < len(op.args):
        return op.args[index]
    return dict(op.kwargs).get(name, default)
