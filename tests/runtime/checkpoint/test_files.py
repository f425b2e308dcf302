"""What is on the disk: whole checkpoints, damaged ones, what goes and what stays."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import planner
from planner.errors import PlanError
from planner.language.lowering.defaults import default_plan
from planner.runtime.checkpoint import checkpoints as module
from planner.runtime.checkpoint.checkpoints import CheckpointWarning
from planner.runtime.checkpoint.kept import KEEP, SAVE_EVERY
from planner.runtime.step.engine import Engine
from tests.builders import PlainMLP, mlp_batch
from tests.captures import capture_module
from tests.runtime.scenarios import build, capture


@pytest.fixture
def engine() -> Engine:
    return make_engine()


def make_engine(kind=torch.optim.AdamW) -> Engine:
    _, network = build("mlp")
    return planner.apply(
        default_plan(capture("mlp"), num_microbatches=2), network, optimizer=kind, loss=None
    )


def train_and_save(engine: Engine, folder: Path, times: int, **options) -> list[dict]:
    """Train a step and save, several times; the weights of each."""
    states = []
    for _ in range(times):
        engine.step(mlp_batch(2))
        states.append(engine.full_state_dict())
        engine.save(folder, **options)
    engine.wait_for_save()
    return states


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def is_state(engine: Engine, state: dict) -> bool:
    return all(torch.equal(t, state[name]) for name, t in engine.full_state_dict().items())


def test_the_last_step_of_a_kept_run_is_saved_though_none_is_due(engine, tmp_path, monkeypatch):
    monkeypatch.setenv(KEEP, str(tmp_path))
    monkeypatch.setenv(SAVE_EVERY, "2")
    assert engine.resume() is None
    for is_last in (False, False, True):
        engine.step(mlp_batch(2))
        engine.keep(now=is_last)
    engine.keep(now=True)  # saved already
    engine.wait_for_save()
    assert names(tmp_path) == ["000001-step-2", "000002-step-3"]


def test_the_last_are_kept_and_the_newest_is_loaded(engine, tmp_path):
    """Also one by name; what a crash left over goes with the next save."""
    (tmp_path / ".saving-000001").mkdir()
    (tmp_path / ".removing-000001").mkdir()
    states = train_and_save(engine, tmp_path, 4, keep=2)
    assert names(tmp_path) == ["000003-step-3", "000004-step-4"]
    loaded = engine.load(tmp_path)
    assert (loaded.path.name, loaded.step, loaded.samples) == ("000004-step-4", 4, 8)
    assert engine.load(tmp_path / "000003-step-3").step == 3
    assert is_state(engine, states[2])
    # Steps begin again from there: the number tells which is the newest.
    train_and_save(engine, tmp_path, 1, keep=2)
    assert names(tmp_path) == ["000004-step-4", "000005-step-4"]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("__0_0.distcp", cut, r"__0_0\.distcp has \d+ bytes of \d+"),
        ("__0_0.distcp", flip, r"__0_0\.distcp has another checksum"),
        (".metadata", flip, r"\.metadata has another checksum"),
        ("__0_0.distcp", os.remove, r"__0_0\.distcp can't be read \(No such file"),
        ("planner.json", cut, r"planner\.json is damaged"),
        ("planner.json", os.remove, r"it has no planner\.json"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(
    engine, tmp_path, name, damage, says
):
    states = train_and_save(engine, tmp_path, 2)
    damage(tmp_path / "000002-step-2" / name)
    with pytest.warns(CheckpointWarning, match=says):
        assert engine.load(tmp_path).step == 1
    assert is_state(engine, states[0])
    before = engine.full_state_dict()
    with pytest.raises(PlanError, match=f"{says}.*; load another checkpoint$") as refused:
        engine.load(tmp_path / "000002-step-2")
    assert "use another" not in str(refused.value)  # what to do is said once
    assert is_state(engine, before)


def test_files_of_two_checkpoints_are_not_mixed(engine, tmp_path):
    train_and_save(engine, tmp_path, 2)
    old, new = tmp_path / "000001-step-1", tmp_path / "000002-step-2"
    (new / "__0_0.distcp").write_bytes((old / "__0_0.distcp").read_bytes())
    with pytest.warns(CheckpointWarning, match="another checksum"):
        assert engine.load(tmp_path).step == 1


def test_what_can_not_be_loaded_is_refused(engine, tmp_path):
    with pytest.raises(PlanError, match="has no checkpoint; give a folder that"):
        engine.load(tmp_path / "nothing")
    with pytest.raises(PlanError, match="keep=0 must be at least 1"):
        engine.save(tmp_path, keep=0)
    train_and_save(engine, tmp_path, 1)
    manifest = tmp_path / "000001-step-1" / "planner.json"
    data = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(data | {"version": 99}))
    with pytest.raises(PlanError, match="version 99 and this planner reads 1; update"):
        engine.load(tmp_path)


def test_a_failing_save_is_told_by_the_next_call(engine, tmp_path):
    """And leaves the checkpoint before it."""
    train_and_save(engine, tmp_path, 1)
    (tmp_path / "file").write_text("")
    engine.save(tmp_path / "file")
    with pytest.raises(PlanError, match="file"):
        engine.step(mlp_batch(2)), engine.wait_for_save()
    assert engine.load(tmp_path).step == 1


def test_training_goes_on_while_files_are_written(engine, tmp_path, monkeypatch):
    """What is saved is the moment of the call, though steps follow before anything is copied."""
    import threading

    gate = threading.Event()
    begin = module.folders.begin
    monkeypatch.setattr(module.folders, "begin", lambda folder: (gate.wait(), begin(folder))[1])
    engine.step(mlp_batch(2))
    state = engine.full_state_dict()
    engine.save(tmp_path)
    engine.step(mlp_batch(2))
    assert not is_state(engine, state)
    assert names(tmp_path) == []
    gate.set()
    engine.wait_for_save()
    engine.load(tmp_path)
    assert is_state(engine, state)


def test_schedulers_scalers_and_generators_are_saved(engine, tmp_path):
    """By name; what has no state dict, or was not saved, is refused."""
    scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, gamma=0.5)
    torch.manual_seed(3)
    engine.step(mlp_batch(2))
    scheduler.step()
    engine.save(tmp_path, extra={"scheduler": scheduler})
    drawn = torch.rand(2)
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    engine.step(mlp_batch(2))
    scheduler.step()
    engine.wait_for_save()
    other = make_engine()
    again = torch.optim.lr_scheduler.StepLR(other.optimizer, 1, gamma=0.1)
    other.load(tmp_path, extra={"scheduler": again})
    assert again.state_dict() != scheduler.state_dict()
    assert (again.last_epoch, again.gamma) == (1, 0.5)
    assert [group["lr"] for group in other.optimizer.param_groups] == rates
    assert torch.equal(torch.rand(2), drawn)
    with pytest.raises(PlanError, match="no extra 'scaler' \\(it has scheduler\\)"):
        other.load(tmp_path, extra={"scaler": again})
    with pytest.raises(PlanError, match="extra 'rate' is a float, without state_dict"):
        other.save(tmp_path, extra={"rate": 0.1})


def test_the_engines_schedulers_are_saved_unasked(tmp_path):
    """Their step goes on; one that was not saved is refused, but for weights to begin from."""

    def scheduled() -> tuple[Engine, torch.optim.Optimizer]:
        network = build("mlp")[1]
        optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
        rates = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        plan = default_plan(capture("mlp"), num_microbatches=2)
        return planner.apply(plan, network, optimizer=optimizer, scheduler=rates), optimizer

    (first, rates), (second, found) = scheduled(), scheduled()
    plain = make_engine()
    plain.save(tmp_path / "start")
    plain.step(mlp_batch(2))
    plain.save(tmp_path / "plain")
    plain.wait_for_save()
    for _ in range(3):
        first.step(mlp_batch(2))
    first.save(tmp_path / "run")
    first.wait_for_save()
    second.load(tmp_path / "run")
    for _ in range(3):
        assert found.param_groups[0]["lr"] == rates.param_groups[0]["lr"] < 1
        first.step(mlp_batch(2))
        second.step(mlp_batch(2))
    with pytest.raises(PlanError, match="no extra 'scheduler of the engine 0'"):
        second.load(tmp_path / "plain")
    assert second.load(tmp_path / "start").step == 0


def test_an_optimizer_whose_state_is_not_shaped_like_its_parameter(tmp_path):
    """Adafactor has rows and columns: whole parameters keep theirs."""
    engine = make_engine(torch.optim.Adafactor)
    train_and_save(engine, tmp_path, 2)
    before = engine.full_state_dict()
    losses = [engine.step(mlp_batch(2)).item() for _ in range(2)]
    other = make_engine(torch.optim.Adafactor)
    other.load(tmp_path)
    assert is_state(other, before)
    assert [other.step(mlp_batch(2)).item() for _ in range(2)] == losses


def test_a_checkpoint_of_another_model_is_refused(engine, tmp_path):
    train_and_save(engine, tmp_path, 1)
    _, network = build("gpt")
    other = planner.apply(default_plan(capture("gpt")), network)
    with pytest.raises(PlanError, match=r"the checkpoint has no model\.\S+; load a checkpoint of"):
        other.load(tmp_path)


class Dropped(PlainMLP):
    def forward(self, x, target):
        return F.mse_loss(F.dropout(super().forward(x), 0.5), target)


def make_dropping(seed: int) -> Engine:
    torch.manual_seed(seed)
    network = Dropped()
    graph = capture_module(network, mlp_batch(2), mlp_batch(3))
    return planner.apply(default_plan(graph, num_microbatches=2), network)


def test_dropout_goes_on_to_the_last_bit(tmp_path):
    """And begins anew, from seed and step, where a plan has other streams."""
    engine = make_dropping(0)
    for _ in range(2):
        engine.step(mlp_batch(2))
    engine.save(tmp_path)
    losses = [engine.step(mlp_batch(2)).item() for _ in range(3)]
    assert len(set(losses)) == 3
    engine.wait_for_save()
    other = make_dropping(1)
    other.load(tmp_path)
    assert [other.step(mlp_batch(2)).item() for _ in range(3)] == losses
    stream = other.state.random
    drawn = []
    for step in (2, 2, 3):
        stream.restore(7, {0: stream.state(), 1: stream.state()}, step)
        with stream.drawn():
            drawn.append(torch.rand(()).item())
    assert drawn[0] == drawn[1] != drawn[2]
