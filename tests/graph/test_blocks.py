"""A list of ops cut into a preamble and blocks: which op is whose, and which blocks are equal."""

from __future__ import annotations

import pytest

from planner.capture.blocks import RawGraph, RawOp, _unit_of, build_graph
from planner.errors import CaptureError
from planner.language.graph import written_buffers
from planner.language.graph.model_graph import Affine, ModelGraph, Op, Ref, TensorMeta


class Drawn:
    """A captured list of ops, written line by line. Mutable: it grows."""

    def __init__(self) -> None:
        self.tensors = {"x": meta("x", kind="input", fqn="x")}
        self.ops: list[RawOp] = []

    def op(self, name: str, module: str, *inputs: str, target: str = "aten.add.Tensor") -> None:
        for held in inputs:
            kind = {"p": "param", "u": "buffer"}.get(held[0])
            if kind and held not in self.tensors:
                self.tensors[held] = meta(held, kind=kind, fqn=f"{module}.weight")
        self.tensors[name] = meta(name)
        args = tuple(map(Ref, inputs))
        self.ops.append(
            RawOp(op=Op(name=name, target=target, args=args, outputs=(name,)), module=module)
        )

    def graph(self) -> ModelGraph:
        raw = RawGraph(
            tensors=self.tensors, inputs=("x",), ops=tuple(self.ops), loss=self.ops[-1].op.name
        )
        return build_graph(raw, name="m", batch_tree={})


def meta(name: str, *, kind="activation", fqn: str = "") -> TensorMeta:
    shape = (4,) if kind in ("param", "buffer") else (Affine(1), 4)
    return TensorMeta(
        name=name, shape=shape, dtype="float32", kind=kind, fqn=fqn, requires_grad=kind == "param"
    )


def layers(drawn: Drawn, last: str = "x", count: int = 3) -> str:
    for i in range(count):
        drawn.op(f"a{i}", f"layers.{i}.fc", last, f"p{i}")
        drawn.op(f"r{i}", "", f"a{i}", last)  # a residual add between layers
        last = f"r{i}"
    return last


def test_children_of_a_list_are_blocks_of_one_class():
    drawn = Drawn()
    drawn.op("e", "embed", "x", "pe")
    last = layers(drawn, "e")
    drawn.op("h", "head", last, "ph")
    graph = drawn.graph()
    assert [b.name for b in graph.blocks] == ["embed", "layers.0", "layers.1", "layers.2", "head"]
    assert [len(graph.classes[b.class_index].ops) for b in graph.blocks] == [1, 2, 2, 2, 1]
    # The first layer adds x, the others what came before: equal blocks all the same.
    assert len({b.class_index for b in graph.blocks[1:4]}) == 1


def test_what_only_the_last_layer_has_after_it_goes_to_what_follows():
    """A pooling after the last layer would make it a class of its own."""
    drawn = Drawn()
    drawn.op("e", "embed", "x", "pe")
    last = layers(drawn, "e")
    drawn.op("mean", "", last, target="aten.relu.default")
    drawn.op("h", "head", "mean", "ph")
    graph = drawn.graph()
    assert len({b.class_index for b in graph.blocks[1:4]}) == 1
    assert [op.target for op in graph.classes[graph.blocks[4].class_index].ops] == [
        "aten.relu.default",
        "aten.add.Tensor",
    ]


def test_values_without_parameters_that_several_blocks_read_are_the_preamble():
    drawn = Drawn()
    drawn.op("mask", "", "x", target="aten.relu.default")
    drawn.op("a", "layers.0", "mask", "p0")
    drawn.op("b", "layers.1", "a", "mask")
    drawn.op("c", "layers.1", "b", "p1")
    graph = drawn.graph()
    assert [op.target for op in graph.preamble.ops] == ["aten.relu.default"]
    assert graph.preamble.inputs == ("x",)
    assert all(graph.preamble.outputs[0] in block.inputs for block in graph.blocks)


def test_random_numbers_are_drawn_once_and_sent_on():
    drawn = Drawn()
    drawn.op("a", "layers.0", "x", "p0")
    drawn.op("noise", "layers.0", "x", target="aten.rand_like.default")
    drawn.op("b", "layers.1", "a", "p1")
    drawn.op("c", "layers.1", "b", "noise")
    graph = drawn.graph()
    assert graph.preamble.ops == ()
    assert len(graph.blocks[0].outputs) == 2


def test_ops_that_the_loss_does_not_need_are_left_out_but_for_writes():
    drawn = Drawn()
    drawn.op("dead", "layers.0", "x", "p9")
    drawn.op("a", "layers.0", "x", "p0")
    drawn.op("kept", "layers.0", "u0", "a", target="aten.copy_.default")
    drawn.op("b", "layers.1", "a", "p1")
    graph = drawn.graph()
    first = graph.classes[graph.blocks[0].class_index]
    assert [op.target for op in first.ops] == ["aten.add.Tensor", "aten.copy_.default"]
    assert [first.tensor[name].kind for name in written_buffers(first)] == ["buffer"]


def test_a_buffer_written_in_one_block_and_read_in_another_is_refused():
    drawn = Drawn()
    drawn.op("a", "layers.0", "x", "p0")
    drawn.op("kept", "layers.0", "u0", "a", target="aten.copy_.default")
    drawn.op("b", "layers.1", "a", "p1")
    drawn.op("c", "layers.1", "b", "u0")
    with pytest.raises(
        CaptureError, match=r"buffer layers\.0\.weight is written in block layers\.0"
    ):
        drawn.graph()


def test_a_model_without_parameters_has_nothing_to_train():
    drawn = Drawn()
    drawn.op("a", "", "x", target="aten.relu.default")
    with pytest.raises(CaptureError, match="uses no parameter"):
        drawn.graph()


@pytest.mark.parametrize(
    ("path", "unit"),
    [("a.layers.3.mlp.up", "a.layers.3"), ("stages.1.2.conv", "stages.1.2"), ("head", None)],
)
def test_units_are_children_of_lists(path, unit):
    assert _unit_of(path) == unit
