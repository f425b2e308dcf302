"""N10: experts' products in 8 bits: each run as a product of its own, whatever its length."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from planner.runtime.stage.calls import narrow
from planner.runtime.stage.calls.rows import narrow_runs
from planner.runtime.stage.calls.rows.narrow_runs import HOPPER, emulated_experts
from tests.runtime.stage.test_compiled import assert_equal, both, run
from tests.runtime.stage.test_narrow import e4m3, values

EXPERTS, INNER, COLUMNS = 5, 32, 48
ENDS = ([10, 10, 33, 49, 65], [0, 0, 0, 0, 64], [16, 32, 48, 64, 80], [0] * 5)


def factors(rows: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    weights = torch.stack([values(INNER, COLUMNS, seed=seed) for seed in range(EXPERTS)])
    return values(rows, INNER, dtype=dtype), weights.to(dtype), values(rows, COLUMNS, dtype=dtype)


def rounded(x: Tensor, dim: int) -> Tensor:
    """In e4m3, each line along a dim by its own scale."""
    return e4m3(x, by_row=True) if dim else e4m3(x.t(), by_row=True).t()


@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("behind", [0, 7], ids=["", "rows behind the last run"])
def test_products_and_gradients_are_those_of_runs_with_rounded_factors(ends, behind):
    """In fp64, where nothing but the cast rounds; runs need not be whole tiles."""
    rows, weights, dy = factors(ends[-1] + behind)
    given = [leaf.clone().requires_grad_() for leaf in (rows, weights)]
    made = narrow_runs.narrow_runs(*given, torch.tensor(ends, dtype=torch.int32))
    made.backward(dy)
    for expert, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        of_run, weight, grad = rows[start:end], weights[expert], dy[start:end]
        if start == end:
            assert given[1].grad[expert].eq(0).all()
            continue
        for found, expected in (
            (made[start:end], rounded(of_run, 1) @ rounded(weight, 0)),
            (given[0].grad[start:end], rounded(grad, 1) @ rounded(weight, 1).t()),
            (given[1].grad[expert], rounded(of_run, 0).t() @ rounded(grad, 0)),
        ):
            assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()


def test_gradients_that_nothing_needs_are_not_made():
    rows, weights, dy = factors(40)
    ends = torch.tensor([8, 16, 24, 32, 40], dtype=torch.int32)
    alone = weights.clone().requires_grad_()
    narrow_runs.narrow_runs(rows, alone, ends).backward(dy)
    assert alone.grad is not None
    alone = rows.clone().requires_grad_()
    narrow_runs.narrow_runs(alone, weights, ends).backward(dy)
    assert alone.grad is not None


def test_kernels_take_the_factors_as_they_lie():
    """By the checks of `torch._scaled_grouped_mm`: strides, scales and where runs end."""
    with torch.device("meta"):
        rows, grad = (torch.empty(70, size, dtype=torch.bfloat16) for size in (INNER, COLUMNS))
        weights = torch.empty(EXPERTS, INNER, COLUMNS, dtype=torch.bfloat16)
        ends = torch.empty(EXPERTS, dtype=torch.int32)
        left, back = narrow.cast(rows, narrow.E4M3, by_row=True)
        right, other_back = narrow.cast(weights.transpose(1, 2), narrow.E4M3, by_row=True)
        scales = back[:, 0], other_back[:, :, 0]
        made = narrow_runs._by_kernel(left, right.transpose(1, 2), *scales, ends, torch.bfloat16)
        assert made.shape == (70, COLUMNS)
        places = narrow_runs._places(ends, 70)
        (left, back), (right, other_back) = (
            narrow_runs._cast_in_runs(factor, places) for factor in (rows, grad)
        )
        made = narrow_runs._by_kernel(
            left, right.t(), back, other_back, places.ends, torch.bfloat16
        )
        assert made.shape == weights.shape


def test_runs_begin_at_whole_tiles_and_none_is_left_out():
    for ends in ENDS:
        places = narrow_runs._places(torch.tensor(ends, dtype=torch.int32), ends[-1] + 3)
        assert all(end % 16 == 0 for end in places.ends.tolist())
        rows = places.row.tolist()
        assert len(set(rows)) == len(rows)
        assert max(rows) < places.size
        assert places.size % 16 == 0


def test_torchaos_casts_of_runs_give_the_same_numbers():
    """Its kernels need a GPU; the casts that they are tested against do not."""
    pytest.importorskip("torchao.prototype.moe_training")
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
    from torchao.prototype.moe_training.utils import torch_to_float8_per_group_colwise

    rows, weights, _ = factors(80, torch.bfloat16)
    ends = torch.tensor(ENDS[2], dtype=torch.int32)
    placed, back = narrow_runs._cast_in_runs(rows, narrow_runs._places(ends, 80))
    theirs, scales = torch_to_float8_per_group_colwise(rows, ends, round_scales_to_power_of_2=True)
    assert torch.equal(placed[:, :80].float(), theirs.t().float())
    assert torch.equal(back.flatten(), scales.reciprocal())
    for factor in (rows, weights.transpose(1, 2)):
        scale = tensor_to_scale(
            factor, narrow.E4M3, scaling_granularity=ScalingGranularity.AXISWISE,
            axiswise_dim=-1, round_scales_to_power_of_2=True,
        )  # fmt: skip
        found, back = narrow.cast(factor, narrow.E4M3, by_row=True)
        expected = to_fp8_saturated(factor.float() * scale, narrow.E4M3)
        assert torch.equal(found.float(), expected.float())
        assert torch.equal(back, scale.reciprocal())


def test_a_gpu_without_the_kernels_is_told(monkeypatch):
    from tests.runtime.test_fp8 import WideExpertsGPT, graph_of

    graph, device = graph_of(kind=WideExpertsGPT), torch.device("cuda:0")
    for major, is_told in ((HOPPER, False), (8, True), (10, True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=(major, 0): found)
        assert ("of experts in 8-bit floats are emulated" in emulated_experts(device, graph)) == (
            is_told
        )
    assert emulated_experts(torch.device("cpu"), graph) == ""
    assert emulated_experts(device, graph_of("fp8-tensorwise", WideExpertsGPT)) == ""


def test_a_compiled_block_of_experts_computes_and_saves_what_its_ops_do():
    from tests.runtime.test_fp8 import WideExpertsGPT, graph_of

    graph = graph_of(kind=WideExpertsGPT)
    program = graph.classes[graph.blocks[1].class_index].bind(2)
    assert sum(op.target.startswith("planner.narrow_runs") for op in program.ops) == 2
    eager, block, queue = both(program)
    expected, eager_bytes = run(eager, program, queue)
    found, saved_bytes = run(block, program, queue)
    assert_equal(found, expected)
    assert saved_bytes == pytest.approx(eager_bytes, rel=1e-3)
