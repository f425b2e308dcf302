"""Loops over experts are told in sorted runs of rows, and compute what they did."""

from __future__ import annotations

import pytest
import torch

from planner.language.graph.module_keys import OPAQUE_MODULE
from planner.language.ops.families.entries.routing import SORT_ROWS, STACK_OF_RUNS, UNSORT_ROWS
from tests.capture.loops.looping import (
    LAYERS,
    LOOPS,
    PASSING_OVER,
    Gated,
    Looping,
    apart,
    batch_of,
    captured,
    plain,
)

WITHIN = 1e-12


def build(loop, make=Gated, **how):
    torch.manual_seed(0)
    return Looping(loop, make, **how).double()


def targets(graph):
    return [
        op.target for block in graph.blocks for op in graph.classes[block.class_index].ops
    ]


def check_told(module, make_batch=batch_of):
    graph = captured(module, make_batch)
    found = targets(graph)
    assert found.count(SORT_ROWS) == found.count(UNSORT_ROWS) == LAYERS
    assert OPAQUE_MODULE not in found
    for size in (1, 5):
        assert apart(graph, module, make_batch(size)) < WITHIN
    return found


@pytest.mark.parametrize("make", [Gated, plain])
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_told(name, make):
    found = check_told(build(LOOPS[name], make))
    assert (STACK_OF_RUNS in found) == (name in PASSING_OVER)
