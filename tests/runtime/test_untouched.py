"""N1: what a script does to its module or optimizer that would not reach the engine is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import planner
from planner.errors import CaptureError, ModelError, PlanError
from planner.plan.defaults import default_plan
from tests.builders import MlpWithTarget, mlp_batch
from tests.captures import capture_tiny


def _applied(name: str, build: type[nn.Module], **options):
    graph = capture_tiny(name)
    plan = default_plan(graph, num_microbatches=1, microbatch_size=4)
    module = build()
    return planner.apply(plan, module, **options), module


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.fc1.weight.requires_grad_(False), "requires_grad of parameter fc1.weight"),
        (lambda m: m.fc1.weight.register_hook(lambda g: g), "gradient hooks of parameter fc1.w"),
        (lambda m: m.fc2.register_forward_hook(lambda *a: None), "hooks of module fc2 was 0"),
        (lambda m: m.eval(), "training of module model was True"),
    ],
)
def test_changes_after_apply_are_refused_at_the_next_step(change, says):
    engine, module = _applied("mlp", MlpWithTarget)
    engine.step(mlp_batch(4))
    change(module)
    with pytest.raises(PlanError, match=says):
        engine.step(mlp_batch(4))


def test_a_model_may_be_in_evaluation_mode_between_steps():
    engine, module = _applied("mlp", MlpWithTarget)
    module.eval()
    engine.evaluate(mlp_batch(4))
    module.train()
    engine.step(mlp_batch(4))


def test_hooks_set_before_apply_are_refused_by_every_rank():
    graph = capture_tiny("mlp")
    plan = default_plan(graph, num_microbatches=1, microbatch_size=4)
    module = MlpWithTarget()
    module.fc1.weight.register_hook(lambda grad: 0.1 * grad)
    with pytest.raises(CaptureError, match=r"parameter fc1.weight has a hook"):
        planner.apply(plan, module)


def test_hooks_on_the_optimizers_step_are_refused():
    optimizer = torch.optim.SGD
    module_given = MlpWithTarget()
    given = optimizer(module_given.parameters(), lr=0.1)
    given.register_step_pre_hook(lambda *a: None)
    plan = default_plan(capture_tiny("mlp"), num_microbatches=1, microbatch_size=4)
    with pytest.raises(ModelError, match="SGD has a hook on its step"):
        planner.apply(plan, module_given, optimizer=given)
    with pytest.raises(ModelError, match="SparseAdam takes sparse gradients"):
        _applied("mlp", MlpWithTarget, optimizer=torch.optim.SparseAdam)
    with pytest.raises(ModelError, match="LBFGS evaluates the model several times"):
        _applied("mlp", MlpWithTarget, optimizer=torch.optim.LBFGS)
