"""Block problems from bound programs: variables of ops and parameters, links of tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.errors import LayoutError
from planner.graph import Op, Program, TensorMeta
from planner.layout.placement import OpSharding, Partial, Placement, Replicate
from search.op_layout.alike import Alike, BoundClass
from search.op_layout.block_prices import STATE_FACTOR, Floats, Prices
from search.op_layout.block_problem import BlockProblem, Boundary, Link, SharedTables, Variable
from search.op_layout.link_patterns import (
    Asks,
    Offer,
    Yields,
    asks,
    link_pattern,
    moves_from_rest,
    offer,
    yields,
)
from search.op_layout.segments import kept_segments, without


def build_block_problems(
    classes: Sequence[BoundClass],
    *,
    boundaries: Sequence[Boundary],
    prices: Prices,
    segments: tuple[int, ...] = (),
    pins: Mapping[tuple[int, str], Placement] | None = None,
    shared: Sequence[Sequence[tuple[int, str]]] = (),
) -> tuple[BlockProblem, ...]:
    """Return the choice problem of bound classes.

    There is one for each of `boundaries`; they differ in the links at the blocks' ends alone.
    `segments` are the counts of segments to offer beside plain shards. `pins` fixes tensors
    inside; `shared` lists groups of (class, param) that are one tied parameter. Raises
    LayoutError when a pin leaves an op no strategy.
    """
    builder = _Builder(prices=prices, segments=segments, pins=dict(pins or {}))
    group_of = {member: tuple(group) for group in shared for member in group}
    builder.add_ops(classes, {member: group[0] for member, group in group_of.items()})
    for one in classes:
        builder.add_links(one, group_of)
    programs = tuple((one.class_index, one.program) for one in classes)
    builder.add_shared_params([tuple(group) for group in shared], dict(programs))
    tables = SharedTables()
    return tuple(
        BlockProblem(
            axis_size=prices.axis_size,
            variables=tuple(builder.variables),
            links=(*builder.links, *builder.links_at_ends(boundary)),
            programs=programs,
            shared=tuple(builder.shared_variables),
            boundary=boundary,
            tables=tables,
        )
        for boundary in boundaries
    )


Member = tuple[int, str]
"""A tensor of a class: the class's index and the tensor's name."""

Use = tuple[int | None, Asks]
"""A variable (None: another block), and what each of its values asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """A tensor that a block takes or hands on: its maker (None: another block) and uses."""

    class_index: int
    meta: TensorMeta
    made: tuple[int, Yields] | None
    uses: tuple[Use, ...]
    is_output: bool

    def link_ends(self, boundary: Boundary) -> tuple[int | None, Yields, tuple[Use, ...]]:
        """Return its maker, the placements that yields, and all its uses."""
        place = boundary.get((self.class_index, self.meta.name), Replicate())
        outside: tuple[Use, ...] = ((None, asks((place, False))),)
        producer, source = self.made or (None, yields(place))
        return producer, source, (*self.uses, *(outside if self.is_output else ()))


class _Builder:
    """Collects variables and links; a builder because ops and links refer to each other."""

    def __init__(
        self,
        *,
        prices: Prices,
        segments: tuple[int, ...],
        pins: dict[tuple[int, str], Placement],
    ) -> None:
        self.prices = prices
        self.segments = segments
        self.pins = pins
        self.variables: list[Variable] = []
        self.links: list[Link] = []
        self.op_variable: dict[tuple[int, str], int] = {}
        self.offers: dict[int, Offer] = {}
        self.shared_variables: list[tuple[tuple[tuple[int, str], ...], int]] = []
        self.ends: list[_End] = []

    def add_ops(self, classes: Sequence[BoundClass], tensor_of: Mapping[Member, Member]) -> None:
        """Add a variable for each op, without strategies that only cut in more segments.

        `tensor_of` says which parameter tied ones are.
        """
        priced = [
            (one, op, self._offered(one, op, alike))
            for one in classes
            for op, alike in zip(one.program.ops, one.alike, strict=True)
        ]
        tensors = [
            [tensor_of.get((i, name), (i, name)) for name in (*op.inputs, *op.outputs)]
            for i, op in ((one.class_index, op) for one, op, _ in priced)
        ]
        kept = kept_segments(
            [(mine, offered) for mine, (_, _, (offered, _, _)) in zip(tensors, priced, strict=True)]
        )
        for (one, op, (every, seconds, num_bytes)), mine in zip(priced, kept, strict=True):
            offered, left = without(every, mine)
            self.op_variable[one.class_index, op.name] = len(self.variables)
            self.offers[len(self.variables)] = offered
            self.variables.append(
                Variable(
                    name=f"{one.class_index}:{op.name}",
                    values=offered.values,
                    seconds=seconds[left],
                    num_bytes=num_bytes[left],
                )
            )

    def _offered(self, one: BoundClass, op: Op, alike: Alike) -> tuple[Offer, Floats, Floats]:
        """Return what an op may take under the pins, with seconds and bytes."""
        offered, seconds, num_bytes = self.prices.of_op(alike, self.segments)
        if not self.pins:
            return offered, seconds, num_bytes
        keep = [
            index
            for index, sharding in enumerate(offered.values)
            if self._respects_pins(one.class_index, op, sharding)
        ]
        if not keep:
            wanted = ", ".join(
                f"{one.program.tensor[name].fqn or name}={self.pins[one.class_index, name]}"
                for name in (*op.inputs, *op.outputs)
                if (one.class_index, name) in self.pins
            )
            raise LayoutError(
                f"no sharding rule of op {op.name} ({op.target}) in block class "
                f"{one.program.name!r} fits the pinned {wanted} on tp={self.prices.axis_size}; "
                "drop a pin or choose another placement"
            )
        values = tuple(offered.values[index] for index in keep)
        return offer(values), seconds[keep], num_bytes[keep]

    def _respects_pins(self, class_index: int, op: Op, sharding: OpSharding) -> bool:
        pairs = (*zip(op.inputs, sharding.inputs, strict=True),
                 *zip(op.outputs, sharding.outputs, strict=True))  # fmt: skip
        return all(self.pins.get((class_index, name), place) == place for name, place in pairs)

    def add_links(
        self,
        one: BoundClass,
        group_of: Mapping[tuple[int, str], tuple[tuple[int, str], ...]],
    ) -> None:
        class_index, program = one.class_index, one.program
        uses = self._uses(class_index, program)
        at_end = {*program.inputs, *program.outputs}
        made: dict[str, tuple[int, Yields]] = {}
        for op in program.ops:
            variable = self.op_variable[class_index, op.name]
            for position, name in enumerate(op.outputs):
                source = self.offers[variable].yields(position)
                if name in at_end:
                    made[name] = variable, source
                else:
                    self._add_link(program.tensor[name], variable, source, uses[name])
        for name in dict.fromkeys((*program.inputs, *program.outputs)):
            self.ends.append(
                _End(
                    class_index=class_index,
                    meta=program.tensor[name],
                    made=made.get(name),
                    uses=tuple(uses[name]),
                    is_output=name in program.outputs,
                )
            )
        for name in program.params:
            if (class_index, name) in group_of:
                continue
            meta = program.tensor[name]
            if meta.kind != "param":
                self._add_link(meta, None, yields(Replicate()), uses[name])
            elif name in one.owned:
                self._add_owned_param(meta, uses[name])
            else:
                self._add_param([(class_index, name)], meta, [uses[name]])

    def _uses(self, class_index: int, program: Program) -> dict[str, list[Use]]:
        """Return the uses of each tensor."""
        uses: dict[str, list[Use]] = defaultdict(list)
        for op in program.ops:
            variable = self.op_variable[class_index, op.name]
            for position, name in enumerate(op.inputs):
                uses[name].append((variable, self.offers[variable].asks(position)))
        return uses

    def links_at_ends(self, boundary: Boundary) -> list[Link]:
        """Return the links of what blocks hand to each other, placed so."""
        before = len(self.links)
        for end in self.ends:
            self._add_link(end.meta, *end.link_ends(boundary))
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
        asked = [place for uses in used for _, use in uses for place, _ in use.asked]
        places = tuple(dict.fromkeys(p for p in (Replicate(), *asked) if p != Partial()))
        pinned = [self.pins[m] for m in members if m in self.pins]
        places = tuple(p for p in places if all(p == pin for pin in pinned))
        if not places:
            raise LayoutError(
                f"parameter {meta.fqn or meta.name!r} is pinned to {', '.join(map(str, pinned))}, "
                "which no op that uses it can take; drop the pin"
            )
        variable = len(self.variables)
        local = [self.prices.local_bytes(meta, place) for place in places]
        self.variables.append(
            Variable(
                name=f"param:{meta.name}",
                values=places,
                seconds=len(members)
                * np.array([self.prices.adding_s(meta, place) for place in places]),
                num_bytes=STATE_FACTOR * np.array(local, dtype=np.float64),
            )
        )
        self.shared_variables.append((tuple(members), variable))
        for uses in used:
            self._add_link(meta, variable, yields(*places), uses)

    def _add_owned_param(self, meta: TensorMeta, uses: Sequence[Use]) -> None:
        """A parameter with one use lies as that use asks; only its gradient may need repair."""
        ((variable, use),) = uses
        if variable is None:
            return
        extra = self.prices.of_moves(meta.bytes_at(1), meta.requires_grad)[moves_from_rest(use)]
        if extra.any():
            old = self.variables[variable]
            self.variables[variable] = replace(old, seconds=old.seconds + extra)

    def _add_link(
        self,
        meta: TensorMeta,
        producer: int | None,
        source: Yields,
        uses: Sequence[Use],
    ) -> None:
        if not uses:
            return
        pattern = link_pattern(source, tuple(use for _, use in uses))
        seconds = self.prices.of_link(pattern, meta.bytes_at(1), meta.requires_grad)
        if not seconds.any():
            return
        self.links.append(
            Link(
                tensor=meta.name,
                producer=producer,
                source=pattern.source,
                uses=tuple(
                    (variable, columns)
                    for (variable, _), columns in zip(uses, pattern.columns, strict=True)
                ),
                seconds=seconds,
                sources=pattern.sources,
                asks=pattern.asks,
            )
        )
