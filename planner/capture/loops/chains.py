"""What a loop does for each expert, put side by side: the same ops, with weights of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from planner.capture.blocks import RawOp
from planner.capture.loops.masks import Chosen, Counts, Masks
from planner.capture.loops.tracing import ROWS
from planner.capture.routing.following import RESHAPED, root_of
from planner.language.graph import Arg, Op, Ref, TensorMeta
from planner.language.ops.record import packet_of

ROWS_OF_MASK = "planner.rows_of_mask.default"


class Unlike(Exception):
    """What is traced is no loop over experts; not an error. Says why."""


@dataclass(frozen=True, slots=True)
class Place:
    """Numbers of what was picked: its rows "r", which choice of them "k", or both in one, "n"."""

    of: str


@dataclass(frozen=True, slots=True)
class Made:
    """What an earlier op of the same expert made: its place in the chain, and which result."""

    at: int
    result: int = 0


@dataclass(frozen=True, slots=True)
class Each:
    """A tensor for each expert: parameters, or slices `of` one tensor along a dim; matrices may be
    `turned`, the last two dims in the other order.
    """

    names: tuple[str, ...]
    of: str = ""
    dim: int = 0
    turned: bool = False


@dataclass(frozen=True, slots=True)
class NumberOfRows:
    """The number of rows that an expert has."""


@dataclass(frozen=True, slots=True)
class Step:
    """An op of all chains; `args` and `kwargs` have `Made`, `Place`, `Each` and `NumberOfRows`
    where they differ or are an expert's own.
    """

    op: Op
    """That of the first expert."""
    module: str
    args: Any
    kwargs: Any


@dataclass(kw_only=True)
class Chains:
    """The steps of a loop, and what it adds to. Mutable while it is read.

    Attributes:
        chosen: what the loop is over.
        steps: what is done for each expert.
        added: the step that adds rows to the result, and by which places.
        start: what the first expert's rows are added to.
        last: the op that has added the last expert's.
        own: all ops of the chains, by their outputs.
    """

    chosen: Chosen
    steps: list[Step] = field(default_factory=list)
    end: Step | None = None
    start: str = ""
    last: str = ""
    own: set[str] = field(default_factory=set)


def picked_in(ops: Sequence[RawOp]) -> list[RawOp]:
    """Return the ops that stand where a trace picked rows."""
    return [item for item in ops if item.op.target == ROWS_OF_MASK]


def read_chains(ops: Sequence[RawOp], tensors: Mapping[str, TensorMeta]) -> list[Chains]:
    """Return the loops of a traced model. Raises Unlike where picks are of no loop."""
    masks = Masks(tensors)
    for item in ops:
        masks.look(item.op)
    loops: dict[str, dict[int, _Chain]] = {}
    chosen: dict[str, Chosen] = {}
    owner: dict[str, _Chain] = {}
    places: dict[str, Place] = {}
    for item in picked_in(ops):
        mask = masks.mask(item.op.inputs[0])
        if mask is None or mask.expert is None:
            raise Unlike(f"rows are picked by what is no choice of an expert{_at(item.op)}")
        if not {*mask.dims} <= {"r", "k", "n"} or len({*mask.dims}) < len(mask.dims):
            raise Unlike(f"rows are picked by several dims{_at(item.op)}")
        for name in item.op.inputs[1:]:
            counts = masks.known.get(name)
            if not isinstance(counts, Counts) or counts.chosen != mask.chosen:
                raise Unlike(f"experts are passed over by counts of another choice{_at(item.op)}")
        chosen[mask.chosen.root] = mask.chosen
        chain = loops.setdefault(mask.chosen.root, {}).setdefault(mask.expert, _Chain())
        # (Rows of an expert lie by row, or choice by choice: all picks of it alike.)
        chain.orders.add(mask.dims[0] == "k")
        for name, label in zip(item.op.outputs, mask.dims, strict=True):
            owner[name], places[name] = chain, Place(label)
        chain.own.update(item.op.outputs)
    reader = _Reader(tensors, owner, places)
    for item in ops:
        reader.read(item)
    return [reader.joined(chosen[root], chains) for root, chains in loops.items()]


@dataclass(kw_only=True)
class _Chain:
    """The ops of an expert, in order. Mutable."""

    ops: list[RawOp] = field(default_factory=list)
    end: RawOp | None = None
    orders: set[bool] = field(default_factory=set)
    own: set[str] = field(default_factory=set)


_ADDS = ("index_add", "index_put")


class _Reader:
    """Deals ops to the experts whose rows they take. Mutable: `owner` and `places` grow."""

    def __init__(
        self,
        tensors: Mapping[str, TensorMeta],
        owner: dict[str, _Chain],
        places: dict[str, Place],
    ) -> None:
        self._tensors, self._owner, self._places = tensors, owner, places
        self._makers: dict[str, Op] = {}
        self._slices: dict[str, tuple[str, int, int]] = {}
        self._turned: dict[str, str] = {}

    def read(self, item: RawOp) -> None:
        """Deal an op."""
        op = item.op
        self._makers |= dict.fromkeys(op.outputs, op)
        if op.target == ROWS_OF_MASK:
            return
        owners = {id(self._owner[n]): self._owner[n] for n in op.inputs if n in self._owner}
        if not owners:
            is_turn = packet_of(op.target) in ("t", "transpose", "numpy_T")
            if is_turn and len(self._tensors[op.inputs[0]].shape) == 2:
                self._turned[op.outputs[0]] = op.inputs[0]
            if packet_of(op.target) == "select":
                _, dim, index = op.args
                if type(dim) is int and type(index) is int:
                    rank = len(self._tensors[op.inputs[0]].shape)
                    self._slices[op.outputs[0]] = (op.inputs[0], dim % rank, index)
            return
        if len(owners) > 1:
            raise Unlike(f"rows of several experts meet{_at(op)}")
        (chain,) = owners.values()
        if op.inputs[0] in self._places and packet_of(op.target) in RESHAPED:
            # (A column of places that is made a row again.)
            self._places[op.outputs[0]] = self._places[op.inputs[0]]
            self._owner[op.outputs[0]] = chain
            chain.own.add(op.outputs[0])
            return
        made = [self._tensors[name].shape for name in op.outputs]
        if all(ROWS in shape for shape in made):
            chain.ops.append(item)
            chain.own.update(op.outputs)
            self._owner |= dict.fromkeys(op.outputs, chain)
        elif packet_of(op.target) in _ADDS and chain.end is None:
            chain.end = item
        else:
            raise Unlike(f"rows of an expert are not added to the others'{_at(op)}")

    def joined(self, chosen: Chosen, chains: Mapping[int, _Chain]) -> Chains:
        """Return the chains of all experts as one."""
        if {*chains} != {*range(chosen.experts)}:
            raise Unlike(f"{len(chains)} of {chosen.experts} experts are looped over")
        each = [chains[expert] for expert in range(chosen.experts)]
        orders = set.union(*(chain.orders for chain in each))
        if len(orders) > 1:
            raise Unlike("rows of an expert are picked in two orders")
        for chain in each:
            self._fold(chain)
        ends = [chain.end for chain in each]
        if len({len(chain.ops) for chain in each}) > 1 or any(end is None for end in ends):
            raise Unlike("experts differ in what is done for them")
        found = Chains(chosen=chosen)
        at: list[dict[str, Made]] = [{} for _ in each]
        for index, row in enumerate(zip(*(chain.ops for chain in each), strict=True)):
            found.steps.append(self._step(row, at))
            for known, item in zip(at, row, strict=True):
                known |= {name: Made(index, n) for n, name in enumerate(item.op.outputs)}
        last = sorted((end.op for end in ends if end is not None), key=self._order)
        sums = [op.args[0] for op in last]
        names = [op.outputs[0] for op in last]
        if not all(isinstance(each, Ref) for each in sums):
            raise Unlike("rows are added to no tensor")
        if [each.name for each in sums[1:]] != names[:-1]:  # type: ignore[union-attr]
            raise Unlike("experts add to different tensors")
        # What is added to differs from expert to expert: the sum so far.
        row = tuple(
            RawOp(op=_without_sum(end.op), module=end.module) for end in ends if end is not None
        )
        found.end = self._step(row, at)
        found.start, found.last = sums[0].name, names[-1]  # type: ignore[union-attr]
        found.own = set().union(*(chain.own for chain in each), names)
        return found

    def _order(self, op: Op) -> int:
        return [*self._tensors].index(op.outputs[0])

    def _fold(self, chain: _Chain) -> None:
        """Make ``sum[rows] = sum[rows] + made`` the addition that it is."""
        end = chain.end
        if end is None or packet_of(end.op.target) != "index_put":
            return
        total, indices, value, *rest = end.op.args
        makers = {item.op.outputs[0]: item for item in chain.ops}
        adds = makers.get(value.name) if isinstance(value, Ref) else None
        if any(rest) or adds is None or packet_of(adds.op.target) != "add" or adds.op.kwargs:
            return
        for taken, made in (adds.op.args[:2], adds.op.args[1::-1]):
            take = makers.get(taken.name) if isinstance(taken, Ref) else None
            if take is None or packet_of(take.op.target) != "index":
                continue
            if take.op.args[0] == total and take.op.args[1] == indices and len(adds.op.args) == 2:
                users = [i for i in chain.ops if {*take.op.outputs} & {*i.op.inputs}]
                if users != [adds]:
                    raise Unlike(f"the sum is used on its way{_at(end.op)}")
                op = Op(
                    name=end.op.name,
                    target="aten.index_put.default",
                    args=(total, indices, made, True),
                    outputs=end.op.outputs,
                    line=end.op.line,
                )
                chain.ops = [item for item in chain.ops if item not in (take, adds)]
                chain.end = RawOp(op=op, module=end.module)
                return

    def _step(self, row: Sequence[RawOp], at: Sequence[Mapping[str, Made]]) -> Step:
        first = row[0]
        if len({(item.op.target, len(item.op.outputs)) for item in row}) > 1:
            raise Unlike(f"experts differ in what is done for them{_at(first.op)}")
        args = self._merged([item.op.args for item in row], at, first.op)
        kwargs = self._merged([item.op.kwargs for item in row], at, first.op)
        return Step(first.op, first.module, args, kwargs)

    def _merged(self, values: Sequence[Any], at: Sequence[Mapping[str, Made]], op: Op) -> Any:
        """Return an argument of all experts."""
        kinds = {type(value) for value in values}
        if len(kinds) > 1:
            raise Unlike(f"experts differ in what they are given{_at(op)}")
        if kinds == {tuple}:
            if len({len(value) for value in values}) > 1:
                raise Unlike(f"experts differ in what they are given{_at(op)}")
            return tuple(self._merged(each, at, op) for each in zip(*values, strict=True))
        if kinds != {Ref}:
            if any(value != values[0] for value in values):
                raise Unlike(f"experts differ in what they are given{_at(op)}")
            return NumberOfRows() if values[0] == ROWS and kinds == {int} else values[0]
        names = [value.name for value in values]
        found: list[Any] = [
            known.get(name) or self._places.get(name) for known, name in zip(at, names, strict=True)
        ]
        if any(each is not None for each in found):
            if any(len(self._tensors[n].shape) != 1 for n in names if n in self._places):
                raise Unlike(f"places are used as a column{_at(op)}")
            if any(each != found[0] for each in found):
                raise Unlike(f"experts differ in which of their rows they take{_at(op)}")
            return found[0]
        # (Each expert may look at the same tensor by an op of its own.)
        views = {
            (root_of(name, self._makers, self._tensors), self._tensors[name].shape)
            for name in names
        }
        if len({*names}) == 1 or len(views) == 1:
            return values[0]
        turned = all(name in self._turned for name in names)
        if turned:
            names = [self._turned[name] for name in names]
        slices = [each for name in names if (each := self._slices.get(name)) is not None]
        if [index for *_, index in slices] == [*range(len(names))]:
            sources = {
                (root_of(of, self._makers, self._tensors), self._tensors[of].shape, dim)
                for of, dim, _ in slices
            }
            if len(sources) == 1:
                source, dim, _ = slices[0]
                return Each(tuple(names), source, dim, turned)
        if all(self._tensors[name].kind == "param" for name in names):
            metas = {(self._tensors[n].shape, self._tensors[n].dtype) for n in names}
            if len(metas) == 1:
                return Each(tuple(names), turned=turned)
        raise Unlike(f"experts differ in what they are given{_at(op)}")


def _without_sum(op: Op) -> Op:
    args: tuple[Arg, ...] = (None, *op.args[1:])
    return Op(name=op.name, target=op.target, args=args, kwargs=op.kwargs, outputs=op.outputs,
              line=op.line)  # fmt: skip


def _at(op: Op) -> str:
    return f" at {op.line}" if op.line else ""
