"""The labels over which a loss is a mean: what a part of a batch counts for in it.

A cross-entropy that ignores some labels is a mean over the others, each counted by the weight of
its class where classes have weights. On a part of the batch it is one over that part's, so the
parts of its mean count by their labels and not by their samples. Labels come from the batch, and
weights from buffers, by ops without parameters (a shift, a fill, a reshape), which
`planner.runtime` runs on each part before the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from planner.across.step import MEAN
from planner.across.walk import PREAMBLE, Finding, across_samples
from planner.graph import Block, ModelGraph, Op, Program, Ref
from planner.ops.record import mutates

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
    """What the block makes of the batch and of that: labels, and the weights of their classes."""
    inputs: tuple[str, ...]
    """The names in the graph of the inputs of `made`."""
    params: tuple[str, ...]
    """The names in the graph of the buffers that `made` reads."""
    ignore_index: int
    """The label that does not count."""
    place: tuple[int, str]
    """The block of the loss, and its op there."""

    @property
    def buffers(self) -> tuple[str, ...]:
        """The names in the graph of all that is read beside the batch."""
        return tuple(dict.fromkeys((*self.preamble.params, *self.params)))


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


def uncounted(graph: ModelGraph, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield what is found across samples, but for means of the loss by which parts are counted."""
    counted = counted_loss(graph)
    places = set() if counted is None else {labels.place for labels in counted.means}
    for finding in findings:
        if finding.kind != "normaliser" or (finding.block_index, finding.name) not in places:
            yield finding


def blocks_across_samples(graph: ModelGraph) -> frozenset[int]:
    """Return the blocks whose results on a batch are not those on its parts, by index.

    A loss that is a sum, or by a number of samples too large, is none of it; nor are means by which
    parts are counted, and ops of which nothing is known.
    """
    found: set[int] = set()
    for block in graph.blocks:
        if any(mutates(op) for op in graph.classes[block.class_index].ops):
            found.add(block.index)
    for finding in uncounted(graph, across_samples(graph)):
        if finding.kind in ("mixed", "pairs", "normaliser", "buffer", "repeated"):
            found.update((finding.block_index, finding.used_in))
    if PREAMBLE in found:
        made = set(graph.preamble.outputs)
        found |= {block.index for block in graph.blocks if made.intersection(block.inputs)}
    return frozenset(found - {PREAMBLE})


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
        elif called in _LOSSES and (labels := _labels(graph, block, op)) is not None:
            yield labels, True
        else:
            yield None, bool(program.only((local,)).inputs)


def _labels(graph: ModelGraph, block: Block, op: Op) -> Labels | None:
    """Return the labels of a mean of class losses; None where it is another, or they depend on
    more than the batch and buffers that stay as they are.
    """
    program, named = graph.classes[block.class_index], dict(op.kwargs)

    def argument(at: int, name: str, default: object) -> object:
        return op.args[at] if len(op.args) > at else named.get(name, default)

    target, ignored = argument(1, "target", None), argument(_IGNORED, "ignore_index", -100)
    weight = argument(2, "weight", None)
    if (
        argument(_REDUCTION, "reduction", MEAN) != MEAN
        or not isinstance(target, Ref)
        or not isinstance(ignored, int)
        or not program.tensor[target.name].dtype.startswith(("int", "uint"))
    ):
        return None
    made = program.only((target.name, *([weight.name] if isinstance(weight, Ref) else [])))
    names = _outside(made.inputs, program.inputs, block.inputs)
    params = _outside(made.params, program.params, block.params)
    preamble = graph.preamble.only(tuple(n for n in names if n in graph.preamble.outputs))
    known = {*graph.batch_inputs, *preamble.outputs}
    labels = Labels(
        preamble=preamble,
        made=made,
        inputs=names,
        params=params,
        ignore_index=ignored,
        place=(block.index, op.name),
    )
    still = all(graph.tensor[name].kind != "param" for name in labels.buffers)
    if not still or not known.issuperset(names) or _written(graph).intersection(labels.buffers):
        return None
    return labels


def _outside(wanted: Sequence[str], local: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return the names in the graph of some tensors of a block."""
    of_graph = dict(zip(local, names, strict=True))
    return tuple(of_graph[name] for name in wanted)


def _written(graph: ModelGraph) -> set[str]:
    """Return the buffers that any block writes."""
    found: set[str] = set()
    for block in graph.blocks:
        program = graph.classes[block.class_index]
        names = dict(zip(program.params, block.params, strict=True))
        writing = (op.inputs[0] for op in program.ops if mutates(op))
        found.update(names[local] for local in writing if local in names)
    return found
