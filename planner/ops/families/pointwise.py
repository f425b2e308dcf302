"""Ops that work element by element, with broadcasting.

Those linear in an input may also take it as Partial: a sum over ranks passes through
them. Non-linear ones never do (relu(a + b) is not relu(a) + relu(b)).
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.graph import Ref
from planner.layout.placement import OpSharding
from planner.ops.call import Call, P, R
from planner.ops.letters import pointwise
from planner.ops.registry import rule

_NONLINEAR = """
abs acos acosh asin asinh atan atan2 atanh ceil celu clamp clamp_max clamp_min clip copysign cos
cosh digamma elu erf erfc erfinv exp exp2 expm1 floor floor_divide fmax fmin fmod frac gelu
hardshrink hardsigmoid hardswish hardtanh leaky_relu lerp lgamma log log10 log1p log2 log_sigmoid
logaddexp logit maximum minimum mish nan_to_num pow reciprocal relu relu6 remainder round rsqrt
selu sgn sigmoid sign silu sin sinc sinh softplus softshrink softsign sqrt square tan tanh
threshold trunc xlogy addcmul addcdiv
copy
bitwise_and bitwise_not bitwise_or bitwise_xor logical_and logical_not logical_or logical_xor
eq ge gt le lt ne greater greater_equal less less_equal not_equal isfinite isinf isnan isclose
__and__ __or__ __xor__ __lshift__ __rshift__
""".split()  # noqa: SIM905 - sixty names read better as text

_LINEAR = ["neg", "clone", "contiguous", "detach", "alias", "positive", "to"]


@rule(*(f"aten.{name}" for name in _NONLINEAR))
def nonlinear(call: Call) -> Iterator[OpSharding]:
    """Every aligned dim can be sharded."""
    yield from pointwise(call)


@rule(*(f"aten.{name}" for name in _LINEAR))
def linear_unary(call: Call) -> Iterator[OpSharding]:
    """Keeps the tensor as it is up to its sign, memory or dtype."""
    yield from pointwise(call)
    if call.is_floating(call.op.inputs[0]) and call.is_floating(call.op.outputs[0]):
        yield OpSharding(inputs=(P,), outputs=(P,))


@rule("aten.add", "aten.sub", "aten.rsub")
def add(call: Call) -> Iterator[OpSharding]:
    """Two tensors may both be Partial; a number may not be added once on each rank."""
    yield from pointwise(call)
    if len(call.inputs) == 2 and call.is_floating(call.op.outputs[0]):
        yield OpSharding(inputs=(P, P), outputs=(P,))


@rule("aten.mul", "aten.multiply", "aten.div", "aten.divide", "aten.true_divide")
def mul(call: Call) -> Iterator[OpSharding]:
    """Linear in each factor of a product, and in the dividend of a plain quotient."""
    yield from pointwise(call)
    if not call.is_floating(call.op.outputs[0]) or call.arg(2, "rounding_mode") is not None:
        return
    divides = "mul" not in call.packet
    for position in range(1 if divides else len(call.inputs)):
        # The dividend may be a number: then the only tensor is the divisor.
        if isinstance(call.op.args[0], Ref) or not divides:
            inputs = tuple(P if i == position else R for i in range(len(call.inputs)))
            yield OpSharding(inputs=inputs, outputs=(P,))


@rule("aten.where")
def where(call: Call) -> Iterator[OpSharding]:
    """Chooses between two tensors; linear in the pair of them."""
    if len(call.inputs) < 2:
        return  # where(condition) yields indices, whose number is not known
    yield from pointwise(call)
    if len(call.inputs) == 3 and call.is_floating(call.op.outputs[0]):
        yield OpSharding(inputs=(R, P, P), outputs=(P,))


@rule("aten.masked_fill")
def masked_fill(call: Call) -> Iterator[OpSharding]:
    """Linear in the tensor when what is filled in is zero."""
    yield from pointwise(call)
    if len(call.inputs) == 2 and call.arg(2, "value") == 0:
        yield OpSharding(inputs=(P, R), outputs=(P,))


@rule("aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.empty_like")
def like(call: Call) -> Iterator[OpSharding]:
    """Takes only the shape of its input."""
    yield from pointwise(call)
