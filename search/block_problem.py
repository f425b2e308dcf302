"""The choice inside block classes, as numbers: which strategy each op takes on the tp axis.

A *variable* is an op (its values: the sharding rules' strategies) or a parameter used in
several places (its values: placements). A variable's value costs seconds (the op's local
forward and backward) and bytes (local parameters with their gradient and optimizer state, and
local outputs). A *link* is one tensor with all its uses: when the producer yields placement
p and uses ask for the set Q of (placement, gradient partial?), it costs
sum over q in Q of redistribute(p -> q). Uses that ask the same share one redistribution,
as in the lowered program. Minimise the sum of all of it.

`block_ilp` and `eliminate` solve this problem, each exactly and by its own method.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.errors import LayoutError
from planner.graph import Op, Program, Ref, TensorMeta, map_refs
from planner.placement import OpSharding, Partial, Placement, Replicate, Shard
from planner.plan import ClassLayout

Ask = tuple[Placement, bool]
"""What a use asks of a tensor: a placement, and whether it returns a partial gradient."""

Strategies = Callable[[Op, Mapping[str, TensorMeta], int], Sequence[OpSharding]]
OpSeconds = Callable[[Op, Mapping[str, TensorMeta]], float]
RedistributeSeconds = Callable[[Placement, Placement, bool, int, bool], float]
"""(source, target, gradient partial, full tensor bytes, has a gradient) -> seconds or inf."""

Boundary = Mapping[tuple[int, str], Placement]
"""Placements of what blocks hand to each other, by (class, tensor); Replicate unless named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What problems of one axis size on one machine have in common; grows as they are built.

    `ops` holds the shardings of an op with the seconds and bytes of each, by signature;
    `links` the seconds of a link by (sources, asks, bytes, has a gradient).
    """

    ops: dict[tuple, tuple[tuple[OpSharding, ...], NDArray[np.float64], NDArray[np.float64]]] = (
        field(default_factory=dict)
    )
    links: dict[tuple, NDArray[np.float64]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Variable:
    """One choice: seconds and bytes of each of its values."""

    name: str
    values: tuple[Any, ...]
    seconds: NDArray[np.float64]
    num_bytes: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Link:
    """One tensor between its maker and its uses.

    producer: variable index, or None when the placement is given. source[value] indexes the
    rows of `seconds`; for each use (variable index or None, asks[value]) the asks index its
    columns. `seconds[p, q]` is the redistribution's time, inf where there is none.
    """

    tensor: str
    producer: int | None
    source: tuple[int, ...]
    uses: tuple[tuple[int | None, tuple[int, ...]], ...]
    seconds: NDArray[np.float64]
    sources: tuple[Placement, ...]
    asks: tuple[Ask, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockProblem:
    """Variables and links of one block class, or of several that share a parameter."""

    axis_size: int
    variables: tuple[Variable, ...]
    links: tuple[Link, ...]
    programs: tuple[tuple[int, Program], ...]
    shared: tuple[tuple[tuple[tuple[int, str], ...], int], ...] = ()
    boundary: Boundary = field(default_factory=dict)

    def value(self, choice: Sequence[int], bytes_price: float = 0.0) -> float:
        """Return the objective of one full choice: seconds + bytes_price * bytes."""
        total = sum(
            v.seconds[i] + bytes_price * v.num_bytes[i]
            for v, i in zip(self.variables, choice, strict=True)
        )
        for link in self.links:
            row = link.source[choice[link.producer] if link.producer is not None else 0]
            columns = {asks[choice[u] if u is not None else 0] for u, asks in link.uses}
            total += sum(link.seconds[row, column] for column in columns)
        return float(total)

    def num_bytes(self, choice: Sequence[int]) -> float:
        """Return the bytes of one full choice."""
        return float(sum(v.num_bytes[i] for v, i in zip(self.variables, choice, strict=True)))


def is_sharded(sharding: OpSharding) -> bool:
    """Whether any input or output of the op is not replicated."""
    return any(not isinstance(p, Replicate) for p in (*sharding.inputs, *sharding.outputs))


def local_tensor(meta: TensorMeta, placement: Placement, axis_size: int) -> TensorMeta:
    """Return a bound tensor's description as one rank of the axis holds it."""
    if not isinstance(placement, Shard):
        return meta
    shape = list(meta.shape_at(1))
    shape[placement.dim] //= axis_size
    return replace(meta, shape=tuple(shape))


def build_block_problem(
    programs: Sequence[tuple[int, Program]],
    *,
    axis_size: int,
    strategies: Strategies,
    op_seconds: OpSeconds,
    redistribute_seconds: RedistributeSeconds,
    boundary: Boundary | None = None,
    **options: Any,
) -> BlockProblem:
    """Return the choice problem between given boundaries; see `build_block_problems`."""
    (problem,) = build_block_problems(
        programs,
        boundaries=(boundary or {},),
        axis_size=axis_size,
        strategies=strategies,
        op_seconds=op_seconds,
        redistribute_seconds=redistribute_seconds,
        **options,
    )
    return problem


def build_block_problems(
    programs: Sequence[tuple[int, Program]],
    *,
    boundaries: Sequence[Boundary],
    axis_size: int,
    strategies: Strategies,
    op_seconds: OpSeconds,
    redistribute_seconds: RedistributeSeconds,
    pins: Mapping[tuple[int, str], Placement] | None = None,
    shared: Sequence[Sequence[tuple[int, str]]] = (),
    state_factor: float = 4.0,
    memory: Memory | None = None,
) -> tuple[BlockProblem, ...]:
    """Return the choice problem of bound programs, given as (class index, program).

    There is one for each of `boundaries`; they differ in the links at the blocks' ends alone.
    `pins` fixes tensors inside; `shared` lists groups of (class, param) that are one
    tied parameter. `state_factor` is how many bytes a parameter byte costs with its gradient
    and optimizer state. `memory` keeps what equal ops and links cost, for calls of one axis
    size on one machine. Raises LayoutError when a pin leaves an op no strategy.
    """
    builder = _Builder(
        axis_size=axis_size,
        strategies=strategies,
        op_seconds=op_seconds,
        redistribute_seconds=redistribute_seconds,
        pins=dict(pins or {}),
        state_factor=state_factor,
        memory=memory or Memory(),
    )
    for class_index, program in programs:
        builder.add_ops(class_index, program)
    group_of = {member: tuple(group) for group in shared for member in group}
    for class_index, program in programs:
        builder.add_links(class_index, program, group_of)
    builder.add_shared_params([tuple(group) for group in shared], dict(programs))
    return tuple(
        BlockProblem(
            axis_size=axis_size,
            variables=tuple(builder.variables),
            links=(*builder.links, *builder.links_at_ends(boundary)),
            programs=tuple(programs),
            shared=tuple(builder.shared_variables),
            boundary=boundary,
        )
        for boundary in boundaries
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """A tensor that a block takes or hands on: its maker (None: another block) and uses."""

    class_index: int
    meta: TensorMeta
    producer: int | None
    source: tuple[Placement, ...]
    uses: tuple[tuple[int | None, list[Ask]], ...]
    is_output: bool

    def link_ends(
        self, boundary: Boundary
    ) -> tuple[tuple[Placement, ...], list[tuple[int | None, list[Ask]]]]:
        """Return the placements its maker yields, and all its uses."""
        place = boundary.get((self.class_index, self.meta.name), Replicate())
        outside: list[tuple[int | None, list[Ask]]] = [(None, [(place, False)])]
        return (
            self.source if self.producer is not None else (place,),
            [*self.uses, *(outside if self.is_output else [])],
        )


def _signature(op: Op, program: Program, owned: set[str]) -> tuple:
    """Return what an op's strategies and price depend on; names of tensors do not count."""

    def meta(name: str) -> tuple:
        tensor = program.tensor[name]
        return tensor.shape, tensor.dtype, tensor.kind, tensor.requires_grad, name in owned

    order: dict[str, int] = {}
    for name in op.inputs:
        order.setdefault(name, len(order))
    plain = map_refs((op.args, op.kwargs), lambda ref: Ref(str(order[ref.name])))
    return op.target, plain, tuple(map(meta, order)), tuple(map(meta, op.outputs))


class _Builder:
    """Collects variables and links; a builder because ops and links refer to each other."""

    def __init__(
        self,
        *,
        axis_size: int,
        strategies: Strategies,
        op_seconds: OpSeconds,
        redistribute_seconds: RedistributeSeconds,
        pins: dict[tuple[int, str], Placement],
        state_factor: float,
        memory: Memory,
    ) -> None:
        self.axis_size = axis_size
        self.strategies = strategies
        self.op_seconds = op_seconds
        self.redistribute_seconds = redistribute_seconds
        self.pins = pins
        self.state_factor = state_factor
        self.variables: list[Variable] = []
        self.links: list[Link] = []
        self.op_variable: dict[tuple[int, str], int] = {}
        self.shared_variables: list[tuple[tuple[tuple[int, str], ...], int]] = []
        self.ends: list[_End] = []
        self.memory = memory

    def add_ops(self, class_index: int, program: Program) -> None:
        owned = _single_use_params(program)
        for op in program.ops:
            offered, seconds, num_bytes = self._priced(op, program, owned)
            keep = [
                index
                for index, sharding in enumerate(offered)
                if self._respects_pins(class_index, op, sharding)
            ]
            allowed = tuple(offered[index] for index in keep)
            if not allowed:
                wanted = ", ".join(
                    f"{name}={self.pins[class_index, name]}"
                    for name in (*op.inputs, *op.outputs)
                    if (class_index, name) in self.pins
                )
                raise LayoutError(
                    f"no sharding rule of op {op.name} ({op.target}) in block class "
                    f"{program.name!r} fits the pinned {wanted} on tp={self.axis_size}; "
                    "drop a pin or choose another placement"
                )
            self.op_variable[class_index, op.name] = len(self.variables)
            self.variables.append(
                Variable(
                    name=f"{class_index}:{op.name}",
                    values=allowed,
                    seconds=seconds[keep],
                    num_bytes=num_bytes[keep],
                )
            )

    def _priced(
        self, op: Op, program: Program, owned: set[str]
    ) -> tuple[tuple[OpSharding, ...], NDArray[np.float64], NDArray[np.float64]]:
        """Return the op's shardings with seconds and bytes; equal ops are priced once."""
        key = _signature(op, program, owned)
        if key not in self.memory.ops:
            offered = tuple(dict.fromkeys(self.strategies(op, program.tensor, self.axis_size)))
            self.memory.ops[key] = (
                offered,
                np.array([self._op_seconds(op, program, s) for s in offered]),
                np.array([self._op_bytes(op, program, s, owned) for s in offered]),
            )
        return self.memory.ops[key]

    def _respects_pins(self, class_index: int, op: Op, sharding: OpSharding) -> bool:
        if not self.pins:
            return True
        pairs = (*zip(op.inputs, sharding.inputs, strict=True),
                 *zip(op.outputs, sharding.outputs, strict=True))  # fmt: skip
        return all(self.pins.get((class_index, name), place) == place for name, place in pairs)

    def _op_seconds(self, op: Op, program: Program, sharding: OpSharding) -> float:
        local = {
            name: local_tensor(program.tensor[name], place, self.axis_size)
            for name, place in (*zip(op.inputs, sharding.inputs, strict=True),
                                *zip(op.outputs, sharding.outputs, strict=True))
        }  # fmt: skip
        return self.op_seconds(op, local)

    def _op_bytes(self, op: Op, program: Program, sharding: OpSharding, owned: set[str]) -> float:
        total = 0.0
        for name, place in zip(op.outputs, sharding.outputs, strict=True):
            total += local_tensor(program.tensor[name], place, self.axis_size).bytes_at(1)
        for name, place in zip(op.inputs, sharding.inputs, strict=True):
            if name in owned:
                local = local_tensor(program.tensor[name], place, self.axis_size)
                total += self.state_factor * local.bytes_at(1)
        return total

    def add_links(
        self,
        class_index: int,
        program: Program,
        group_of: Mapping[tuple[int, str], tuple[tuple[int, str], ...]],
    ) -> None:
        uses = self._uses(class_index, program)
        owned = _single_use_params(program)
        at_end = {*program.inputs, *program.outputs}
        made: dict[str, tuple[int, tuple[Placement, ...]]] = {}
        for op in program.ops:
            variable = self.op_variable[class_index, op.name]
            for position, name in enumerate(op.outputs):
                source = tuple(s.outputs[position] for s in self.variables[variable].values)
                if name in at_end:
                    made[name] = variable, source
                else:
                    self._add_link(program.tensor[name], variable, source, uses[name])
        for name in dict.fromkeys((*program.inputs, *program.outputs)):
            producer, source = made.get(name, (None, ()))
            self.ends.append(
                _End(
                    class_index=class_index,
                    meta=program.tensor[name],
                    producer=producer,
                    source=source,
                    uses=tuple(uses[name]),
                    is_output=name in program.outputs,
                )
            )
        for name in program.params:
            if (class_index, name) in group_of:
                continue
            meta = program.tensor[name]
            if meta.kind != "param":
                self._add_link(meta, None, [Replicate()], uses[name])
            elif name in owned:
                self._add_owned_param(meta, uses[name])
            else:
                self._add_param([(class_index, name)], meta, uses[name])

    def _uses(
        self, class_index: int, program: Program
    ) -> dict[str, list[tuple[int | None, list[Ask]]]]:
        """For each tensor its uses: (variable, what each of its values asks)."""
        uses: dict[str, list[tuple[int | None, list[Ask]]]] = defaultdict(list)
        for op in program.ops:
            variable = self.op_variable[class_index, op.name]
            shardings = self.variables[variable].values
            for position, name in enumerate(op.inputs):
                asks = [(s.inputs[position], gradient_partial(s, position)) for s in shardings]
                uses[name].append((variable, asks))
        return uses

    def links_at_ends(self, boundary: Boundary) -> list[Link]:
        """Return the links of what blocks hand to each other, placed so."""
        before = len(self.links)
        for end in self.ends:
            source, uses = end.link_ends(boundary)
            self._add_link(end.meta, end.producer, source, uses)
        made = self.links[before:]
        del self.links[before:]
        return made

    def add_shared_params(
        self, groups: Sequence[tuple[tuple[int, str], ...]], programs: Mapping[int, Program]
    ) -> None:
        for group in groups:
            members = [(c, name) for c, name in group if c in programs]
            if not members:
                continue
            gathered: list[tuple[int | None, list[Ask]]] = []
            for class_index, name in members:
                gathered += self._uses(class_index, programs[class_index])[name]
            first_class, first_name = members[0]
            self._add_param(members, programs[first_class].tensor[first_name], gathered)

    def _add_param(
        self,
        members: Sequence[tuple[int, str]],
        meta: TensorMeta,
        uses: list[tuple[int | None, list[Ask]]],
    ) -> None:
        """A parameter with several uses chooses its placement by a variable of its own."""
        asked = [place for _, asks in uses for place, _ in asks]
        places = tuple(dict.fromkeys(p for p in (Replicate(), *asked) if p != Partial()))
        pinned = [self.pins[m] for m in members if m in self.pins]
        places = tuple(p for p in places if all(p == pin for pin in pinned))
        if not places:
            raise LayoutError(
                f"parameter {meta.fqn or meta.name!r} is pinned to {', '.join(map(str, pinned))}, "
                "which no op that uses it can take; drop the pin"
            )
        variable = len(self.variables)
        local = [local_tensor(meta, p, self.axis_size).bytes_at(1) for p in places]
        self.variables.append(
            Variable(
                name=f"param:{meta.name}",
                values=places,
                seconds=np.zeros(len(places)),
                num_bytes=self.state_factor * np.array(local, dtype=np.float64),
            )
        )
        self.shared_variables.append((tuple(members), variable))
        self._add_link(meta, variable, list(places), uses)

    def _add_owned_param(self, meta: TensorMeta, uses: list[tuple[int | None, list[Ask]]]) -> None:
        """A parameter with one use lies as that use asks; only its gradient may need repair."""
        ((variable, asks),) = uses
        if variable is None:
            return
        extra = np.array([self._repair_seconds(meta, ask) for ask in asks])
        old = self.variables[variable]
        self.variables[variable] = replace(old, seconds=old.seconds + extra)

    def _repair_seconds(self, meta: TensorMeta, ask: Ask) -> float:
        place, partial = ask
        return self.redistribute_seconds(
            at_rest(place), place, partial, meta.bytes_at(1), meta.requires_grad
        )

    def _add_link(
        self,
        meta: TensorMeta,
        producer: int | None,
        source: Sequence[Placement],
        uses: Sequence[tuple[int | None, Sequence[Ask]]],
    ) -> None:
        if not uses:
            return
        sources = tuple(dict.fromkeys(source))
        asks = tuple(dict.fromkeys(ask for _, asked in uses for ask in asked))
        seconds = self._link_seconds(meta, sources, asks)
        if not seconds.any():
            return
        row = {place: index for index, place in enumerate(sources)}
        column = {ask: index for index, ask in enumerate(asks)}
        self.links.append(
            Link(
                tensor=meta.name,
                producer=producer,
                source=tuple(row[p] for p in source),
                uses=tuple((u, tuple(column[a] for a in asked)) for u, asked in uses),
                seconds=seconds,
                sources=sources,
                asks=asks,
            )
        )

    def _link_seconds(
        self, meta: TensorMeta, sources: tuple[Placement, ...], asks: tuple[Ask, ...]
    ) -> NDArray[np.float64]:
        """Return the seconds from each source to each ask; equal links are asked once."""
        key = sources, asks, meta.bytes_at(1), meta.requires_grad
        if key not in self.memory.links:
            self.memory.links[key] = np.array(
                [
                    [
                        self.redistribute_seconds(source, place, partial, *key[2:])
                        for place, partial in asks
                    ]
                    for source in sources
                ]
            )
        return self.memory.links[key]


def gradient_partial(sharding: OpSharding, position: int) -> bool:
    """Whether the op returns a partial gradient for its input at `position`.

    A replicated input of an op that works on shards meets only this rank's share of the
    outputs, so each rank holds a term of its gradient.
    """
    if not isinstance(sharding.inputs[position], Replicate):
        return False
    return any(not isinstance(p, Replicate) for p in sharding.outputs)


def at_rest(asked: Placement) -> Placement:
    """Return how a parameter with one use lies: as asked, but whole where a term is asked.

    A bias added to a partial sum is taken by one rank only; every rank holds it.
    """
    return Replicate() if isinstance(asked, Partial) else asked


def _single_use_params(program: Program) -> set[str]:
    """Parameters that exactly one op argument uses (and no output hands on)."""
    count: dict[str, int] = defaultdict(int)
    for op in program.ops:
        for name in op.inputs:
            count[name] += 1
    return {
        name
        for name in program.params
        if program.tensor[name].kind == "param" and count[name] == 1 and name not in program.outputs
    }


def read_layouts(problem: BlockProblem, choice: Sequence[int]) -> dict[int, ClassLayout]:
    """Return the ClassLayout of each class that a solved choice means."""
    picked = {v.name: v.values[i] for v, i in zip(problem.variables, choice, strict=True)}
    param_place = {
        member: problem.variables[variable].values[choice[variable]]
        for members, variable in problem.shared
        for member in members
    }
    layouts = {}
    for class_index, program in problem.programs:
        ops = {op.name: picked[f"{class_index}:{op.name}"] for op in program.ops}
        params = []
        for name in program.params:
            place = param_place.get((class_index, name))
            if place is None and program.tensor[name].kind == "param":
                place = next(
                    (
                        ops[op.name].inputs[position]
                        for op in program.ops
                        for position, used in enumerate(op.inputs)
                        if used == name
                    ),
                    None,
                )
            params.append(str(at_rest(place or Replicate())))
        layouts[class_index] = ClassLayout(
            class_index=class_index,
            inputs=_boundary_texts(problem, class_index, program.inputs),
            params=tuple(params),
            outputs=_boundary_texts(problem, class_index, program.outputs),
            ops=tuple(
                (name, str(sharding))
                for name, sharding in ops.items()
                if isinstance(sharding, OpSharding) and is_sharded(sharding)
            ),
        )
    return layouts


def _boundary_texts(
    problem: BlockProblem, class_index: int, names: Sequence[str]
) -> tuple[str, ...]:
    return tuple(str(problem.boundary.get((class_index, name), Replicate())) for name in names)


def best_by_brute_force(problem: BlockProblem, bytes_price: float = 0.0) -> tuple[float, list[int]]:
    """Return the optimum by trying every combination; for tiny problems in tests."""
    sizes = [range(len(v.values)) for v in problem.variables]
    return min(
        ((problem.value(choice, bytes_price), list(choice)) for choice in product(*sizes)),
        key=lambda pair: pair[0],
    )
