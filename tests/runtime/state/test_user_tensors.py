"""D3: a script's own tensor, cut over the ranks of a plan and whole again."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

import planner
from planner.errors import LayoutError
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.state.users_module.user_tensors import shard_tensor
from tests.runtime.alone import mesh_of
from tests.runtime.scenarios import build, capture
from tests.spawn import run_ranks

TABLE = torch.arange(30, dtype=torch.float32).view(5, 6)


def cut_and_gather(plan: Plan) -> dict[str, tuple[torch.Tensor, bool]]:
    _, module = build("gpt")
    engine = planner.apply(plan, module)
    found = {}
    for name, dims in (("both", {"data": 0, "tp": 1}), ("tp", {"tp": -1}), ("none", {})):
        cut = engine.shard_tensor(TABLE, **dims)
        assert isinstance(cut, DTensor)
        found[name] = cut.to_local(), torch.equal(cut.full_tensor(), TABLE)
        other = engine.shard_tensor(TABLE.T.contiguous())
        assert torch.equal((cut @ other).full_tensor(), TABLE @ TABLE.T)
    for wrong in ({"pp": 0}, {"tp": 2}):
        with pytest.raises(LayoutError, match=r"use data or|use -2 to 1"):
            engine.shard_tensor(TABLE, **wrong)
    engine.close()
    return found


def test_a_tensor_is_cut_over_replicas_and_tp_and_whole_again():
    plan = default_plan(capture("gpt"), dp=2, tp=2, num_microbatches=1)
    ranks = run_ranks(cut_and_gather, 4, plan)
    assert all(is_whole for rank in ranks for _, is_whole in rank.values())
    # dp outermost: rank 1 is the second tp rank of the first replica.
    assert [tuple(rank["both"][0].shape) for rank in ranks] == [(3, 3), (3, 3), (2, 3), (2, 3)]
    assert torch.equal(ranks[3]["both"][0], TABLE[3:, 3:])
    assert torch.equal(ranks[1]["tp"][0], TABLE[:, 3:])
    assert torch.equal(ranks[2]["none"][0], TABLE)


def test_a_rank_alone_keeps_all():
    _, module = build("gpt")
    engine = planner.apply(default_plan(capture("gpt")), module)
    cut = engine.shard_tensor(TABLE, tp=0)
    assert torch.equal(cut.full_tensor(), TABLE)
    engine.close()


def test_an_axis_or_a_dim_that_is_not_there_is_refused_before_anything_is_sent():
    mesh = mesh_of(default_plan(capture("mlp")))
    with pytest.raises(LayoutError, match=r"axis 'cp' cuts no tensor; use data or tp"):
        shard_tensor(TABLE, mesh, {"data": 0, "cp": 1})
    with pytest.raises(LayoutError, match=r"shape \(5, 6\) has no dim -3, .* use -2 to 1"):
        shard_tensor(TABLE, mesh, {"tp": -3})
    number = torch.tensor(2.0)
    with pytest.raises(LayoutError, match=r"shape \(\) has no dim 0"):
        shard_tensor(number, mesh, {"tp": 0})
    assert torch.equal(shard_tensor(number, mesh, {}).full_tensor(), number)
    assert torch.equal(shard_tensor(TABLE, mesh, {"data": -1}).to_local(), TABLE)
