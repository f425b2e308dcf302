"""Block problems from bound programs: variables of ops and parameters, edges of tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.deadline import check_time
from planner.errors import LayoutError
from planner.language.graph import Op, Program, TensorMeta
from planner.language.layout.placement import OpSharding, Partial, Placement, Replicate
from planner.language.stacks.tensor_parallel import Dims, dim_of
from search.op_layout.block_prices import STATE_FACTOR, BoundClass, Floats, OpSignature, Prices
from search.op_layout.block_problem import BlockProblem, Boundary, ReshardEdge, Variable, at_rest
from search.op_layout.reshard_edges import (
    Produced,
    Requirements,
    Strategies,
    edge_pattern,
    moves_between,
    produced,
    requirements,
    shared_strategies,
)
from search.op_layout.segments import kept_segments, without


def build_block_problems(
    classes: Sequence[BoundClass],
    *,
    boundaries: Sequence[Boundary],
    prices: Prices,
    segments: tuple[int, ...] = (),
    pins: Mapping[tuple[int, str], Placement] | None = None,
    dims: Mapping[tuple[int, str], Dims] | None = None,
    shared: Sequence[Sequence[tuple[int, str]]] = (),
    weights: Mapping[int, float] | None = None,
) -> tuple[BlockProblem, ...]:
    """Return the choice problem of bound classes.

    There is one for each of `boundaries`; they differ in the edges at the blocks' ends alone.
    `segments` are the counts of segments to try beside plain shards. `pins` fixes tensors
    inside, `dims` the dims along which some are split, in any segments; `shared` lists groups of
    (class, param) that are one tied parameter. What a class costs counts by its entry in
    `weights`, 1 unless given. Raises LayoutError when a pin or dims leave an op no strategy.
    """
    # Boundaries change the edges at the blocks' ends alone: all else is built once.
    builder = _Builder(
        prices=prices,
        segments=segments,
        pins=dict(pins or {}),
        dims=dict(dims or {}),
        weights=dict(weights or {}),
    )
    group_of = {member: tuple(group) for group in shared for member in group}
    builder.add_ops(classes, {member: group[0] for member, group in group_of.items()})
    for bound_class in classes:
        builder.add_edges(bound_class, group_of)
    programs = tuple((bound_class.class_index, bound_class.program) for bound_class in classes)
    builder.add_shared_params([tuple(group) for group in shared], dict(programs))
    return tuple(
        BlockProblem(
            axis_size=prices.axis_size,
            variables=tuple(builder.variables),
            edges=(*builder.edges, *builder.links_at_ends(boundary)),
            programs=programs,
            shared=tuple(builder.shared_variables),
            boundary=boundary,
        )
        for boundary in boundaries
    )


Member = tuple[int, str]
"""A tensor of a class: the class's index and the tensor's name."""

Use = tuple[int | None, Requirements]
"""A variable (None: another block), and what each of its values requires."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """A tensor that a block takes or hands on: its producer (None: another block) and uses."""

    class_index: int
    meta: TensorMeta
    made: tuple[int, Produced] | None
    uses: tuple[Use, ...]
    is_output: bool
    weight: float

    def link_ends(self, boundary: Boundary) -> tuple[int | None, Produced, tuple[Use, ...]]:
        """Return its producer, the placements that it makes, and all its uses."""
        place = boundary.get((self.class_index, self.meta.name), Replicate())
        # A block that hands the tensor on is a use of it: the boundary's placement is required.
        outside: tuple[Use, ...] = ((None, requirements((place, False))),)
        # What no op of the block makes arrives from another block, as the boundary places it.
        producer, source = self.made or (None, produced(place))
        return producer, source, (*self.uses, *(outside if self.is_output else ()))


class _Builder:
    """Collects variables and edges; a builder because ops and edges refer to each other."""

    def __init__(
        self,
        *,
        prices: Prices,
        segments: tuple[int, ...],
        pins: dict[tuple[int, str], Placement],
        dims: dict[tuple[int, str], Dims],
        weights: dict[int, float],
    ) -> None:
        self.prices = prices
        self.segments = segments
        self.pins = pins
        self.dims = dims
        self.weights = weights
        self.variables: list[Variable] = []
        self.edges: list[ReshardEdge] = []
        self.op_variable: dict[tuple[int, str], int] = {}
        self.strategies: dict[int, Strategies] = {}
        self.shared_variables: list[tuple[tuple[tuple[int, str], ...], int]] = []
        self.ends: list[_End] = []

    def add_ops(self, classes: Sequence[BoundClass], tensor_of: Mapping[Member, Member]) -> None:
        """Add a variable for each op, without strategies that only cut in more segments.

        `tensor_of` says which parameter tied ones are.
        """
        # (class, op, its strategies with seconds and bytes)
        priced = [
            (bound_class, op, self._strategies_of(bound_class, op, signature))
            for bound_class in classes
            for op, signature in zip(bound_class.program.ops, bound_class.signatures, strict=True)
        ]
        tensors = [
            [tensor_of.get((i, name), (i, name)) for name in (*op.inputs, *op.outputs)]
            for i, op in ((bound_class.class_index, op) for bound_class, op, _ in priced)
        ]
        # Strategies in segments that lead nowhere would only make tables larger.
        kept = kept_segments(
            [
                (mine, strategies)
                for mine, (_, _, (strategies, _, _)) in zip(tensors, priced, strict=True)
            ]
        )
        for (bound_class, op, (every, seconds, num_bytes)), mine in zip(priced, kept, strict=True):
            strategies, left = without(every, mine)
            weight = self._weight(bound_class.class_index)
            self.op_variable[bound_class.class_index, op.name] = len(self.variables)
            self.strategies[len(self.variables)] = strategies
            self.variables.append(
                Variable(
                    name=f"{bound_class.class_index}:{op.name}",
                    values=strategies.values,
                    seconds=weight * seconds[left],
                    num_bytes=weight * num_bytes[left],
                )
            )

    def _weight(self, class_index: int) -> float:
        """Return how much a block of a class counts beside those it is solved with."""
        return self.weights.get(class_index, 1.0)

    def _strategies_of(
        self, bound_class: BoundClass, op: Op, signature: OpSignature
    ) -> tuple[Strategies, Floats, Floats]:
        """Return what an op may take under the pins, with seconds and bytes."""
        strategies, seconds, num_bytes = self.prices.of_op(signature, self.segments)
        # Without pins, ops of a signature share one object, and so its patterns of edges.
        if not self.pins and not self.dims:
            return strategies, seconds, num_bytes
        keep = [
            index
            for index, sharding in enumerate(strategies.values)
            if self._respects_pins(bound_class.class_index, op, sharding)
        ]
        if not keep:
            index, program = bound_class.class_index, bound_class.program
            pinned = ", ".join(
                f"{program.tensor[name].fqn or name}={self._wanted((index, name))}"
                for name in (*op.inputs, *op.outputs)
                if (index, name) in self.pins or (index, name) in self.dims
            )
            raise LayoutError(
                f"no sharding rule of op {op.name} ({op.target}) in block class "
                f"{program.name!r} fits the pinned {pinned} on tp={self.prices.axis_size}; "
                "drop a pin or choose another placement"
            )
        values = tuple(strategies.values[index] for index in keep)
        return shared_strategies(values), seconds[keep], num_bytes[keep]

    def _respects_pins(self, class_index: int, op: Op, sharding: OpSharding) -> bool:
        pairs = (*zip(op.inputs, sharding.inputs, strict=True),
                 *zip(op.outputs, sharding.outputs, strict=True))  # fmt: skip
        return all(self._may_lie((class_index, name), place) for name, place in pairs)

    def _may_lie(self, member: Member, place: Placement) -> bool:
        """Whether a tensor may lie so, by its pin and by the dims that it may be split along."""
        dims = self.dims.get(member)
        return self.pins.get(member, place) == place and (dims is None or dim_of(place) in dims)

    def _wanted(self, member: Member) -> str:
        if member in self.pins:
            return str(self.pins[member])
        return " or ".join("R" if dim is None else f"S({dim})" for dim in self.dims[member])

    def add_edges(
        self,
        bound_class: BoundClass,
        group_of: Mapping[tuple[int, str], tuple[tuple[int, str], ...]],
    ) -> None:
        class_index, program = bound_class.class_index, bound_class.program
        uses, weight = self._uses(class_index, program), self._weight(class_index)
        at_end = {*program.inputs, *program.outputs}
        made: dict[str, tuple[int, Produced]] = {}
        for op in program.ops:
            check_time()
            variable = self.op_variable[class_index, op.name]
            for position, name in enumerate(op.outputs):
                source = self.strategies[variable].produced(position)
                # What blocks hand on is redistributed as each boundary says (`links_at_ends`).
                if name in at_end:
                    made[name] = variable, source
                else:
                    self._add_edge(program.tensor[name], variable, source, uses[name], weight)
        for name in dict.fromkeys((*program.inputs, *program.outputs)):
            self.ends.append(
                _End(
                    class_index=class_index,
                    meta=program.tensor[name],
                    made=made.get(name),
                    uses=tuple(uses[name]),
                    is_output=name in program.outputs,
                    weight=weight,
                )
            )
        for name in program.params:
            if (class_index, name) in group_of:
                continue
            meta = program.tensor[name]
            if meta.kind != "param":
                # Buffers and constants are whole on every rank.
                self._add_edge(meta, None, produced(Replicate()), uses[name], weight)
            elif name in bound_class.owned:
                self._add_owned_param(meta, uses[name], weight)
            else:
                self._add_param([(class_index, name)], meta, [uses[name]])

    def _uses(self, class_index: int, program: Program) -> dict[str, list[Use]]:
        """Return the uses of each tensor."""
        uses: dict[str, list[Use]] = defaultdict(list)
        for op in program.ops:
            variable = self.op_variable[class_index, op.name]
            for position, name in enumerate(op.inputs):
                uses[name].append((variable, self.strategies[variable].requirements(position)))
        return uses

    def links_at_ends(self, boundary: Boundary) -> list[ReshardEdge]:
        """Return the edges of what blocks hand to each other, placed so."""
        before = len(self.edges)
        for end in self.ends:
            self._add_edge(end.meta, *end.link_ends(boundary), end.weight)
        # Edges of the ends are returned, and not kept: those of the next boundary take their place.
        made = self.edges[before:]
        del self.edges[before:]
        return made

    def add_shared_params(
        self, groups: Sequence[tuple[tuple[int, str], ...]], programs: Mapping[int, Program]
    ) -> None:
        for group in groups:
            # Of a group of tied parameters, those of the classes that are solved together here.
            members = [(c, name) for c, name in group if c in programs]
            if not members:
                continue
            used = [self._uses(c, programs[c])[name] for c, name in members]
            first_class, first_name = members[0]
            self._add_param(members, programs[first_class].tensor[first_name], used)

    def _add_param(
        self,
        members: Sequence[tuple[int, str]],
        meta: TensorMeta,
        used: Sequence[Sequence[Use]],
    ) -> None:
        """A parameter with several uses, given by member, chooses its placement by a variable of
        its own; each member's block redistributes it for itself.
        """
        # A parameter may lie as any use requires it, or whole; no rank holds a term of a sum.
        required = [place for uses in used for _, use in uses for place, _ in use.required]
        places = tuple(dict.fromkeys(p for p in (Replicate(), *required) if p != Partial()))
        places = tuple(p for p in places if all(self._may_lie(m, p) for m in members))
        if not places:
            pinned = [self._wanted(m) for m in members if m in self.pins or m in self.dims]
            raise LayoutError(
                f"parameter {meta.fqn or meta.name!r} is pinned to {', '.join(map(str, pinned))}, "
                "which no op that uses it can take; drop the pin"
            )
        variable = len(self.variables)
        local = [self.prices.local_bytes(meta, place) for place in places]
        weights = [self._weight(class_index) for class_index, _ in members]
        self.variables.append(
            Variable(
                name=f"param:{meta.name}",
                values=places,
                # Each member's block adds a gradient of its own to the sum.
                seconds=sum(weights)
                * np.array([self.prices.adding_s(meta, place) for place in places]),
                num_bytes=STATE_FACTOR * np.array(local, dtype=np.float64),
            )
        )
        self.shared_variables.append((tuple(members), variable))
        for uses, weight in zip(used, weights, strict=True):
            self._add_edge(meta, variable, produced(*places), uses, weight)

    def _add_owned_param(self, meta: TensorMeta, uses: Sequence[Use], weight: float) -> None:
        """A parameter with one use lies as that use requires; only its gradient may need repair."""
        ((variable, use),) = uses
        if variable is None:
            return
        # Read whole beside shards, a parameter has a partial gradient: an all-reduce.
        extra = self.prices.of_moves(meta.bytes_at(1), meta.requires_grad)[_moves_from_rest(use)]
        if extra.any():
            old = self.variables[variable]
            self.variables[variable] = replace(old, seconds=old.seconds + weight * extra)

    def _add_edge(
        self,
        meta: TensorMeta,
        producer: int | None,
        source: Produced,
        uses: Sequence[Use],
        weight: float,
    ) -> None:
        if not uses:
            return
        pattern = edge_pattern(source, tuple(use for _, use in uses))
        seconds = self.prices.of_edge(pattern, meta.bytes_at(1), meta.requires_grad)
        # Free whatever lies where: the tensor ties no choices to each other.
        if not seconds.any():
            return
        self.edges.append(
            ReshardEdge(
                tensor=meta.name,
                producer=producer,
                source=pattern.source,
                uses=tuple(
                    (variable, columns)
                    for (variable, _), columns in zip(uses, pattern.columns, strict=True)
                ),
                seconds=weight * seconds,
            )
        )


@lru_cache(maxsize=4096)
def _moves_from_rest(use: Requirements) -> NDArray[np.intp]:
    """Return the moves between a parameter with one use, as it lies, and that use."""
    return np.array(
        [
            moves_between((at_rest(place),), ((place, partial),))[0, 0]
            for place, partial in use.required
        ]
    )
