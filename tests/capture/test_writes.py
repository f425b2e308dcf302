"""In-place writes as pure ops: what is written, through which view, and who reads it then."""

from __future__ import annotations

import pytest
import torch

from planner.capture.reading.record import Recorder
from planner.capture.reading.writes import pure_form, rebind, root_of, substitute, without_out
from planner.errors import CaptureError
from planner.language.graph import Ref

aten = torch.ops.aten
NODE = torch.fx.Graph().placeholder("x")


def recorder() -> Recorder:
    """x [2, 3]; v = x[0] of it; w, a view that can't be followed."""
    record = Recorder()
    for name, shape, kind in (("x", (2, 3), "activation"), ("p", (2, 3), "param")):
        record.tensor(name, torch.ones(shape), kind=kind)
    for name, target, shape in (("v", "aten.select.int", (3,)), ("w", "aten.view.default", (6,))):
        record.tensor(name, torch.ones(shape), kind="activation")
        record.emit(NODE, target, name, (Ref("x"), 0, 0), (), (name,))
    record.tensor("new", torch.ones(3), kind="activation")
    return record


def test_the_pure_form_of_an_op_in_place():
    record = recorder()
    args = (Ref("x"), Ref("p"))
    assert pure_form(record, NODE, aten.add_.Tensor, args)[0] is aten.add.Tensor
    assert pure_form(record, NODE, aten.copy_.default, args)[0] is None  # the source itself
    narrow = (Ref("x"), Ref("v"))
    assert pure_form(record, NODE, aten.copy_.default, narrow)[0] is aten.copy.default
    with pytest.raises(CaptureError, match="writes in place into p"):
        pure_form(record, NODE, aten.add_.Tensor, (Ref("p"), Ref("x")))


@pytest.mark.parametrize(
    ("in_place", "args", "pure"),
    [
        (aten.bernoulli_.float, (0.5,), aten.bernoulli.p),  # stochastic depth
        (aten.normal_.default, (0.0, 1.0), aten.normal_functional.default),
        (aten.pow_.Scalar, (2,), aten.pow.Tensor_Scalar),
        (aten.pow_.Tensor, (Ref("p"),), aten.pow.Tensor_Tensor),
        (aten.floor_divide_.Tensor, (Ref("p"),), aten.floor_divide.default),
        (aten.dropout_.default, (0.5, True), aten.dropout.default),
    ],
)
def test_a_pure_form_takes_the_same_by_whatever_name(in_place, args, pure):
    """N1: overloads of one name may take other things: pow.Scalar a tensor as exponent."""
    assert pure_form(recorder(), NODE, in_place, (Ref("x"), *args))[0] is pure


def test_a_pure_form_is_given_what_the_op_in_place_takes_by_default():
    """`x.bernoulli_()` draws with 0.5; its pure form must be told."""
    target, args, _ = pure_form(recorder(), NODE, aten.bernoulli_.float, (Ref("x"),))
    assert (target, args) == (aten.bernoulli.p, (Ref("x"), 0.5))
    target, args, _ = pure_form(recorder(), NODE, aten.normal_.default, (Ref("x"),))
    assert (target, args) == (aten.normal_functional.default, (Ref("x"),))
    target, args, _ = pure_form(recorder(), NODE, aten.add_.Tensor, (Ref("x"), Ref("p")))
    assert args == (Ref("x"), Ref("p"))


def test_an_op_with_an_out_without_it():
    record = recorder()
    given = (("out", Ref("x")),)
    target, kwargs, written = without_out(record, NODE, aten.mm.out, (Ref("p"), Ref("p")), given)
    assert (target, kwargs, written) == (aten.mm.default, (), Ref("x"))


def test_a_write_into_a_view_is_a_write_into_its_base():
    record = recorder()
    assert root_of(record, Ref("v")) == Ref("x")
    env = {NODE: Ref("x")}
    root, whole, _ = rebind(record, Ref("v"), Ref("new"), [env], NODE, grad_enabled=True, copies=())
    assert root == Ref("x")
    assert env[NODE] == whole  # who reads x from now on reads the whole with the part put in
    scatter = record.ops[-1].op
    assert scatter.target == "aten.select_scatter.default"
    assert scatter.args == (Ref("x"), Ref("new"), 0, 0)
    assert "w" in record.stale  # another view of what was written


def test_a_write_through_a_reshape_leaves_its_base_unread():
    record = recorder()
    env = {NODE: Ref("w")}
    made = rebind(record, Ref("w"), Ref("new"), [env], NODE, grad_enabled=True, copies=())
    assert made == (Ref("w"), Ref("new"), Ref("new"))
    assert env[NODE] == Ref("new")
    assert {"x", "v", "w"} <= record.stale
    with pytest.raises(CaptureError, match="written in place"):
        record.emit(NODE, "aten.neg.default", "y", (Ref("x"),), (), ("y",))


def test_a_write_through_a_reshape_of_a_buffer_is_refused():
    record = recorder()
    with pytest.raises(CaptureError, match="writes in place through view"):
        rebind(record, Ref("w"), Ref("new"), [], NODE, grad_enabled=True, copies={"x"})


def test_writes_that_autograd_treats_in_its_own_way_are_refused():
    record = recorder()
    record.tensor("t", torch.ones(3), kind="activation", requires_grad=True)
    with pytest.raises(CaptureError, match="without gradient into a tensor"):
        rebind(record, Ref("t"), Ref("new"), [], NODE, grad_enabled=False, copies=())


def test_every_region_around_sees_a_write():
    inner, outer = {NODE: Ref("x")}, {NODE: Ref("x")}
    substitute([outer, inner], Ref("x"), Ref("new"))
    assert inner[NODE] == outer[NODE] == Ref("new")
