"""ZeRO of parameters with fewer rows than ranks: their shards are of another dim."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import planner
from costmodel import estimate
from planner.language.layout.sharing import shard_dim
from planner.language.lowering.defaults import default_plan
from planner.language.lowering.holdings import Holdings
from planner.language.plan import Plan
from planner.runtime.proofs.by_block.coverage import check_coverage
from planner.runtime.proofs.dryrun import dry_run
from tests.builders import gpt_batch
from tests.captures import capture_module
from tests.cpu_profile import CpuProfile
from tests.runtime.beside import OneProcess, gap_by_tensor, train_beside
from tests.runtime.scenarios import RTOL, build, capture, check, clip_many
from tests.spawn import run_ranks
from tests.stacked import EXPERTS, StackedGPT

NAME = "stacked-gpt"


@pytest.mark.parametrize(
    ("shape", "shards", "dim"),
    [
        ((8, 4096, 14336), 8, 0),
        ((8, 4096, 14336), 64, 1),
        ((12, 4096, 14336), 8, 1),  # a third of 12 rows would be padding
        ((50257, 768), 8, 0),  # 7 rows are: less than another copy of it costs
        ((3, 6, 10), 4, 0),  # nothing divides
        ((3, 6, 10), 5, 2),
        ((3,), 4, 0),
    ],
)
def test_the_dim_is_the_first_that_divides_unless_the_first_pads_little(shape, shards, dim):
    assert shard_dim(shape, shards) == dim


def test_it_trains_as_one_process():
    """Three experts on four ranks, and on two: ZeRO 1, 2, 3, HSDP, and beside tp."""
    four: dict[str, Any] = {"dp": 4, "microbatch_size": 4, "num_microbatches": 2}
    cases = [(NAME, {**four, "zero_stage": zero}) for zero in (1, 2, 3)]
    cases += [
        (NAME, {"rp": 2, "dp": 2, "zero_stage": 3, "num_microbatches": 2, "microbatch_size": 2}),
        (NAME, {"tp": 2, "dp": 2, "zero_stage": 3, "microbatch_size": 2}),
        (NAME, {"cp": 4, "zero_stage": 1, "recompute": "full"}),
        (NAME, {"pp": 2, "dp": 2, "zero_stage": 2, "num_microbatches": 2, "microbatch_size": 2}),
    ]
    check(4, cases)


def test_the_norm_counts_each_shard_once():
    graph = capture(NAME, torch.float64)
    plans = [(NAME, default_plan(graph, dp=4, zero_stage=zero)) for zero in (1, 3)]
    for norm, alone, gap in run_ranks(clip_many, 4, plans, 0.1)[0]:
        assert norm == pytest.approx(alone, rel=RTOL)
        assert gap < RTOL


@pytest.mark.parametrize("sizes", [{"dp": 4}, {"rp": 2, "dp": 4}, {"dp": 2, "tp": 4, "pp": 2}])
def test_a_checkpoint_has_each_element_once(sizes):
    graph = capture(NAME, torch.float64)
    plan = default_plan(graph, **sizes, zero_stage=1, num_microbatches=2)
    assert list(check_coverage(graph, plan, Holdings(graph, plan).of)) == []


def adafactor(module: torch.nn.Module) -> torch.optim.Optimizer:
    """It reads rows and columns of whole matrices; a small epsilon would turn rounding where a
    gradient is zero into full steps.
    """
    return torch.optim.Adafactor(module.parameters(), lr=1e-2, eps=(1e-5, 1e-3))


def train_on_wholes(plan: Plan) -> tuple[float, float, tuple[int, ...]]:
    """Return the gaps of the training and of its averages, and the shape of an expert's shard."""
    torch.set_default_dtype(torch.float64)
    tiny, module = build(NAME)
    alone = OneProcess(module, adafactor, loss=tiny.loss)
    engine = planner.apply(plan, module, optimizer=adafactor(module))
    average = engine.average_weights(decay=0.0)  # of the last step alone
    batches = [tiny.batch(plan.global_batch) for _ in range(2)]
    gaps = train_beside(engine, alone, batches, evaluates=True)
    of_average = gap_by_tensor(average.full_state_dict(), alone.parameters())
    shard = engine.state.trained.by_name()["layers.0.1.up"][0].to_local()
    return gaps.largest, of_average, tuple(shard.shape)


def test_optimizers_of_whole_parameters_evaluation_and_averages_read_the_shards():
    plan = default_plan(capture(NAME, torch.float64), dp=4, zero_stage=3)
    for largest, of_average, shard in run_ranks(train_on_wholes, 4, plan):
        assert largest < RTOL
        assert of_average < RTOL
        assert shard == (EXPERTS, 8, 12)


@pytest.mark.parametrize(
    "layout",
    [
        *({"dp": 4, "zero_stage": zero} for zero in (1, 2, 3)),
        {"rp": 2, "dp": 2, "zero_stage": 3},
        {"dp": 2, "tp": 2, "zero_stage": 1},
    ],
    ids=str,
)
def test_its_memory_is_that_of_the_dry_run(layout):
    """Copies on the way to and from messages, of wide experts that outweigh the activations."""

    def wide() -> StackedGPT:
        return StackedGPT(width=512)

    graph = capture_module(wide(), gpt_batch(2), gpt_batch(3))
    plan = default_plan(graph, num_microbatches=2, **layout)
    (predicted,) = estimate(graph, CpuProfile(), plan).memory
    run = dry_run(plan, graph, wide, rank=plan.world_size - 1, on_gloo=True)
    assert float(predicted.tensor_bytes) == pytest.approx(run.peak_bytes, rel=1e-4)
