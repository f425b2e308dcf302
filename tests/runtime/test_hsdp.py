"""N12, HSDP: shards inside a group of replicas, copied across groups (fp64, rtol 1e-10)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from planner.language.lowering.defaults import default_plan
from planner.runtime.process.groups.mesh import build_mesh
from tests.runtime.scenarios import RTOL, capture, check, clip_many
from tests.spawn import run_ranks


def test_two_by_two_equals_one_process():
    """Several microbatches: copies sum their shards in the last backward alone."""
    both = {"rp": 2, "dp": 2, "microbatch_size": 2, "num_microbatches": 2}
    cases = [("small-gpt", {**both, "zero_stage": zero}) for zero in (1, 2, 3)]
    cases += [
        ("unet", {**both, "zero_stage": 3, "recompute": "full", "microbatch_size": 1}),
        ("small-gpt", {"rp": 2, "cp": 2, "zero_stage": 3}),
        ("small-gpt", {**both, "zero_stage": 0}),
        # Nothing to share: rp alone is data parallelism.
        ("small-gpt", {"rp": 2, "tp": 2, "zero_stage": 1}),
        ("small-tied-gpt", {"rp": 2, "pp": 2, "zero_stage": 3}),
    ]
    check(4, cases)


@pytest.mark.slow
def test_it_goes_with_pieces_and_pipelines():
    both = {"rp": 2, "dp": 2, "num_microbatches": 2}
    check(
        8,
        [
            ("small-gpt", {**both, "tp": 2, "zero_stage": 3}),
            ("small-tied-gpt", {**both, "pp": 2, "zero_stage": 1}),
            ("small-tied-gpt", {**both, "pp": 2, "zero_stage": 3, "schedule": "fthenb"}),
        ],
    )


def test_the_norm_counts_each_shard_once():
    graph = capture("small-gpt", torch.float64)
    plans = [("small-gpt", default_plan(graph, rp=2, dp=2, zero_stage=zero)) for zero in (0, 1, 3)]
    for norm, alone, gap in run_ranks(clip_many, 4, plans, 0.1)[0]:
        assert norm == pytest.approx(alone, rel=RTOL)
        assert gap < RTOL


def sizes(plan: Any) -> dict[str, tuple[int, ...]]:
    """The global ranks of this rank's groups."""
    mesh = build_mesh(plan, torch.device("cpu"))
    found = {}
    for name in ("data", "shards", "copies"):
        group = mesh.group(name)
        found[name] = (
            () if group is None else tuple(torch.distributed.get_process_group_ranks(group))
        )
    mesh.close()
    return found


def test_shards_are_neighbours_and_copies_far_apart():
    plan = default_plan(capture("small-gpt", torch.float64), rp=2, dp=2, zero_stage=3)
    assert run_ranks(sizes, 4, plan)[1] == {
        "data": (0, 1, 2, 3),
        "shards": (0, 1),
        "copies": (1, 3),
    }
