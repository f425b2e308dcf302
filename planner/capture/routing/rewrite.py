"""Told routing in the place of ops that sort rows, bias them and put them back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner.capture.blocks import RawGraph, RawOp, live_ops
from planner.capture.routing.follow import follow
from planner.capture.routing.following import root_of
from planner.capture.routing.values import (
    Back,
    Biases,
    Blank,
    Known,
    Numbers,
    Ones,
    Order,
    Repeated,
    Rows,
    sort_of,
)
from planner.language.graph import Arg, Op, Ref, Size, TensorMeta
from planner.language.ops.families.entries.routing import BIAS_OF_RUNS, SORT_ROWS, UNSORT_ROWS
from planner.language.ops.record import family_of, packet_of

RESHAPE = "aten.reshape.default"
_TAKES = ("index", "index_select", "gather")
_PUTS = (*_TAKES, "index_put", "index_copy", "index_add", "scatter", "scatter_add")


def with_told_routing(raw: RawGraph) -> RawGraph:
    """Return a graph whose routing is told, where it is recognised."""
    ops = [item.op for item in live_ops(raw)]
    if not any(family_of(op.target).deals_rows for op in ops):
        return raw
    known, makers = follow(ops, raw.tensors)
    sorts = {
        sort: told
        for sort in dict.fromkeys(value.sort for value in known.values() if isinstance(value, Rows))
        if (told := _Told.of(sort, ops, raw, known)) is not None
    }
    if not sorts:
        return raw
    rewriting = _Rewriting(known=known, makers=makers, tensors=dict(raw.tensors))
    rewritten: list[RawOp] = []
    for item in live_ops(raw):
        sort = next((s for s in map(sort_of, map(known.get, item.op.outputs)) if s in sorts), None)
        made = [item.op] if sort is None else rewriting.told(item.op, sorts[sort])
        rewritten += [RawOp(op=op, module=item.module) for op in made]
    return replace(raw, tensors=rewriting.tensors, ops=tuple(rewritten))


@dataclass(frozen=True, kw_only=True)
class _Told:
    """A sort all of whose uses are recognised."""

    sort: str
    take: Op
    """The op that takes rows in its order."""
    number: int
    """Of experts."""

    @classmethod
    def of(
        cls, sort: str, ops: Sequence[Op], raw: RawGraph, known: Mapping[str, Known]
    ) -> _Told | None:
        """Return what a sort is told with; None where a value of its order is used otherwise, or
        no product is of runs.
        """
        mine = {name for name, value in known.items() if sort_of(value) == sort}
        held = {name for name in mine if not isinstance(known[name], Back)}
        if raw.loss in held:
            return None
        takes, numbers, returns = [], set(), 0
        for op in ops:
            makes = [known.get(name) for name in op.outputs]
            if held.intersection(op.inputs) and not all(
                isinstance(value, Blank | Ones | Numbers) or sort_of(value) == sort
                for value in makes
            ):
                return None
            if not mine.intersection(op.outputs):
                continue
            if isinstance(makes[0], Rows) and _is_take(op, known):
                takes.append(op)
            if isinstance(makes[0], Biases):
                numbers.add(raw.tensors[makes[0].of].shape[0])
            if family_of(op.target).deals_rows:
                numbers.add(raw.tensors[op.inputs[1]].shape[0])
                returns |= 1
            if isinstance(makes[0], Back):
                if not _has_dtype(makes[0], raw.tensors, raw.tensors[op.outputs[0]]):
                    return None
                returns |= 2
        if len(takes) != 1 or len(numbers) != 1 or returns != 3:
            return None
        (number,) = numbers
        return cls(sort=sort, take=takes[0], number=number) if isinstance(number, int) else None


def _is_take(op: Op, known: Mapping[str, Known]) -> bool:
    return packet_of(op.target) in _TAKES and isinstance(known.get(op.inputs[1]), Order)


def _has_dtype(back: Back, tensors: Mapping[str, TensorMeta], made: TensorMeta) -> bool:
    """Whether copies put back have the dtype that rows times weights have."""
    found = {_cast_to(back.rows, back.casts, tensors)}
    if back.weights is not None:
        found.add(_cast_to(back.weights.of, back.weights.casts, tensors))
    wider = {"float32"} if len(found) == 2 and "float64" not in found else found
    return made.dtype in wider and len(wider) == 1


def _cast_to(name: str, casts: Sequence[Op], tensors: Mapping[str, TensorMeta]) -> str:
    return tensors[casts[-1].outputs[0] if casts else name].dtype


@dataclass(kw_only=True)
class _Rewriting:
    """The ops that are told so far; grows `tensors`."""

    known: Mapping[str, Known]
    makers: Mapping[str, Op]
    tensors: dict[str, TensorMeta]
    _ends: dict[str, str] = field(default_factory=dict)
    _orders: dict[str, str] = field(default_factory=dict)

    def told(self, op: Op, told: _Told) -> list[Op]:
        """Return what an op becomes, after what gives its inputs their shape."""
        made = self.known[op.outputs[0]]
        if op is told.take:
            return self._sorted(op, told)
        if family_of(op.target).deals_rows:
            ends = Ref(self._ends[told.sort])
            return [replace(op, args=(*op.args[:2], ends), kwargs=_without_ends(op))]
        if isinstance(made, Rows) and any(
            isinstance(self.known.get(name), Biases) for name in op.inputs
        ):
            first, second = op.inputs
            rows, biases = (
                (first, second) if isinstance(self.known[first], Rows) else (second, first)
            )
            of = self.known[biases]
            assert isinstance(of, Biases)
            args = (Ref(rows), Ref(of.of), Ref(self._ends[told.sort]))
            return [replace(op, target=BIAS_OF_RUNS, args=args, kwargs=())]
        if isinstance(made, Back):
            is_put = packet_of(op.target) in _PUTS and not made.split
            if is_put or made.copies > 1:
                return self._unsorted(op, made, told)
        return [op]

    def _sorted(self, op: Op, told: _Told) -> list[Op]:
        source, order = op.inputs[0], self.known[op.inputs[1]]
        repeated = self.known.get(source)
        assert isinstance(order, Order)
        copies = order.divided
        if isinstance(repeated, Repeated):
            source, copies = repeated.of, repeated.times
        sort = self.makers[told.sort]
        shape = (self.tensors[source].shape[0], copies)
        before, experts = self._shaped(sort.inputs[0], shape, op)
        names = tuple(f"{op.outputs[0]}.{what}" for what in ("order", "ends"))
        self._orders[told.sort], self._ends[told.sort] = names
        places = self.tensors[told.sort]
        self._add(names[0], places.shape, "int64")
        self._add(names[1], (told.number,), "int32")
        stable = (True,) if dict(sort.kwargs).get("stable") else ()
        args = (Ref(source), Ref(experts), told.number, *stable)
        outputs = (op.outputs[0], *names)
        return [*before, replace(op, target=SORT_ROWS, args=args, kwargs=(), outputs=outputs)]

    def _unsorted(self, op: Op, back: Back, told: _Told) -> list[Op]:
        ops, rows = self._cast(back.rows, back.casts, op)
        weights = None
        if back.weights is not None:
            before, cast = self._cast(back.weights.of, back.weights.casts, op)
            shape = (self.tensors[op.outputs[0]].shape[0], back.copies)
            shaped, name = self._shaped(cast, shape, op)
            ops, weights = [*ops, *before, *shaped], Ref(name)
        args = (Ref(rows), Ref(self._orders[told.sort]), weights, back.copies)
        return [*ops, replace(op, target=UNSORT_ROWS, args=args, kwargs=())]

    def _shaped(self, name: str, shape: tuple[Size, ...], op: Op) -> tuple[list[Op], str]:
        """Return a tensor [r, k] with the entries of another, and the op that makes it if any."""
        root = root_of(name, self.makers, self.tensors)
        if self.tensors[root].shape == shape:
            return [], root
        if shape[1] == 1 and self.tensors[root].shape == shape[:1]:
            return [], root
        made = f"{op.outputs[0]}.{root}"
        self._add(made, shape, self.tensors[root].dtype, like=root)
        args = (Ref(root), shape)
        return [Op(name=made, target=RESHAPE, args=args, outputs=(made,), line=op.line)], made

    def _cast(self, name: str, casts: Sequence[Op], op: Op) -> tuple[list[Op], str]:
        """Return a tensor after casts that were of it in another order."""
        ops = []
        for cast in casts:
            made = f"{op.outputs[0]}.{cast.outputs[0]}"
            self._add(
                made, self.tensors[name].shape, self.tensors[cast.outputs[0]].dtype, like=name
            )
            args = (Ref(name), *cast.args[1:])
            ops.append(replace(cast, name=made, args=args, outputs=(made,)))
            name = made
        return ops, name

    def _add(self, name: str, shape: tuple[Size, ...], dtype: str, *, like: str = "") -> None:
        needs = bool(like) and self.tensors[like].requires_grad
        self.tensors[name] = TensorMeta(
            name=name, shape=shape, dtype=dtype, kind="activation", requires_grad=needs
        )


def _without_ends(op: Op) -> tuple[tuple[str, Arg], ...]:
    return tuple((key, value) for key, value in op.kwargs if not isinstance(value, Ref))
