"""What a script has in place of an optimizer's state, a state dict and its launcher's variables."""

from __future__ import annotations

import copy
import io
import os

import pytest
import torch
from torch import Tensor

from planner.errors import PlanError
from planner.integrations.script.optimizer import StateAway, groups_of, refuse_changes
from planner.integrations.script.ranks import Variables
from planner.integrations.script.values.snapshots import _IN_PLACE, Snapshot

READS = [
    lambda t: t.sum().item(),
    lambda t: (t + 1).tolist(),
    lambda t: torch.cat([t, t]).tolist(),
    lambda t: t.norm(dim=0).tolist(),
    lambda t: t[1].tolist(),
    lambda t: t.clone().mul_(2).tolist(),
    lambda t: copy.deepcopy(t).add_(1).tolist(),
    lambda t: torch.equal(t, torch.arange(6.0).view(2, 3)),
    lambda t: torch.stack([t, t], dim=0).shape,
    lambda t: t.numpy().sum().item(),
    lambda t: torch.zeros(2, 3).copy_(t).tolist(),
]
WRITES = [
    lambda t: t.mul_(2),
    lambda t: t.copy_(torch.ones(2, 3)),
    lambda t: t.zero_(),
    lambda t: t.__setitem__(0, 1.0),
    lambda t: t[0].add_(1),
    lambda t: t.view(-1).__setitem__(0, 1.0),
    lambda t: t.t().fill_(0),
    lambda t: torch.add(torch.ones(2, 3), 1, out=t),
    lambda t: torch.max(torch.ones(2, 3, 2), 2, out=(t, torch.zeros(2, 3, dtype=torch.int64))),
    lambda t: t.detach().mul_(2),
]


def snapshot(updates: list[int]) -> Snapshot:
    return Snapshot.of(torch.arange(6.0).view(2, 3), lambda: len(updates))


@pytest.mark.parametrize("read", READS)
def test_a_snapshot_reads_as_its_values_until_the_next_update(read):
    updates: list[int] = []
    taken = snapshot(updates)
    assert read(taken) == read(torch.arange(6.0).view(2, 3))
    updates.append(1)
    with pytest.raises(PlanError, match="is read after a later update"):
        read(taken)


@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_a_snapshot_or_to_its_views_is_refused(write):
    taken = snapshot([])
    with pytest.raises(PlanError, match="is written to, which is a copy"):
        write(taken)
    assert taken.plain.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("name", sorted(name for name in _IN_PLACE if hasattr(Tensor, name)))
def test_every_operator_in_place_is_a_write(name):
    taken = Snapshot.of(torch.ones(2, 2, dtype=torch.int64), lambda: 0)
    with pytest.raises(PlanError, match="is written to"):
        getattr(taken, name)(torch.ones(2, 2, dtype=torch.int64))


def test_in_place_operators_are_those_of_tensors():
    own = {n for n in dir(Tensor) if n.startswith("__i") and callable(getattr(Tensor, n))}
    assert (
        own - {"__init__", "__init_subclass__", "__int__", "__index__", "__invert__"} - {"__iter__"}
        <= _IN_PLACE
    )


def test_a_snapshot_is_saved_as_a_tensor_and_its_shape_may_be_told_at_any_time():
    updates: list[int] = []
    taken, file = snapshot(updates), io.BytesIO()
    torch.save({"w": taken}, file)
    file.seek(0)
    found = torch.load(file)["w"]
    assert type(found) is Tensor
    assert torch.equal(found, torch.arange(6.0).view(2, 3))
    updates.append(1)
    assert (taken.shape, taken.dtype, taken.numel(), taken.dim()) == ((2, 3), torch.float32, 6, 2)


def test_an_optimizers_state_is_away_and_its_groups_stay():
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = torch.optim.SGD([{"params": params[:1]}, {"params": params[1:]}], lr=0.1)
    groups = groups_of(optimizer)
    with pytest.raises(PlanError, match=r"optimizer\.state is read or changed"):
        refuse_changes(optimizer, groups)  # the state is not away yet
    optimizer.state = StateAway()
    refuse_changes(optimizer, groups)
    optimizer.param_groups[0]["lr"] = 1.0  # options are the script's
    refuse_changes(optimizer, groups)
    for touch in (len, list, bool, lambda s: s[params[0]], lambda s: params[0] in s,
                  lambda s: s.get(params[0]), lambda s: s.clear(), lambda s: s.update({}),
                  lambda s: s.setdefault(params[0], {}), lambda s: s.items()):  # fmt: skip
        with pytest.raises(PlanError, match=r"optimizer\.state_dict\(\) gives what it is"):
            touch(optimizer.state)
    optimizer.param_groups[1]["params"].reverse()
    with pytest.raises(PlanError, match=r"parameters of optimizer\.param_groups were changed"):
        refuse_changes(optimizer, groups)


def test_a_launchers_variables_are_hidden_and_given(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("OTHER", "kept")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    variables = Variables()
    assert (variables.rank, variables.are_hidden) == (3, False)
    variables.hide()
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & os.environ.keys()
    assert os.environ["OTHER"] == "kept"
    with variables.given():
        assert os.environ["WORLD_SIZE"] == "4"
    assert variables.are_hidden
    assert "RANK" not in os.environ
    variables.restore()
    assert (os.environ["RANK"], variables.are_hidden) == ("3", False)
    assert "LOCAL_RANK" not in os.environ
