"""Lowered programs equal the dense ones on every rank, values and gradients."""

from __future__ import annotations

import random

import pytest

from planner.sharding import propagate_graph
from tests.sharding.models import NAMES, captured
from tests.sharding.programs import check_lowered
from tests.sharding.random_layouts import random_layout


@pytest.mark.parametrize("axis_size", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_propagated_layouts_equal_dense(name, axis_size):
    """P2, D5, M22: every block class of every model, column and row splits included."""
    graph = captured(name)
    for layout in propagate_graph(graph, microbatch_size=2, axis_size=axis_size):
        check_lowered(graph.classes[layout.class_index].bind(2), layout, axis_size)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NAMES)
def test_random_layouts_equal_dense(name, seed):
    """M10, M12: any strategy for any op, joined by any redistribution, computes the same."""
    graph = captured(name)
    for index, program in enumerate(graph.classes):
        rng = random.Random(f"{name}{seed}{index}")
        bound = program.bind(2)
        check_lowered(bound, random_layout(bound, rng, 2), 2, seed)
