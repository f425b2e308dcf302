"""What of a state dict lies in no stage: by the user's names, whole, in the user's dtypes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import planner
from planner.language.lowering.defaults import default_plan
from planner.runtime.state.users_module.outside import OutsideTensors
from tests.captures import capture_module


class Net(nn.Module):
    """Reads a buffer before its blocks, as a mask; has a weight that it never reads."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.spare = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.register_buffer("shift", torch.arange(4.0))
        self.register_buffer("hidden", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x + self.shift * self.hidden).square().mean()


def outside_of(model: nn.Module, **options: bool) -> OutsideTensors:
    graph = capture_module(Net(), {"x": torch.randn(2, 4)}, {"x": torch.randn(3, 4)})
    held = {tensor.fqn for tensor in graph.tensors if tensor.kind in ("param", "buffer")}
    held -= {"spare"}
    options = {"may_be_empty": False, "makes_buffers": False} | options
    read = {graph.tensor[name].fqn for name in graph.preamble.params}
    return OutsideTensors.of(model, held=held, read=read, **options)


def test_what_no_block_uses_is_kept_whole_under_its_name():
    found = outside_of(Net())
    assert found.unused.keys() == {"spare"}
    assert found.unused["spare"].shape == (3,)
    assert found.dtypes == {
        "up.weight": torch.float32,
        "up.bias": torch.float32,
        "spare": torch.float64,
        "shift": torch.float32,
    }
    assert found.empty == frozenset()
    assert found.tensors.keys() == found.unused.keys() | found.also_read.keys()


def test_what_came_without_values_is_named():
    model = Net().to("meta")
    assert outside_of(model).empty == frozenset()
    named = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    assert outside_of(model, may_be_empty=True).empty == named
    made = outside_of(model, may_be_empty=True, makes_buffers=True)
    assert made.empty == named - {"shift", "hidden"}
    assert all(not tensor.is_meta for tensor in made.tensors.values())


@pytest.fixture
def group():
    """That which planner.apply makes."""
    yield
    dist.destroy_process_group()


class Tied(Net):
    """Has a weight that it never reads under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.out.weight = self.table.weight


def test_a_tied_weight_that_no_block_uses_has_its_values_under_all_its_names(group):
    model = Tied()
    assert torch.equal(model.out.weight, model.table.weight)
    values = model.table.weight.detach().clone()
    examples = ({"x": torch.randn(2, 4)}, {"x": torch.randn(3, 4)})
    graph = capture_module(model, *examples)
    plan = default_plan(graph, num_microbatches=1, microbatch_size=2)
    engine = planner.apply(plan, model, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    engine.step(examples[0])
    state = engine.full_state_dict()
    assert torch.equal(state["table.weight"], values)
    assert torch.equal(state["out.weight"], values)
