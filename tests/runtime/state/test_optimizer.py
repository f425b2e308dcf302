"""The user's optimizer, pointed at what a rank holds; several optimizers as one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from planner.errors import ModelError
from planner.runtime.state.optimizers.optimizer import build_optimizer, read_beyond_elements
from planner.runtime.state.optimizers.several import Several


def network() -> nn.Linear:
    return nn.Linear(3, 2)


def held_of(module: nn.Module, *names: str) -> dict[str, list[nn.Parameter]]:
    """What stands on this rank for some of a module's parameters."""
    params = dict(module.named_parameters())
    return {name: [nn.Parameter(params[name].detach().clone())] for name in names}


def test_groups_and_schedulers_go_on_with_what_stands_here():
    module = network()
    given = torch.optim.SGD(
        [{"params": [module.weight], "lr": 0.5}, {"params": [module.bias], "lr": 0.1}]
    )
    scheduler = torch.optim.lr_scheduler.StepLR(given, 1, gamma=0.1)
    held = held_of(module, "weight")  # the bias is on another rank
    optimizer = build_optimizer(given, module, held)
    assert optimizer is given
    (weight,) = held["weight"]
    assert [group["params"] for group in given.param_groups] == [[weight], []]
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), module.weight.detach() - 0.5)
    scheduler.step()
    assert [group["lr"] for group in given.param_groups] == pytest.approx([0.05, 0.01])


def test_frozen_copies_are_not_stepped_on_and_names_follow():
    module = network()
    held = held_of(module, "weight", "bias")
    held["bias"][0].requires_grad_(False)
    given = torch.optim.AdamW(module.named_parameters())
    build_optimizer(given, module, held)
    (group,) = given.param_groups
    assert group["params"] == held["weight"]
    assert group["param_names"] == ["weight"]


@pytest.mark.parametrize("given", [None, torch.optim.AdamW, lambda ps: torch.optim.AdamW(ps)])
def test_a_class_or_a_function_makes_one_of_what_trains_here(given):
    module = network()
    held = held_of(module, "weight")
    optimizer = build_optimizer(given, module, held)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.param_groups[0]["params"] == held["weight"]
    assert build_optimizer(given, module, {}) is None


def stepped(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    """Counts no steps: found by what it keeps."""
    optimizer = torch.optim.SGD(module.parameters(), momentum=0.9)
    module(torch.arange(3.0)[None]).sum().backward()
    optimizer.step()
    return optimizer


def hooked(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(module.parameters())
    optimizer.register_step_pre_hook(lambda *given: None)
    return optimizer


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (stepped, "has stepped already; apply the plan before"),
        (momentum, "momentum_buffer is not the same everywhere; apply the plan before training"),
        (hooked, "has a hook on its step"),
        (lambda m: [torch.optim.SGD([m.weight]), hooked(nn.Linear(1, 1))], "are not the model's"),
        (lambda m: [torch.optim.SGD([m.weight]), hooked_on(m.bias)], "has a hook on its step"),
        (lambda m: torch.optim.SGD(nn.Linear(1, 1).parameters()), "are not the model's"),
        (lambda m: torch.optim.LBFGS(m.parameters()), "evaluates the model several times"),
        (lambda m: lambda params: "none", "made a str; give a torch optimizer"),
        (lambda m: [], "has nothing in its list"),
        (lambda m: [torch.optim.SGD], "has type in its list"),
        (
            lambda m: [torch.optim.SGD(m.parameters()), torch.optim.SGD([m.bias])],
            "have a parameter in common",
        ),
    ],
)
def test_an_optimizer_that_would_train_otherwise_is_refused(make, says):
    module = network()
    with pytest.raises(ModelError, match=says):
        build_optimizer(make(module), module, held_of(module, "weight", "bias"))


def hooked_on(param: nn.Parameter) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([param])
    optimizer.register_step_post_hook(lambda *given: None)
    return optimizer


class ById(torch.optim.SGD):
    """Has something of each parameter beside its groups: by itself, or by its id."""

    def __init__(self, params, key) -> None:
        params = list(params)
        super().__init__(params, lr=0.1)
        self.scales = [{key(param): 2.0} for param in params]


@pytest.mark.parametrize(
    ("key", "says"),
    [(id, r"id\(\) of the parameter weight"), (lambda param: param, "the parameter weight")],
)
def test_what_stands_beside_the_groups_can_not_be_replaced(key, says):
    module = network()
    with pytest.raises(ModelError, match=f"ById has {says} beside its param groups"):
        build_optimizer(ById(module.parameters(), key), module, held_of(module, "weight", "bias"))


def test_state_made_before_is_of_the_pieces_size():
    module = network()
    given = torch.optim.Adagrad(module.parameters(), initial_accumulator_value=0.25)
    held = {"weight": [nn.Parameter(torch.zeros(1, 3))], "bias": []}
    build_optimizer(given, module, held)
    (state,) = given.state.values()
    assert torch.equal(state["sum"], torch.full((1, 3), 0.25))


class Trust(torch.optim.SGD):
    """Scales an update by norms of the whole parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param -= param.grad * param.norm() / param.grad.norm()


def test_wholes_are_needed_only_where_more_than_an_element_is_read_and_cut():
    params = [nn.Parameter(torch.ones(2, 2))]
    plain, trust = torch.optim.SGD(params), Trust(params)
    assert read_beyond_elements(plain, is_cut=True, is_spread=True) == []
    assert read_beyond_elements(trust, is_cut=False, is_spread=True) == []
    assert read_beyond_elements(trust, is_cut=True, is_spread=True) == params


def several() -> tuple[list[nn.Parameter], Several, list[torch.optim.Optimizer]]:
    params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    parts = [
        torch.optim.SGD(
            [{"params": [params[0]], "lr": 0.5}, {"params": [params[1]], "lr": 0.25}], momentum=0.5
        ),
        torch.optim.AdamW([params[2]], lr=0.125),
    ]
    for param in params:
        param.grad = torch.ones(2)
    return params, Several(parts), parts


def test_parts_step_together_and_share_groups_and_state():
    params, whole, parts = several()
    expected, _, alone = several()
    scheduler = torch.optim.lr_scheduler.StepLR(parts[1], 1, gamma=0.5)
    other = torch.optim.lr_scheduler.StepLR(alone[1], 1, gamma=0.5)
    for _ in range(2):
        whole.step()
        scheduler.step()
        for each in alone:
            each.step()
        other.step()
    assert all(map(torch.equal, params, expected))
    assert [group["lr"] for group in whole.param_groups] == [0.5, 0.25, 0.03125]
    assert set(whole.state) == set(params)


def test_a_state_dict_of_all_is_loaded_into_each():
    params, whole, _ = several()
    whole.step()
    whole.param_groups[2]["lr"] = 0.0625
    kept = copy.deepcopy(whole.state_dict())
    fresh, again, parts = several()
    with torch.no_grad():
        for new, old in zip(fresh, params, strict=True):
            new.copy_(old)
    again.load_state_dict(kept)
    assert [len(part.param_groups) for part in parts] == [2, 1]
    assert parts[1].param_groups[0]["lr"] == 0.0625
    whole.step()
    again.step()
    assert all(map(torch.equal, fresh, params))


class HalfMomentum(torch.optim.SGD):
    """An optimizer that keeps what it is given in a dtype of its own."""

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].half()


def test_each_optimizer_takes_its_own_part_of_a_state():
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    whole = Several([torch.optim.AdamW([first]), HalfMomentum([second], momentum=0.9)])
    for param in (first, second):
        param.grad = torch.full_like(param, 0.5)
    whole.step()
    saved = copy.deepcopy(whole.state_dict())
    whole.load_state_dict(saved)
    assert whole.state[second]["momentum_buffer"].dtype == torch.float16
    assert whole.state[first]["exp_avg"].dtype == torch.float32
    assert whole.parts[1].state is whole.state
    assert whole.parts[1].param_groups[0] is whole.param_groups[1]
    with pytest.raises(ValueError, match="1 param groups and the optimizers 2"):
        whole.load_state_dict(saved | {"param_groups": saved["param_groups"][:1]})
