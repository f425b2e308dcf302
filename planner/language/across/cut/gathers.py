"""Ops that compute across samples, run on the whole batch by every replica.

What such an op takes is gathered over the replicas in the order of samples, and what follows from
it goes on as on one device: it is computed in whole by all. So one replica has, of a tensor that
grows with the batch, either the rows of its own samples or those of all. A tensor of all samples
goes back to a replica's own rows where it leaves its block.

    local rows --gather_samples--> all rows --op--> all rows or a number --own_samples--> local rows

The gradient of a gathered row is the sum of what all replicas have for it. Each replica's loss
counts by its samples, so the sum over replicas of what a parameter gets behind a gather is the
whole batch's gradient once, as it is elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from planner.language.across.walk import PREAMBLE, follow_model, states_of_blocks
from planner.language.graph import Affine, ModelGraph, Op, Program, Ref, Size, TensorMeta, map_refs
from planner.language.graph.mixing import Kind
from planner.language.graph.module_keys import OPAQUE_MODULE
from planner.language.layout.placement import Shard
from planner.language.layout.redistribute import GATHER_SAMPLES, OWN_SAMPLES
from planner.language.ops.record import is_random, mutates
from planner.language.ops.samples.state import IN_ORDER, State, growing_dims
from planner.language.ops.samples.step import BOUND

BATCH = "batch"
"""The axes that cut a batch, as an argument."""

GATHERED: tuple[Kind, ...] = ("mixed", "pairs", "normaliser", "size")
"""Kinds of findings that it is an answer to."""

_MOST_PASSES = 32
_ANY = 2 * BOUND
"""A number of samples at which a graph with gathers is looked at."""

WholeOps = Mapping[int, frozenset[str]]
"""The ops to run on the whole batch, by class."""


class _NotGathered(Exception):
    """An op can't be run on the whole batch."""


def whole_ops(graph: ModelGraph) -> WholeOps | None:
    """Return the ops that compute across samples with all they take along, by class; nothing where
    some can't be run on the whole batch.
    """
    chosen: dict[int, frozenset[str]] = {}
    for _ in range(_MOST_PASSES):
        try:
            made = _with(graph, chosen, _ANY, ())
        except _NotGathered:
            return None
        causes: dict[int, set[str]] = {}
        followed = follow_model(made)
        places = [(f.block_index, f.name) for f in followed.findings if f.kind in GATHERED]
        # What takes a value of the whole batch, as the number of its samples, has it there.
        edits = [(at, edit) for at, edits in followed.edits.items() for edit in edits]
        places += [(at, edit.op) for at, edit in edits if edit.share is None]
        for block_index, name in places:
            if block_index == PREAMBLE:
                return None
            causes.setdefault(made.blocks[block_index].class_index, set()).add(name)
        if not causes:
            # What a part counts for in a term is in the graph before plans are; it is no other one
            # where the term is computed on the whole batch.
            return chosen if not edits else None
        more = {index: chosen.get(index, frozenset()) | names for index, names in causes.items()}
        if all(chosen.get(index) == names for index, names in more.items()):
            return None
        chosen |= more
    return None


def with_gathers(
    graph: ModelGraph, ops: WholeOps, num_samples: int, parts: Sequence[int] = ()
) -> ModelGraph:
    """Return the graph that runs these ops on a batch of so many samples.

    Sizes of the whole batch are numbers in it, so its microbatch size is that of a replica.
    """
    return _with(graph, ops, num_samples, tuple(parts)) if ops else graph


def _with(graph: ModelGraph, ops: WholeOps, num_samples: int, parts: tuple[int, ...]) -> ModelGraph:
    if not ops:
        return graph
    states: dict[int, Mapping[str, State]] = {}
    for block, found in states_of_blocks(graph):
        if block.class_index not in ops:
            continue
        known = states.setdefault(block.class_index, found)
        if {n: _shape_of(s) for n, s in known.items()} != {
            n: _shape_of(s) for n, s in found.items()
        }:
            raise _NotGathered
    classes = list(graph.classes)
    for index, names in ops.items():
        classes[index] = _Rewrite(
            program=graph.classes[index],
            states=states[index],
            whole=names,
            num_samples=num_samples,
            parts=parts,
        ).program_with_gathers()
    return replace(graph, classes=tuple(classes))


def _shape_of(state: State) -> tuple[object, ...]:
    """What of a state decides how its tensor is gathered."""
    return state.rows, state.order, state.points, bool(state.sums), bool(state.loose), state.lost


@dataclass(kw_only=True)
class _Rewrite:
    """A class whose ops across samples run on the whole batch. Mutable: the ops so far."""

    program: Program
    states: Mapping[str, State]
    whole: frozenset[str]
    num_samples: int
    parts: tuple[int, ...]
    ops: list[Op] = field(default_factory=list)
    tensors: dict[str, TensorMeta] = field(default_factory=dict)
    of_all: dict[str, str] = field(default_factory=dict)
    """By tensor, the name of what it is on the whole batch; its own where it is nothing else."""
    numbers: set[str] = field(default_factory=set)
    """Results of ops on the whole batch that are as large as those of a part: right for both."""

    def __post_init__(self) -> None:
        self._maker = {name: op for op in self.program.ops for name in op.outputs}
        self.tensors = dict(self.program.tensor)

    def program_with_gathers(self) -> Program:
        for op in self.program.ops:
            # What reads a tensor of all samples computes on all.
            reads_all = any(self.of_all.get(name) == name for name in op.inputs)
            if op.name in self.whole or reads_all:
                self._run_whole(op, {name: name for name in op.outputs}, op.name)
            else:
                self.ops.append(op)
        outputs = tuple(map(self._own_rows, self.program.outputs))
        used = {name for op in self.ops for name in (*op.inputs, *op.outputs)}
        used.update((*self.program.inputs, *self.program.params, *outputs))
        return replace(
            self.program,
            ops=tuple(self.ops),
            outputs=outputs,
            tensors=tuple(t for name, t in self.tensors.items() if name in used),
        )

    def _run_whole(self, op: Op, called: Mapping[str, str], name: str) -> None:
        """Append an op on the whole batch, whose results are `called` so."""
        if is_random(op) or mutates(op) or op.target == OPAQUE_MODULE:
            raise _NotGathered  # replicas would draw, or write, or keep what differs
        taken = {each: self._on_all(each) for each in op.inputs}
        self.ops.append(
            replace(
                op,
                name=name,
                args=self._sized(map_refs(op.args, lambda ref: Ref(taken[ref.name]))),
                kwargs=self._sized(map_refs(op.kwargs, lambda ref: Ref(taken[ref.name]))),
                outputs=tuple(called[each] for each in op.outputs),
            )
        )
        for each, made in called.items():
            meta = self.program.tensor[each]
            self.tensors[made] = replace(meta, name=made, shape=tuple(map(self._size, meta.shape)))
            if made == each and not _grows(meta):
                self.numbers.add(each)
            else:
                self.of_all[each] = made

    def _on_all(self, name: str) -> str:
        """Return the name of a tensor as it is on the whole batch."""
        if name in self.of_all:
            return self.of_all[name]
        state = self.states[name]
        if name in self.numbers or (state.is_whole and not _grows(self.program.tensor[name])):
            return name
        op = self._maker.get(name)
        if op is not None and not self._depends(op):
            return self._again(op, name)
        if state.rows is not None and self._is_in_order(name, state):
            return self._gathered(name, state.rows)
        if op is None:
            raise _NotGathered
        return self._again(op, name)

    def _depends(self, op: Op) -> bool:
        """Whether an op's result follows from samples, and not from their number alone."""
        return is_random(op) or any(
            self.program.tensor[name].kind != "param"
            and (name not in self._maker or self._depends(self._maker[name]))
            and (_grows(self.program.tensor[name]) or not self.states[name].is_whole)
            for name in op.inputs
        )

    def _is_in_order(self, name: str, state: State) -> bool:
        growing = growing_dims(self.program.tensor[name])
        assert state.rows is not None
        return (
            growing == [state.rows.dim]
            and self._per_sample(name, state.rows.dim) % state.rows.segments == 0
            and state.points is None
            and state.order == IN_ORDER
            and not (state.sums or state.loose or state.lost)
        )

    def _per_sample(self, name: str, dim: int) -> int:
        size = self.program.tensor[name].shape[dim]
        if not isinstance(size, Affine) or size.fixed:
            raise _NotGathered
        return size.per_sample

    def _again(self, op: Op, name: str) -> str:
        """Run an op, that has run on a replica's own samples, on the whole batch, too."""
        called = {each: f"{each}_of_all" for each in op.outputs}
        self._run_whole(op, called, f"{op.name}_of_all")
        return called[name]

    def _gathered(self, name: str, rows: Shard) -> str:
        made = f"{name}_of_all"
        meta = self.program.tensor[name]
        shape = tuple(map(self._size, meta.shape))
        self._add(
            made,
            replace(meta, name=made, shape=shape, kind="activation", fqn="", aliases=()),
            GATHER_SAMPLES,
            (Ref(name), BATCH, rows.dim, rows.segments, self.parts),
        )
        self.of_all[name] = made
        return made

    def _own_rows(self, name: str) -> str:
        """Return the name of an output of the block as a replica has it."""
        if self.of_all.get(name) != name:
            return name
        meta = self.program.tensor[name]
        if len(growing_dims(meta)) != 1:
            raise _NotGathered
        (dim,) = growing_dims(meta)
        self._per_sample(name, dim)
        made = f"{name}_own"
        self._add(made, replace(meta, name=made), OWN_SAMPLES, (Ref(name), BATCH, dim, self.parts))
        return made

    def _add(self, made: str, meta: TensorMeta, target: str, args: tuple) -> None:
        self.tensors[made] = meta
        self.ops.append(Op(name=made, target=target, args=args, outputs=(made,)))

    def _size(self, size: Size) -> Size:
        return size.at(self.num_samples) if isinstance(size, Affine) else size

    def _sized(self, arg: Any) -> Any:
        if isinstance(arg, Affine):
            return self._size(arg)
        return tuple(map(self._sized, arg)) if isinstance(arg, tuple) else arg


def _grows(meta: TensorMeta) -> bool:
    return bool(growing_dims(meta))
