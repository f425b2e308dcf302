"""Saved with one precision and loaded with another: fp32 copies are what is stored."""

from __future__ import annotations

import pytest
import torch

import planner
from planner.language.lowering.defaults import default_plan
from planner.runtime.checkpoint.checkpoints import CheckpointWarning
from planner.runtime.step.engine import Engine
from tests.builders import PlainMLP, mlp_batch
from tests.captures import capture_module


class Frozen(PlainMLP):
    """Its first layer does not train."""

    def __init__(self):
        super().__init__()
        self.fc1.requires_grad_(False)

    def forward(self, x, y):
        return torch.nn.functional.mse_loss(super().forward(x), y)


def make_engine(precision: str, *, is_frozen: bool = False, **choices) -> Engine:
    torch.manual_seed(0)
    network = Frozen().requires_grad_() if not is_frozen else Frozen()
    graph = capture_module(network, mlp_batch(2), mlp_batch(3), precision=precision)
    plan = default_plan(graph, microbatch_size=2, num_microbatches=1, **choices)
    on_host = precision == "bf16" and is_frozen
    return planner.apply(
        plan.model_copy(update={"precision": precision, "optimizer_on_host": on_host}), network
    )


def test_masters_go_between_precisions_and_back(tmp_path):
    """bf16 -> model -> bf16: no bit is lost, and nothing is warned of."""
    first = make_engine("bf16")
    for _ in range(3):
        first.step(mlp_batch(2))
    first.save(tmp_path / "a")
    first.wait_for_save()
    state = first.full_state_dict()
    assert state["fc1.weight"].dtype == torch.float32
    assert not torch.equal(state["fc1.weight"].bfloat16().float(), state["fc1.weight"])
    in_fp32 = make_engine("model")
    assert in_fp32.load(tmp_path / "a").casts == ()
    in_fp32.save(tmp_path / "b")
    in_fp32.wait_for_save()
    again = make_engine("bf16")
    again.load(tmp_path / "b")
    for name, tensor in again.full_state_dict().items():
        assert torch.equal(tensor, state[name]), name
    # The bf16 weights too: the next step is the same.
    assert again.step(mlp_batch(2)).item() == first.step(mlp_batch(2)).item()
    assert torch.equal(again.full_state_dict()["fc1.weight"], first.full_state_dict()["fc1.weight"])


def test_what_is_rounded_is_said(tmp_path):
    """Frozen weights rest in bf16: they have no fp32 copy. The optimizer is on the host."""
    engine = make_engine("model", is_frozen=True)
    engine.step(mlp_batch(2))
    engine.save(tmp_path)
    engine.wait_for_save()
    short = make_engine("bf16", is_frozen=True)
    says = (
        r"2 tensors saved in float32 \(precision 'model'\) are bfloat16 here "
        r"\(precision 'bf16'\), such as model\.fc1\.bias"
    )
    with pytest.warns(CheckpointWarning, match=says):
        loaded = short.load(tmp_path)
    assert len(loaded.casts) == 1
    state, found = engine.full_state_dict(), short.full_state_dict()
    assert torch.equal(found["fc2.weight"], state["fc2.weight"])
    assert torch.equal(found["fc1.weight"], state["fc1.weight"].bfloat16().float())
    # Weights on the device were made from the copies on the host.
    (stage,) = short.stages.values()
    weights = {fqn: p for fqn, p in stage.named_params().items() if fqn == "fc2.weight"}
    assert torch.equal(weights["fc2.weight"], state["fc2.weight"].bfloat16())
