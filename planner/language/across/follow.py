"""Follows the samples through the ops of a program, in order.

What no parameter reaches and nothing draws (`State.pure`) can be made of the whole batch before a
step: where such a tensor mixes samples it is `loose`, which is no fault. An op that a parameter
reaches takes a loose input's value of the whole batch, and that of a sum which it can't take as a
term; only where that does not help, samples meet in a way that parts of the batch don't give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.language.across.by_rules import by_rules
from planner.language.across.written import written
from planner.language.graph import Affine, Op
from planner.language.graph.function_keys import AUTOGRAD_FUNCTION
from planner.language.graph.mixing import Kind
from planner.language.graph.module_keys import OPAQUE_MODULE
from planner.language.ops.record import family_of, is_random, mutates
from planner.language.ops.samples.state import ANY_ORDER, IN_ORDER, State, growing_dims, lies
from planner.language.ops.samples.step import Fault, Step, Walk


def follow_program(walk: Walk) -> None:
    """Add the states of all tensors that a program makes, the faults of its ops and their edits."""
    walk.write(filter(mutates, walk.program.ops))
    for op in walk.program.ops:
        states = [walk.states[name] for name in op.inputs]
        found = _pure(walk, step_of(walk, op, states))
        if found is None:
            found = _reached(walk, op, states)
        walk.states.update(zip(op.outputs, found, strict=True))


def step_of(walk: Walk, op: Op, states: Sequence[State]) -> Step:
    """Return an op of a walk with the states of its inputs and what its record says of samples."""
    facts = family_of(op.target).across
    return Step(walk=walk, op=op, states=list(states), facts=facts, rules=by_rules)


def _pure(walk: Walk, step: Step) -> tuple[State, ...] | None:
    """Return what an op makes of the batch alone; None where a parameter or a draw is in it."""
    op = step.op
    if op.target in (AUTOGRAD_FUNCTION, OPAQUE_MODULE) or is_random(op) or mutates(op):
        return None
    if not all(state.pure for state in step.states):
        return None
    loose = next((state for state in step.states if state.loose), None)
    if loose is None:
        found = _followed(step)
        if not step.faults and not step.edits:
            return tuple(replace(state, pure=True) for state in found)
        kind: Kind = next((fault.kind for fault in step.faults), "mixed")
        return tuple(_loose(walk, name, step.named(op.name), kind) for name in op.outputs)
    return tuple(_loose(walk, name, loose.loose, loose.loose_kind) for name in op.outputs)


def _loose(walk: Walk, name: str, cause: str, kind: Kind) -> State:
    samples = lies(walk.program.tensor[name], walk.unit)
    return State(rows=samples, pure=True, loose=cause, loose_kind=kind)


def _reached(walk: Walk, op: Op, given: Sequence[State]) -> tuple[State, ...]:
    """Return what an op makes of parameters, or of numbers that are drawn."""
    best: tuple[Step, tuple[State, ...]] | None = None
    # Values of the whole batch are taken for as few inputs as it needs.
    for is_taken in (_is_loose, _is_loose_or_sum, _is_across):
        tried = step_of(walk, op, given)
        for at, name in enumerate(op.inputs):
            if given[at].pure and is_taken(given[at]):
                whole = _whole(walk, name)
                if whole is not None:
                    tried.states[at] = whole
                    tried.take_whole(at)
        left = next((state for state in tried.states if state.loose), None)
        if left is not None:
            fault = Fault(kind=left.loose_kind, op=left.loose, used_by=op.name)
            tried.faults[fault] = None
            best = tried, tried.anything()
            break
        found = _followed(tried)
        if best is None or not tried.faults:
            best = tried, found
        if not tried.faults:
            break
    assert best is not None
    tried, found = best
    tried.commit()
    return tuple(replace(state, pure=False) for state in found)


def _is_loose(state: State) -> bool:
    return bool(state.loose)


def _is_loose_or_sum(state: State) -> bool:
    return bool(state.loose or state.sums)


def _is_across(state: State) -> bool:
    odd = state.rows is not None and (
        state.order not in (IN_ORDER, ANY_ORDER) or state.points is not None
    )
    return odd or _is_loose_or_sum(state)


def _whole(walk: Walk, name: str) -> State | None:
    """Return the state of a tensor's value of the whole batch, of which a part has its rows; None
    where samples do not lie along one of its dims.
    """
    tensor = walk.program.tensor[name]
    sizes = [tensor.shape[dim] for dim in growing_dims(tensor)]
    if len(sizes) > 1 or any(isinstance(size, Affine) and size.fixed for size in sizes):
        return None
    return State(rows=lies(tensor, walk.unit), pure=True, whole=walk.named(name))


def _followed(step: Step) -> tuple[State, ...]:
    op = step.op
    if step.compares(op.outputs) and not step.compares(op.inputs):
        step.blame("pairs")
        return step.anything()
    if mutates(op) and not step.facts.handlers:
        return written(step)
    for handler in step.facts.handlers:
        found = handler(step)
        if found is not None:
            return found
    return by_rules(step)
