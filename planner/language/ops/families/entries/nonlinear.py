"""Non-linear ops element by element, with broadcasting: activations, powers, comparisons.

None takes a Partial: relu(a + b) is not relu(a) + relu(b).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from planner.language.layout.placement import OpSharding, Shard
from planner.language.ops.call import Call, R
from planner.language.ops.families.entries.arithmetic import numbers_divided, rest_of_numbers
from planner.language.ops.kernel import (
    KernelCall,
    Saved,
    gradients_of_result_size,
    in_order_of_inputs,
    saves_inputs,
    saves_nothing,
    saves_result,
)
from planner.language.ops.letters import Letters, by_letters, pointwise
from planner.language.ops.record import OpFamily, ShardRule, aten, register
from planner.language.ops.samples.step import Across


def nonlinear(call: Call) -> Iterator[OpSharding]:
    """Every aligned dim can be sharded."""
    yield from pointwise(call)


def _by_boundaries(call: Call) -> Iterator[OpSharding]:
    """Numbers of any shape, boundaries [k]."""
    letters: Letters = range(len(call.inputs[0]))
    yield from by_letters([letters, *[[None]] * (len(call.inputs) - 1)], [letters])


def _among(call: Call) -> Iterator[OpSharding]:
    """Entries of any shape, and all that each is looked for among: a tensor or a number."""
    if call.op.target == "aten.isin.Scalar_Tensor":
        return
    yield from _by_boundaries(call)


def _prelu(call: Call) -> Iterator[OpSharding]:
    """Tensor [n, c, ...], weight [c] or [1]."""
    for d in range(len(call.inputs[0])):
        if d != 1:
            yield OpSharding(inputs=(Shard(d), R), outputs=(Shard(d),))


def _power(call: KernelCall) -> Saved:
    """The gradient of x**2 reads x, of x**c reads x; of x**0 and x**1 nothing."""
    args = call.op.args
    exponent = args[1] if len(args) > 1 else None
    return Saved() if exponent in (0, 1) else Saved(tensors=call.op.inputs)


# ---------------------------------------------------------------------------------------- records

_NONLINEAR = OpFamily(
    name="non-linear",
    targets=aten(
        "acos acosh asin asinh atan atan2 atanh celu clamp_max clamp_min clip copysign cosh"
        " digamma elu erf erfc erfinv exp2 expm1 fmax fmin frac hardshrink"
        " hardsigmoid hardswish lerp lgamma log10 log1p log2 log_sigmoid logaddexp logit maximum"
        " minimum mish nan_to_num reciprocal relu6 selu sgn sinc sinh"
        " softshrink square tan threshold xlogy addcmul addcdiv"
        " bitwise_and bitwise_not bitwise_or bitwise_xor"
        " logical_and logical_not logical_or logical_xor"
        " eq ge gt le lt ne greater greater_equal less less_equal not_equal"
        " isfinite isinf isnan isclose __and__ __or__ __xor__ __lshift__ __rshift__"
    ),
    shard=(ShardRule(nonlinear),),
    result=in_order_of_inputs,
)
"""Every entry from the entries at its place."""

register(_NONLINEAR)


def _nonlinear(names: str, **facts: Any) -> None:
    register(replace(_NONLINEAR, name=f"non-linear: {names}", targets=aten(names), **facts))


_nonlinear("floor_divide", across=Across(handlers=(numbers_divided,)))
_nonlinear("fmod remainder", across=Across(handlers=(rest_of_numbers,)))
_nonlinear("copy", elements_alone=True)
_nonlinear("ceil floor round sign trunc", saved=saves_nothing)  # their gradient is zero
_nonlinear("log clamp leaky_relu hardtanh softplus", saved=saves_inputs(0))
_nonlinear("gelu", saved=saves_inputs(0), flop_per_element=10, elements_alone=True)
_nonlinear("silu", saved=saves_inputs(0), flop_per_element=5, elements_alone=True)
_nonlinear("abs sin", saved=saves_inputs(0), scratch=gradients_of_result_size(1))
_nonlinear("cos", saved=saves_inputs(0), scratch=gradients_of_result_size(2))
_nonlinear("relu exp", saved=saves_result, elements_alone=True)
_nonlinear("tanh", saved=saves_result, flop_per_element=5, elements_alone=True)
_nonlinear("sigmoid", saved=saves_result, flop_per_element=4, elements_alone=True)
_nonlinear("sqrt", saved=saves_result, scratch=gradients_of_result_size(1), elements_alone=True)
_nonlinear("rsqrt", saved=saves_result, scratch=gradients_of_result_size(2), elements_alone=True)
_nonlinear("pow", saved=_power, scratch=gradients_of_result_size(2), elements_alone=True)

register(
    OpFamily(
        name="other ops on entries",
        targets=aten(
            "float_power polar complex angle signbit nextafter hypot heaviside logaddexp2"
            " special_expit special_xlogy special_erfcx special_i0e special_entr i0 rad2deg deg2rad"
            " fill zero view_as_real_copy gcd lcm bitwise_left_shift bitwise_right_shift isneginf"
            " isposinf isreal resolve_conj resolve_neg polygamma igamma igammac"
            " fake_quantize_per_tensor_affine"
        ),
        result=in_order_of_inputs,
        across=Across(rule=nonlinear),
    )
)
register(
    OpFamily(
        name="places among boundaries",
        targets=aten("bucketize"),
        across=Across(rule=_by_boundaries),
    )
)
register(OpFamily(name="membership", targets=aten("isin"), across=Across(rule=_among)))
register(OpFamily(name="slope of a channel", targets=aten("prelu"), across=Across(rule=_prelu)))
