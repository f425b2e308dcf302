"""Ops that keep their input's entries up to the sign, the dtype or the memory they lie in.

A sum over ranks passes through them, so they take a Partial.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from planner.language.layout.placement import OpSharding, Placement, Shard
from planner.language.ops.call import Call, P, R
from planner.language.ops.kernel import (
    KernelCall,
    View,
    in_order_of_inputs,
    same_memory,
    saves_nothing,
)
from planner.language.ops.letters import pointwise
from planner.language.ops.record import OpFamily, ShardRule, aten, register
from planner.language.ops.samples.step import BY_RULES, Across
from planner.language.ops.strides import is_contiguous


def linear_unary(call: Call) -> Iterator[OpSharding]:
    """Keeps the tensor as it is up to its sign, memory or dtype."""
    yield from pointwise(call)
    if call.is_floating(call.op.inputs[0]) and call.is_floating(call.op.outputs[0]):
        yield OpSharding(inputs=(P,), outputs=(P,))


def with_a_linear_input(call: Call) -> Iterator[OpSharding]:
    """Each entry from the entries at its place; linear in the first tensor."""
    yield from pointwise(call)
    yield OpSharding(inputs=(P, R)[: len(call.inputs)], outputs=(P,))


def as_another(call: Call) -> Iterator[OpSharding]:
    """The first tensor's entries; of a second, of any shape, only the dtype is read."""
    places: list[tuple[Placement, ...]]
    places = [(P, R, *map(Shard, range(len(shape)))) for shape in call.inputs]
    first, *others = places
    for place in first:
        for rest in product(*others):
            yield OpSharding(inputs=(place, *rest), outputs=(place,))


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


# ---------------------------------------------------------------------------------------- records

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
    _LINEAR,
    name="cast",
    targets=aten("to"),
    view=_cast_view,
    moves_nothing=_of_one_dtype,
    across=Across(algebra="cast"),
)
register(_CAST)
register(
    replace(
        _CAST,
        name="cast to another tensor's dtype",
        targets=aten("type_as"),
        shard=(),
        across=Across(rule=as_another),
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
        across=BY_RULES,
    )
)

register(
    OpFamily(
        name="parts of complex numbers",
        targets=aten("imag conj _conj conj_physical"),
        across=Across(rule=with_a_linear_input),
    )
)
