"""Where a model computes across samples: its blocks followed from the batch to the loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from planner.language.across.follow import follow_program
from planner.language.graph import Block, ModelGraph, Op, Program, TensorMeta, Unit
from planner.language.graph.mixing import Kind
from planner.language.ops.samples.state import (
    ANY_ORDER,
    CONSTANT,
    IN_ORDER,
    SAMPLES,
    WHOLE,
    State,
    growing_dims,
    lies,
)
from planner.language.ops.samples.step import Edit, Fault, Walk

PREAMBLE = -1
"""The place of what comes before the first block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One op of a block by which what is computed of a sample depends on the others."""

    kind: Kind
    """What is wrong (see `Kind`)."""
    op: str
    """The op to blame, as the user calls it."""
    name: str
    """Its name in its block."""
    line: str
    """Where the op stands in the model's source."""
    block_index: int
    """The block of the op; `PREAMBLE` for what comes before the first."""
    used_by: str
    """The op where a sum over samples becomes more than a term of the loss; empty for `op`."""
    used_in: int
    """The block of `used_by`."""


@dataclass(frozen=True, kw_only=True)
class Followed:
    """What was found of a model.

    Attributes:
        findings: what makes its training depend on how the batch is cut, in order.
        share: what a part of the batch counts for in the loss (`State.share`).
        terms: the shares and divisors that are in a SCALED loss.
        edits: by block, what makes its parts give what the whole batch gives.
    """

    findings: tuple[Finding, ...]
    share: str
    terms: tuple[str, ...]
    edits: Mapping[int, tuple[Edit, ...]]


def follow_model(graph: ModelGraph) -> Followed:
    """Follow a model's samples from the batch to the loss.

    BatchNorm is not among the findings: see `planner.language.across.cut.batch_statistics`.
    """
    return _Model(graph).follow()


def across_samples(graph: ModelGraph) -> tuple[Finding, ...]:
    """Return what makes a model's training depend on how the batch is cut, in order.

    Empty for a model whose loss follows from those of the parts of a batch.
    """
    return follow_model(graph).findings


def states_of_blocks(graph: ModelGraph) -> Iterator[tuple[Block, Mapping[str, State]]]:
    """Yield each block with the states of all tensors in it, by its class's names."""
    model = _Model(graph)
    model.follow()
    for block in graph.blocks:
        yield block, model.states_in(block.index)


def runs_of_samples(
    graph: ModelGraph, tensors: Iterable[tuple[int, str]]
) -> dict[tuple[int, str], int]:
    """Return in how many runs of a dim tensors of blocks have their samples, by block and name: in
    several where the batch stacks what belongs together, or the model one copy behind the other.
    """
    model = _Model(graph)
    model.follow()
    states: dict[int, dict[str, State]] = {}
    found: dict[tuple[int, str], int] = {}
    for block_index, name in tensors:
        if block_index not in states:
            states[block_index] = model.states_in(block_index)
        rows = states[block_index][name].rows
        found[block_index, name] = 1 if rows is None else rows.segments
    return found


class _Model:
    """Follows a graph. Mutable: what was found of a class is kept for its other blocks."""

    def __init__(self, graph: ModelGraph) -> None:
        self._graph = graph
        self._known: dict[
            tuple[int, tuple[State, ...]],
            tuple[tuple[State, ...], list[Fault], tuple[Edit, ...]],
        ] = {}
        self._states: dict[str, State] = {}
        self._found: dict[Finding, None] = {}
        self._edits: dict[int, tuple[Edit, ...]] = {}

    def follow(self) -> Followed:
        graph = self._graph
        for name in graph.batch_inputs:
            self._states[name] = _of_batch(graph.tensor[name], graph.unit)
        if graph.whole is not None:
            for name, value in graph.whole.values:
                state = _of_batch(graph.tensor[name], graph.unit)
                self._states[name] = replace(state, whole=value)
            for name, count in graph.whole.shares:
                self._states[name] = replace(CONSTANT, whole=count)
        self._pairs_in_batch()
        self._follow(PREAMBLE, graph.preamble, graph.preamble.inputs, graph.preamble.outputs)
        for block in graph.blocks:
            program = graph.classes[block.class_index]
            self._follow(block.index, program, block.inputs, block.outputs, block.class_index)
        state = self._look_at_loss()
        return Followed(
            findings=tuple(self._found),
            share=state.share,
            terms=state.terms,
            edits={place: edits for place, edits in self._edits.items() if edits},
        )

    def states_in(self, block_index: int) -> dict[str, State]:
        """Return the states of all tensors in a block, once all was followed."""
        block = self._graph.blocks[block_index]
        program = self._graph.classes[block.class_index]
        walk = Walk(program=program, states=_held(program), unit=self._graph.unit)
        given = (self._states[name] for name in block.inputs)
        walk.states.update(zip(program.inputs, given, strict=True))
        follow_program(walk)
        return walk.states

    def _follow(
        self,
        place: int,
        program: Program,
        inputs: Sequence[str],
        outputs: Sequence[str],
        class_index: int = PREAMBLE,
    ) -> None:
        """Add the states of a block's outputs, and what it has to blame."""
        given = [self._states[name] for name in inputs]
        # What a sum comes from is not the class's matter: equal blocks are followed once.
        local = tuple(
            replace(state, sums=state.sums and (f"@{i}",)) for i, state in enumerate(given)
        )
        key = (class_index, local)
        if key not in self._known:
            walk = Walk(program=program, states=_held(program), unit=self._graph.unit)
            walk.states.update(zip(program.inputs, local, strict=True))
            follow_program(walk)
            made = tuple(walk.states[name] for name in program.outputs)
            self._known[key] = made, list(walk.faults), tuple(walk.edits)
        made, faults, edits = self._known[key]

        def of_model(name: str) -> str:
            """The name in the model of an op or a tensor of the class, or what it is already."""
            return f"{place}{name}" if name[:1] == ":" else name

        def causes(name: str) -> tuple[str, ...]:
            """The ops of the model behind an op of the class."""
            if name[0] == "@":
                return given[int(name[1:])].sums
            return (of_model(name) if ":" in name else f"{place}:{name}",)

        for name, state in zip(outputs, made, strict=True):
            self._states[name] = replace(
                state,
                sums=tuple(dict.fromkeys(c for cause in state.sums for c in causes(cause))),
                share=of_model(state.share),
                terms=tuple(map(of_model, state.terms)),
                loose=of_model(state.loose),
                whole=of_model(state.whole),
                order=_named(place, state.order, given),
                points=None if state.points is None else _named(place, state.points, given),
            )
        for fault in faults:
            for cause in causes(fault.op):
                self._add(fault.kind, cause, f"{place}:{fault.used_by}")
        if edits:
            self._edits[place] = tuple(
                replace(edit, share=edit.share and of_model(edit.share)) for edit in edits
            )

    def _add(self, kind: Kind, cause: str, used: str) -> None:
        (at, op), (used_in, user) = self._op(cause), self._op(used)
        finding = Finding(
            kind=kind,
            op=_called(op),
            name=op.name,
            line=op.line,
            block_index=at,
            used_by="" if cause == used else _called(user),
            used_in=used_in,
        )
        self._found[finding] = None

    def _op(self, where: str) -> tuple[int, Op]:
        place, _, name = where.partition(":")
        index = int(place)
        return index, next(op for op in program_at(self._graph, index).ops if op.name == name)

    def _pairs_in_batch(self) -> None:
        """A tensor of the batch with two dims of samples is cut along both."""
        for name in self._graph.batch_inputs:
            if len(growing_dims(self._graph.tensor[name])) < 2:
                continue
            users: Mapping[int, Program] = {
                block.index: self._graph.classes[block.class_index]
                for block in self._graph.blocks
                if name in block.inputs
            }
            for index, program in users.items():
                local = program.inputs[self._graph.blocks[index].inputs.index(name)]
                op = next(op for op in program.ops if local in op.inputs)
                self._add("pairs", f"{index}:{op.name}", f"{index}:{op.name}")

    def _look_at_loss(self) -> State:
        state = self._states[self._graph.loss]
        if not state.rows and not state.loose:
            return state if state.sums else State(share=SAMPLES)
        # It still has rows, or is of the batch alone: no sum of parts.
        at = self._graph.producer[self._graph.loss]
        block = self._graph.blocks[at]
        program = self._graph.classes[block.class_index]
        local = program.outputs[block.outputs.index(self._graph.loss)]
        end = next(op for op in program.ops if local in op.outputs)
        self._add("mixed", f"{at}:{end.name}", f"{at}:{end.name}")
        return State(share=SAMPLES)


def program_at(graph: ModelGraph, place: int) -> Program:
    """Return the program of a block, or of the preamble."""
    if place == PREAMBLE:
        return graph.preamble
    return graph.classes[graph.blocks[place].class_index]


def names_at(graph: ModelGraph, place: int) -> Iterator[tuple[str, str]]:
    """Yield the tensors that a block takes and hands on by their names in its program, with those
    in the graph.
    """
    program = program_at(graph, place)
    if place == PREAMBLE:
        yield from ((name, name) for name in (*program.inputs, *program.params, *program.outputs))
        return
    block = graph.blocks[place]
    for what in ("inputs", "params", "outputs"):
        yield from zip(getattr(program, what), getattr(block, what), strict=True)


def _is_norm_in_training(op: Op) -> bool:
    """Whether an op is a BatchNorm that takes statistics of the batch."""
    return op.target == "aten.batch_norm.default" and bool(op.args[5])


def _held(program: Program) -> dict[str, State]:
    """Return the states of parameters, and of buffers and constants."""
    return {
        name: WHOLE if program.tensor[name].kind == "param" else CONSTANT for name in program.params
    }


def _called(op: Op) -> str:
    """What a user calls an op: ATen's name, or that of a function or module of their own."""
    name = op.target.split(".")[1]
    if name in ("autograd_function", "opaque_module") and isinstance(op.args[0], str):
        return op.args[0].partition("@")[0]
    return name


def _of_batch(tensor: TensorMeta, unit: Unit) -> State:
    """What comes with the batch: samples that belong together may lie in several runs of it."""
    return State(rows=lies(tensor, unit), pure=True)


def _named(place: int, order: str, given: Sequence[State]) -> str:
    """An order's name in the whole model."""
    known = {IN_ORDER, ANY_ORDER} | {name for s in given for name in (s.order, s.points or "")}
    return order if order in known else f"{place}:{order}"


def follows_from_parts(graph: ModelGraph) -> bool:
    """Whether the loss of a batch follows from those of its parts, as `follow_model` says; buffers
    that forward writes are apart.
    """
    return all(finding.kind in ("buffer", "repeated") for finding in across_samples(graph))


def blocks_across_samples(graph: ModelGraph, *, weighted_loss: bool = False) -> frozenset[int]:
    """Return the blocks whose results on a batch are not those on its parts, by index.

    Ops of which nothing is known are none of it, nor, with a `weighted_loss`, divisors of the loss
    that the user counts in parts.
    """
    found: set[int] = set()
    for block in graph.blocks:
        if any(map(_is_norm_in_training, graph.classes[block.class_index].ops)):
            found.add(block.index)
    for finding in across_samples(graph):
        if finding.kind != "unknown" and not (finding.kind == "normaliser" and weighted_loss):
            found.update((finding.block_index, finding.used_in))
    if PREAMBLE in found:
        made = set(graph.preamble.outputs)
        found |= {block.index for block in graph.blocks if made.intersection(block.inputs)}
    return frozenset(found - {PREAMBLE})
