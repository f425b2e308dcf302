"""What no op uses, in the prediction as on the ranks: whole on the CPU, never trained."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from costmodel import CostCache, estimate
from planner.language.graph import from_json, to_json
from planner.language.lowering.defaults import default_plan
from planner.runtime.proofs.dryrun import dry_run
from search.request import SearchRequest
from search.result_cache import question_digest
from tests.captures import capture_module
from tests.cpu_profile import CpuProfile

WIDTH, UNUSED = 128, 256


class Model(nn.Module):
    """Two layers that train; a pooler, its twin tied to it, and tables that nothing reads."""

    def __init__(self, *, has_unused: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        if has_unused:
            self.pooler = nn.Linear(UNUSED, UNUSED)
            self.twin = nn.Linear(UNUSED, UNUSED, bias=False)
            self.twin.weight = self.pooler.weight
            self.register_buffer("stored", torch.zeros(100))
            self.register_buffer("passing", torch.zeros(1000), persistent=False)
        # Used by a block, read before all blocks, and in the state dict: ranks have both copies.
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale.exp()
        for layer in self.layers:
            x = layer(x) * scale
        return (x * self.scale).square().mean()


def _batch(size: int) -> tuple[torch.Tensor]:
    return (torch.zeros(size, WIDTH),)


def _captured(precision: str = "model", **options: bool):
    model = Model(**options)
    return capture_module(model, _batch(2), _batch(3), name="m", precision=precision)


SCALE_BYTES = 4 * WIDTH
KEPT_BYTES = 4 * (UNUSED * UNUSED + UNUSED + 100) + SCALE_BYTES
"""The pooler once, `stored` and `scale`: in the model's own dtype, whatever the plan's is."""


@pytest.mark.parametrize("precision", ["model", "bf16"])
@pytest.mark.parametrize(
    "layout", [{}, {"pp": 2}, {"dp": 2, "zero_stage": 3}], ids=["one", "pp", "zero3"]
)
def test_it_lies_on_the_host_as_in_the_dry_run_and_takes_no_more_of_a_device(layout, precision):
    found = []
    for has_unused in (True, False):
        graph = _captured(precision, has_unused=has_unused)
        costs = CostCache(graph, CpuProfile())
        plan = default_plan(graph, microbatch_size=4, num_microbatches=2, **layout)
        plan = plan.model_copy(update={"precision": precision})
        predicted = estimate(graph, costs.profile, plan, costs=costs).memory
        for pp_rank in range(plan.pp):
            rank, build = pp_rank * plan.dp, partial(Model, has_unused=has_unused)
            run = dry_run(plan, graph, build, rank=rank, on_gloo=True)
            assert predicted[pp_rank].host_bytes == run.host_peak_bytes == graph.outside_bytes
            found.append((has_unused, predicted[pp_rank].total, run.peak_bytes, run.start_bytes))
    half = len(found) // 2
    assert [each[1:] for each in found[:half]] == [each[1:] for each in found[half:]]
    assert graph.outside_bytes == SCALE_BYTES


def test_it_is_no_part_of_the_structure_that_plans_are_for():
    graph = _captured()
    assert graph.outside_bytes == KEPT_BYTES
    without = replace(graph, outside_bytes=0)
    assert graph.fingerprint == without.fingerprint
    assert from_json(to_json(graph)).outside_bytes == KEPT_BYTES  # as kept captures have it
    request = SearchRequest(num_devices=1, global_batch=4)
    profile = CpuProfile()
    assert question_digest(graph, profile, request) != question_digest(without, profile, request)
