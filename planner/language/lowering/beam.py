"""Beam search over the op placements of one program.

Ops are visited in order. A *state* is what the rest of the program can see of the choices
so far: where the live values lie and which redistributions already exist. Of all ways to
reach a state only the cheapest is kept, and of all states the `BEAM` with the best outlook,
so on the narrow graphs of real blocks the result is close to a shortest path.

The cost stands for time without knowing the machine, in bytes on the wire: a collective
moves (n-1)/n of its payload (an all-reduce twice that); work that is not divided among the
ranks costs by its flop and its memory traffic; a parameter costs its local bytes once.
The weights below only say how these compare; the search prices layouts properly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from planner.errors import LayoutError
from planner.language.graph import Op, Program, TensorMeta
from planner.language.layout.placement import OpSharding, Partial, Placement, Replicate, has_way
from planner.language.layout.redistribute import collectives, payload_bytes
from planner.language.ops.call import local_shape
from planner.language.ops.flops import backward_work, op_work
from planner.language.ops.record import family_of
from planner.language.ops.registry import (
    grad_is_partial,
    is_linear,
    repeated,
    segment_counts,
    strategies,
    terms_of,
)

BEAM = 64

WIRE = {"all_reduce": 2.0, "all_gather": 1.05, "reduce_scatter": 1.05, "all_to_all": 0.6}
"""Bytes on the wire per byte of payload. A gather and a scatter together cost slightly more
than one all-reduce, so that the simpler form wins when nothing else is gained."""

# Bytes on the wire that a flop, a byte of memory traffic and a byte of a parameter are worth.
FLOP_WEIGHT = 1 / 16
TRAFFIC_WEIGHT = 1 / 32
PARAM_WEIGHT = 1.0

Move = tuple[str, Placement, bool]
"""A redistribution that exists: (value, placement, grad_partial)."""


@dataclass(frozen=True, slots=True)
class State:
    """A partial choice: its cost, placements of live values, moves made, params placed so
    far, and the choices that led here as a linked list.
    """

    cost: float
    placement: Mapping[str, Placement]
    moved: frozenset[Move]
    params: tuple[tuple[str, Placement], ...] = ()
    choices: tuple | None = None

    def history(self) -> list[tuple[str, OpSharding]]:
        """Return the chosen sharding of each op, in order."""
        found = []
        link = self.choices
        while link is not None:
            link, name, sharding = link
            found.append((name, sharding))
        return found[::-1]


@dataclass(frozen=True, slots=True)
class _Step:
    """One op with what the sweep needs of it, worked out once for all states."""

    op: Op
    inputs: tuple[str, ...]
    options: tuple[tuple[OpSharding, float], ...]
    live: frozenset[str]
    is_costly: bool


@dataclass(kw_only=True)
class BeamSearch:
    """The sweep over one bound program. `pins` must hold at every op they touch.

    With `sum_later` gradients of whole parameters are summed outside (`lowering.lower`), so
    their uses cost nothing here, and what repeats a smaller tensor is gathered as that one.
    `may_lie` says which placements of a tensor to consider, and `segments` in how many segments
    what the axis cuts is handed on between blocks, `mirrored` or not.
    """

    program: Program
    axis_size: int
    pins: Mapping[str, Placement] = field(default_factory=dict)
    sum_later: bool = False
    may_lie: Callable[[str, Placement], bool] = lambda name, placement: True
    segments: int = 1
    mirrored: bool = False

    def __post_init__(self) -> None:
        """Work out sizes once; the sweep reads them at every state."""
        self._bytes = {t.name: payload_bytes(t) for t in self.program.tensors}
        # Bytes that a redistribution to R moves: of a tensor that repeats another, those of the
        # other.
        self._gathered = dict(self._bytes)
        for name, op in repeated(self.program).items() if self.sum_later else ():
            self._gathered[name] = self._gathered[op.inputs[0]]
        self._segments = segment_counts(self.program, self.segments)
        # Of a ring over n ranks: all parts but a rank's own.
        self._wire = (self.axis_size - 1) / self.axis_size
        self._summed_later = self._weights() if self.sum_later else set()

    def _weights(self) -> set[str]:
        """Return the parameters, and what linear ops make of them alone."""
        found = {n for n in self.program.params if self.program.tensor[n].requires_grad}
        for op in self.program.ops:
            terms = terms_of(op)
            if terms and found.issuperset(terms) and is_linear(op, self.program.tensor):
                found.update(op.outputs)
        return found

    def run(self, placement: Mapping[str, Placement], outputs: Mapping[str, Placement]) -> State:
        """Return the cheapest state found that ends with `outputs` placed as required.

        `placement` is where inputs, and params not left to choose, lie. Raises LayoutError
        when an op can't honour the pins.
        """
        states = [State(0.0, placement, frozenset())]
        for step in self._steps():
            # What follows depends on the key alone, so of all ways to it the cheapest suffices
            # (dynamic programming); the beam cuts what is left.
            best: dict[object, State] = {}
            for state in states:
                for sharding, cost in self._follow(state, step):
                    following = self._take(state, step, sharding, cost)
                    if following is None:
                        continue
                    key = (frozenset(following.placement.items()), following.moved)
                    kept = best.get(key)
                    if kept is None or following.cost < kept.cost:
                        best[key] = following
            states = sorted(best.values(), key=self._outlook)[:BEAM]
        ended = []
        for state in states:
            left: State | None = state
            for name, wanted in outputs.items():
                left = left and self._fetch(left, name, wanted, grad_partial=False)
            if left is not None:
                ended.append(left)
        return min(ended, key=lambda s: s.cost)

    def _steps(self) -> list[_Step]:
        last_use = dict.fromkeys(self.program.tensor, -1)
        for position, op in enumerate(self.program.ops):
            last_use.update(dict.fromkeys(op.inputs, position))
        # Outputs live to the end.
        last_use.update(dict.fromkeys(self.program.outputs, len(self.program.ops)))
        return [
            _Step(
                op=op,
                inputs=op.inputs,
                options=tuple((s, self._work(op, s)) for s in self._allowed(op)),
                # Values that are dead leave the key: states that differ in them alone merge.
                live=frozenset(name for name, last in last_use.items() if last > position),
                is_costly=family_of(op.target).worth_moving,
            )
            for position, op in enumerate(self.program.ops)
        ]

    def _allowed(self, op: Op) -> list[OpSharding]:
        """Return the shardings of an op that honour every pin on its tensors."""
        offered = strategies(
            op,
            self.program.tensor,
            self.axis_size,
            segments=self._segments,
            mirrored=self.mirrored,
        )
        names = (*op.inputs, *op.outputs)
        offered = tuple(
            s for s in offered if all(map(self.may_lie, names, (*s.inputs, *s.outputs)))
        )
        if not offered:
            raise LayoutError(
                f"{op.name} ({op.target}{' in ' + op.module if op.module else ''}) has no sharding "
                f"on {self.axis_size} ranks that is asked for; ask for another, or for fewer ranks"
            )
        if not self.pins:
            return list(offered)
        allowed = [
            s
            for s in offered
            if all(
                self.pins.get(name, placed) == placed
                for name, placed in zip(names, (*s.inputs, *s.outputs), strict=True)
            )
        ]
        if not allowed:
            clashing = [f"{n}: {self.pins[n]}" for n in dict.fromkeys(names) if n in self.pins]
            raise LayoutError(
                f"pins {' and '.join(clashing)} can't be honoured together by {op.name} "
                f"({op.target}{' in ' + op.module if op.module else ''}), which runs as "
                f"{'; '.join(map(str, offered))}; drop or change one of them"
            )
        return allowed

    def _follow(self, state: State, step: _Step) -> list[tuple[OpSharding, float]]:
        """Drop options in which a cheap op is the reason to move a value.

        Moves pay off where much work follows, or where a sum must be taken; a cheap op
        keeps to where one of its inputs already is.
        """
        if step.is_costly:
            return list(step.options)
        available: list[tuple[int, set[Placement]]] = []
        for i, name in enumerate(step.inputs):
            if name in state.placement:
                where = {move[1] for move in state.moved if move[0] == name}
                available.append((i, where | {state.placement[name]}))
        # A sum has to be taken in any case: to do it here may be the best place.
        if any(Partial() in where for _, where in available):
            return list(step.options)
        following = [
            option
            for option in step.options
            if any(option[0].inputs[i] in where for i, where in available)
        ]
        return following or list(step.options)

    def _outlook(self, state: State) -> float:
        """Cost so far and what live values will cost at least: a Partial must be summed."""
        summed = {move[0] for move in state.moved}
        owed = sum(
            self._bytes[name]
            for name, placed in state.placement.items()
            if isinstance(placed, Partial) and name not in summed
        )
        return state.cost + WIRE["all_reduce"] * owed * self._wire

    def _work(self, op: Op, sharding: OpSharding) -> float:
        """Return the weighted local work of an op, forward and backward."""
        local: dict[str, TensorMeta] = {}
        names = (*op.inputs, *op.outputs)
        for name, placed in zip(names, (*sharding.inputs, *sharding.outputs), strict=True):
            meta = self.program.tensor[name]
            local[name] = replace(meta, shape=local_shape(meta.shape_at(1), placed, self.axis_size))
        forward, backward = op_work(op, local), backward_work(op, local)
        flop = forward.flop + backward.flop
        traffic = forward.num_bytes + backward.num_bytes
        return flop * FLOP_WEIGHT + traffic * TRAFFIC_WEIGHT

    def _take(self, state: State, step: _Step, sharding: OpSharding, cost: float) -> State | None:
        """Return the state after an op ran as `sharding`; None where an input can't lie so."""
        partial = grad_is_partial(sharding.outputs)
        for name, wanted in zip(step.inputs, sharding.inputs, strict=True):
            fetched = self._fetch(state, name, wanted, grad_partial=partial)
            if fetched is None:
                return None
            state = fetched
        live = step.live
        placement = {n: p for n, p in state.placement.items() if n in live}
        for name, placed in zip(step.op.outputs, sharding.outputs, strict=True):
            if name in live:
                placement[name] = placed
        return State(
            state.cost + cost,
            placement,
            frozenset(move for move in state.moved if move[0] in live),
            state.params,
            (state.choices, step.op.name, sharding),
        )

    def _fetch(
        self, state: State, name: str, wanted: Placement, *, grad_partial: bool
    ) -> State | None:
        """Return the state in which a value is also available as `wanted`; None if it can't be."""
        cost, placement, params = state.cost, state.placement, state.params
        meta = self.program.tensor[name]
        if name not in placement:  # a parameter's first use decides where it rests
            # A parameter rests whole or cut, never as terms of a sum.
            at_rest = Replicate() if isinstance(wanted, Partial) else wanted
            shared = 1 if isinstance(at_rest, Replicate) else self.axis_size
            cost += PARAM_WEIGHT * self._bytes[name] / shared
            placement = {**placement, name: at_rest}
            params = (*params, (name, at_rest))
        have = placement[name]
        if not has_way(have, wanted):
            return None
        grad_partial = grad_partial and meta.requires_grad and isinstance(wanted, Replicate)
        grad_partial = grad_partial and name not in self._summed_later
        move = (name, wanted, grad_partial)
        # A redistribution that exists is shared, as lowering does it.
        if (have == wanted and not grad_partial) or move in state.moved:
            if placement is state.placement:
                return state
            return State(cost, placement, state.moved, params, state.choices)
        forward, backward = collectives(have, wanted, grad_partial)
        wire = WIRE[forward] if forward else 0.0
        if backward and meta.requires_grad:
            wire += WIRE[backward]
        # (Only towards R is the source gathered and repeated again.)
        moved = self._gathered if isinstance(wanted, Replicate) else self._bytes
        cost += wire * moved[name] * self._wire
        return State(cost, placement, state.moved | {move}, params, state.choices)
