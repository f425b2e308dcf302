"""Gradients that a model has as sparse tensors: which stay rows, and which are dense in a plan.

In one process a table's gradient is sparse where all that reads it is lookups of an
``nn.Embedding(sparse=True)``, and dense as soon as something else does. A gradient by bags
(``nn.EmbeddingBag``) is dense in a plan: SGD and Adagrad, which take both, do the same with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from planner.capture.blocks import RawOp
from planner.language.graph import Op, TensorMeta
from planner.language.graph.tables import can_have_rows, is_sparse_lookup

_PLACE_OF_SPARSE = {
    "aten.embedding": 4,
    "aten.embedding_bag": 5,
    "aten._embedding_bag": 5,
    "aten._embedding_bag_forward_only": 5,
}
"""Where an op is told whether the gradient of its table is a sparse tensor."""


def dense_where_mixed(ops: Sequence[RawOp], tensors: Mapping[str, TensorMeta]) -> list[RawOp]:
    """Return ops whose gradients are sparse for tables alone of which all gradients are rows."""
    readers: dict[str, list[Op]] = defaultdict(list)
    for raw in ops:
        for name in dict.fromkeys(raw.op.inputs):
            readers[name].append(raw.op)
    tables = {
        name
        for name, own in readers.items()
        if tensors[name].kind == "param"
        and tensors[name].requires_grad
        and all(is_sparse_lookup(op) and can_have_rows(op, name) for op in own)
    }
    return [raw if tables.intersection(raw.op.inputs) else _dense(raw) for raw in ops]


def _dense(raw: RawOp) -> RawOp:
    at = _PLACE_OF_SPARSE.get(raw.op.target.rpartition(".")[0])
    if at is None or len(raw.op.args) <= at or not raw.op.args[at]:
        return raw
    args = (*raw.op.args[:at], False, *raw.op.args[at + 1 :])
    return replace(raw, op=replace(raw.op, args=args))
