"""Whole tensors by the user's names on rank 0."""

from __future__ import annotations

import torch

from planner.language.layout.placements import WHOLE
from planner.language.lowering.defaults import default_plan
from planner.runtime.state.gather import gather
from tests.runtime.alone import mesh_of
from tests.runtime.scenarios import capture


def test_a_tied_parameter_is_returned_under_each_of_its_names():
    graph = capture("tied-gpt")
    plan = default_plan(graph)
    held = {
        meta.name: torch.full(meta.shape_at(1), float(i)) for i, meta in enumerate(graph.params)
    }
    found = gather(graph, plan, mesh_of(plan), graph.params, lambda meta: (held[meta.name], WHOLE))
    assert found["head.weight"] is found["token.weight"]
    assert set(found) == {name for meta in graph.params for name in (meta.fqn, *meta.aliases)}
    for meta in graph.params:
        assert torch.equal(found[meta.fqn], held[meta.name])
        assert found[meta.fqn] is not held[meta.name]  # a copy: the next step changes the piece
