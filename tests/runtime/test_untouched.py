"""N1: what a script does to its module or optimizer that would not reach the engine is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import planner
from planner.errors import CaptureError, ModelError, PlanError
from planner.plan.defaults import default_plan
from tests.builders import MlpWithTarget, mlp_batch
from tests.captures import capture_module, capture_tiny


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


def test_a_frozen_parameter_is_unfrozen_by_another_plan(tmp_path):
    """The message for a changed requires_grad says so."""

    def applied(*, frozen: bool):
        module = MlpWithTarget()
        module.fc1.weight.requires_grad_(not frozen)
        graph = capture_module(module, mlp_batch(2), mlp_batch(3))
        plan = default_plan(graph, num_microbatches=1, microbatch_size=4)
        return planner.apply(plan, module), module

    engine, module = applied(frozen=True)
    engine.step(mlp_batch(4))
    module.fc1.weight.requires_grad_(True)
    with pytest.raises(PlanError, match=r"engine.save, search a plan for the model frozen so, and"):
        engine.step(mlp_batch(4))
    engine.save(tmp_path)
    saved = engine.full_state_dict()
    engine.wait_for_save()
    engine, _ = applied(frozen=False)
    engine.load(tmp_path)
    assert all(torch.equal(t, saved[name]) for name, t in engine.full_state_dict().items())
    engine.step(mlp_batch(4))
    found = engine.full_state_dict()
    assert not torch.equal(found["fc1.weight"], saved["fc1.weight"])


def test_deterministic_algorithms_give_the_same_bits_twice():
    """Dropout and an embedding's gradient included; the engine uses no op that refuses."""

    def trained() -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        module = Dropped()
        graph = capture_module(module, _ids(2), _ids(3))
        engine = planner.apply(
            default_plan(graph, num_microbatches=2, microbatch_size=2, recompute="full"),
            module,
            max_grad_norm=1.0,
        )
        for _ in range(2):
            engine.step(_ids(4))
        state = engine.full_state_dict()
        engine.close()
        return state

    torch.use_deterministic_algorithms(True)
    try:
        first, second = trained(), trained()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(first[name], second[name]) for name in first)


class Dropped(nn.Module):
    """An embedding, dropout and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7)

    def forward(self, ids):
        hidden = nn.functional.dropout(self.rows(ids), 0.3)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())


def _ids(size: int) -> tuple[torch.Tensor]:
    return (torch.arange(size * 5).view(size, 5) % 7,)
