"""Lowering: a block's program and op placements → the program each rank of an axis runs.

The local program has local shapes and explicit ``planner.redistribute`` ops; everything
else is the captured op, with sizes of the shard where its arguments spell sizes. Every
consumer that takes a value in the same placement shares one redistribution, so the
backward of q, k and v projections costs one all-reduce, not three.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from planner.errors import LayoutError
from planner.language.graph import ModelGraph, Op, Program, Ref, TensorMeta, map_refs
from planner.language.layout.axes import Degrees, lowered_axes
from planner.language.layout.class_layout import ClassLayout
from planner.language.layout.placement import (
    OpSharding,
    Own,
    Placement,
    Replicate,
    Shard,
    cut_dim,
    parse_placement,
)
from planner.language.layout.redistribute import REDISTRIBUTE, redistribute_op
from planner.language.lowering.experts import check_rows, spread_experts
from planner.language.lowering.passes.losses_in_chunks import with_losses_in_chunks
from planner.language.ops.call import local_shape
from planner.language.ops.registry import (
    grad_is_partial,
    is_linear,
    local_ops,
    repeated,
    terms_of,
    why_not_divided,
)

if TYPE_CHECKING:
    from planner.language.plan import Plan

ONCE = "planner.count_gradient_once"
"""Target of an op that leaves a whole gradient on the first rank only; args (Ref, axis)."""


def local_program(
    graph: ModelGraph,
    plan: Plan,
    class_index: int,
    *,
    degrees: Degrees,
    microbatch_size: int,
    watched: tuple[str, ...] = (),
    planned: ModelGraph | None = None,
) -> Program:
    """Return what a rank of a stage of these degrees runs for a block class.

    The program is lowered on one axis after the other, innermost first. `watched` tensors become
    further outputs, in the placements in which their ops make them. `planned` is the graph on the
    plan's own batch, where sizes of the whole batch are numbers in it (None: the same).
    """
    whole = graph.classes[class_index]
    full_size = plan.microbatch_units // degrees.along("batch")
    # Layouts were found for a full microbatch. A smaller microbatch is lowered beside it, as the
    # segments of its layout follow from comparing the two programs.
    programs = [whole.bind(microbatch_size)]
    if planned is not None or microbatch_size != full_size:
        programs.append((planned or graph).classes[class_index].bind(full_size))
    programs = [replace(bound, outputs=(*bound.outputs, *watched)) for bound in programs]
    placed_on: dict[str, ClassLayout] = {}
    for axis in lowered_axes():
        layout = plan.layout(class_index, axis=axis.name, degrees=degrees)
        placed_on |= {} if layout is None else {axis.name: layout}
        if layout is not None and watched:
            made = (str(made_as(whole, layout, name)) for name in watched)
            layout = layout.model_copy(update={"outputs": (*layout.outputs, *made)})
        layouts = [layout]
        # (Layouts on the next axis are for programs as lowered on this, so both go on.)
        if len(programs) > 1:
            fitted = layout and _resized(
                layout, programs[1], programs[0], full_size, microbatch_size
            )
            layouts = [fitted, layout]
        programs = [
            lower(
                bound,
                placed,
                axis=axis.name,
                axis_size=degrees[axis.name],
                sum_later=axis.whole_params,
            )
            for bound, placed in zip(programs, layouts, strict=True)
        ]
    program = programs[0]
    if degrees["ep"] > 1:
        check_rows(whole, placed_on, degrees)
        on_ep = plan.layout(class_index, axis="ep", degrees=degrees)
        program = spread_experts(program, degrees["ep"], etp=degrees["etp"], layout=on_ep)
    return with_losses_in_chunks(program, plan.logit_rows)


def _resized(
    layout: ClassLayout, full: Program, program: Program, full_size: int, size: int
) -> ClassLayout:
    """Return a layout for `full`, of microbatches of `full_size`, for the program of another size.

    Where a dim of rows counts samples and each is cut (`Shard` with segments that are the
    samples or parts of them), there are as many segments as there are samples.
    """

    def resize(name: str, here: str, placement: Placement) -> Placement:
        # Segments that are no multiple of the samples do not count samples (q, k, v of a fused
        # weight).
        if not isinstance(placement, Shard | Own) or placement.segments % full_size:
            return placement
        sizes = full.tensor[name].shape, program.tensor[here].shape
        # The dim does not grow with the batch: its segments are something else. (What says where a
        # rank's own rows are is of rows that grow, though it may not grow itself.)
        if placement.dim is not None and sizes[0][placement.dim] == sizes[1][placement.dim]:
            return placement
        return replace(placement, segments=placement.segments // full_size * size)

    shardings, resized = layout.op_shardings, []
    for op, here in zip(full.ops, program.ops, strict=True):
        if op.name in shardings:
            placed = shardings[op.name]
            changed = OpSharding(
                inputs=tuple(map(resize, op.inputs, here.inputs, placed.inputs)),
                outputs=tuple(map(resize, op.outputs, here.outputs, placed.outputs)),
            )
            resized.append((here.name, str(changed)))
    ends = {
        what: tuple(
            str(resize(name, here, parse_placement(text)))
            for name, here, text in zip(
                getattr(full, what), getattr(program, what), getattr(layout, what), strict=True
            )
        )
        for what in ("inputs", "outputs")
    }
    return layout.model_copy(update={"ops": tuple(resized), **ends})


def made_as(program: Program, layout: ClassLayout | None, name: str) -> Placement:
    """Return the placement in which an op of the program makes a tensor under a layout."""
    op = next(op for op in program.ops if name in op.outputs)
    sharding = None if layout is None else layout.op_shardings.get(op.name)
    return Replicate() if sharding is None else sharding.outputs[op.outputs.index(name)]


def lower(
    program: Program,
    layout: ClassLayout | None,
    *,
    axis: str = "",
    axis_size: int,
    sum_later: bool = False,
) -> Program:
    """Return what one rank of `axis` (the innermost if not given) runs for a bound program.

    Inputs and params enter, and outputs leave, at the layout's placements. With `sum_later`
    the gradient of every whole parameter is left as a sum over the axis that the caller takes,
    for example once a step with the sums over replicas; and a tensor that repeats a smaller one
    (`sharding.repeated`) is gathered as that one, and repeated again. Without a layout every
    rank runs the whole program; on an axis of size one it is returned unchanged. Raises
    LayoutError when the layout is for another program, a size does not divide, or an op can't
    run as placed.
    """
    # With `sum_later` even a program that runs whole is changed: its parameters' gradients would be
    # counted once a rank.
    if axis_size == 1 or (layout is None and not sum_later):
        return program
    axis = axis or lowered_axes()[0].name
    layout = layout or _replicated(program)
    _check_layout(program, layout)
    lowering = _Lowering(program=program, axis=axis, axis_size=axis_size, sum_later=sum_later)
    for names, texts in ((program.inputs, layout.inputs), (program.params, layout.params)):
        for name, text in zip(names, texts, strict=True):
            lowering.enter(name, parse_placement(text))
    shardings = layout.op_shardings
    for op in program.ops:
        lowering.run(op, shardings.get(op.name))
    # A block's outputs leave with a whole gradient: the next block has taken its sum already.
    outputs = tuple(
        lowering.fetch(name, parse_placement(text), grad_partial=False)
        for name, text in zip(program.outputs, layout.outputs, strict=True)
    )
    ops = lowering.used_ops(outputs)
    made = {name for op in ops for name in op.outputs} | {*program.inputs, *program.params}
    return replace(
        program,
        name=f"{program.name}_{axis}{axis_size}",
        outputs=outputs,
        tensors=tuple(meta for name, meta in lowering.tensors.items() if name in made),
        ops=ops,
    )


def _replicated(program: Program) -> ClassLayout:
    whole = (program.inputs, program.params, program.outputs)
    inputs, params, outputs = (("R",) * len(names) for names in whole)
    return ClassLayout(class_index=0, inputs=inputs, params=params, outputs=outputs, ops=())


def _check_layout(program: Program, layout: ClassLayout) -> None:
    for what, names, texts in (
        ("inputs", program.inputs, layout.inputs),
        ("params", program.params, layout.params),
        ("outputs", program.outputs, layout.outputs),
    ):
        if len(names) != len(texts):
            raise LayoutError(
                f"the layout has placements of {len(texts)} {what} but {program.name} has "
                f"{len(names)}; it was made for another model"
            )
    unknown = {name for name, _ in layout.ops} - {op.name for op in program.ops}
    if unknown:
        raise LayoutError(
            f"the layout places op {min(unknown)}, which {program.name} does not have; "
            "it was made for another model"
        )


@dataclass(kw_only=True)
class _Lowering:
    """The local program so far. Not frozen because it grows op by op.

    Attributes:
        program: what is lowered, bound, with whole tensors.
        axis: the mesh axis.
        axis_size: its ranks.
        sum_later: whether gradients of whole parameters stay sums over the axis.
        ops: of the local program, in order.
        tensors: its tensors, local, by name.
        placement: how each tensor of `program` lies where it is made.
        moved: the redistributions so far, by tensor, placement and whether the gradient of the
            result is a sum; with the name of the result.
        summed_later: parameters, and what linear ops make of them alone, whose gradient may be
            left as terms.
        again: names of ops that were run again on a whole source.
    """

    program: Program
    axis: str
    axis_size: int
    sum_later: bool
    ops: list[Op] = field(default_factory=list)
    tensors: dict[str, TensorMeta] = field(default_factory=dict)
    placement: dict[str, Placement] = field(default_factory=dict)
    moved: dict[tuple[str, Placement, bool], str] = field(default_factory=dict)
    summed_later: set[str] = field(default_factory=set)
    again: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Find what need not be gathered at its full size."""
        self.repeated = repeated(self.program) if self.sum_later else {}

    def enter(self, name: str, placement: Placement) -> None:
        """Note a tensor that exists in one placement."""
        meta = self.program.tensor[name]
        self._add(name, meta, placement)
        self.placement[name] = placement
        # Its gradient may stay a sum over the axis, to be taken once a step.
        if self.sum_later and meta.kind == "param" and isinstance(placement, Replicate):
            self.summed_later |= {name} if meta.requires_grad else set()

    def run(self, op: Op, sharding: OpSharding | None) -> None:
        """Append an op, after the redistributions its inputs need."""
        if sharding is None:
            replicated = Replicate()
            sharding = OpSharding(
                inputs=(replicated,) * len(op.inputs), outputs=(replicated,) * len(op.outputs)
            )
        form = local_ops(
            op, sharding, self.program.tensor, axis=self.axis, axis_size=self.axis_size
        )
        # Ops on shards leave on whole inputs only a term of their gradient.
        partial = grad_is_partial(sharding.outputs)
        # Where a weight is only transposed or cast, terms of its gradient pass as they are.
        passes = not partial and self._stays_a_sum(op)
        # An op may take one tensor twice in different placements, so its references are
        # renamed by position; a local form keeps their order.
        fetched = [
            self.fetch(name, placement, grad_partial=partial or passes)
            for name, placement in zip(op.inputs, sharding.inputs, strict=True)
        ]
        # Names that the local form makes itself must not be taken for the op's inputs.
        made = {meta.name for meta in form.tensors} | set(op.outputs)
        for local in form.ops:
            self.ops.append(_with_inputs(local, op, fetched, made))
        for meta in form.tensors:
            self._add(meta.name, meta, sharding.outputs[0])
        for name, placement in zip(op.outputs, sharding.outputs, strict=True):
            self.enter(name, placement)
        if passes:
            self.summed_later.update(op.outputs)

    def fetch(self, name: str, placement: Placement, *, grad_partial: bool) -> str:
        """Return the name of a tensor in a placement, redistributing it at most once."""
        meta = self.program.tensor[name]
        have = self.placement[name]
        # Only of a value that is whole: the gradient of a shard is that shard, of a sum it is
        # whole.
        grad_partial = grad_partial and meta.requires_grad and isinstance(placement, Replicate)
        # A use that leaves a term adds it to the later sum, with no collective now. A use that
        # leaves a whole gradient on every rank would be counted once a rank, so it counts on the
        # first alone.
        if name in self.summed_later:
            if grad_partial:
                return name
            name = self._counted_once(name)
        if have == placement and not grad_partial:
            return name
        # Consumers with the same demand share a redistribution, and so its collective in the
        # backward.
        key = (name, placement, grad_partial)
        if key not in self.moved:
            text = str(placement).replace("(", "").replace(")", "")
            moved = f"{name}_{self.axis}_{text}{'_reduced' if grad_partial else ''}"
            self._add(moved, meta, placement)
            self.moved[key] = moved
            self.ops.append(
                self._repeat(name, moved, placement, grad_partial)
                if name in self.repeated and isinstance(placement, Replicate)
                else redistribute_op(
                    name,
                    moved,
                    axis=self.axis,
                    src=have,
                    dst=placement,
                    grad_partial=grad_partial,
                )
            )
        return self.moved[key]

    def _repeat(self, name: str, target: str, placement: Placement, grad_partial: bool) -> Op:
        """Return the op that makes `target`, a tensor as `name` but whole, of its whole source.

        The op is linear: terms of the gradient of what it makes give terms of its source's.
        """
        op = self.repeated[name]
        # Rather than gather the repeated tensor: its source is smaller by the number of repeats.
        self.again.add(op.name)
        source = self.fetch(op.inputs[0], placement, grad_partial=grad_partial)

        def rename(ref: Ref) -> Ref:
            return Ref(source)

        args, kwargs = map_refs(op.args, rename), map_refs(op.kwargs, rename)
        return replace(op, name=target, args=args, kwargs=kwargs, outputs=(target,))

    def used_ops(self, outputs: tuple[str, ...]) -> tuple[Op, ...]:
        """Return the ops so far without those whose results all users take repeated again."""
        needed = set(outputs)
        kept: list[Op] = []
        # From the last: an op is needed if an output or an op behind it reads what it makes.
        for op in reversed(self.ops):
            may_go = op.name in self.again or op.target == REDISTRIBUTE
            if not (self.again and may_go) or needed.intersection(op.outputs):
                kept.append(op)
                needed.update(op.inputs)
        return tuple(reversed(kept))

    def _stays_a_sum(self, op: Op) -> bool:
        terms = terms_of(op)
        is_of_params = bool(terms) and self.summed_later.issuperset(terms)
        return is_of_params and is_linear(op, self.program.tensor)

    def _counted_once(self, name: str) -> str:
        """Return a parameter for uses that leave the same whole gradient on every rank."""
        once = f"{name}_{self.axis}_once"
        if once not in self.tensors:
            self._add(once, self.program.tensor[name], Replicate())
            self.ops.append(
                Op(name=once, target=ONCE, args=(Ref(name), self.axis), outputs=(once,))
            )
        return once

    def _add(self, name: str, meta: TensorMeta, placement: Placement) -> None:
        shape = meta.shape_at(1)
        called = meta.fqn or meta.name
        reason = why_not_divided(called, shape, placement, self.axis, self.axis_size)
        if reason:
            raise LayoutError(
                f"{called} of shape {list(shape)} can't be cut as {placement}: {reason}"
            )
        if name == meta.name and cut_dim(placement) is None:
            self.tensors[name] = meta
            return
        kind = "activation" if name != meta.name else meta.kind
        local = local_shape(shape, placement, self.axis_size)
        self.tensors[name] = replace(meta, name=name, shape=local, kind=kind)


def _with_inputs(local: Op, op: Op, fetched: list[str], made: set[str]) -> Op:
    """Return an op of a local form with the op's inputs replaced by those fetched.

    An op with the same inputs takes them in order, since one tensor may stand there in two
    placements; others name them. What the form itself made keeps its name.
    """
    if tuple(fetched) == op.inputs:
        return local
    names, by_place = iter(fetched), local.inputs == op.inputs
    by_name = dict(zip(op.inputs, fetched, strict=True))

    def rename(ref: Ref) -> Ref:
        if ref.name in made:
            return ref
        return Ref(next(names) if by_place else by_name[ref.name])

    return replace(local, args=map_refs(local.args, rename), kwargs=map_refs(local.kwargs, rename))
