"""A module that was left without values says where they are, whatever touches them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner.errors import PlanError
from planner.runtime.state.users_module.away import plain, take_away


def test_values_that_are_away_are_refused_by_name():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    held = module[0].weight
    take_away(module)
    assert module[0].weight.shape == (2, 2)
    assert "0.weight" in repr(held)
    for read in (
        lambda: held + 1,
        lambda: module[0].bias.norm(),
        lambda: module[1].running_var * 2,
    ):
        with pytest.raises(PlanError, match=r"needs the values of \d\.\w+, which the engine has"):
            read()
    with pytest.raises(PlanError, match=r"load_state_dict after planner\.apply"):
        module.load_state_dict(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict())
    module.zero_grad()  # as loops for one device do
    with pytest.raises(PlanError, match=r"the gradient of 0\.weight is in the engine"):
        assert held.grad


def test_it_can_be_captured_anew():
    module = nn.Linear(2, 2)
    take_away(module)
    away = module.weight
    with plain(module):
        assert type(module.weight) is nn.Parameter
        assert module(torch.ones(1, 2, device="meta")).is_meta
    assert module.weight is away
