"""N1: ops of a library that a forward imports: ranks, which run no forward, import it too."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.capture import capture_module
from planner.errors import ModelError
from planner.language.graph import from_json, to_json
from planner.language.lowering.defaults import default_plan
from planner.runtime.process.groups.mesh import build_mesh
from planner.runtime.stage.program_fx import aten_overload
from planner.runtime.step.engine import Engine
from tests.spawn import run_ranks


class Halving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        import tests.lazy_library  # noqa: F401

        for layer in self.layers:
            x = torch.ops.planner_tests.halved(layer(x))
        return F.mse_loss(x, wanted)


def batch(size: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(size)
    return torch.randn(size, 8), torch.randn(size, 8)


def loss_of_step(graph: dict) -> float:
    assert "tests.lazy_library" not in sys.modules
    torch.manual_seed(0)
    model = Halving()
    read = from_json(graph)
    plan = default_plan(read, pp=2, num_microbatches=2, microbatch_size=2)
    engine = Engine(plan, read, model, build_mesh(plan, torch.device("cpu")))
    return engine.step(batch(4)).item()


def test_ranks_import_what_the_graph_names():
    torch.manual_seed(0)
    model = Halving()
    graph = capture_module(model, batch(2), batch(3))
    assert graph.libraries == ("tests.lazy_library",)
    found = run_ranks(loss_of_step, 2, to_json(graph))
    assert found == pytest.approx([model(*batch(4)).item()] * 2)


def test_an_op_that_is_not_there_is_named():
    with pytest.raises(ModelError, match="the model calls planner_tests::doubled, which is not"):
        aten_overload("planner_tests.doubled.default")
