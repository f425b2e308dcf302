"""Ops that work element by element, with broadcasting.

Those linear in an input may also take it as Partial: a sum over ranks passes through
them. Non-linear ones never do (relu(a + b) is not relu(a) + relu(b)).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from planner.graph import Ref
from planner.layout.placement import OpSharding, Shard
from planner.ops.call import Call, P, R
from planner.ops.kernel import (
    KernelCall,
    Saved,
    View,
    gradients_of_result_size,
    in_order_of_inputs,
    same_memory,
    saved_factors,
    saves_inputs,
    saves_nothing,
    saves_result,
    unreduced_gradients,
)
from planner.ops.letters import Letters, by_letters, pointwise
from planner.ops.record import Across, OpFamily, ShardRule, aten, register
from planner.ops.strides import is_contiguous


def nonlinear(call: Call) -> Iterator[OpSharding]:
    """Every aligned dim can be sharded."""
    yield from pointwise(call)


def linear_unary(call: Call) -> Iterator[OpSharding]:
    """Keeps the tensor as it is up to its sign, memory or dtype."""
    yield from pointwise(call)
    if call.is_floating(call.op.inputs[0]) and call.is_floating(call.op.outputs[0]):
        yield OpSharding(inputs=(P,), outputs=(P,))


def add(call: Call) -> Iterator[OpSharding]:
    """Two tensors may both be Partial; a number may not be added once on each rank."""
    yield from pointwise(call)
    if len(call.inputs) == 2 and call.is_floating(call.op.outputs[0]):
        yield OpSharding(inputs=(P, P), outputs=(P,))


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


def where(call: Call) -> Iterator[OpSharding]:
    """Chooses between two tensors; linear in the pair of them."""
    if len(call.inputs) < 2:
        return  # where(condition) yields indices, whose number is not known
    yield from pointwise(call)
    if len(call.inputs) == 3 and call.is_floating(call.op.outputs[0]):
        yield OpSharding(inputs=(R, P, P), outputs=(P,))


def masked_fill(call: Call) -> Iterator[OpSharding]:
    """Linear in the tensor when what is filled in is zero."""
    yield from pointwise(call)
    if len(call.inputs) == 2 and call.arg(2, "value") == 0:
        yield OpSharding(inputs=(P, R), outputs=(P,))


# --------------------------------------------------- of ops without sharding rule: samples alone


def with_a_linear_input(call: Call) -> Iterator[OpSharding]:
    """Each entry from the entries at its place; linear in the first tensor."""
    yield from pointwise(call)
    yield OpSharding(inputs=(P, R)[: len(call.inputs)], outputs=(P,))


def _by_boundaries(call: Call) -> Iterator[OpSharding]:
    """Numbers of any shape, boundaries [k]."""
    letters: Letters = range(len(call.inputs[0]))
    yield from by_letters([letters, *[[None]] * (len(call.inputs) - 1)], [letters])


def _prelu(call: Call) -> Iterator[OpSharding]:
    """Tensor [n, c, ...], weight [c] or [1]."""
    for d in range(len(call.inputs[0])):
        if d != 1:
            yield OpSharding(inputs=(Shard(d), R), outputs=(Shard(d),))


# ------------------------------------------------------------------------------------- memory


def _of_one_dtype(call: Call) -> bool:
    """Whether a cast does nothing."""
    return call.tensor[call.op.inputs[0]].dtype == call.tensor[call.op.outputs[0]].dtype


def _cast_view(call: KernelCall, position: int) -> View | None:
    """A cast to the dtype it has hands its input on."""
    source, output = call.op.inputs[0], call.op.outputs[0]
    same = call.tensor[source].dtype == call.tensor[output].dtype
    return View(source, call.strides[source]) if same else None


def _contiguous_view(call: KernelCall, position: int) -> View | None:
    """What is row-major already is handed on."""
    (source,) = call.op.inputs
    strides = call.strides[source]
    return View(source, strides) if is_contiguous(call.shape(source), strides) else None


def _factors(call: KernelCall) -> Saved:
    """`a * b` saves each factor whose partner needs a gradient."""
    if len(call.op.inputs) < 2:
        return Saved()
    return Saved(tensors=saved_factors(call, *call.op.inputs[:2]))


def _quotient(call: KernelCall) -> Saved:
    """The gradient of a / b reads b, and that of b reads a too."""
    names = call.op.inputs
    if len(names) < 2:
        return Saved()
    return Saved(tensors=names[:2] if call.needs_grad(names[1]) else names[1:2])


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
        " digamma elu erf erfc erfinv exp2 expm1 floor_divide fmax fmin fmod frac hardshrink"
        " hardsigmoid hardswish lerp lgamma log10 log1p log2 log_sigmoid logaddexp logit maximum"
        " minimum mish nan_to_num reciprocal relu6 remainder selu sgn sinc sinh"
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

_LINEAR = OpFamily(
    name="linear: keeps its input up to the sign",
    targets=aten("neg positive"),
    shard=(ShardRule(linear_unary),),
    result=in_order_of_inputs,
    saved=saves_nothing,
    elements_alone=True,
)
_SAME = Across(algebra="rearrangement")
"""The entries of the input, unchanged."""

register(_LINEAR)
register(replace(_LINEAR, name="copy", targets=aten("clone"), across=_SAME))
register(
    OpFamily(
        name="row-major copy",
        targets=aten("contiguous"),
        shard=(ShardRule(linear_unary),),
        view=_contiguous_view,
        saved=saves_nothing,
        across=_SAME,
    )
)
register(
    OpFamily(
        name="another name",
        targets=aten("detach alias"),
        shard=(ShardRule(linear_unary),),
        moves_nothing=True,
        view=same_memory,
        saved=saves_nothing,
        across=_SAME,
    )
)
_CAST = replace(
    _LINEAR, name="cast", targets=aten("to"), view=_cast_view, moves_nothing=_of_one_dtype
)
register(_CAST)
register(
    replace(
        _CAST,
        name="cast to another tensor's dtype",
        targets=aten("type_as"),
        shard=(),
        across=Across(rule=with_a_linear_input),
    )
)
register(
    replace(
        _CAST,
        name="cast to new memory",
        targets=aten("_to_copy"),
        shard=(),
        view=None,
        moves_nothing=False,
    )
)

_ADDITION = OpFamily(
    name="addition",
    targets=aten("add sub rsub"),
    shard=(ShardRule(add),),
    result=in_order_of_inputs,
    saved=saves_nothing,
    elements_alone=True,
    across=Across(algebra="addition"),
)
register(_ADDITION)
register(
    replace(
        _ADDITION,
        name="product of entries",
        targets=aten("mul multiply"),
        shard=(ShardRule(mul),),
        saved=_factors,
        unreduced=unreduced_gradients,
        across=Across(algebra="product"),
    )
)
register(
    replace(
        _ADDITION,
        name="quotient of entries",
        targets=aten("div divide true_divide"),
        shard=(ShardRule(mul),),
        saved=_quotient,
        across=Across(algebra="quotient"),
    )
)
register(
    OpFamily(
        name="choice between two tensors",
        targets=aten("where"),
        shard=(ShardRule(where),),
        result=in_order_of_inputs,
        saved=saves_inputs(0),
    )
)
register(
    OpFamily(
        name="masked fill",
        targets=aten("masked_fill"),
        shard=(ShardRule(masked_fill),),
        result=in_order_of_inputs,
        saved=saves_inputs(1),
    )
)

register(
    OpFamily(
        name="other ops on entries",
        targets=aten(
            "float_power polar complex angle signbit nextafter hypot heaviside logaddexp2"
            " special_expit special_xlogy special_erfcx special_i0e special_entr i0 rad2deg deg2rad"
            " fill zero view_as_real_copy gcd lcm bitwise_left_shift bitwise_right_shift isneginf"
            " isposinf isreal resolve_conj resolve_neg polygamma igamma igammac"
            " fake_quantize_per_tensor_affine isin"
        ),
        result=in_order_of_inputs,
        across=Across(rule=nonlinear),
    )
)
register(
    OpFamily(
        name="parts of complex numbers",
        targets=aten("imag conj"),
        across=Across(rule=with_a_linear_input),
    )
)
register(
    OpFamily(
        name="places among boundaries",
        targets=aten("bucketize"),
        across=Across(rule=_by_boundaries),
    )
)
register(OpFamily(name="slope of a channel", targets=aten("prelu"), across=Across(rule=_prelu)))
