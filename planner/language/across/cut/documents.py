"""How much work each sample of a batch is, where samples are packed documents.

A document's tokens meet each other alone, so causal attention to a sample of documents of d tokens
takes about the sum of d squared over two: a sample of one long document many times as much as one
of short ones. What a sample takes follows from the tables that attention is told of, which are made
of the batch alone; all else takes as long for each sample, as all have one shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from planner.language.across.cut.batch_statistics import batch_norms
from planner.language.across.walk import across_samples
from planner.language.across.whole import Making
from planner.language.graph import Affine, Arg, ModelGraph, Op, Program, Ref, map_refs
from planner.language.ops.attention_pairs import pairs_met
from planner.language.ops.families.products.masked_attention import MASKED
from planner.language.ops.flops import backward_work, model_flop, op_work
from planner.language.ops.record import is_random

_SAME, _KEYS = 8, 9
"""Which arguments of attention its tables are: numbers of documents, and the keys that count."""


class Pattern(NamedTuple):
    """By what blocks attend to documents."""

    same: str
    """The table that numbers each place's document, [rows, places]."""
    keys: str | None
    """The table that is true at places that count; None where all do."""
    low: int | None
    """The least by which a query is ahead of a key (`planner.language.ops.attention_pairs`)."""
    high: int | None
    """The most."""
    chunk: int | None
    """Places of a run in which both are."""
    rows: int
    """Rows of the tables for each sample that a graph counts."""


@dataclass(frozen=True, kw_only=True)
class DocumentWork:
    """What tells the work of samples.

    Attributes:
        program: makes the tables, of the batch alone.
        pair_flop: of each pair of places that meet, by pattern with tables of the program, in all
            blocks that attend so, forward and backward.
        other_flop: of all else for one sample, forward and backward: alike for all.
    """

    program: Program
    pair_flop: dict[Pattern, int]
    other_flop: int


def document_work(graph: ModelGraph) -> DocumentWork | None:
    """Return what tells the work of each sample of a captured model; None where samples are no
    packed documents, or where it matters which are together in a part of the batch.

    Samples may change places in a batch where its loss follows from those of the samples. It does
    not where an op computes across them, or normalises by those of its part (BatchNorm).
    """
    by_class = [_attended(program) for program in graph.classes]
    if not any(by_class) or across_samples(graph) or batch_norms(graph):
        return None
    making = Making(graph)
    found: list[tuple[Pattern, _Attention]] = []
    for block in graph.blocks:
        for each in by_class[block.class_index]:
            if not each.pairs:
                return None
            same = making.value(block.index, each.pattern.same)
            keys = each.pattern.keys
            keys = None if keys is None else making.value(block.index, keys)
            found.append((each.pattern._replace(same=same, keys=keys), each))
    tables = [name for pattern, _ in found for name in pattern[:2] if name is not None]
    program = making.program(tuple(dict.fromkeys(tables)))
    is_plain = all(op.target.startswith("aten.") and not is_random(op) for op in program.ops)
    if not is_plain or any(graph.tensor[name].kind != "constant" for name in program.params):
        return None
    # Blocks that make tables in one way have the same.
    first = _first_alike(program)
    pair_flop: Counter[Pattern] = Counter()
    for pattern, each in found:
        keys = None if pattern.keys is None else first[pattern.keys]
        pair_flop[pattern._replace(same=first[pattern.same], keys=keys)] += round(
            each.flop / each.pairs
        )
    return DocumentWork(
        program=program.only(tuple(dict.fromkeys(first.values()))),
        pair_flop=dict(pair_flop),
        other_flop=round(model_flop(graph, 1) - sum(each.flop for _, each in found)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attention:
    """Attention of a class of blocks: its tables by names there, its flop, forward and backward, as
    if each sample were one document, and how many pairs meet then (0 where that is not known).
    """

    pattern: Pattern
    flop: float
    pairs: float


def _attended(program: Program) -> list[_Attention]:
    """Return the attention of a class of blocks that is told of documents."""
    ops = [op for op in program.ops if op.target == MASKED and isinstance(op.args[_SAME], Ref)]
    bound = program.bind(1) if ops else program
    at = {op.name: op for op in bound.ops}
    return [_attention(op, program, at[op.name], bound) for op in ops]


def _attention(op: Op, program: Program, of_one: Op, bound: Program) -> _Attention:
    rows, _, places, _ = program.tensor[op.inputs[0]].shape
    low, high, chunk = (_number(arg) for arg in op.args[3:6])
    same, keys = (_name(op.args[number]) for number in (_SAME, _KEYS))
    assert same is not None, "documents are numbered"
    pairs, per_sample = 0.0, 1
    if isinstance(rows, Affine) and not rows.fixed and isinstance(places, int):
        per_sample = rows.per_sample
        pairs = pairs_met(places, places, low=low, high=high, chunk=chunk) * per_sample
    forward = op_work(of_one, bound.tensor)
    return _Attention(
        pattern=Pattern(same, keys, low, high, chunk, per_sample),
        flop=forward.flop + backward_work(of_one, bound.tensor, forward).flop,
        pairs=pairs,
    )


def _first_alike(program: Program) -> dict[str, str]:
    """Return for each output the first that is made by the same ops of the same inputs."""
    made = {name: (op, at) for op in program.ops for at, name in enumerate(op.outputs)}
    numbers: dict[Hashable, int] = {}
    known: dict[str, str] = {}

    def told(name: str) -> str:
        """What a tensor is made of, in a word: alike for tensors that are equal."""
        if name not in made:
            return name
        if name not in known:
            op, at = made[name]
            args, kwargs = (
                map_refs(each, lambda ref: Ref(told(ref.name))) for each in (op.args, op.kwargs)
            )
            # (No name of a tensor begins with a digit.)
            known[name] = f"{numbers.setdefault((op.target, args, kwargs, at), len(numbers))}"
        return known[name]

    first: dict[str, str] = {}
    return {name: first.setdefault(told(name), name) for name in program.outputs}


def _name(arg: Arg) -> str | None:
    return arg.name if isinstance(arg, Ref) else None


def _number(arg: Arg) -> int | None:
    assert arg is None or isinstance(arg, int), "bounds are numbers"
    return arg
