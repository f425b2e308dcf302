"""Sums over samples, and factors of their number: what makes a loss a mean.

With n samples a tensor is n**power as large as its state says. A sum divided by their number, or by
another sum over samples, is a mean.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from planner.across.state import WHOLE, State
from planner.across.step import AXIS, Step, handles
from planner.graph import Ref
from planner.layout.placement import OpSharding, Partial, Replicate
from planner.ops.registry import apart_strategies_of


def power_of(step: Step) -> int:
    """How the result grows with the number of samples, beside what its state says.

    Notes where a value that depends on their number is used otherwise than as a factor.
    """
    powers = [state.power for state in step.states]
    sizes = step.batch_sizes()
    if not any(powers) and not sizes:
        return 0
    factor, algebra = 0, step.facts.algebra
    if algebra in ("product", "quotient") and all(size.fixed == 0 for size in sizes):
        factor, sizes = len(sizes), []
    if sizes:
        step.blame("size")
        return 0
    if algebra == "product":
        return sum(powers) + factor
    if algebra == "quotient" and step.arg(2, "rounding_mode") is None:
        first = isinstance(step.op.args[0], Ref)
        divisors = sum(powers[1:]) if first else sum(powers)
        return (powers[0] - divisors - factor) if first else factor - divisors
    is_sum = algebra == "addition" and len(step.states) > 1
    if len(set(powers)) == 1 and (is_sum or _is_linear(step)):
        return powers[0]
    if step.packet in ("aten.linear", "aten.where") and _is_linear(step):
        return max(powers, key=abs)
    step.blame("size")
    return 0


def _is_linear(step: Step) -> bool:
    """Whether an op is linear in the inputs that grow with the number of samples."""
    terms = tuple(Partial() if state.power else Replicate() for state in step.states)
    if len(step.op.inputs) == 1 and step.packet in ("aten.sum", "aten.mean", "aten.cumsum"):
        return True
    plain, metas = step.without_names(whole_numbers_too=True)
    outputs = (Partial(),) * len(step.op.outputs)
    return OpSharding(inputs=terms, outputs=outputs) in apart_strategies_of(plain, metas, AXIS, ())


def sum_and_constant(step: Step) -> tuple[State, ...] | None:
    """A mean over samples stays one when something is added that no sample changes.

    So does a sum up to that, which does no harm to a divisor: 1e-8 keeps it from zero.
    """
    if step.facts.algebra != "addition" or any(state.rows for state in step.states):
        return None
    sums = [state for state in step.states if state.sums]
    powers = {state.power for state in sums}
    if len(powers) > 1 or any(s.power for s in step.states if not s.sums) or step.batch_sizes():
        return None
    causes, shares = joined_causes(sums)
    return (State(sums=causes, shares=shares, power=max(powers), bounded=any(powers)),)


def joined_causes(states: Iterable[State]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the sums that tensors come from, and those they were divided by."""
    states = tuple(states)
    sums = dict.fromkeys(cause for state in states for cause in state.sums)
    return tuple(sums), tuple(dict.fromkeys(cause for s in states for cause in s.shares))


@handles("clamp", "clamp_min", "maximum")
def _kept_from_zero(step: Step) -> tuple[State, ...] | None:
    """A sum over samples that may become a divisor."""
    state = step.states[0]
    if not state.sums or any(other != WHOLE for other in step.states[1:]):
        return None
    return (replace(state, bounded=True),)


@handles("div", "divide", "true_divide")
def _quotient(step: Step) -> tuple[State, ...] | None:
    """A sum over samples divided by another is a mean over what the other counts."""
    if len(step.states) != 2 or not step.states[1].sums:
        return None
    above, below = step.states
    power = above.power - below.power
    shares = tuple(dict.fromkeys((*above.shares, *below.sums, *below.shares)))
    if above.sums and not above.bounded:
        return (replace(above, shares=shares, power=power),)
    if above.rows and above.points is None and _is_only_summed(step):
        return (replace(above, equal=False, shares=shares, power=power),)
    return None


def _is_only_summed(step: Step) -> bool:
    users = step.walk.users.get(step.op.outputs[0], [])
    sums = [u for u in users if u.target in ("aten.sum.default",)]
    return bool(users) and len(sums) == len(users)


@handles("cumsum", "sum", "mean", "flip", "roll")
def _sum_of_sum(step: Step) -> tuple[State, ...] | None:
    """Linear in a tensor that samples were summed to."""
    state = step.states[0]
    return (state,) if state.sums and not state.bounded else None
