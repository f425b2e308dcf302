"""A plain script's training goes on under a plan, and a plan's in a plain script (fp64)."""

from __future__ import annotations

import copy

import pytest
import torch

import planner
from planner.errors import PlanError
from planner.language.lowering.defaults import default_plan
from planner.runtime.checkpoint.convert import convert
from planner.runtime.checkpoint.weight_files.single_device import from_state_dict
from tests.runtime.scenarios import build, capture

pytest.importorskip("safetensors.torch", reason="the hf extra is not installed")


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def _optimizer(module, *, named: bool = False):
    given = module.named_parameters() if named else module.parameters()
    return torch.optim.AdamW(given, lr=1e-2, eps=1e-3)


def _train(module, optimizer, batch):
    optimizer.zero_grad()
    module(**batch).backward()
    optimizer.step()


@pytest.mark.parametrize("optimizer_name", ["adamw", "adafactor"])
@pytest.mark.usefixtures("double")
def test_there_and_back(tmp_path, optimizer_name):
    def optimizer_of(module):
        if optimizer_name == "adamw":
            return _optimizer(module)
        return torch.optim.Adafactor(module.named_parameters(), lr=1e-2, eps=(1e-5, 1e-3))

    tiny, module = build("tied-gpt")
    plan = default_plan(capture("tied-gpt", torch.float64), num_microbatches=2, microbatch_size=2)
    batches = [{k: v[4 * s :] for k, v in tiny.batch(4 * s + 4).items()} for s in range(4)]
    alone = copy.deepcopy(module)
    optimizer = optimizer_of(alone)
    for batch in batches[:2]:
        _train(alone, optimizer, batch)
    saved = {"model": alone.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "plain.pt")
    convert(tmp_path / "plain.pt", tmp_path / "run")
    engine = planner.apply(plan, module, optimizer=optimizer_of(module))
    loaded = engine.load(tmp_path / "run")
    assert loaded.step == 2
    engine.step(batches[2])
    _train(alone, optimizer, batches[2])
    _assert_close(engine.full_state_dict(), alone.state_dict())

    engine.save(tmp_path / "later")
    engine.wait_for_save()
    convert(tmp_path / "later", tmp_path / "back.pt", kind="training")
    back = torch.load(tmp_path / "back.pt")
    again = build("tied-gpt")[1]
    again.load_state_dict(back["model"])
    others = optimizer_of(again)
    others.load_state_dict(back["optimizer"])
    _train(again, others, batches[3])
    engine.step(batches[3])
    _assert_close(engine.full_state_dict(), again.state_dict())


def _assert_close(found, expected):
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-10)


def test_parameters_are_named_where_they_fit_in_one_way():
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = _optimizer(module)
    _step(module)(optimizer)
    # Weights, biases and running statistics of one shape: nothing tells them apart.
    with pytest.raises(PlanError, match="in no single way, and does not name them"):
        from_state_dict(optimizer.state_dict(), module.state_dict())
    named = _optimizer(module, named=True)
    _step(module)(named)
    notes, tensors = from_state_dict(named.state_dict(), module.state_dict())
    assert notes.groups[0]["params"] == [name for name, _ in module.named_parameters()]
    assert set(tensors) == {
        f"optim.{state}.{name}"
        for state in ("exp_avg", "exp_avg_sq")
        for name, _ in module.named_parameters()
    }
    plain = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = _optimizer(plain)
    _step(plain)(optimizer)
    notes, _ = from_state_dict(optimizer.state_dict(), plain.state_dict())
    assert notes.groups[0]["params"] == [name for name, _ in plain.named_parameters()]


def test_groups_without_names_are_refused():
    module = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW([{"params": [module.bias]}, {"params": [module.weight]}])
    with pytest.raises(PlanError, match="in several groups, and does not name them"):
        from_state_dict(optimizer.state_dict(), module.state_dict())


def _step(module):
    def step(optimizer):
        module(torch.randn(5, 3)).sum().backward()
        optimizer.step()

    return step
