"""N1: what a script does to its module or optimizer that would not reach the engine is refused."""

from __future__ import annotations

import copy
import io
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import planner
from planner.errors import CaptureError, ModelError, PlanError
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.state.users_module.untouched import Untouched
from tests.builders import MlpWithTarget, mlp_batch
from tests.captures import capture_module, capture_tiny
from tests.runtime.beside import OneProcess, gap_by_tensor
from tests.spawn import run_ranks


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
        (lambda m: setattr(m, "fc2", nn.Linear(8, 8)), "fc2 is another object than when the plan"),
        (
            lambda m: setattr(m.fc1, "weight", nn.Parameter(torch.ones(8, 8))),
            "fc1.weight is another object",
        ),
        (lambda m: setattr(m.fc1, "in_features", 9), "fc1.in_features was .* and is 9; the engine"),
    ],
)
def test_changes_after_apply_are_refused_at_the_next_step(change, says):
    engine, module = _applied("mlp", MlpWithTarget)
    engine.step(mlp_batch(4))
    change(module)
    with pytest.raises(PlanError, match=says):
        engine.step(mlp_batch(4))


class Annealed(nn.Module):
    """Numbers of a forward, of which a script may change each between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 2.0
        self.settings = SimpleNamespace(weights=[0.5, 0.5], names={"rate": 0.1})
        self.norm = nn.LayerNorm(4)


def test_numbers_that_the_forward_or_the_loss_reads_stay_what_they_are():
    module = Annealed()
    share, criterion = 0.5, nn.CrossEntropyLoss(label_smoothing=0.1)

    def loss(output, batch):
        return output * share * WEIGHT

    Untouched(module, loss).check()
    settings = module.settings
    for change, back, path in [
        (lambda: setattr(module, "temperature", 1.0), None, "temperature"),
        (lambda: setattr(module.norm, "eps", 1.0), None, "norm.eps"),
        (lambda: settings.weights.__setitem__(1, 0.7), None, r"settings.weights.1"),
        (lambda: settings.names.update(rate=0.2), None, "settings.names.rate"),
        (lambda: globals().update(WEIGHT=3.0), lambda: globals().update(WEIGHT=1.0), "WEIGHT"),
    ]:
        untouched = Untouched(module, loss)
        change()
        with pytest.raises(PlanError, match=f"{path} was .* pass what changes from step to step"):
            untouched.check()
        if back is not None:
            back()
    untouched = Untouched(module, loss)
    share = 0.6
    with pytest.raises(PlanError, match=r"share was 0.5 when the plan was applied and is 0.6"):
        untouched.check()
    untouched = Untouched(module, criterion)
    criterion.label_smoothing = 0.2
    with pytest.raises(PlanError, match=r"label_smoothing was 0.1"):
        untouched.check()


WEIGHT = 1.0


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda m: m.state_dict(), "detach needs the values of fc1.weight, which the engine has"),
        (lambda m: m(*mlp_batch(2)), "needs the values of fc1.weight"),
        (lambda m: m.fc1.weight.data.clamp_(0, 1), "values of fc1.weight"),
        (lambda m: nn.init.ones_(m.fc2.bias), "fill_ needs the values of fc2.bias"),
        (lambda m: torch.ones(1).add_(m.fc2.bias), "add_ needs the values of fc2.bias"),
        (copy.deepcopy, "values of fc1.weight"),
        (lambda m: m.double(), "_to_copy needs the values of fc1.weight"),
        (lambda m: torch.save(m.fc1.weight, io.BytesIO()), "values of fc1.weight"),
        (lambda m: m.load_state_dict({}), "load_state_dict after planner.apply, since which"),
        (
            lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0),
            r"the gradient of fc1.weight is in the engine .* max_grad_norm=\) to clip",
        ),
        (lambda m: setattr(m.fc1.weight, "grad", None), "the gradient of fc1.weight"),
    ],
)
def test_values_that_the_module_has_no_longer_are_refused(use, says):
    """In silence they would be those of tensors without any, or go nowhere."""
    _, module = _applied("mlp", MlpWithTarget)
    with pytest.raises(PlanError, match=says):
        use(module)


def test_what_was_trained_goes_back_into_the_module():
    engine, module = _applied("mlp", MlpWithTarget)
    engine.step(mlp_batch(4))
    state = engine.full_state_dict()
    module.load_state_dict(state, assign=True)
    assert torch.isfinite(module(*mlp_batch(4)))
    assert all(torch.equal(t, state[name]) for name, t in module.state_dict().items())
    assert torch.equal(copy.deepcopy(module).fc1.weight, module.fc1.weight)
    module.load_state_dict(state)
    with pytest.raises(PlanError, match=r"fc1.weight is another object"):
        engine.step(mlp_batch(4))


def test_what_a_script_held_of_the_module_is_refused_too():
    graph = capture_tiny("mlp")
    module = MlpWithTarget()
    held = list(module.parameters())
    held[0].is_matrix = True
    planner.apply(default_plan(graph, num_microbatches=1, microbatch_size=4), module)
    with pytest.raises(PlanError, match=r"mul_ needs the values of fc1.weight"):
        torch.zeros(1).mul_(held[0])
    assert held[0].is_matrix
    assert "fc1.weight" in repr(held[0])


def test_what_needs_no_values_works_as_before():
    engine, module = _applied("mlp", MlpWithTarget)
    assert sum(p.numel() for p in module.parameters()) == sum(
        p.numel() for p in MlpWithTarget().parameters()
    )
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in module.parameters())
    module.zero_grad()
    engine.step(mlp_batch(4))


def _trained_in_a_loop_for_one_device(plan: Plan) -> tuple[float, list[str]]:
    """The gap to one process, and what is refused, where a script still clears and steps."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    module = MlpWithTarget()
    alone = OneProcess(module, lambda each: torch.optim.SGD(each.fc1.parameters(), lr=0.1))
    given = torch.optim.SGD(module.fc1.parameters(), lr=0.1)
    engine = planner.apply(plan, module, optimizer=given)
    for step in range(3):
        torch.manual_seed(step)
        batch = tuple(t.double() for t in mlp_batch(plan.global_batch))
        engine.step(batch)
        given.zero_grad()
        alone.step(batch)
    state = engine.full_state_dict()
    gap = gap_by_tensor(state, alone.parameters())

    def adds_a_group() -> None:
        given.add_param_group({"params": list(module.fc2.parameters())})
        engine.step(batch)

    engine.step(batch, update=False)
    said = []
    for wrong in (given.zero_grad, given.step, adds_a_group):
        try:
            wrong()
        except PlanError as error:
            said.append(str(error))
    return gap, said


def test_a_loop_for_one_device_that_clears_and_steps():
    """`zero_grad` took gradients out of what ranks sum, so that replicas came apart."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        graph = capture_tiny("mlp")
    finally:
        torch.set_default_dtype(before)
    plan = default_plan(graph, dp=2, num_microbatches=2, microbatch_size=2)
    for gap, said in run_ranks(_trained_in_a_loop_for_one_device, 2, plan):
        assert gap < 1e-12
        assert "optimizer.zero_grad() after engine.step(..., update=False) would lose" in said[0]
        assert "SGD.step() was called after planner.apply, and engine.step makes" in said[1]
        assert "SGD has parameters that it had not when the plan was applied" in said[2]


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
    with pytest.raises(ModelError, match="SparseAdam takes sparse gradients, and those of all but"):
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
