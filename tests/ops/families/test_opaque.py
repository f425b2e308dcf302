"""Modules called as they are: what a trial counted is what they cost, and samples lie apart."""

from __future__ import annotations

import pytest

from planner.language.graph import Op, Ref, TensorMeta
from planner.language.graph.module_keys import OPAQUE_MODULE
from planner.language.layout.placement import OpSharding
from planner.language.ops.call import Call, Work
from planner.language.ops.families.opaque import samples_apart
from planner.language.ops.kernel import KernelCall
from planner.language.ops.record import family_of

FORWARD = (1000, 600, 200, 7, 64)
BACKWARD = (2000, 900, 500, 9, 96)
"""Flop, bytes read, bytes written, kernels, scratch bytes."""


def tensor(name: str, *shape: int, kind="activation") -> TensorMeta:
    return TensorMeta(name=name, shape=shape, dtype="float32", kind=kind)


TENSOR = {
    each.name: each
    for each in (
        tensor("x", 4, 8), tensor("table", 8, 8), tensor("weight", 8, 8, kind="param"),
        tensor("y", 4, 3), tensor("z", 4, 5),
    )
}  # fmt: skip


def module(holds_samples: tuple[bool, ...]) -> Op:
    """Return a call with two tensors of the model's and a parameter of the module's own."""
    args = (Ref("x"), Ref("table"), Ref("weight"))
    return Op(
        name="module", target=OPAQUE_MODULE,
        args=("key", args, holds_samples, (FORWARD, BACKWARD)), outputs=("y", "z"),
    )  # fmt: skip


def call(holds_samples: tuple[bool, ...] = (True, False)) -> Call:
    return Call(module(holds_samples), TENSOR, 2)


def test_tensors_that_hold_samples_are_cut_along_them():
    assert list(samples_apart(call())) == [OpSharding.parse("S(0),R,R->S(0),S(0)")]
    assert list(samples_apart(call((True, True)))) == [OpSharding.parse("S(0),S(0),R->S(0),S(0)")]
    assert list(samples_apart(call((False, False)))) == []


def test_its_work_is_what_was_counted_forward_and_backward():
    family = family_of(OPAQUE_MODULE)
    assert family.flop(call()) == 1000
    assert family.backward(call(), Work(flop=1.0, read_bytes=1.0, write_bytes=1.0)) == Work(
        flop=2000.0, read_bytes=900.0, write_bytes=500.0
    )
    assert family.kernels(call()) == (7, 9)
    assert not family.recomputed


def test_bytes_of_its_results_are_not_read():
    """800 bytes are moved; 4 * (3 + 5) numbers of 4 bytes are results, counted as such."""
    assert family_of(OPAQUE_MODULE).reads(call()) == 800 - 128
    made = dict(TENSOR, z=tensor("z", 400, 5))
    assert family_of(OPAQUE_MODULE).reads(Call(module((True, False)), made, 2)) == 0


@pytest.mark.parametrize(("forward", "scratch"), [(True, 64), (False, 96)])
def test_its_inputs_alone_are_saved_and_each_direction_has_its_scratch(forward, scratch):
    kernel = KernelCall(module((True, False)), TENSOR, {}, "cuda")
    family = family_of(OPAQUE_MODULE)
    assert family.saved(kernel).tensors == ("x", "table", "weight")
    assert family.scratch(kernel, forward=forward) == scratch
