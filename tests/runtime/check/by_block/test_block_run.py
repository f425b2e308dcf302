"""N6: a block run op by op makes what autograd makes; large random tensors take little memory."""

from __future__ import annotations

import pytest
import torch

from planner.language.layout.axes import lowered_axes
from planner.runtime.proofs.by_block.simulate.block_run import BlockRun
from planner.runtime.proofs.by_block.simulate.pieces_of import largest_difference, largest_entry
from planner.runtime.proofs.by_block.simulate.windows import drawn, moved_by_a_unit
from planner.runtime.stage.program_fx import to_graph_module
from tests.sharding.models import captured
from tests.sharding.programs import random_cotangents, random_values, run_dense


@pytest.mark.parametrize("name", ["gpt", "unet", "hf-llama"])
def test_a_run_op_by_op_is_autograd_s(name):
    graph = captured(name)
    for program in (each.bind(2) for each in graph.classes):
        values = random_values(program, 0)
        cotangents = random_cotangents(program, 1)
        outputs, grads = run_dense(program, values, cotangents)
        module = to_graph_module(
            program, dict.fromkeys(a.name for a in lowered_axes()), torch.device("cpu")
        )
        run = BlockRun(module, program)
        for found, expected in zip(run.forward(values), outputs, strict=True):
            assert torch.equal(found, expected.detach())
        inputs, params = run.backward(cotangents)
        for name, grad in grads.items():
            if grad is None:
                continue
            found = inputs[name] if name in inputs else params[name].make()
            assert largest_difference(found, grad) <= 1e-12 * largest_entry(grad)


def test_a_large_tensor_takes_little_memory():
    matrix = drawn("weight", (100_000, 4096), torch.float32)
    assert matrix.untyped_storage().nbytes() < 60e6
    assert torch.equal(matrix, drawn("weight", (100_000, 4096), torch.float32))
    assert not torch.equal(matrix[:10], drawn("other", (100_000, 4096), torch.float32)[:10])
    assert 0.019 < matrix[::1000].std().item() < 0.021
    # No row, and no piece of one, is another's.
    rows = matrix[torch.arange(0, 100_000, 12_500)][:, ::512]
    assert len(torch.unique(rows)) == rows.numel()


def test_a_tensor_moved_by_a_unit_is_near():
    tensor = drawn("weight", (64, 64), torch.float64)
    moved = moved_by_a_unit(tensor, 1)
    apart = (moved - tensor).abs() / tensor.abs()
    assert 0 < apart.max() < 4e-16
    assert torch.equal(moved_by_a_unit(torch.arange(4), 1), torch.arange(4))


def test_differences_see_what_is_not_finite():
    tensor = torch.tensor([1.0, float("inf"), float("nan")])
    assert largest_difference(tensor, tensor.clone()) == 0
    assert largest_difference(tensor, torch.tensor([1.5, float("inf"), float("nan")])) == 0.5
    assert largest_difference(tensor, torch.tensor([1.0, float("inf"), 0.0])) == float("inf")
    assert largest_difference(tensor, torch.tensor([1.0, 2.0, float("nan")])) == float("inf")
    assert largest_difference(tensor, tensor.double()) == float("inf")
    assert largest_entry(tensor) == 1
