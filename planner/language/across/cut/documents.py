"""How much work each sample of a batch is, where samples are packed documents.

A document's tokens meet each other alone, so causal attention to a sample of documents of d tokens
takes about the sum of d squared over two: a sample of one long document many times as much as one
of short ones. What a sample takes follows from the tables that attention is told of, which are made
of the batch alone; all else takes as long for each sample, as all have one shape.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from planner.language.across.cut.batch_statistics import batch_norms
from planner.language.across.walk import across_samples
from planner.language.across.whole import Making
from planner.language.graph import Affine, Arg, ModelGraph, Program, Ref
from planner.language.ops.attention_pairs import pairs_met
from planner.language.ops.families.products.masked_attention import MASKED
from planner.language.ops.flops import backward_work, model_flop, op_work
from planner.language.ops.record import is_random

_TABLES = 8, 9
"""Which arguments of attention its tables are: numbers of documents, and the keys that count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attended:
    """A pattern by which blocks attend to documents.

    Attributes:
        same: the output that numbers each place's document, [rows, places].
        keys: the output that is true at places that count; None where all do.
        low, high, chunk: as attention has them (`planner.language.ops.attention_pairs`).
        rows: rows of the tables for each sample that a graph counts.
        pair_flop: of each pair of places that meet, in all blocks that attend so, forward and
            backward.
    """

    same: str
    keys: str | None
    low: int | None
    high: int | None
    chunk: int | None
    rows: int
    pair_flop: int


@dataclass(frozen=True, kw_only=True)
class DocumentWork:
    """What tells the work of samples.

    Attributes:
        program: makes the tables, of the batch alone.
        patterns: how blocks attend by them.
        other_flop: of all else for one sample, forward and backward: alike for all.
    """

    program: Program
    patterns: tuple[Attended, ...]
    other_flop: int


def document_work(graph: ModelGraph) -> DocumentWork | None:
    """Return what tells the work of each sample of a captured model; None where samples are no
    packed documents, or where it matters which are together in a part of the batch.

    Samples may change places in a batch where its loss follows from those of the samples. It does
    not where an op computes across them, or normalises by those of its part (BatchNorm).
    """
    making = Making(graph)
    found: Counter[tuple[str, str | None, int | None, int | None, int | None, int]] = Counter()
    priced = 0.0
    for block in graph.blocks:
        program = graph.classes[block.class_index]
        for op in program.ops:
            if op.target != MASKED or not isinstance(op.args[_TABLES[0]], Ref):
                continue
            tables = [op.args[at] for at in _TABLES]
            same, keys = (
                making.value(block.index, table.name) if isinstance(table, Ref) else None
                for table in tables
            )
            query = program.tensor[op.inputs[0]].shape
            rows, places = query[0], query[2]
            if not isinstance(rows, Affine) or rows.fixed or isinstance(places, Affine):
                return None
            low, high, chunk = (_number(arg) for arg in op.args[3:6])
            assert same is not None, "it is a Ref"
            bound = program.bind(1)
            bound_op = next(each for each in bound.ops if each.name == op.name)
            flop = op_work(bound_op, bound.tensor).flop + backward_work(bound_op, bound.tensor).flop
            priced += flop
            # (Prices are of sequences of one document.)
            pairs = pairs_met(places, places, low=low, high=high, chunk=chunk)
            found[same, keys, low, high, chunk, rows.per_sample] += round(
                flop / max(1.0, pairs * rows.per_sample)
            )
    if not found:
        return None
    outputs = dict.fromkeys(name for key in found for name in key[:2] if name is not None)
    program = making.program(tuple(outputs))
    held = [graph.tensor[name] for name in program.params]
    if any(meta.kind != "constant" for meta in held) or any(map(is_random, program.ops)):
        return None
    if across_samples(graph) or batch_norms(graph):
        return None
    patterns = tuple(
        Attended(same=same, keys=keys, low=low, high=high, chunk=chunk, rows=rows, pair_flop=flop)
        for (same, keys, low, high, chunk, rows), flop in found.items()
    )
    other = round(model_flop(graph, 1) - priced)
    return DocumentWork(program=program, patterns=patterns, other_flop=other)


def _number(arg: Arg) -> int | None:
    assert arg is None or isinstance(arg, int), "bounds are numbers"
    return arg
