"""A model in evaluation mode, in the names of the graph that a plan was made for."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from planner.errors import PlanError
from planner.language.graph import ModelGraph, Ref
from planner.language.graph.evaluation import evaluation_graph
from tests.captures import capture_module

WIDTH = 4


class TwoStreams(nn.Module):
    """Uses its second input first in evaluation mode, where the first is not scaled."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, y):
        if self.training:
            x = x * 0.5
        y = self.right(y)
        return self.left(x), y


class Network(nn.Module):
    """Two streams through two layers; `scale` is made of the batch alone, for both of them."""

    def __init__(self, scale_in_evaluation: float = 3.0):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(TwoStreams() for _ in range(2))
        self.scale_in_evaluation = scale_in_evaluation

    def forward(self, x, target):
        scale = torch.cos(x) * (3.0 if self.training else self.scale_in_evaluation)
        left, right = self.first(x), self.second(x)
        for layer in self.layers:
            left, right = layer(left + scale, right)
        return F.mse_loss(left - right, target)


@cache
def captured(is_training: bool, scale: float = 3.0) -> ModelGraph:
    def batch(size):
        return {"x": torch.zeros(size, WIDTH), "target": torch.zeros(size, WIDTH)}

    module = Network(scale).train(is_training)
    return capture_module(module, batch(2), batch(3), name="streams")


def read_by(graph: ModelGraph, number: int, weight: str) -> str:
    """The tensor of the model that the product with a block's weight reads."""
    block = graph.blocks[number]
    program = graph.classes[block.class_index]
    names = dict(zip(program.params, block.params, strict=True))
    for op in program.ops:
        given = [arg.name for arg in op.args if isinstance(arg, Ref)]
        if any(graph.tensor[names[n]].fqn.endswith(weight) for n in given if n in names):
            return dict(zip(program.inputs, block.inputs, strict=True)).get(given[0], given[0])
    raise AssertionError(weight)


def test_inputs_are_told_apart_where_their_order_of_use_is_another():
    """`right` reads what the layer before made for it, whichever input is used first."""
    graph = captured(True)
    found = evaluation_graph(graph, captured(False))
    assert found.blocks == graph.blocks
    layers = [n for n, block in enumerate(graph.blocks) if block.name.startswith("layers")]
    assert len(layers) == 2
    for number in layers:
        assert captured(False).blocks[number].inputs[0] != graph.blocks[number].inputs[0]
        weight = "right.weight"
        assert read_by(found, number, weight) == read_by(graph, number, weight)
    targets = {op.target for program in found.classes for op in program.ops}
    assert "aten.mul.Tensor" not in targets  # what evaluation leaves out


def test_a_graph_stands_for_itself():
    graph = captured(True)
    assert evaluation_graph(graph, graph) == graph


def test_what_the_batch_alone_makes_must_be_the_same():
    """It is made once for all blocks, by the ops of training."""
    graph = captured(True)
    assert graph.preamble.ops
    with pytest.raises(PlanError, match=r"of the batch alone has other arguments in aten\.mul"):
        evaluation_graph(graph, captured(False, 2.0))


def test_other_blocks_and_tensors_are_refused_by_name():
    graph = captured(True)
    first, *others = graph.blocks
    with pytest.raises(PlanError, match="its blocks are others; evaluate a copy"):
        evaluation_graph(graph, replace(graph, blocks=tuple(others)))
    elsewhere = replace(first, inputs=tuple("other" for _ in first.inputs))
    with pytest.raises(PlanError, match=f"block {first.name} takes other"):
        evaluation_graph(graph, replace(graph, blocks=(elsewhere, *others)))
    more = replace(graph.classes[first.class_index], ops=2 * graph.classes[first.class_index].ops)
    classes = tuple(more if n == first.class_index else c for n, c in enumerate(graph.classes))
    with pytest.raises(PlanError, match=f"block {first.name} runs aten"):
        evaluation_graph(graph, replace(graph, classes=classes))
