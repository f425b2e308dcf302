"""The record of an export: names, gradients, views, and reads of views that a write left behind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from planner.capture.reading.record import Recorder, is_view
from planner.errors import CaptureError
from planner.language.graph import Ref

NODE = SimpleNamespace(meta={"nn_module_stack": {"k": ("user.layers.0@1", "Linear")}})


def recorder() -> Recorder:
    record = Recorder()
    record.tensor("x", torch.ones(2, 3), kind="param", fqn="x", requires_grad=True)
    record.tensor("n", torch.ones(2, dtype=torch.int64), kind="input", fqn="n")
    return record


def test_names_are_used_once():
    record = recorder()
    assert [record.fresh("x"), record.fresh("x"), record.fresh("y")] == ["x_1", "x_2", "y"]
    assert (record.tensors["n"].shape, record.tensors["n"].dtype) == ((2,), "int64")


def test_a_gradient_follows_the_inputs_unless_the_op_has_none():
    record = recorder()
    assert record.needs_grad("relu", (Ref("x"),), ())
    assert record.needs_grad("add", (1,), (("other", (Ref("n"), Ref("x"))),))
    assert not record.needs_grad("argmax", (Ref("x"),), ())
    assert not record.needs_grad("relu", (Ref("n"),), ())


def test_ops_stand_where_they_are_put_and_know_their_module():
    record = recorder()
    for name, at in (("a", None), ("b", None), ("c", 1)):
        record.emit(NODE, "aten.relu.default", name, (Ref("x"),), (), (name,), at=at)
    assert [raw.op.name for raw in record.ops] == ["a", "c", "b"]
    assert {raw.module for raw in record.ops} == {"layers.0"}


def test_views_of_views_are_found_and_stale_ones_may_not_be_read():
    record = recorder()
    for name, target, source in (
        ("v", "aten.select.int", "x"),
        ("w", "aten.view.default", "v"),
        ("c", "aten.clone.default", "w"),
    ):
        record.emit(NODE, target, name, (Ref(source), 0, 0), (), (name,))
    assert record.views_of("x") == {"v", "w"}
    record.stale.add("w")
    with pytest.raises(CaptureError, match="reads a view"):
        record.emit(NODE, "aten.relu.default", "r", (Ref("w"),), (), ("r",))
    assert is_view("aten.select.int")
    assert not is_view("aten.clone.default")
