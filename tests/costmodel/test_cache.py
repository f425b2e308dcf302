"""What the cost cache tells apart, and what it does not."""

import pytest

from costmodel.cache import CostCache
from planner.language.layout.axes import Degrees
from planner.language.lowering.defaults import default_plan
from tests.captures import capture_tiny
from tests.search.machine import Machine


@pytest.fixture(scope="module")
def graph():
    return capture_tiny("gpt")


@pytest.fixture(scope="module")
def costs(graph) -> CostCache:
    return CostCache(graph, Machine())


def test_replicas_run_the_same_program(graph, costs):
    """The program of a rank depends on the axes that blocks are lowered on, not on dp."""
    for index in range(len(graph.classes)):
        assert costs.local(index, 2, Degrees(dp=4)) is costs.local(index, 2)
        assert costs.block(index, 2, Degrees(dp=4)) is costs.block(index, 2)
    assert costs.local(0, 2) is not costs.local(0, 4)


def test_a_layout_on_an_axis_of_one_rank_says_nothing(graph, costs):
    layouts = default_plan(graph, tp=2).layouts
    layer = next(layout for layout in layouts if any(p != "R" for p in layout.params))
    index = layer.class_index
    assert costs.block(index, 2, Degrees(), (layer,)) is costs.block(index, 2)
    cut = costs.block(index, 2, Degrees(tp=2), (layer,))
    assert cut.load.param_bytes < costs.block(index, 2).load.param_bytes


def test_axes_are_lowered_one_after_the_other(graph, costs):
    """cp keeps parameters as tp has cut them: a rank of both holds as much and computes less."""
    plan = default_plan(graph, cp=2, tp=2)
    index = graph.blocks[1].class_index
    layouts = tuple(layout for layout in plan.layouts if layout.class_index == index)
    both = costs.block(index, 2, plan.degrees, layouts)
    on_tp = costs.block(index, 2, Degrees(tp=2), layouts)
    assert both.load.param_bytes == on_tp.load.param_bytes
    assert both.times.forward_flop < on_tp.times.forward_flop


def test_a_block_takes_the_batch_itself_or_through_the_preamble(graph, costs):
    first = costs.batch_inputs(0)
    assert first
    assert first <= set(graph.batch_inputs)
    assert costs.batch_inputs(0) is first
