"""The labels over which a loss is a mean: what a part of a batch counts for in it.

A cross-entropy that ignores some labels is a mean over the others. On a part of the batch it is one
over that part's, so the parts of its mean count by their labels and not by their samples. Labels
come from the batch by ops without weights (a shift, a fill, a reshape), which `planner.runtime`
runs on each part before the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.across.step import MEAN
from planner.graph import ModelGraph, Op, Program, Ref

_LOSSES = {"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"}
_REDUCTION, _IGNORED = 3, 4
"""Places of arguments of all of them."""

_SCALED = {
    "alias", "clone", "div", "mul", "neg", "reshape", "squeeze", "to", "unsqueeze", "view",
}  # fmt: skip
"""Ops by which a term of a sum stays one, where all other arguments are numbers."""


@dataclass(frozen=True, kw_only=True)
class Labels:
    """The labels of one mean, as ops on the batch alone make them."""

    preamble: Program
    """What is made of the batch ahead of all blocks; `inputs` are names of batch tensors."""
    made: Program
    """What the block makes of the batch and of that."""
    inputs: tuple[str, ...]
    """The names in the graph of the inputs of `made`."""
    ignore_index: int
    """The label that does not count."""


@dataclass(frozen=True, kw_only=True)
class CountedLoss:
    """A loss that is a sum with means over labels in it."""

    means: tuple[Labels, ...]
    """The labels of each of these means; at least one."""
    is_all: bool
    """Whether no other term of the sum depends on the batch."""


def counted_loss(graph: ModelGraph) -> CountedLoss | None:
    """Return over which labels the loss of a model is a mean; None where nothing says so."""
    terms = list(_terms(graph, graph.loss))
    means = tuple(labels for labels, _ in terms if labels is not None)
    if not means:
        return None
    return CountedLoss(
        means=means, is_all=not any(labels is None and batch for labels, batch in terms)
    )


def _terms(graph: ModelGraph, name: str) -> Iterator[tuple[Labels | None, bool]]:
    """Yield the labels of each term of a sum, and whether it depends on the batch."""
    place = graph.producer.get(name)
    if place is None:  # of the batch, or of the preamble
        yield None, True
        return
    block = graph.blocks[place]
    program = graph.classes[block.class_index]
    inputs = dict(zip(program.inputs, block.inputs, strict=True))
    maker = {out: op for op in program.ops for out in op.outputs}
    waiting = [program.outputs[block.outputs.index(name)]]
    while waiting:
        local = waiting.pop()
        if local in inputs:
            yield from _terms(graph, inputs[local])
            continue
        op = maker.get(local)
        if op is None:  # a parameter
            yield None, False
            continue
        called = op.target.split(".")[1]
        given = [arg for arg in (*op.args, *(v for _, v in op.kwargs)) if isinstance(arg, Ref)]
        if called in ("add", "sub") or (called in _SCALED and len(given) == 1):
            waiting += [ref.name for ref in given]
        elif called in _LOSSES and (labels := _labels(graph, program, inputs, op)) is not None:
            yield labels, True
        else:
            yield None, bool(program.only((local,)).inputs)


def _labels(graph: ModelGraph, program: Program, inputs: dict[str, str], op: Op) -> Labels | None:
    """Return the labels of a mean of class losses; None where it is another, or they depend on
    more than the batch.
    """
    named = dict(op.kwargs)

    def argument(at: int, name: str, default: object) -> object:
        return op.args[at] if len(op.args) > at else named.get(name, default)

    target, ignored = argument(1, "target", None), argument(_IGNORED, "ignore_index", -100)
    if (
        argument(_REDUCTION, "reduction", MEAN) != MEAN
        or argument(2, "weight", None) is not None
        or not isinstance(target, Ref)
        or not isinstance(ignored, int)
        or not program.tensor[target.name].dtype.startswith(("int", "uint"))
    ):
        return None
    made = program.only((target.name,))
    names = tuple(inputs[local] for local in made.inputs)
    preamble = graph.preamble.only(tuple(n for n in names if n in graph.preamble.outputs))
    known = {*graph.batch_inputs, *preamble.outputs}
    if made.params or preamble.params or not known.issuperset(names):
        return None
    return Labels(preamble=preamble, made=made, inputs=names, ignore_index=ignored)
