"""An optimizer that DTensor can't run on shards is refused in a line."""

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
