"""Tables of rows whose gradient is of the rows that were looked up, and of no others.

A model says so with ``nn.Embedding(sparse=True)``: an optimizer then changes touched rows alone.
In a captured graph the lookup is ATen's, with its argument `sparse`; what runs is an op of ours
(`TABLE_LOOKUP`), which hands the gradients of rows to whoever keeps the table.

A plan may keep tables in the host's memory, sparse or not: their lookups are this op, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from planner.errors import PlanError
from planner.language.graph.model_graph import Arg, ModelGraph, Op, Program, Ref, TensorMeta

Where = Literal["", "device", "host"]
"""Where a table with a gradient of rows lies."""

TABLE_LOOKUP = "planner.table_lookup"
"""Target of a lookup whose gradient is rows; args (Ref of the table, Ref of indices, padding,
whether the model has the gradient as a sparse tensor)."""

_LOOKUP = "aten.embedding.default"
_PADDING, _BY_FREQUENCY, _SPARSE = 2, 3, 4


def is_sparse_lookup(op: Op) -> bool:
    """Whether an op is a lookup whose gradient the model has as rows."""
    if op.target == TABLE_LOOKUP:
        return bool(op.args[3])
    return op.target == _LOOKUP and bool(_arg(op, _SPARSE, "sparse", False))


def can_have_rows(op: Op, name: str) -> bool:
    """Whether an op reads a table by lookups alone, whose gradients no count scales."""
    if op.target == TABLE_LOOKUP:
        return True
    is_table = (
        isinstance(op.args[0], Ref) and op.inputs.count(name) == 1 and op.args[0].name == name
    )
    by_frequency = _arg(op, _BY_FREQUENCY, "scale_grad_by_freq", False)
    return is_table and op.target == _LOOKUP and not by_frequency


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A trained parameter that lookups alone read.

    Attributes:
        name, fqn: its names in the graph and in the user's module.
        rows, width: its shape.
        is_sparse: whether its gradient is a sparse tensor in the model.
        per_sample: rows looked up for a sample, some perhaps several times.
    """

    name: str
    fqn: str
    rows: int
    width: int
    is_sparse: bool
    per_sample: int


def tables_of(graph: ModelGraph) -> tuple[Table, ...]:
    """Return the tables of a graph, in the order of their first blocks."""
    # Blocks alike read alike: ops are looked at once a class.
    reads: list[dict[str, list[Op]]] = [defaultdict(list) for _ in graph.classes]
    for program, of_class in zip(graph.classes, reads, strict=True):
        for op in program.ops:
            for inner in dict.fromkeys(op.inputs):
                of_class[inner].append(op)
    lookups = [
        {inner for inner, ops in of_class.items() if all(can_have_rows(op, inner) for op in ops)}
        for of_class in reads
    ]
    readers: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for block in graph.blocks:
        program = graph.classes[block.class_index]
        for inner, name in zip(program.params, block.params, strict=True):
            if inner in reads[block.class_index]:
                readers[name].append((block.class_index, inner))
    found = []
    for name, places in readers.items():
        meta = graph.tensor[name]
        if meta.kind != "param" or not meta.requires_grad or len(meta.shape) != 2:
            continue
        if not all(inner in lookups[index] for index, inner in places):
            continue
        rows, width = meta.shape_at(1)
        ops = [(op, graph.classes[index]) for index, inner in places for op in reads[index][inner]]
        indices = [program.tensor[op.inputs[1]] for op, program in ops]
        found.append(
            Table(
                name=name,
                fqn=meta.fqn,
                rows=rows,
                width=width,
                is_sparse=all(is_sparse_lookup(op) for op, _ in ops),
                per_sample=sum(each.numel_at(2) - each.numel_at(1) for each in indices),
            )
        )
    return tuple(found)


def without_mixed_classes(graph: ModelGraph, names: Collection[str]) -> frozenset[str]:
    """Return the parameters, and those that blocks of their classes have in their places."""
    found = set(names)
    while True:
        more = {
            other
            for at, own in _places(graph)
            if found.intersection(own) and not found.issuperset(own)
            for other in own
        }
        if more <= found:
            return frozenset(found)
        found |= more


def with_table_lookups(graph: ModelGraph, on_host: Collection[str] = ()) -> ModelGraph:
    """Return the graph that runs: lookups with a gradient of rows are ops of ours.

    `on_host` names the tables that are kept in the host's memory, as the user's module does. Raises
    PlanError for what is no table, or where a block has one there that an equal block has not.
    """
    tables = {table.fqn: table for table in tables_of(graph)}
    for fqn in on_host:
        if fqn not in tables:
            raise PlanError(
                f"the plan keeps {fqn} on the host, which is no trained table that lookups alone "
                "read; search again"
            )
    lies: dict[str, Where] = {t.name: "device" for t in tables.values() if t.is_sparse}
    lies |= {tables[fqn].name: "host" for fqn in on_host}
    own: dict[int, dict[str, Where]] = defaultdict(dict)
    for (class_index, inner), params in _places(graph):
        found = {lies.get(name, "") for name in params}
        if len(found) > 1:
            raise PlanError(
                "the plan keeps a table on the host and not that of an equal block; search again"
            )
        own[class_index][inner] = found.pop()
    classes = tuple(_with_lookups(p, own[index]) for index, p in enumerate(graph.classes))
    if classes == graph.classes:
        return graph
    return replace(graph, classes=classes, tensors=_lying(graph.tensors, lies))


def _places(graph: ModelGraph) -> Iterator[tuple[tuple[int, str], set[str]]]:
    """Yield each class's places of parameters, with the parameters that blocks have there."""
    found: dict[tuple[int, str], set[str]] = defaultdict(set)
    for block in graph.blocks:
        program = graph.classes[block.class_index]
        for inner, name in zip(program.params, block.params, strict=True):
            found[block.class_index, inner].add(name)
    yield from found.items()


def _with_lookups(program: Program, lies: Mapping[str, Where]) -> Program:
    if not any(lies.values()):
        return program
    ops = (
        _own(op) if op.target == _LOOKUP and lies.get(op.inputs[0]) else op for op in program.ops
    )
    return replace(program, ops=tuple(ops), tensors=_lying(program.tensors, lies))


def _lying(tensors: Sequence[TensorMeta], lies: Mapping[str, Where]) -> tuple[TensorMeta, ...]:
    return tuple(
        replace(meta, table=lies[meta.name]) if lies.get(meta.name) else meta for meta in tensors
    )


def _own(op: Op) -> Op:
    padding = _arg(op, _PADDING, "padding_idx", -1)
    args = (*op.args[:2], padding, is_sparse_lookup(op))
    return replace(op, target=TABLE_LOOKUP, args=args, kwargs=())


def _arg(op: Op, index: int, name: str, default: Arg) -> Arg:
    if index < len(op.args):
        return op.args[index]
    return dict(op.kwargs).get(name, default)
