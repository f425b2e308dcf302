"""What an op does to the samples of its tensors, by the rules in its record.

A rule by which shards of the inputs, each alone, give shards of the outputs says that samples
stay apart; a rule by which they give terms of a sum says that they are summed.
"""

from __future__ import annotations

from dataclasses import replace

from planner.language.across.sums import (
    as_rules_see,
    is_linear_in_sums,
    levelled,
    number_at,
    of_numbers,
    sum_and_constant,
)
from planner.language.layout.placement import OpSharding, Partial, Placement, Replicate, Shard
from planner.language.ops.call import Call, fits
from planner.language.ops.record import family_of, is_random
from planner.language.ops.registry import apart_strategies_of, has_rule
from planner.language.ops.samples.state import (
    ADDED,
    ANY_ORDER,
    IN_ORDER,
    SAMPLES,
    WHOLE,
    State,
    summed,
)
from planner.language.ops.samples.step import AXIS, MEAN, Step, in_one_order, numbers_are_values


def by_rules(step: Step) -> tuple[State, ...]:
    """Return what the rules say of an op, noting what they and the states do not allow."""
    op = step.op
    if all(state.is_whole or state.lost for state in step.states) and not step.grows():
        lost = any(state.lost for state in step.states)
        return (replace(WHOLE, lost=lost),) * len(op.outputs)
    numbers_are_values(step)
    in_one_order(step)
    if step.batch_sizes():
        counted = of_numbers(step)
        if counted is not None:
            return counted
        at = number_at(step)
        if at is None:
            step.blame("size")
        else:
            step.take_number(at)
    if any(state.sums for state in step.states):
        found = _of_sums(step)
        if found is not None:
            return found
    matched = _match(step)
    if matched is not None:
        return tuple(
            _outcome(step, placement, name)
            for placement, name in zip(matched.outputs, op.outputs, strict=True)
        )
    if any(state.rows for state in step.states):
        is_known = has_rule(op.target) or step.facts.rule is not None
        step.blame("mixed" if is_known else "unknown")
    elif any(map(step.growing, op.outputs)):
        step.blame("unknown")
    return step.anything()


def _of_sums(step: Step) -> tuple[State, ...] | None:
    """What becomes of sums over samples, the other inputs being the same in all parts; None, and a
    fault, where it is more than a term of the loss.
    """
    meet_rows = any(state.rows or state.lost for state in step.states)
    if not meet_rows and not any(map(step.growing, step.op.outputs)) and not _truncates(step):
        if len(step.op.inputs) == 1 and (step.facts.algebra in ("rearrangement", "cast")):
            return (step.states[0],) * len(step.op.outputs)
        affine = sum_and_constant(step)
        if affine is not None:
            return affine
        if is_linear_in_sums(step):
            return (summed(levelled(step)),) * len(step.op.outputs)
    step.blame_sums()
    return None


def _match(step: Step) -> OpSharding | None:
    """The sharding that takes each input as its samples lie, and no other tensor in parts."""
    op = step.op
    if _truncates(step):
        return None
    keeps = step.facts.in_runs
    counts = _segments(step)
    if len(counts) > 1 and not keeps:
        return None
    inputs = tuple(_placement(state, keeps) for state in step.states)
    sums = Partial() in inputs or step.facts.algebra == "sum"
    plain, metas = as_rules_see(step, whole_numbers_too=sums)
    offered = apart_strategies_of(plain, metas, AXIS, tuple(counts - {1}) if keeps else ())
    offered += _by_own_rule(step, Call(plain, {m.name: m for m in metas}, AXIS))
    fitting = [sharding for sharding in offered if sharding.inputs == inputs]
    growing = [step.growing(name) for name in op.outputs]
    if not any(growing) and all(isinstance(place, Replicate) for place in inputs):
        return OpSharding(inputs=inputs, outputs=(Replicate(),) * len(op.outputs))
    for sharding in fitting:
        places = zip(sharding.outputs, growing, strict=True)
        if all(
            place.dim in dims if isinstance(place, Shard) else not dims for place, dims in places
        ):
            return sharding
    return None


def _by_own_rule(step: Step, call: Call) -> tuple[OpSharding, ...]:
    """What the record says of samples alone, beside the sharding rules."""
    rule, shapes = step.facts.rule, (*call.inputs, *call.outputs)
    found = rule(call) if rule is not None else ()
    return tuple(s for s in found if fits((*s.inputs, *s.outputs), shapes, AXIS))


def _segments(step: Step) -> set[int]:
    """In how many runs the rows of the batch lie in their dim; equal rows lie in any."""
    return {
        s.rows.segments for s in step.states if s.rows and not (s.equal and s.order == ANY_ORDER)
    }


def _placement(state: State, keeps_segments: bool) -> Placement:
    if state.sums:
        return Partial()
    if state.rows is None:
        return Replicate()
    return state.rows if keeps_segments else Shard(state.rows.dim)


def _outcome(step: Step, placement: Placement, name: str) -> State:
    """What a tensor is that follows from rows under a sharding."""
    rows = [state for state in step.states if state.rows]
    equal = all(state.equal for state in rows) and not is_random(step.op)
    if isinstance(placement, Replicate):
        return WHOLE
    if isinstance(placement, Partial):
        is_mean = _is_mean(step)
        if equal and is_mean:
            return WHOLE
        return State(sums=(step.op.name,), share=SAMPLES if is_mean else ADDED)
    assert isinstance(placement, Shard), "rows in orders of ranks' own have rules of their own"
    if not step.facts.in_runs:
        placement = Shard(placement.dim, max(_segments(step), default=1))
    if not rows:
        return State(rows=placement, equal=True)
    orders = {state.order for state in rows}
    points = next((state.points for state in rows if state.points is not None), None)
    if points == ANY_ORDER and len(step.op.inputs) == 1:
        (source,) = step.op.inputs
        if _rows_in(step, source) != _rows_in(step, name):  # a number for each of several rows
            orders, points = {IN_ORDER}, IN_ORDER
    return State(
        rows=placement,
        order=next(iter(orders - {ANY_ORDER}), ANY_ORDER),
        points=points,
        each=max(state.each for state in rows),
        equal=equal,
        lost=any(s.lost for s in rows) and step.walk.program.tensor[name].dtype.startswith("int"),
    )


def _rows_in(step: Step, name: str) -> int:
    return step.walk.bound[name].numel_at(1)


def _is_mean(step: Step) -> bool:
    place = step.facts.reduction_arg
    if place is not None:
        return bool(step.arg(place, "reduction", MEAN) == MEAN)
    return step.facts.algebra == "mean"


def _truncates(step: Step) -> bool:
    """Whether an op rounds what sums over samples: counts alone are whole numbers already."""
    if step.facts.algebra != "cast" or not step.states[0].sums:
        return False
    (source,), (made,) = step.op.inputs[:1], step.op.outputs
    tensor, maker = step.walk.program.tensor, step.walk.maker.get(source)
    becomes = tensor[made].dtype
    if becomes == "bool":
        return True
    counts = maker is not None and family_of(maker.target).across.counts
    is_float = tensor[source].dtype.startswith(("float", "bfloat"))
    return is_float and becomes.startswith(("int", "uint")) and not counts
