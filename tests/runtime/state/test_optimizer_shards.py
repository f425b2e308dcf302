"""Optimizers on shards: refused in a line where DTensor can't run them, fused beside wholes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from planner.errors import ModelError
from planner.runtime.state.optimizers.shards import stepping_shards
from tests.spawn import run_ranks


def step_of(name: str) -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    weight.grad = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    optimizer = getattr(torch.optim, name)([weight])
    try:
        with stepping_shards(optimizer):
            optimizer.step()
    except ModelError as error:
        return str(error)
    return ""


def test_what_dtensor_does_not_do_is_said_in_a_line():
    (said, _) = run_ranks(step_of, 2, "Rprop")
    assert said.startswith("Rprop can't step on parameters of which ranks have shards (aten.")
    assert "\n" not in said
    assert "another optimizer" in said
    assert run_ranks(step_of, 2, "SGD") == ["", ""]


def test_other_errors_are_left_alone():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    with pytest.raises(RuntimeError, match="its own"), stepping_shards(optimizer):
        raise RuntimeError("its own")


def step_fused() -> tuple[bool, bool]:
    """Whether fused AdamW moves a shard and a whole of one group as one by one, and keeps it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values = []
    for fused in (True, False):
        shard = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
        number = nn.Parameter(torch.ones(()))
        shard.grad = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
        number.grad = torch.ones(())
        optimizer = torch.optim.AdamW([shard, number], fused=fused)
        before = optimizer.param_groups[0]
        for _ in range(2):
            with stepping_shards(optimizer):
                optimizer.step()
        kept = optimizer.param_groups == [before] and before["params"][1] is number
        values.append(torch.cat([shard.to_local().flatten(), number.detach().reshape(1)]))
    return torch.allclose(*values), kept


def test_fused_kernels_step_on_shards_and_on_wholes_apart():
    """A number, and experts that no other rank has, are whole beside shards of ZeRO."""
    assert run_ranks(step_fused, 2) == [(True, True)] * 2
