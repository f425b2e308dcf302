"""Where a model computes across samples: its blocks followed from the batch to the loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from planner.across.follow import follow_program
from planner.across.state import ANY_ORDER, IN_ORDER, WHOLE, State
from planner.across.step import Fault, Kind, Walk
from planner.graph import Affine, ModelGraph, Op, Program, TensorMeta, Unit
from planner.layout.placement import Shard

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
    power: int = 0
    """The power of the number of parts by which gradients are too small."""


def across_samples(graph: ModelGraph) -> tuple[Finding, ...]:
    """Return what makes a model's training depend on how the batch is cut, in order.

    Empty for a model whose loss is a mean over samples that are each computed alone.
    BatchNorm is not among it: see `planner.plan.batch_statistics`.
    """
    return _Model(graph).findings()


def runs_of_samples(
    graph: ModelGraph, tensors: Iterable[tuple[int, str]]
) -> dict[tuple[int, str], int]:
    """Return in how many runs of a dim tensors of blocks have their samples, by block and name: in
    several where the batch stacks what belongs together, or the model one copy behind the other.
    """
    model = _Model(graph)
    model.findings()
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
        self._known: dict[tuple[int, tuple[State, ...]], tuple[tuple[State, ...], list[Fault]]] = {}
        self._states: dict[str, State] = {}
        self._found: dict[Finding, None] = {}

    def findings(self) -> tuple[Finding, ...]:
        graph = self._graph
        for name in graph.batch_inputs:
            self._states[name] = _of_batch(graph.tensor[name], graph.unit)
        self._pairs_in_batch()
        self._follow(PREAMBLE, graph.preamble, graph.preamble.inputs, graph.preamble.outputs)
        for block in graph.blocks:
            program = graph.classes[block.class_index]
            self._follow(block.index, program, block.inputs, block.outputs, block.class_index)
        self._look_at_loss()
        return tuple(self._found)

    def states_in(self, block_index: int) -> dict[str, State]:
        """Return the states of all tensors in a block, once all was followed."""
        block = self._graph.blocks[block_index]
        program = self._graph.classes[block.class_index]
        walk = Walk(program=program, states=dict.fromkeys(program.params, WHOLE))
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
            replace(state, sums=state.sums and (f"@{i}",), shares=state.shares and (f"/{i}",))
            for i, state in enumerate(given)
        )
        key = (class_index, local)
        if key not in self._known:
            walk = Walk(program=program, states=dict.fromkeys(program.params, WHOLE))
            walk.states.update(zip(program.inputs, local, strict=True))
            follow_program(walk)
            made = tuple(walk.states[name] for name in program.outputs)
            self._known[key] = made, list(walk.faults)
        made, faults = self._known[key]

        def causes(name: str) -> tuple[str, ...]:
            """The ops of the model behind an op of the class."""
            if name[0] == "@":
                return given[int(name[1:])].sums
            return given[int(name[1:])].shares if name[0] == "/" else (f"{place}:{name}",)

        for name, state in zip(outputs, made, strict=True):
            self._states[name] = replace(
                state,
                sums=tuple(dict.fromkeys(c for cause in state.sums for c in causes(cause))),
                shares=tuple(dict.fromkeys(c for cause in state.shares for c in causes(cause))),
                order=_named(place, state.order, given),
                points=None if state.points is None else _named(place, state.points, given),
            )
        for fault in faults:
            for cause in causes(fault.op):
                self._add(fault.kind, cause, f"{place}:{fault.used_by}")

    def _add(self, kind: Kind, cause: str, used: str, power: int = 0) -> None:
        (at, op), (used_in, user) = self._op(cause), self._op(used)
        finding = Finding(
            kind=kind,
            op=_called(op),
            name=op.name,
            line=op.line,
            block_index=at,
            used_by="" if cause == used else _called(user),
            used_in=used_in,
            power=power,
        )
        self._found[finding] = None

    def _op(self, where: str) -> tuple[int, Op]:
        place, _, name = where.partition(":")
        index = int(place)
        program = (
            self._graph.preamble
            if index == PREAMBLE
            else self._graph.classes[self._graph.blocks[index].class_index]
        )
        return index, next(op for op in program.ops if op.name == name)

    def _pairs_in_batch(self) -> None:
        """A tensor of the batch with two dims of samples is cut along both."""
        for name in self._graph.batch_inputs:
            if len(_growing(self._graph.tensor[name])) < 2:
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

    def _look_at_loss(self) -> None:
        state = self._states[self._graph.loss]
        at = self._graph.producer[self._graph.loss]
        block = self._graph.blocks[at]
        program = self._graph.classes[block.class_index]
        local = program.outputs[block.outputs.index(self._graph.loss)]
        end = next(op for op in program.ops if local in op.outputs)
        causes, last = state.sums or (f"{at}:{end.name}",), f"{at}:{end.name}"
        for cause in state.shares:
            self._add("normaliser", cause, last)
        # It still has rows, or a sum kept from zero that nothing was divided by: no mean of parts.
        if state.rows or (state.bounded and not state.power):
            for cause in causes:
                self._add("mixed", cause, last)
        # Each part computes n**power of its own n: the average is a power of parts too small.
        elif state.power:
            for cause in causes:
                self._add("sum", cause, cause, state.power)


def _called(op: Op) -> str:
    """What a user calls an op: ATen's name, or that of a function or module of their own."""
    name = op.target.split(".")[1]
    if name in ("autograd_function", "opaque_module") and isinstance(op.args[0], str):
        return op.args[0].partition("@")[0]
    return name


def _of_batch(tensor: TensorMeta, unit: Unit) -> State:
    """What comes with the batch: samples that belong together may lie in several runs of it."""
    growing = _growing(tensor)
    if not growing:
        return WHOLE
    size = tensor.shape[growing[0]]
    assert isinstance(size, Affine)
    return State(rows=Shard(growing[0], unit.runs_of(size.per_sample)))


def _growing(tensor: TensorMeta) -> list[int]:
    return [d for d, s in enumerate(tensor.shape) if isinstance(s, Affine) and s.per_sample]


def _named(place: int, order: str, given: Sequence[State]) -> str:
    """An order's name in the whole model."""
    known = {IN_ORDER, ANY_ORDER} | {name for s in given for name in (s.order, s.points or "")}
    return order if order in known else f"{place}:{order}"
