"""A graph whose parts of a batch give what the whole batch gives.

Three things of a loss can't be made of a part alone, and follow from the whole batch without a
parameter (`planner.language.across.follow`), so they are made before the step, by a program of
their own: values across samples that an op takes (the number of labels that count, a mean of the
rewards, weights that add up to 1), the number of samples as a value, and what a part counts for in
a term of the loss. Blocks take these as further inputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from planner.language.across.walk import PREAMBLE, Followed, follow_model, names_at, program_at
from planner.language.graph import (
    Affine,
    Block,
    ModelGraph,
    Op,
    Program,
    Ref,
    Symbol,
    TensorMeta,
    WholeBatch,
    map_refs,
)
from planner.language.graph.mixing import Kind
from planner.language.ops.record import mutates
from planner.language.ops.samples.state import ADDED, SAMPLES, SCALED
from planner.language.ops.samples.step import Edit

PART_OF = "planner.part_of"
"""Target of an op that multiplies a term of a loss by its share; args (Ref of the term, Ref of the
share). Without a share nothing is left of the term, be it a number or none (a mean over nothing).
"""


_OF_SAMPLES: tuple[Kind, ...] = ("mixed", "pairs", "normaliser", "size")
"""Kinds of findings by which a loss does not follow from those of parts."""


@dataclass(frozen=True, kw_only=True)
class LossShares:
    """What parts of a batch count for in a model's loss.

    Attributes:
        share: of a part in the loss (see `planner.language.ops.samples.state.State.share`).
        terms: what is in a loss whose terms have their shares in them already.
        program: makes the graph's values of the whole batch, and counts over it; params are named
            as in the graph.
        counts: its output for each share and term that is no word of
        `planner.language.ops.samples.state`.
    """

    share: str
    terms: tuple[str, ...]
    program: Program
    counts: dict[str, str]


def with_whole_values(graph: ModelGraph) -> ModelGraph:
    """Return a graph as parts of a batch compute it, with what they take of the whole batch."""
    followed = follow_model(graph)
    if any(finding.kind in _OF_SAMPLES for finding in followed.findings):
        # Terms of a loss that does not follow from parts have no shares to be given.
        values = {
            place: tuple(edit for edit in edits if edit.share is None)
            for place, edits in followed.edits.items()
        }
        followed = replace(followed, edits={at: edits for at, edits in values.items() if edits})
    if not followed.edits:
        return graph
    return _Edited(graph, followed).graph()


def loss_shares(graph: ModelGraph) -> LossShares:
    """Return what parts count for in the loss of a graph of `with_whole_values`."""
    followed = follow_model(graph)
    if any(edit.share is not None for edits in followed.edits.values() for edit in edits):
        # (Terms without their shares, of a loss that does not follow from parts.)
        followed = replace(followed, share=SAMPLES, terms=())
    making = Making(graph)
    counts = {}
    values: tuple[str, ...] = ()
    if graph.whole is not None:
        values = graph.whole.program.outputs
        making.take(graph.whole.program)
    for name in dict.fromkeys((followed.share, *followed.terms)):
        if name in (ADDED, SAMPLES, SCALED):
            continue
        counts[name] = name if name in values else making.count(name)
    return LossShares(
        share=followed.share,
        terms=followed.terms,
        program=making.program(tuple(dict.fromkeys((*values, *counts.values())))),
        counts=counts,
    )


@dataclass(kw_only=False)
class Making:
    """Collects ops that make values of the batch alone. Mutable: it grows value by value."""

    graph: ModelGraph
    ops: dict[str, Op] = field(default_factory=dict)
    tensors: dict[str, TensorMeta] = field(default_factory=dict)

    def program(self, outputs: tuple[str, ...]) -> Program:
        """Return the program that makes some of the values."""
        used = [name for op in self.ops.values() for name in op.inputs] + list(outputs)
        outside = dict.fromkeys(name for name in used if name not in self.tensors)
        metas = [self.graph.tensor[name] for name in outside]
        batch = set(self.graph.batch_inputs)
        return Program(
            name="whole",
            inputs=tuple(name for name in outside if name in batch),
            params=tuple(name for name in outside if name not in batch),
            outputs=outputs,
            tensors=(*metas, *self.tensors.values()),
            ops=tuple(self.ops.values()),
        )

    def value(self, place: int, name: str) -> str:
        """Return the name in the program of a block's tensor, after the ops that make it."""
        program = program_at(self.graph, place)
        maker = next((op for op in program.ops if name in op.outputs), None)
        if maker is None:
            outer = dict(names_at(self.graph, place))[name]
            return self._from_outside(outer)
        return self._made(place, maker)[maker.outputs.index(name)]

    def _from_outside(self, name: str) -> str:
        if name in self.graph.preamble.outputs:
            return self.value(PREAMBLE, name)
        place = self.graph.producer.get(name)
        if place is None:
            # Of the batch, a buffer, or a value of the whole batch that a block is given.
            given = dict(self.graph.whole.values) if self.graph.whole is not None else {}
            return given.get(name, name)
        inner = {outer: inner for inner, outer in names_at(self.graph, place)}
        return self.value(place, inner[name])

    def _made(self, place: int, op: Op) -> tuple[str, ...]:
        # (What runs is Python, whose names begin with a letter.)
        where = "" if place == PREAMBLE else f"b{place}."

        def renamed(name: str) -> str:
            return f"{where}{name}"

        outputs = tuple(map(renamed, op.outputs))
        if outputs[0] not in self.tensors:
            sources = {name: self.value(place, name) for name in dict.fromkeys(op.inputs)}
            program = program_at(self.graph, place)
            self._add(
                replace(
                    op,
                    name=renamed(op.name),
                    args=map_refs(op.args, lambda ref: Ref(sources[ref.name])),
                    kwargs=map_refs(op.kwargs, lambda ref: Ref(sources[ref.name])),
                    outputs=outputs,
                ),
                *(replace(program.tensor[name], name=renamed(name)) for name in op.outputs),
            )
        return outputs

    def _add(self, op: Op, *metas: TensorMeta) -> str:
        self.ops[op.name] = op
        self.tensors |= {meta.name: replace(meta, requires_grad=False) for meta in metas}
        return op.outputs[0]

    def _op(self, name: str, target: str, args: tuple, shape: tuple, dtype: str) -> str:
        meta = TensorMeta(name=name, shape=shape, dtype=dtype, kind="activation")
        return self._add(Op(name=name, target=target, args=args, outputs=(name,)), meta)

    def take(self, program: Program) -> None:
        """Take over the ops of another such program."""
        for op in program.ops:
            self._add(op, *(program.tensor[name] for name in op.outputs))

    def number(self, size: Affine) -> str:
        """Return the name of the number that a size of the whole batch is."""
        name = f"size_{size.per_sample}_{size.fixed}"
        if name not in self.tensors:
            dtype = (("dtype", Symbol("dtype", "int64")), ("device", Symbol("device")))
            op = Op(
                name=name,
                target="aten.full.default",
                args=((), size),
                kwargs=dtype,
                outputs=(name,),
            )
            self._add(op, TensorMeta(name=name, shape=(), dtype="int64", kind="activation"))
        return name

    def count(self, share: str) -> str:
        """Return the name of what a mean of class losses counts: its labels that are not ignored,
        each by the weight of its class.

        `share` is the loss's op, as ``block:op``.
        """
        where, _, name = share.partition(":")
        place = int(where)
        program = program_at(self.graph, place)
        loss = next(op for op in program.ops if op.name == name)
        count = f"count_{place}_{name}"
        if count in self.tensors:
            return count
        named = dict(loss.kwargs)
        target, weight, ignored = (
            loss.args[at] if len(loss.args) > at else named.get(word, default)
            for at, word, default in (
                (1, "target", None),
                (2, "weight", None),
                (4, "ignore_index", -100),
            )
        )
        assert isinstance(target, Ref)
        meta = program.tensor[target.name]
        labels = self.value(place, target.name)
        counting = f"{count}_each"
        self._op(counting, "aten.ne.Scalar", (Ref(labels), ignored), meta.shape, "bool")
        if isinstance(weight, Ref):
            weights, dtype = self.value(place, weight.name), program.tensor[weight.name].dtype
            is_not, classes, of_labels = (f"{count}_{what}" for what in ("not", "class", "weight"))
            self._op(is_not, "aten.logical_not.default", (Ref(counting),), meta.shape, "bool")
            # (An ignored label may be none of the classes.)
            self._op(
                classes,
                "aten.masked_fill.Scalar",
                (Ref(labels), Ref(is_not), 0),
                meta.shape,
                meta.dtype,
            )
            indices = (Ref(classes),)
            self._op(of_labels, "aten.index.Tensor", (Ref(weights), indices), meta.shape, dtype)
            each = f"{count}_counts"
            self._op(each, "aten.mul.Tensor", (Ref(of_labels), Ref(counting)), meta.shape, dtype)
            counting = each
            return self._op(count, "aten.sum.default", (Ref(counting),), (), dtype)
        return self._op(count, "aten.sum.default", (Ref(counting),), (), "int64")


class _Edited:
    """Makes the graph with what parts take of the whole batch. Mutable: names are given as it goes
    through the blocks.
    """

    def __init__(self, graph: ModelGraph, followed: Followed) -> None:
        self._graph, self._followed = graph, followed
        self._making = Making(graph)
        self._values: dict[str, str] = {}
        self._shares: dict[tuple[str, str], str] = {}
        self._metas: dict[str, TensorMeta] = {}

    def graph(self) -> ModelGraph:
        """Return the graph."""
        graph, edits = self._graph, self._followed.edits
        own: dict[tuple[int, tuple[Edit, ...]], list[int]] = defaultdict(list)
        for block in graph.blocks:
            own[block.class_index, edits.get(block.index, ())].append(block.index)
        taken = {class_index for class_index, changes in own if not changes}
        classes = list(graph.classes)
        blocks = list(graph.blocks)
        for (class_index, changes), members in own.items():
            if not changes:
                continue
            for number, index in enumerate(members):
                program, given = self._program(graph.blocks[index], changes)
                if number == 0:
                    # Blocks of the class without these changes keep it.
                    if class_index in taken:
                        class_index = len(classes)
                        classes.append(program)
                    else:
                        taken.add(class_index)
                        classes[class_index] = program
                blocks[index] = self._block(graph.blocks[index], program, class_index, given)
        preamble = graph.preamble
        used = {name for block in blocks for name in (*block.inputs, *block.params)}
        preamble = preamble.only(tuple(name for name in preamble.outputs if name in used))
        whole = WholeBatch(
            program=self._making.program(self._outputs()),
            values=tuple((name, value) for value, name in self._values.items()),
            shares=tuple((name, count) for (count, _), name in self._shares.items()),
        )
        kept = used | {*preamble.params, *whole.program.params, *graph.batch_inputs}
        kept |= {name for block in blocks for name in block.outputs}
        held = ("param", "buffer", "constant")
        return replace(
            graph,
            tensors=(
                *(meta for meta in graph.tensors if meta.name in kept or meta.kind in held),
                *self._metas.values(),
            ),
            preamble=preamble,
            blocks=tuple(blocks),
            classes=tuple(classes),
            whole=whole,
        )

    def _outputs(self) -> tuple[str, ...]:
        counts = (count for count, _ in self._shares if count != SAMPLES)
        return tuple(dict.fromkeys((*self._values, *counts)))

    def _program(
        self, block: Block, changes: Iterable[Edit]
    ) -> tuple[Program, tuple[tuple[str, str], ...]]:
        """Return a block's program with the changes, and its further inputs with their names in the
        graph.
        """
        program = self._graph.classes[block.class_index]
        by_op: dict[str, list[Edit]] = defaultdict(list)
        for change in changes:
            by_op[change.op].append(change)
        rewriting = _Rewriting(program=program)
        for op in program.ops:
            # Values before shares of them. Numbers last: as tensors they move the places of others.
            for change in sorted(
                by_op.get(op.name, ()), key=lambda c: (c.is_number, c.share is not None, c.at)
            ):
                op = self._changed(rewriting, block, op, change)
            rewriting.ops.append(op)
        return rewriting.finished(), tuple(rewriting.taken.items())

    def _changed(self, rewriting: _Rewriting, block: Block, op: Op, change: Edit) -> Op:
        if change.share is None and change.is_number:
            size = op.args[change.at]
            assert isinstance(size, Affine)
            return rewriting.with_number(op, change.at, self._number(size))
        if change.share is None:
            name = self._value(block.index, op.inputs[change.at], rewriting.program)
            return rewriting.with_tensor(op, change.at, name, self._metas[name])
        if change.is_number and not isinstance(op.args[change.at], Ref):
            op = rewriting.with_number_as_tensor(op, change.at)
        name = self._share(change.share, rewriting.dtype_of(op, change))
        return rewriting.with_share(op, change, name, self._metas[name])

    def _block(
        self, block: Block, program: Program, class_index: int, given: tuple[tuple[str, str], ...]
    ) -> Block:
        old = self._graph.classes[block.class_index]
        names = dict(zip(old.inputs, block.inputs, strict=True))
        names |= {inner: name for name, inner in given}
        params = dict(zip(old.params, block.params, strict=True))
        return replace(
            block,
            class_index=class_index,
            inputs=tuple(names[inner] for inner in program.inputs),
            params=tuple(params[inner] for inner in program.params),
        )

    def _value(self, place: int, inner: str, program: Program) -> str:
        value = self._making.value(place, inner)
        if value not in self._values:
            name = self._values[value] = f"whole_{len(self._values)}"
            meta = program.tensor[inner]
            self._metas[name] = TensorMeta(
                name=name, shape=meta.shape, dtype=meta.dtype, kind="activation"
            )
        return self._values[value]

    def _number(self, size: Affine) -> tuple[str, TensorMeta]:
        value = self._making.number(size)
        if value not in self._values:
            name = self._values[value] = f"whole_{len(self._values)}"
            self._metas[name] = TensorMeta(name=name, shape=(), dtype="int64", kind="activation")
        name = self._values[value]
        return name, self._metas[name]

    def _share(self, share: str, dtype: str) -> str:
        count = share if share == SAMPLES else self._making.count(share)
        if (count, dtype) not in self._shares:
            name = self._shares[count, dtype] = f"share_{len(self._shares)}"
            self._metas[name] = TensorMeta(name=name, shape=(), dtype=dtype, kind="activation")
        return self._shares[count, dtype]


@dataclass(kw_only=True)
class _Rewriting:
    """A program on its way to taking values of the whole batch. Mutable: it grows op by op."""

    program: Program
    ops: list[Op] = field(default_factory=list)
    tensors: dict[str, TensorMeta] = field(default_factory=dict)
    taken: dict[str, str] = field(default_factory=dict)
    """Further inputs by their names in the graph."""

    def _input(self, name: str, meta: TensorMeta) -> str:
        if name not in self.taken:
            inner = self.taken[name] = f"whole{len(self.taken)}"
            self.tensors[inner] = replace(meta, name=inner)
        return self.taken[name]

    def with_tensor(self, op: Op, at: int, name: str, meta: TensorMeta) -> Op:
        """Return an op that takes a further input for its tensor at a place."""
        return _with_ref(op, at, self._input(name, meta))

    def with_number(self, op: Op, at: int, given: tuple[str, TensorMeta]) -> Op:
        """Return an op that takes a further input for its argument at a place."""
        return _with_arg(op, at, Ref(self._input(*given)))

    def with_number_as_tensor(self, op: Op, at: int) -> Op:
        """Return an op whose plain number at a place is a tensor of its result's dtype."""
        name = f"{op.name}_number"
        dtype = self.program.tensor[op.outputs[0]].dtype
        self.tensors[name] = TensorMeta(name=name, shape=(), dtype=dtype, kind="activation")
        kwargs = (("dtype", Symbol("dtype", dtype)), ("device", Symbol("device")))
        self.ops.append(
            Op(
                name=name,
                target="aten.full.default",
                args=((), op.args[at]),
                kwargs=kwargs,
                outputs=(name,),
                line=op.line,
            )
        )
        return _with_arg(op, at, Ref(name))

    def dtype_of(self, op: Op, change: Edit) -> str:
        """Return the dtype of the term of an op that has a share."""
        return self._meta(self._term(op, change)).dtype

    def _term(self, op: Op, change: Edit) -> str:
        if change.is_number:
            arg = op.args[change.at]
            assert isinstance(arg, Ref)
            return arg.name
        return op.inputs[change.at]

    def _meta(self, name: str) -> TensorMeta:
        return self.tensors.get(name) or self.program.tensor[name]

    def with_share(self, op: Op, change: Edit, name: str, meta: TensorMeta) -> Op:
        """Return an op that takes a term times its share, after the op that multiplies them."""
        term, share = self._term(op, change), self._input(name, meta)
        made = f"{term}_{share}"
        if made not in self.tensors:
            self.tensors[made] = replace(self._meta(term), name=made, kind="activation", fqn="")
            self.ops.append(
                Op(
                    name=made,
                    target=PART_OF,
                    args=(Ref(term), Ref(share)),
                    outputs=(made,),
                    line=op.line,
                )
            )
        if change.is_number:
            return _with_arg(op, change.at, Ref(made))
        return _with_ref(op, change.at, made)

    def finished(self) -> Program:
        """Return the program, without what is not read any more."""
        needed = set(self.program.outputs)
        kept: list[Op] = []
        for op in reversed(self.ops):
            if mutates(op) or needed.intersection(op.outputs):
                kept.append(op)
                needed.update(op.inputs)
        made = {name for op in kept for name in op.outputs}
        inputs = (*self.program.inputs, *self.taken.values())
        return replace(
            self.program,
            inputs=tuple(name for name in inputs if name in needed),
            params=tuple(name for name in self.program.params if name in needed),
            tensors=tuple(
                meta
                for meta in (*self.program.tensors, *self.tensors.values())
                if meta.name in needed | made
            ),
            ops=tuple(reversed(kept)),
        )


def _with_arg(op: Op, at: int, ref: Ref) -> Op:
    args = (*op.args[:at], ref, *op.args[at + 1 :])
    return replace(op, target=op.target.replace(".Scalar", ".Tensor"), args=args)


def _with_ref(op: Op, at: int, name: str) -> Op:
    """Return an op that takes another tensor at one place among its inputs."""
    place = -1

    def change(ref: Ref) -> Ref:
        nonlocal place
        place += 1
        return Ref(name) if place == at else ref

    return replace(op, args=map_refs(op.args, change), kwargs=map_refs(op.kwargs, change))
