"""Propagation: op placements for a whole block, chosen without a solver.

Ops are visited in order. A *state* is what the rest of the program can see of the choices
so far: where the live values lie and which redistributions already exist. Of all ways to
reach a state only the cheapest is kept, and of all states the `BEAM` cheapest, so on the
narrow graphs of real blocks the result is close to a shortest path.

The cost stands for time without knowing the machine, in bytes on the wire: a collective
moves (n-1)/n of its payload (an all-reduce twice that); work that is not divided among the
ranks costs by its flop and its memory traffic; a parameter costs its local bytes once.
The weights below only say how these compare; the search prices layouts properly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from planner.errors import LayoutError
from planner.flops import (
    ATTENTION,
    CONVOLUTIONS,
    MATMULS,
    backward_work,
    op_work,
    packet_of,
)
from planner.graph import ModelGraph, Op, Program, TensorMeta
from planner.placement import OpSharding, Partial, Placement, Replicate
from planner.plan import ClassLayout
from planner.redistribute import collectives, payload_bytes
from planner.sharding.call import divides, local_shape
from planner.sharding.registry import grad_is_partial, strategies

BEAM = 64

WIRE = {"all_reduce": 2.0, "all_gather": 1.05, "reduce_scatter": 1.05, "all_to_all": 0.6}
"""Bytes on the wire per byte of payload. A gather and a scatter together cost slightly more
than one all-reduce, so that the simpler form wins when nothing else is gained."""

COSTLY = MATMULS | ATTENTION | CONVOLUTIONS | {"embedding", "cross_entropy_loss", "nll_loss_nd"}
"""Ops worth moving their inputs for."""

FLOP_WEIGHT = 1 / 16
TRAFFIC_WEIGHT = 1 / 32
PARAM_WEIGHT = 1.0


@dataclass(frozen=True, slots=True)
class _State:
    """A partial choice: cost so far, placements of live values, moves made, and its past."""

    cost: float
    placement: Mapping[str, Placement]
    moved: frozenset[tuple[str, Placement, bool]]
    params: tuple[tuple[str, Placement], ...]
    choices: tuple | None


def propagate_layout(
    class_index: int,
    program: Program,
    axis_size: int,
    *,
    pins: Mapping[str, Placement] | None = None,
    inputs: tuple[Placement, ...] | None = None,
    outputs: tuple[Placement, ...] | None = None,
) -> ClassLayout:
    """Choose the layout of a bound block program on an axis of `axis_size` ranks.

    `pins` fixes the placement of params, inputs or intermediate values by name. `inputs` and
    `outputs` are the placements at the block's boundary, Replicate by default. Raises
    LayoutError when a pin names nothing, does not divide, or no op can honour it.
    """
    pins = dict(pins or {})
    replicated = Replicate()
    inputs = inputs or (replicated,) * len(program.inputs)
    outputs = outputs or (replicated,) * len(program.outputs)
    _check_pins(program, pins, axis_size)
    placement: dict[str, Placement] = dict(zip(program.inputs, inputs, strict=True))
    placement |= {
        name: pins.get(name, replicated)
        for name in program.params
        if name in pins or program.tensor[name].kind != "param"
    }
    placement |= {name: pins[name] for name in program.inputs if name in pins}
    search = _Propagation(program=program, axis_size=axis_size, pins=pins)
    best = search.run(placement, dict(zip(program.outputs, outputs, strict=True)))
    chosen = dict(best.params)
    return ClassLayout(
        class_index=class_index,
        inputs=tuple(str(placement[name]) for name in program.inputs),
        params=tuple(
            str(chosen.get(name, placement.get(name, replicated))) for name in program.params
        ),
        outputs=tuple(map(str, outputs)),
        ops=tuple(
            (name, str(sharding))
            for name, sharding in _history(best)
            if any(p != replicated for p in (*sharding.inputs, *sharding.outputs))
        ),
    )


def propagate_graph(
    graph: ModelGraph, *, microbatch_size: int, axis_size: int
) -> tuple[ClassLayout, ...]:
    """Choose a layout for every block class, all block boundaries replicated.

    A parameter shared by several classes (a tied embedding) has one placement at rest: the
    class nearest the loss, which multiplies by it, decides.
    """
    used_by: dict[str, set[int]] = {}
    for block in graph.blocks:
        for name in block.params:
            used_by.setdefault(name, set()).add(block.class_index)
    decided: dict[str, Placement] = {}
    layouts: dict[int, ClassLayout] = {}
    for block in reversed(graph.blocks):
        index = block.class_index
        if index in layouts:
            continue
        program = graph.classes[index].bind(microbatch_size)
        names = dict(zip(block.params, program.params, strict=True))
        pins = {local: decided[name] for name, local in names.items() if name in decided}
        layouts[index] = propagate_layout(index, program, axis_size, pins=pins)
        for name, placement in zip(block.params, layouts[index].param_placements, strict=True):
            if len(used_by[name]) > 1:
                decided[name] = placement
    return tuple(layouts[index] for index in sorted(layouts))


def _check_pins(program: Program, pins: Mapping[str, Placement], axis_size: int) -> None:
    for name, placement in pins.items():
        if name not in program.tensor:
            raise LayoutError(f"pin {name}: {placement} names no tensor of {program.name}")
        shape = program.tensor[name].shape_at(1)
        if not divides(placement, shape, axis_size):
            raise LayoutError(
                f"pin {name}: {placement} can't be honoured: shape {list(shape)} does not divide "
                f"by {axis_size} there; choose a dim whose size is a multiple of {axis_size}"
            )


def _history(state: _State) -> list[tuple[str, OpSharding]]:
    found = []
    link = state.choices
    while link is not None:
        link, name, sharding = link
        found.append((name, sharding))
    return found[::-1]


@dataclass(kw_only=True)
class _Propagation:
    """The sweep over one program. Not frozen because it memoises what an op costs."""

    program: Program
    axis_size: int
    pins: Mapping[str, Placement]

    def run(self, placement: dict[str, Placement], outputs: dict[str, Placement]) -> _State:
        """Return the cheapest state that ends with `outputs` placed as asked."""
        last_use = dict.fromkeys(self.program.tensor, -1)
        for position, op in enumerate(self.program.ops):
            last_use.update(dict.fromkeys(op.inputs, position))
        last_use.update(dict.fromkeys(self.program.outputs, len(self.program.ops)))
        states = [_State(0.0, placement, frozenset(), (), None)]
        for position, op in enumerate(self.program.ops):
            options = self._options(op)
            live = {name for name, last in last_use.items() if last > position}
            best: dict[object, _State] = {}
            for state in states:
                for sharding, cost in self._follow(state, op, options):
                    following = self._step(state, op, sharding, cost, live)
                    key = (frozenset(following.placement.items()), following.moved)
                    kept = best.get(key)
                    if kept is None or following.cost < kept.cost:
                        best[key] = following
            states = sorted(best.values(), key=self._outlook)[:BEAM]
        ended = []
        for state in states:
            for name, wanted in outputs.items():
                state = self._fetch(state, name, wanted, grad_partial=False)
            ended.append(state)
        return min(ended, key=lambda s: s.cost)

    def _options(self, op: Op) -> list[tuple[OpSharding, float]]:
        """Shardings an op may take under the pins, with the cost of its local work."""
        offered = strategies(op, self.program.tensor, self.axis_size)
        allowed = [
            sharding
            for sharding in offered
            if all(
                self.pins.get(name, placed) == placed
                for name, placed in zip(op.outputs, sharding.outputs, strict=True)
            )
        ]
        if not allowed:
            pinned = ", ".join(f"{n}: {self.pins[n]}" for n in op.outputs if n in self.pins)
            raise LayoutError(
                f"pin {pinned} can't be honoured: op {op.name} ({op.target}) offers only "
                f"{'; '.join(map(str, offered))}"
            )
        return [(sharding, self._work(op, sharding)) for sharding in allowed]

    def _follow(
        self, state: _State, op: Op, options: list[tuple[OpSharding, float]]
    ) -> list[tuple[OpSharding, float]]:
        """Drop options in which a cheap op is the reason to move a value.

        Moves pay off where much work follows, or where a sum must be taken; a cheap op
        keeps to where one of its inputs already is.
        """
        if packet_of(op.target) in COSTLY:
            return options
        values = [(i, name) for i, name in enumerate(op.inputs) if name in state.placement]
        following = [
            (sharding, cost)
            for sharding, cost in options
            if any(
                state.placement[name] in (sharding.inputs[i], Partial())
                or any(move[:2] == (name, sharding.inputs[i]) for move in state.moved)
                for i, name in values
            )
        ]
        return following or options

    def _outlook(self, state: _State) -> float:
        """Cost so far and what live values will cost at least: a Partial must be summed."""
        owed = sum(
            payload_bytes(self.program.tensor[name])
            for name, placed in state.placement.items()
            if isinstance(placed, Partial) and not any(move[0] == name for move in state.moved)
        )
        return state.cost + WIRE["all_reduce"] * owed * (self.axis_size - 1) / self.axis_size

    def _work(self, op: Op, sharding: OpSharding) -> float:
        local: dict[str, TensorMeta] = {}
        for name, placed in self._placed(op, sharding):
            meta = self.program.tensor[name]
            local[name] = replace(meta, shape=local_shape(meta.shape_at(1), placed, self.axis_size))
        forward, backward = op_work(op, local), backward_work(op, local)
        flop = forward.flop + backward.flop
        traffic = forward.num_bytes + backward.num_bytes
        return flop * FLOP_WEIGHT + traffic * TRAFFIC_WEIGHT

    def _placed(self, op: Op, sharding: OpSharding) -> Iterator[tuple[str, Placement]]:
        yield from zip(op.inputs, sharding.inputs, strict=True)
        yield from zip(op.outputs, sharding.outputs, strict=True)

    def _step(
        self, state: _State, op: Op, sharding: OpSharding, cost: float, live: set[str]
    ) -> _State:
        partial = grad_is_partial(sharding.outputs)
        for name, wanted in zip(op.inputs, sharding.inputs, strict=True):
            state = self._fetch(state, name, wanted, grad_partial=partial)
        placement = {n: p for n, p in state.placement.items() if n in live}
        placement |= {
            name: placed
            for name, placed in zip(op.outputs, sharding.outputs, strict=True)
            if name in live
        }
        return _State(
            cost=state.cost + cost,
            placement=placement,
            moved=frozenset(move for move in state.moved if move[0] in live),
            params=state.params,
            choices=(state.choices, op.name, sharding),
        )

    def _fetch(self, state: _State, name: str, wanted: Placement, *, grad_partial: bool) -> _State:
        """Return the state in which a value is also available as `wanted`."""
        meta = self.program.tensor[name]
        if name not in state.placement:  # a parameter's first use decides where it rests
            at_rest = Replicate() if isinstance(wanted, Partial) else wanted
            whole = payload_bytes(meta)
            kept = whole if isinstance(at_rest, Replicate) else whole / self.axis_size
            state = replace(
                state,
                cost=state.cost + PARAM_WEIGHT * kept,
                placement={**state.placement, name: at_rest},
                params=(*state.params, (name, at_rest)),
            )
        have = state.placement[name]
        grad_partial = grad_partial and meta.requires_grad and isinstance(wanted, Replicate)
        move = (name, wanted, grad_partial)
        if (have == wanted and not grad_partial) or move in state.moved:
            return state
        forward, backward = collectives(have, wanted, grad_partial)
        if not meta.requires_grad:
            backward = None
        wire = sum(WIRE[kind] for kind in (forward, backward) if kind is not None)
        cost = wire * payload_bytes(meta) * (self.axis_size - 1) / self.axis_size
        return replace(state, cost=state.cost + cost, moved=state.moved | {move})
