"""Parameters that nothing of a step reached have no gradient, on whichever rank they were."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from planner.language.layout.placements import WHOLE
from planner.runtime.state.gradients.reached import Reached, without_gradients
from tests.spawn import run_ranks


class Stage:
    """A stage that says which of its parameters may be passed over."""

    def __init__(self, optional, reached=()):
        self._optional, self._reached = optional, set(reached)

    def may_be_unreached(self):
        return iter(self._optional)

    def reached(self):
        return iter(self._reached)

    def forget_reached(self):
        self._reached.clear()


def mesh(group=None):
    return SimpleNamespace(group=lambda name: group, device=torch.device("cpu"))


def test_what_one_stage_s_backwards_missed():
    stage = Stage(["a", "b", "shared"], reached=["a"])
    # Another stage has a copy of one: its gradient is a sum over both.
    names = ["a", "b", "shared", "dense"]
    found = Reached({0: stage}, mesh(), [names, ["shared"]], dict.fromkeys(names, WHOLE))
    assert found.missing() == {"b"}
    found.begin()
    assert found.missing() == {"a", "b"}


def _missing(names):
    own = names[dist.get_rank()]
    stage = Stage(["a", "b", "c"], reached=own)
    placements = dict.fromkeys(["a", "b", "c"], WHOLE)
    return Reached({0: stage}, mesh(dist.group.WORLD), [[*placements]], placements).missing()


def test_what_another_replica_reached_is_reached():
    assert run_ranks(_missing, 2, [["a"], ["c"]]) == [frozenset({"b"})] * 2


def test_gradients_are_back_afterwards():
    param = nn.Parameter(torch.ones(2))
    param.grad = grad = torch.ones(2)
    with without_gradients([param]):
        assert param.grad is None
    assert param.grad is grad
