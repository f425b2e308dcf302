"""Programs of a rank: one for each class and size, made when the size is met."""

from __future__ import annotations

import pytest
import torch

from planner.errors import LayoutError
from planner.language.lowering.defaults import default_plan
from planner.runtime.stage import programs
from planner.runtime.stage.programs import Programs
from planner.runtime.stage.recompute import Keeper
from tests.captures import capture_tiny
from tests.runtime.alone import mesh_of


def made_for(graph, plan, monkeypatch) -> tuple[Programs, list[int]]:
    sizes: list[int] = []
    lower = programs.local_program

    def noted(*args, microbatch_size: int, **options):
        sizes.append(microbatch_size)
        if microbatch_size == 3:
            raise LayoutError("3 does not divide")
        return lower(*args, microbatch_size=microbatch_size, **options)

    monkeypatch.setattr(programs, "local_program", noted)
    return Programs([graph], plan, mesh_of(plan), keeper=Keeper(), weight_queue=None), sizes


def test_a_size_is_lowered_once_and_runs_the_class(monkeypatch):
    graph = capture_tiny("mlp")
    plan = default_plan(graph, microbatch_size=4)
    made, sizes = made_for(graph, plan, monkeypatch)
    first = made.of_class(0)
    assert made.of_class(0) is first
    assert sizes == [4]  # a full microbatch, so that a bad layout is told before training
    program = graph.classes[0]
    inputs = [torch.ones(program.tensor[n].shape_at(2)) for n in (*program.inputs, *program.params)]
    outputs = first(2)(*inputs)
    assert first(2) is first(2)
    assert sizes == [4, 2]
    assert [o.shape for o in outputs] == [program.tensor[n].shape_at(2) for n in program.outputs]


def test_a_size_that_cannot_run_as_planned_names_the_batch_that_can(monkeypatch):
    graph = capture_tiny("mlp")
    plan = default_plan(graph, microbatch_size=4, num_microbatches=2)
    made, _ = made_for(graph, plan, monkeypatch)
    with pytest.raises(LayoutError, match=r"3 instead of 4 samples .* give batches of 8"):
        made.of_class(0)(3)
