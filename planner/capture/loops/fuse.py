"""One course for the rows of all experts, in the place of a loop: sorted, multiplied, summed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.capture.blocks import RawGraph, RawOp, live_ops
from planner.capture.loops.chains import (
    Chains,
    Each,
    Made,
    NumberOfRows,
    Place,
    Step,
    Unlike,
    picked_in,
    read_chains,
)
from planner.capture.loops.tracing import ROWS
from planner.capture.routing.following import RESHAPED, Following, root_of, times
from planner.capture.routing.rows import by_rows
from planner.capture.routing.values import Rows
from planner.language.graph import Affine, Arg, Op, Ref, Size, Symbol, TensorMeta
from planner.language.ops.families.entries.routing import (
    BIAS_OF_RUNS,
    SORT_ROWS,
    STACK_OF_RUNS,
    UNSORT_ROWS,
)
from planner.language.ops.families.products.matmul import PRODUCT_OF_RUNS
from planner.language.ops.record import packet_of
from planner.units import DTYPE_BYTES


def with_told_loops(raw: RawGraph, passes_over: Callable[[str], bool]) -> RawGraph:
    """Return a graph in which no traced loop is left. Raises Unlike where one is none.

    `passes_over` says of a module, by its name, whether its loop does nothing with experts that
    have no rows.
    """
    ops = live_ops(raw)
    picks = picked_in(raw.ops)
    if not picks:
        return raw
    if len(picked_in(ops)) < len(picks):
        raise Unlike("rows are picked that nothing follows from")
    tensors = dict(raw.tensors)
    loops = read_chains(ops, tensors)
    last = {loop.last: loop for loop in loops}
    makers: dict[str, Op] = {}
    told: list[RawOp] = []
    for item in ops:
        name = item.op.outputs[0]
        if name in last:
            skips = passes_over(item.module)
            told += _Fusing(last[name], tensors, makers, item, passes_over=skips).run()
        else:
            told.append(item)
        makers |= dict.fromkeys(item.op.outputs, item.op)
    found = replace(raw, tensors=tensors, ops=tuple(told))
    live = live_ops(found)
    if left := picked_in(live):
        raise Unlike(f"rows that are picked are used otherwise at {left[0].op.line}")
    for item in live:
        _check_sizes(item.op, tensors)
    kept = {name for item in live for name in item.op.outputs}
    for loop in loops:
        _check_beside(loop, ops, kept, passes_over)
    return found


def _check_sizes(op: Op, tensors: Mapping[str, TensorMeta]) -> None:
    """Raise Unlike where an op beside the loops has the number of rows that a trace gave each
    expert, as a size or as a value.
    """
    metas = [tensors[name] for name in (*op.inputs, *op.outputs)]
    found = [op.args, op.kwargs, *(meta.shape for meta in metas), *(meta.data for meta in metas)]
    for value in _found(tuple(found), object):
        numbers = (value.per_sample, value.fixed) if isinstance(value, Affine) else (value,)
        if any(isinstance(n, int | float) and n and n % ROWS == 0 for n in numbers):
            raise Unlike(f"the number of an expert's rows is computed with at {op.line}")


def _check_beside(
    loop: Chains, ops: Sequence[RawOp], kept: set[str], passes_over: Callable[[str], bool]
) -> None:
    """Raise Unlike where a loop that passes over experts without rows does more than with rows:
    what is left of that would be done for all of them.
    """
    names = [item.op.outputs[0] for item in ops]
    first, end = min(map(names.index, loop.own.intersection(names))), names.index(loop.last)
    if not passes_over(ops[end].module):
        return
    for item in ops[first:end]:
        if kept.intersection(item.op.outputs) and packet_of(item.op.target) not in RESHAPED:
            raise Unlike(f"more than rows is passed over at {item.op.line}")


@dataclass(frozen=True, kw_only=True)
class _Sorted:
    """Rows in the order of their experts."""

    name: str


@dataclass(frozen=True, kw_only=True)
class _Weights:
    """A weight for each choice, [r, k], before it is picked; `casts` are of it."""

    name: str
    casts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Weighted:
    """Rows times weights; `casts` are of the product."""

    rows: _Sorted
    weights: _Weights


_Value = _Sorted | _Weights | _Weighted


class _Fusing:
    """Writes the ops of one loop. Mutable: ops and tensors are added."""

    def __init__(
        self,
        loop: Chains,
        tensors: dict[str, TensorMeta],
        makers: Mapping[str, Op],
        item: RawOp,
        *,
        passes_over: bool,
    ) -> None:
        self._loop, self._tensors, self._makers = loop, tensors, makers
        self._item, self._passes_over = item, passes_over
        self._ops: list[RawOp] = []
        self._values: dict[tuple[int, int], _Value] = {}
        self._ends = self._order = self._source = self._label = self._taken_rows = ""
        self._number = 0

    def run(self) -> list[RawOp]:
        """Return what stands in the place of the op that adds the last expert's rows."""
        for at, step in enumerate(self._loop.steps):
            self._do(at, step)
        end = self._loop.end
        assert end is not None
        self._added(end)
        return self._ops

    # ------------------------------------------------------------------------------ ops

    def _emit(
        self, target: str, args: tuple[Arg, ...], *made: TensorMeta, step: Step | None = None,
        kwargs: tuple[tuple[str, Arg], ...] = (), last: bool = False,
    ) -> tuple[str, ...]:  # fmt: skip
        base = self._item.op.outputs[0]
        self._number += 1
        names = (base,) if last else tuple(
            f"{base}.loop{self._number}" + (f".{n}" if len(made) > 1 else "")
            for n in range(len(made))
        )  # fmt: skip
        for name, meta in zip(names, made, strict=True):
            self._tensors[name] = replace(meta, name=name)
        op = self._item.op if step is None else step.op
        emitted = Op(name=names[0], target=target, args=args, kwargs=kwargs, outputs=names,
                     line=op.line)  # fmt: skip
        self._ops.append(RawOp(op=emitted, module=self._item.module))
        return names

    def _meta(self, shape: Sequence[Size], like: str, *, grad: bool = True) -> TensorMeta:
        meta = self._tensors[like]
        return TensorMeta(
            name="", shape=tuple(shape), dtype=meta.dtype, kind="activation",
            requires_grad=grad and meta.requires_grad,
        )  # fmt: skip

    @property
    def _rows(self) -> Size:
        """How many copies of rows there are, r k."""
        first = self._tensors[self._source].shape[0]
        return first if self._label == "n" else times(first, self._loop.chosen.choices)

    # ------------------------------------------------------------------------------ steps

    def _do(self, at: int, step: Step) -> None:
        packet, given = packet_of(step.op.target), _found(step.args, Made)
        if not given:
            if packet not in ("index", "index_select"):
                raise Unlike(f"rows are picked by {packet}{_at(step)}")
            self._values[at, 0] = self._taken(step)
            return
        values = [self._values[each.at, each.result] for each in given]
        if len(step.op.outputs) == 1 and (made := self._of_weights(step, packet, values)):
            self._values[at, 0] = made
        elif packet in ("linear", "matmul", "mm") and isinstance(values[0], _Sorted):
            self._values[at, 0] = self._product(step, packet, values)
        elif packet == "add" and len(values) == 1 and _found(step.args, Each) and not step.kwargs:
            self._values[at, 0] = self._sum(step, values[0])
        else:
            for result, name in enumerate(self._by_rows(step)):
                self._values[at, result] = _Sorted(name=name)

    def _taken(self, step: Step) -> _Value:
        """Rows of a tensor, or weights of their choices."""
        source, indices, *_ = step.args
        if packet_of(step.op.target) == "index_select":
            if indices not in (0,) or len(step.args) != 3:
                raise Unlike(f"rows are picked along another dim{_at(step)}")
            indices = (step.args[2],)
        places = tuple(each for each in indices if each is not None)
        labels = tuple(each.of for each in places if isinstance(each, Place))
        if len(labels) != len(places) or not isinstance(source, Ref | Each):
            raise Unlike(f"rows are picked by more than their places{_at(step)}")
        if isinstance(source, Each):
            return self._column(source, labels, step)
        shape, name = self._tensors[source.name].shape, source.name
        if indices[0] is None and len(indices) == 2 and shape[0] == 1 and len(shape) == 3:
            # (x[None, rows] of x with a dim of size 1 before.)
            maker = self._makers[name]
            if packet_of(maker.target) != "unsqueeze":
                raise Unlike(f"rows are picked along another dim{_at(step)}")
            name = maker.inputs[0]
            shape = self._tensors[name].shape
        elif len(indices) != len(labels):
            raise Unlike(f"rows are picked along another dim{_at(step)}")
        choices = self._loop.chosen.choices
        if labels in (("r",), ("n",)) and len(shape) == 2 and self._is_rows(shape[0], labels[0]):
            is_weight = shape[1] == 1 and self._source
            if not is_weight:
                return self._sorted(name, labels[0], step)
        is_flat = labels == ("n",) and shape[:1] == (self._copies(),)
        is_one = labels == ("r",) and choices == 1 and shape[:1] == (self._copies(),)
        is_table = labels in (("r", "k"),) and shape in (
            (self._firsts(), choices),
            (self._firsts(), choices, 1),
        )
        is_short = len(shape) == 1 or shape[1:] == (1,) or is_table
        if not (is_flat or is_one or is_table) or not is_short or "int" in self._dtype(name):
            raise Unlike(f"what is picked is neither rows nor weights{_at(step)}")
        return _Weights(name=self._shaped(name, (self._firsts(), choices), step))

    def _column(self, source: Each, labels: tuple[str, ...], step: Step) -> _Value:
        """The weights of rows in an expert's column of a table [r, e]: those that they chose."""
        shape = self._tensors[source.of].shape if source.of else ()
        is_table = shape == (self._firsts(), self._loop.chosen.experts) and source.dim == 1
        if not is_table or labels != ("r",):
            raise Unlike(f"experts differ in what is picked of{_at(step)}")
        numbers = self._shaped(
            self._loop.chosen.root, (self._firsts(), self._loop.chosen.choices), step
        )
        meta = self._meta(self._tensors[numbers].shape, source.of)
        args = (Ref(source.of), 1, Ref(numbers))
        (name,) = self._emit("aten.gather.default", args, meta, step=step)
        return _Weights(name=name)

    def _copies(self) -> Size:
        """How many choices there are of all rows."""
        return times(self._firsts(), self._loop.chosen.choices)

    def _firsts(self) -> Size:
        """How many rows there are, r."""
        chosen = self._loop.chosen
        shape = self._tensors[self._makers[chosen.root].inputs[0]].shape[:-1]
        first, *others = shape
        for size in others:
            if type(size) is not int:
                raise Unlike("rows are chosen along several dims of samples")
            first = times(first, size)
        return first

    def _is_rows(self, size: Size, label: str) -> bool:
        return size == (self._copies() if label == "n" else self._firsts())

    def _dtype(self, name: str) -> str:
        return self._tensors[name].dtype

    def _sorted(self, name: str, label: str, step: Step) -> _Sorted:
        if self._source:
            if (self._source, self._label) != (name, label):
                raise Unlike(f"rows of two tensors are picked{_at(step)}")
            return _Sorted(name=self._taken_rows)
        self._source, self._label = name, label
        chosen, width = self._loop.chosen, self._tensors[name].shape[1]
        shape: tuple[Size, ...] = (self._firsts(), chosen.choices)
        if label == "n":
            shape = (self._copies(), 1)
        numbers = self._shaped(chosen.root, shape, step)
        rows, order, ends = self._emit(
            SORT_ROWS,
            (Ref(name), Ref(numbers), chosen.experts, True),
            self._meta((self._rows, width), name),
            replace(self._meta((self._rows,), numbers, grad=False), dtype="int64"),
            replace(self._meta((chosen.experts,), numbers, grad=False), dtype="int32"),
            step=step,
        )
        self._order, self._ends, self._taken_rows = order, ends, rows
        return _Sorted(name=rows)

    def _shaped(self, name: str, shape: tuple[Size, ...], step: Step | None = None) -> str:
        """Return a tensor with the entries of another, of this shape."""
        root = root_of(name, self._makers, self._tensors)
        if self._tensors[root].shape == shape:
            return root
        if shape[1:] == (1,) and self._tensors[root].shape == shape[:1]:
            shape = (*shape[:1], 1)
        meta = self._meta(shape, root)
        (made,) = self._emit("aten.reshape.default", (Ref(root), shape), meta, step=step)
        return made

    def _of_weights(self, step: Step, packet: str, values: Sequence[_Value]) -> _Value | None:
        """Weights as a column, or cast; rows times weights, and a cast of these."""
        first = values[0]
        if isinstance(first, _Weights) and len(values) == 1:
            if packet == "detach":
                return self._detached(first, step)
            if packet in RESHAPED:
                return first
            if packet in ("to", "_to_copy"):
                return replace(first, casts=(*first.casts, self._dtype(step.op.outputs[0])))
        if isinstance(first, _Weighted) and len(values) == 1:
            shapes = [self._tensors[n].shape for n in (step.op.inputs[0], step.op.outputs[0])]
            is_cast = packet in ("to", "_to_copy")
            if is_cast and self._dtype(step.op.outputs[0]) == self._dtype(self._item.op.outputs[0]):
                return first  # (the sum is cast to what it is added to)
            if packet in RESHAPED and packet != "detach" and shapes[0] == shapes[1]:
                return first
        if packet == "mul" and len(values) == 2 and len(step.args) == 2:
            shapes = [self._tensors[name].shape for name in step.op.inputs]
            for one, other, column in ((*values, shapes[1]), (*values[::-1], shapes[0])):
                if isinstance(one, _Sorted) and isinstance(other, _Weights):
                    if column != (ROWS, 1):
                        raise Unlike(f"weights are no column{_at(step)}")
                    return _Weighted(rows=one, weights=other)
        is_view = packet in RESHAPED and packet != "detach"
        if is_view and isinstance(first, _Sorted) and len(values) == 1:
            shapes = [
                tuple(size for size in self._tensors[n].shape if size != 1)
                for n in (step.op.inputs[0], step.op.outputs[0])
            ]
            made = self._tensors[step.op.outputs[0]].shape
            if shapes[0] == shapes[1] and made == (ROWS, *self._tensors[first.name].shape[1:]):
                return first
        if not all(isinstance(each, _Sorted) for each in values):
            raise Unlike(f"weighted rows are computed on by {packet}{_at(step)}")
        return None

    def _detached(self, weights: _Weights, step: Step) -> _Weights:
        """Weights that have no gradient."""
        if weights.casts:
            raise Unlike(f"cast weights are detached{_at(step)}")
        meta = self._meta(self._tensors[weights.name].shape, weights.name, grad=False)
        (name,) = self._emit("aten.detach.default", (Ref(weights.name),), meta, step=step)
        return _Weights(name=name)

    def _product(self, step: Step, packet: str, values: Sequence[_Value]) -> _Value:
        """Rows times their experts' matrices, plus their biases."""
        rows, weights, *bias = step.args
        (value,) = values
        if not isinstance(rows, Made) or not isinstance(weights, Each) or step.kwargs:
            raise Unlike(f"rows meet a matrix that is not their expert's{_at(step)}")
        assert isinstance(value, _Sorted)
        matrices = self._stacked(weights, 3, step)
        if (packet == "linear") != weights.turned:
            number, out, inner = self._tensors[matrices].shape
            meta = self._meta((number, inner, out), matrices)
            args: tuple[Arg, ...] = (Ref(matrices), 1, 2)
            (matrices,) = self._emit("aten.transpose.int", args, meta, step=step)
        width = self._tensors[matrices].shape[2]
        made = self._tensors[step.op.outputs[0]]
        meta = replace(self._meta((self._rows, width), step.op.outputs[0]), dtype=made.dtype)
        args = (Ref(value.name), Ref(matrices), Ref(self._ends))
        (name,) = self._emit(PRODUCT_OF_RUNS, args, meta, step=step)
        if bias and bias[0] is not None:
            if not isinstance(bias[0], Each):
                raise Unlike(f"rows meet a bias that is not their expert's{_at(step)}")
            return self._biased(name, bias[0], step)
        return _Sorted(name=name)

    def _sum(self, step: Step, rows: _Value) -> _Value:
        """Rows plus a vector of their expert's."""
        (each,) = _found(step.args, Each)
        made = self._tensors[step.op.outputs[0]]
        if not isinstance(rows, _Sorted):
            raise Unlike(f"weights are added to{_at(step)}")
        same = made.dtype == self._dtype(rows.name)
        if len(step.args) != 2 or not same or made.shape[-1:] != self._tensors[rows.name].shape[1:]:
            raise Unlike(f"rows meet weights by a sum{_at(step)}")
        return self._biased(rows.name, each, step)

    def _biased(self, rows: str, each: Each, step: Step) -> _Sorted:
        """Rows plus their experts' biases."""
        biases = self._stacked(each, 2, step)
        if self._tensors[biases].shape[1:] != self._tensors[rows].shape[1:]:
            raise Unlike(f"rows meet biases of another width{_at(step)}")
        args = (Ref(rows), Ref(biases), Ref(self._ends))
        (name,) = self._emit(BIAS_OF_RUNS, args, replace(self._tensors[rows], name=""), step=step)
        return _Sorted(name=name)

    def _stacked(self, each: Each, dims: int, step: Step) -> str:
        """Return one tensor of all experts' weights."""
        if each.of:
            if (
                each.dim
                or each.of not in self._tensors
                or len(self._tensors[each.of].shape) != dims
            ):
                raise Unlike(f"matrices are cut from another dim{_at(step)}")
            return each.of
        meta = self._tensors[each.names[0]]
        if len(meta.shape) != dims - 1:
            raise Unlike(f"rows meet weights of {len(meta.shape)} dims{_at(step)}")
        shape = (len(each.names), *meta.shape)
        grad = any(self._tensors[name].requires_grad for name in each.names)
        made = TensorMeta(name="", shape=shape, dtype=meta.dtype, kind="activation",
                          requires_grad=grad)  # fmt: skip
        refs = tuple(map(Ref, each.names))
        if self._passes_over:
            args: tuple[Arg, ...] = (Ref(self._ends), refs)
            return self._emit(STACK_OF_RUNS, args, made, step=step)[0]
        return self._emit("aten.stack.default", (refs, 0), made, step=step)[0]

    def _by_rows(self, step: Step) -> tuple[str, ...]:
        """An op that computes each row alone, on all of them."""
        values = [self._values[each.at, each.result] for each in _found(step.args, Made)]
        if not all(isinstance(each, _Sorted) for each in values):
            raise Unlike(f"weighted rows are computed on by {packet_of(step.op.target)}{_at(step)}")
        if _found((step.args, step.kwargs), Each) or _found((step.args, step.kwargs), Place):
            raise Unlike(f"rows meet weights by {packet_of(step.op.target)}{_at(step)}")
        is_shape = packet_of(step.op.target) in (*RESHAPED, "expand")
        if _found((step.args, step.kwargs), NumberOfRows) and not is_shape:
            raise Unlike(f"the number of rows is computed with{_at(step)}")

        def told(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(told, value))
            if isinstance(value, Made):
                found = self._values[value.at, value.result]
                assert isinstance(found, _Sorted)
                return Ref(found.name)
            return self._rows if isinstance(value, NumberOfRows) else value

        metas = []
        for name in step.op.outputs:
            shape = self._tensors[name].shape
            if shape[:1] != (ROWS,) or ROWS in shape[1:]:
                raise Unlike(f"rows lie along another dim{_at(step)}")
            metas.append(
                replace(self._tensors[name], shape=(self._rows, *shape[1:]), kind="activation")
            )
        names = self._emit(
            step.op.target, told(step.args), *metas, step=step, kwargs=told(step.kwargs)
        )
        op = self._ops[-1].op
        rows = {n for n in op.inputs if self._tensors[n].shape[:1] == (self._rows,)}
        known = dict.fromkeys(rows, Rows(sort=self._order))
        at = Following(op=op, tensors=self._tensors, known=known, makers={})
        if by_rows(at) is None:
            raise Unlike(f"rows meet each other{_at(step)}")
        return names

    # -------------------------------------------------------------------------- the end

    def _added(self, step: Step) -> None:
        """Rows summed over their choices, and added to what the loop began with."""
        packet = packet_of(step.op.target)
        _, *args = step.args
        adds = True
        if packet == "index_add":
            dim, place, made, *rest = args
            ok = dim in (0,) and not rest and not step.kwargs
        else:
            indices, made, *rest = args
            place, adds = indices[0], bool(rest and rest[0])
            ok = len(indices) == 1 and not step.kwargs
        if not ok or not isinstance(place, Place) or not isinstance(made, Made):
            raise Unlike(f"rows are added in a way that is not known{_at(step)}")
        value, start = self._values[made.at, made.result], self._loop.start
        maker = self._makers.get(root_of(start, self._makers, self._tensors))
        blank = packet_of(maker.target) if maker is not None else ""
        is_zero = blank in ("zeros", "zeros_like", "new_zeros") or (
            blank in ("full", "full_like", "new_full") and maker is not None
            and maker.args[-1] == 0
        )  # fmt: skip
        is_blank = is_zero or blank in ("empty", "empty_like", "new_empty")
        copies = 1 if self._label == "n" else self._loop.chosen.choices
        if place.of != self._label or (not adds and (copies > 1 or not is_blank)):
            raise Unlike(f"rows are put where others are{_at(step)}")
        weights = None
        if isinstance(value, _Weighted):
            weights, rows = value.weights, value.rows
        elif isinstance(value, _Sorted):
            rows = value
        else:
            raise Unlike(f"weights are added{_at(step)}")
        total = self._tensors[self._item.op.outputs[0]]
        first = self._tensors[self._source].shape[0]
        width = self._tensors[rows.name].shape[1:]
        if total.shape != (first, *width):
            raise Unlike(f"rows are added to what has another shape{_at(step)}")
        dtype, taken = self._dtype(rows.name), None
        if weights is not None:
            name = weights.name
            for cast in weights.casts:
                if cast != self._dtype(name):
                    meta = replace(self._meta(self._tensors[name].shape, name), dtype=cast)
                    (name,) = self._emit(
                        "aten.to.dtype", (Ref(name), Symbol("dtype", cast)), meta, step=step
                    )
            if copies == 1 and self._label == "n":
                name = self._shaped(name, (self._copies(), 1), step)
            taken = Ref(name)
            found = {dtype, self._dtype(name)}
            if len(found) > 1:
                dtype = "float64" if "float64" in found else "float32"
        made_of = Ref(rows.name)
        if DTYPE_BYTES[total.dtype] > DTYPE_BYTES[dtype]:
            # (The sum is not rounded to less than what it is added to.)
            dtype = total.dtype
            meta = replace(self._meta(self._tensors[rows.name].shape, rows.name), dtype=dtype)
            cast_args: tuple[Arg, ...] = (made_of, Symbol("dtype", dtype))
            made_of = Ref(self._emit("aten.to.dtype", cast_args, meta, step=step)[0])
        grad = total.requires_grad
        made_meta = replace(total, dtype=dtype, kind="activation", requires_grad=grad)
        unsort: tuple[Arg, ...] = (made_of, Ref(self._order), taken, copies)
        is_cast, is_sum = dtype != total.dtype, not (is_zero or not adds)
        (name,) = self._emit(
            UNSORT_ROWS, unsort, made_meta, step=step, last=not is_cast and not is_sum
        )
        if is_cast:
            args = (Ref(name), Symbol("dtype", total.dtype))
            (name,) = self._emit(
                "aten.to.dtype", args, replace(total, kind="activation"), step=step,
                last=not is_sum,
            )  # fmt: skip
        if is_sum:
            args = (Ref(start), Ref(name))
            self._emit("aten.add.Tensor", args, replace(total, kind="activation"), step=step,
                       last=True)  # fmt: skip


def _found(value: Any, kind: type) -> list[Any]:
    """Return the arguments of a kind, in order."""
    if isinstance(value, tuple):
        return [each for item in value for each in _found(item, kind)]
    return [value] if isinstance(value, kind) else []


def _at(step: Step) -> str:
    return f" at {step.op.line}" if step.op.line else ""
