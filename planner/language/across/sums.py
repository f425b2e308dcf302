"""Sums over samples, and what each part of a batch counts for in them.

A mean over samples is the sum of the parts' means, each by its share of the samples; a mean over
labels that count, by its share of these; a sum is the sum of the parts'. A sum over samples may be
scaled, and sums of one share added; a value that no sample reaches is in a mean what it is in each
part. Where shares differ, each term is multiplied by its own before they are added (`Scale`), so
that the parts' sums just add up. A divisor that no parameter reaches is taken of the whole batch.
"""

from __future__ import annotations

from dataclasses import replace

from planner.language.graph import Affine, Op, Ref, TensorMeta
from planner.language.layout.placement import OpSharding, Partial, Replicate
from planner.language.ops.registry import apart_strategies_of, without_names
from planner.language.ops.samples.state import ADDED, SAMPLES, SCALED, State, joined_sums, summed
from planner.language.ops.samples.step import AXIS, BOUND, Step


def as_rules_see(step: Step, *, whole_numbers_too: bool) -> tuple[Op, tuple[TensorMeta, ...]]:
    """Return a step's op as rules see it; they sum over ranks what can carry a gradient only."""
    plain, metas = without_names(step.op.bind(BOUND), step.walk.bound)
    if whole_numbers_too:
        whole = ("int", "uint", "bool")
        metas = tuple(
            replace(m, dtype="float32") if m.dtype.startswith(whole) else m for m in metas
        )
    return plain, metas


def is_linear_in_sums(step: Step) -> bool:
    """Whether an op is linear in the inputs that are sums, taken together."""
    terms = tuple(Partial() if state.sums else Replicate() for state in step.states)
    plain, metas = as_rules_see(step, whole_numbers_too=True)
    outputs = (Partial(),) * len(step.op.outputs)
    return OpSharding(inputs=terms, outputs=outputs) in apart_strategies_of(plain, metas, AXIS, ())


def levelled(step: Step) -> tuple[State, ...]:
    """Return the sums among an op's inputs with shares that agree; others are scaled first.

    So is a mean over labels that count before it is multiplied by what a parameter reaches: of a
    part without such labels it is 0/0, which its share of zero would not take out of that
    parameter's gradient.
    """
    sums = [state for state in step.states if state.sums]
    shares = {state.share for state in sums}
    counts_labels = bool(shares - {ADDED, SAMPLES, SCALED})
    is_multiplied = step.facts.algebra not in ("addition", "rearrangement")
    by_trained = is_multiplied and any(not (state.sums or state.pure) for state in step.states)
    if len(shares) > 1 or (counts_labels and by_trained):
        step.states = [_scaled(step, at) for at in range(len(step.states))]
        sums = [state for state in step.states if state.sums]
    return tuple(sums)


def _scaled(step: Step, at: int) -> State:
    """Return an input as a sum that has its share in it, which the edit of the op gives it."""
    state = step.states[at]
    if not state.sums or state.share in (ADDED, SCALED):
        return state
    step.scale(step.op.inputs[at], state.share)
    return State(sums=state.sums, share=SCALED, terms=(state.share,), pure=state.pure)


def sum_and_constant(step: Step) -> tuple[State, ...] | None:
    """Sums over samples, added to or joined with values that no sample reaches.

    In a mean such a value is what it is in each part. In a sum over parts it must count once, so
    each part adds its share of the samples times it.
    """
    if step.facts.algebra != "addition":
        return None
    if any(not (state.sums or state.is_whole) for state in step.states):
        return None
    sums = levelled(step)
    is_sum = sums[0].share in (ADDED, SCALED)
    if is_sum and not all(state.sums for state in step.states):
        for at, state in enumerate(step.states):
            if not state.sums:
                step.scale(step.op.inputs[at], SAMPLES)
        constant = State(sums=joined_sums(sums), share=SCALED, terms=(SAMPLES,))
        sums = (*sums, constant)
    number = _added_number(step)
    if is_sum and number is not None:
        step.scale_number(number, SAMPLES)
        sums = (*sums, State(share=SCALED, terms=(SAMPLES,)))
    return (summed(sums),) * len(step.op.outputs)


def _added_number(step: Step) -> int | None:
    """Return which argument is a plain number that is added."""
    numbers = (
        at
        for at, arg in enumerate(step.op.args[:2])
        if isinstance(arg, int | float | Affine) and not isinstance(arg, bool) and arg != 0
    )
    return next(numbers, None) if step.packet in ("aten.add", "aten.sub", "aten.rsub") else None


def of_numbers(step: Step) -> tuple[State, ...] | None:
    """Follow an op with the number of samples among its values; None where it is no factor.

    Raises no fault: a sum over samples divided by it is a mean over them, a mean times it is a sum.
    """
    sizes, algebra = step.batch_sizes(), step.facts.algebra
    if len(sizes) != 1 or len(step.states) != 1 or sizes[0].fixed:
        return None
    state = step.states[0]
    if not state.sums:
        return None
    is_divisor = algebra == "quotient" and isinstance(step.op.args[0], Ref)
    if is_divisor and step.arg(2, "rounding_mode") is None and state.share == ADDED:
        return (State(sums=state.sums, share=SAMPLES, pure=state.pure),)
    if algebra == "product" and state.share == SAMPLES:
        return (State(sums=state.sums, share=ADDED, pure=state.pure),)
    return None


def number_at(step: Step) -> int | None:
    """Return which argument of an arithmetic op is a number of samples that a tensor may replace:
    the second of two; None where it is another.
    """
    arithmetic = step.facts.algebra in ("product", "quotient", "addition")
    values = [at for at, arg in enumerate(step.op.args) if isinstance(arg, Affine)]
    is_second = values == [1] and not any(isinstance(v, Affine) for _, v in step.op.kwargs)
    return 1 if arithmetic and is_second and isinstance(step.op.args[0], Ref) else None
