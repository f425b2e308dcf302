"""Which modules become ops, and what their ops hold."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner.capture import capture_module
from planner.capture.opaque.modules import OpaqueModules
from planner.errors import CaptureError
from planner.language.across import across_samples
from planner.language.graph import Affine, from_json, to_json
from planner.language.graph.module_keys import OPAQUE_MODULE
from tests.captures import capture_module as captured
from tests.opaque_models import PARTS, Chain, IfMean, PickedRows, batch


def opaque_ops(graph):
    return [op for program in graph.classes for op in program.ops if op.target == OPAQUE_MODULE]


@pytest.mark.parametrize("what", PARTS)
def test_the_smallest_module_is_an_op_in_every_block(what):
    graph = captured(Chain(PARTS[what]), batch(2), batch(3))
    (op,) = opaque_ops(graph)  # of the one class that all blocks have
    assert op.args[0].partition("@")[0] == PARTS[what].__name__
    assert sum(block.class_index == 1 for block in graph.blocks) == 4
    # A module that draws takes a seed, too, which has no gradient.
    assert op.args[2] == ((True, False) if what == "draws" else (True,))
    assert from_json(to_json(graph)) == graph


def test_an_exception_that_is_being_handled_hides_no_module():
    """A user captures in an except block: the capture's errors have that one as their context."""
    try:
        raise KeyError("no plan yet")
    except KeyError:
        graph = capture_module(Chain(PickedRows), batch(2), batch(3))
    assert len(opaque_ops(graph)) == 1


def test_samples_that_decide_together_are_found():
    """A choice by the batch's mean: a plan that cuts the batch says so."""
    graph = captured(Chain(IfMean), batch(2), batch(3))
    (op,) = opaque_ops(graph)
    assert op.args[2] == ()
    assert {finding.op for finding in across_samples(graph)} == {"IfMean"}
    assert not across_samples(captured(Chain(PickedRows), batch(2), batch(3)))


def test_costs_grow_with_the_samples():
    (op,) = opaque_ops(captured(Chain(PickedRows), batch(2), batch(3)))
    for counts in op.args[3]:
        assert all(isinstance(c, int) or (isinstance(c, Affine) and c.fixed == 0) for c in counts)


def test_a_capture_leaves_classes_and_random_numbers_as_they_were():
    before, model, examples = PickedRows.forward, Chain(PickedRows, num=1), (batch(2), batch(3))
    state = torch.get_rng_state()
    capture_module(model, *examples)
    assert PickedRows.forward is before
    assert torch.equal(torch.get_rng_state(), state)


def test_other_errors_add_nothing():
    class Fails(nn.Module):
        def forward(self, x):
            raise RuntimeError("of another kind")

    model = nn.Sequential(Fails())
    with pytest.raises(RuntimeError) as raised:
        model(torch.ones(2))
    assert not OpaqueModules().add_from(raised.value, model)
    with pytest.raises(CaptureError, match="of another kind"):
        capture_module(model, torch.ones(2, 1), torch.ones(3, 1))
