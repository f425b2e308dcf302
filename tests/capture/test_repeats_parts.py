"""The steps of capturing a stack in part, each alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from planner.capture.blocks import RawGraph, RawOp
from planner.capture.checks.stays_on_meta import OnMeta
from planner.capture.repeats.expand import NotRepeated, expand
from planner.capture.repeats.find import PERIODS, Repeat, does_the_same, find_repeat
from planner.capture.repeats.in_part import capture_in_part, is_steady, long_lists
from planner.capture.repeats.trace import (
    Earlier,
    Held,
    Made,
    Trace,
    is_tied,
    layer_lists,
    trace_forward,
    truncated,
)
from planner.language.graph import Op, Ref, TensorMeta

LAYERS = 10


def made_trace(scales: list[float], *, reads_back: int = 1) -> Trace:
    """A trace of layers that scale what the layer `reads_back` before made; op 0 comes first."""
    trace = Trace(begins={"layers": []}, ends={"layers": []}, called={"layers": []})
    trace.events.append(("first", "", (("input", 0),), ()))
    for k, scale in enumerate(scales):
        trace.begins["layers"].append(len(trace.events))
        trace.called["layers"].append(k)
        read = Made(max(0, k + 1 - reads_back), 0)
        trace.events.append(("scale", "", (read, Held(f"layers.{k}.weight"), repr(scale)), ()))
        trace.ends["layers"].append(len(trace.events))
    trace.events.append(("last", "", (Made(len(scales), 0),), ()))
    return trace


@pytest.mark.parametrize(
    ("scales", "first", "period"),
    [
        ([1.0] * LAYERS, 1, 1),
        ([2.0, *[1.0] * LAYERS], 1, 1),
        ([1.0, 2.0] * LAYERS, 1, 2),
        ([1.0, 1.0, 2.0] * LAYERS, 1, 3),
    ],
)
def test_the_shortest_period_is_found(scales: list[float], first: int, period: int) -> None:
    found = find_repeat(made_trace(scales), "layers", len(scales))
    assert found is not None
    assert (found.first, found.period) == (first, period)
    assert found.kept < first + (PERIODS + 1) * period
    assert (found.layers - found.kept) % period == 0


@pytest.mark.parametrize(
    "trace",
    [
        made_trace([1.0] * 5),
        made_trace([*[1.0] * LAYERS, 2.0]),
        made_trace([float(k) for k in range(LAYERS)]),
        made_trace([1.0] * LAYERS, reads_back=2),
    ],
    ids=["few", "another last", "all unlike", "reads two back"],
)
def test_what_does_not_repeat(trace: Trace) -> None:
    assert find_repeat(trace, "layers", len(trace.begins["layers"])) is None


def test_a_short_model_that_does_otherwise_is_told() -> None:
    whole = made_trace([1.0] * LAYERS)
    repeat = find_repeat(whole, "layers", LAYERS)
    assert repeat is not None
    assert does_the_same(whole, made_trace([1.0] * repeat.kept), repeat)
    assert not does_the_same(whole, made_trace([1.0 / repeat.kept] * repeat.kept), repeat)
    other_end = made_trace([1.0] * repeat.kept)
    other_end.events[-1] = ("mean", "", (Made(repeat.kept, 0),), ())
    assert not does_the_same(whole, other_end, repeat)


def raw(layers: int, **other: Any) -> RawGraph:
    """A captured stack of layers that multiply by a weight; `other` replaces layer 2's op."""
    shape = (4, 4)
    tensors = {"x": TensorMeta(name="x", shape=shape, dtype="float32", kind="input", fqn="x")}
    ops, before = [], "x"
    for k in range(layers):
        weight, out = f"p_layers_{k}_weight", f"mul_{k}"
        fqn = f"layers.{k}.weight"
        tensors[weight] = TensorMeta(
            name=weight, shape=shape, dtype="float32", kind="param", fqn=fqn, requires_grad=True
        )
        tensors[out] = TensorMeta(
            name=out, shape=shape, dtype="float32", kind="activation", requires_grad=True
        )
        args = (Ref(before), Ref(weight))
        op = Op(name=out, target="aten.mul.Tensor", args=args, outputs=(out,))
        ops.append(RawOp(op=replace(op, **other) if k == 2 else op, module=f"layers.{k}"))
        before = out
    tensors["sum"] = TensorMeta(name="sum", shape=(), dtype="float32", kind="activation")
    total = Op(name="sum", target="aten.sum.default", args=(Ref(before),), outputs=("sum",))
    return RawGraph(
        tensors=tensors, inputs=("x",), ops=(*ops, RawOp(op=total, module="")), loss="sum"
    )


REPEAT = Repeat(path="layers", first=1, period=1, layers=LAYERS, kept=4)
ORDER = [f"layers.{k}.weight" for k in range(LAYERS)]


def test_copies_read_each_other_in_a_row() -> None:
    whole = expand(raw(4), REPEAT, ORDER)
    assert [t.fqn for t in whole.tensors.values() if t.kind == "param"] == ORDER
    assert [item.module for item in whole.ops] == [f"layers.{k}" for k in range(LAYERS)] + [""]
    before = "x"
    for k, item in enumerate(whole.ops[:-1]):
        assert item.op.inputs == (before, f"p_layers_{k}_weight")
        (before,) = item.op.outputs
    assert whole.ops[-1].op.inputs == (before,)


@pytest.mark.parametrize(
    "other", [{"target": "aten.add.Tensor"}, {"args": (Ref("mul_0"), Ref("p_layers_2_weight"))}]
)
def test_periods_that_differ_are_not_copied(other: dict[str, Any]) -> None:
    with pytest.raises(NotRepeated):
        expand(raw(4, **other), REPEAT, ORDER)


def test_lists_of_layers_and_ties() -> None:
    model = nn.ModuleDict({"few": nn.ModuleList(nn.Linear(2, 2) for _ in range(3))})
    model["many"] = nn.ModuleList(nn.Linear(2, 2) for _ in range(8))
    model["mixed"] = nn.ModuleList([nn.Linear(2, 2), nn.ReLU()] * 4)
    assert [path for path, _ in layer_lists(model, least=7)] == ["many"]
    assert not is_tied(model, "many")
    model["many"][3].weight = model["few"][0].weight
    assert is_tied(model, "many")


def test_a_trace_tells_layers_apart_and_holds_nothing() -> None:
    model = nn.Sequential(nn.Sequential(*(nn.Linear(2, 2) for _ in range(8))), nn.ReLU())
    model.to("meta")
    inputs = (torch.empty(3, 2, device="meta"),)
    trace = trace_forward(model, model, inputs, OnMeta(), ("0",))
    assert trace.called["0"] == list(range(8))
    assert all(a < b for a, b in zip(trace.begins["0"], trace.ends["0"], strict=True))
    held = [each for event in trace.events for each in event[2] if isinstance(each, Held)]
    assert Held("0.3.weight") in held


def twice(scales: list[float], then: list[float]) -> Trace:
    """Two forwards of a model, which scale otherwise."""
    return replace(made_trace(then), earlier=made_trace(scales))


def test_layers_that_differ_in_a_second_forward_do_not_repeat() -> None:
    equal, other = [1.0] * LAYERS, [1.0] * LAYERS
    other[LAYERS // 2] = 2.0
    repeat = find_repeat(twice(equal, equal), "layers", LAYERS)
    assert repeat is not None
    assert find_repeat(twice(equal, other), "layers", LAYERS) is None
    kept = [1.0] * repeat.kept
    assert does_the_same(twice(equal, equal), twice(kept, kept), repeat)
    assert not does_the_same(twice(equal, equal), made_trace(kept), repeat)
    assert not does_the_same(twice(equal, equal), twice(kept, [2.0] * repeat.kept), repeat)


def test_what_a_layer_kept_is_told_relative_to_it() -> None:
    def kept_by(reader: int) -> Trace:
        """Layers that read in the second forward what they made in the first; of one, another."""
        trace = twice([1.0] * LAYERS, [1.0] * LAYERS)
        for k, at in enumerate(trace.begins["layers"]):
            name, structure, _, shapes = trace.events[at]
            made = Earlier(Made(1 + (0 if k == reader else k), 0))
            trace.events[at] = (name, structure, (made,), shapes)
        return trace

    assert find_repeat(kept_by(0), "layers", LAYERS) is not None
    assert find_repeat(kept_by(7), "layers", LAYERS) is None


def test_gradients_that_reach_more_of_each_layer_before_are_not_steady() -> None:
    nodes = [10, 20, 30, 40]  # each kept layer makes ten
    repeat = replace(REPEAT, first=1)
    assert is_steady(repeat, [12, 22, 23, 32, 33, 42, 43, 99], nodes)
    assert is_steady(repeat, [22, 23, 32, 33, 42], nodes)  # the last may differ
    assert not is_steady(repeat, [22, 23, 32, 42], nodes)


def test_a_model_without_lists_is_exported_whole() -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("nothing is to be traced or exported")

    model = nn.Linear(2, 2)
    paths = long_lists(model)
    assert paths == ()
    found = capture_in_part(
        model, Trace(), paths, copy=never, trace=never, export=never, reached=()
    )
    assert found is None


def test_a_module_has_all_its_layers_again() -> None:
    model = nn.Sequential(nn.Sequential(*(nn.Linear(2, 2) for _ in range(8))), nn.ReLU())
    names = [name for name, _ in model.named_parameters()]
    with truncated(model, "0", 3) as short:
        assert len(short[0]) == 3
    assert [name for name, _ in model.named_parameters()] == names
