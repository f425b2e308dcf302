"""What an optimizer reads for the update of an element is measured, not listed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from planner.errors import ModelError
from planner.runtime.state.optimizers import reach
from planner.runtime.state.optimizers.reach import fresh_state, reaches
from tests.reaches import measure


@pytest.fixture(autouse=True)
def _measured(monkeypatch):
    monkeypatch.setattr(reach, "_reach", measure)  # each time


class Named(torch.optim.Optimizer):
    """An optimizer of a user, by what it does to a gradient."""

    def __init__(self, params, kind: str) -> None:
        super().__init__(params, {"lr": 0.0, "kind": kind})  # a warm-up begins at 0
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            grads = [param.grad for param in group["params"]]
            for param, grad in zip(group["params"], grads, strict=True):
                match group["kind"]:
                    case "plain":
                        update = grad.sign()
                    case "trust":
                        update = grad * param.norm() / grad.norm()
                    case "late":  # a preconditioner that begins after some steps
                        update = grad / grad.norm() if self.steps > 15 else grad
                    case "large":  # factored from a size of 128 on
                        update = grad - grad.mean(0) if min(grad.shape) >= 128 else grad
                    case "clip":
                        update = grad / torch.stack([g.norm() for g in grads]).norm()
                    case "limit":  # far above the gradients that a trial begins with
                        norm = torch.stack([g.norm() for g in grads]).norm()
                        update = grad * (1e5 / norm).clamp(max=1)
                    case "spike":  # leaves out a step of large gradients
                        norm = torch.stack([g.norm() for g in grads]).norm()
                        update = grad if norm < 1e3 else torch.zeros_like(grad)
                    case "place":
                        update = grad / (1 + [g is grad for g in grads].index(True))
                    case "noise":
                        update = grad + torch.randn_like(grad)
                    case "share":
                        dist.all_reduce(grad)
                        update = grad
                    case "matrices":
                        update = grad @ grad.T @ grad
                param.sub_(update, alpha=group["lr"])


class ByName(torch.optim.SGD):
    """Goes by the names in its groups."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for name, param in zip(group["param_names"], group["params"], strict=True):
                if "norm" in name:
                    param.grad.mul_(0.1)
        return super().step(closure)


class Wrapped(torch.optim.Optimizer):
    """Holds the optimizer that steps, with the same groups."""

    def __init__(self, params) -> None:
        self.inner = torch.optim.AdamW(params)
        super().__init__(self.inner.param_groups, {})
        self.param_groups = self.inner.param_groups

    def step(self, closure=None):
        self.inner.step()


def _scheduled(params):
    optimizer = torch.optim.Adafactor(params)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step))
    return optimizer


TORCHS = {
    "ASGD": "element",
    "Adadelta": "element",
    "Adafactor": "tensor",
    "Adagrad": "element",
    "Adam": "element",
    "AdamW": "element",
    "Adamax": "element",
    "LBFGS": None,  # refused: it evaluates the model
    "Muon": "tensor",
    "NAdam": "element",
    "RAdam": "element",
    "RMSprop": "element",
    "Rprop": "element",
    "SGD": "element",
    "SparseAdam": "element",
}


def test_every_optimizer_of_torch_has_a_reach():
    own = {
        name
        for name, found in vars(torch.optim).items()
        if isinstance(found, type) and issubclass(found, torch.optim.Optimizer)
    }
    assert own - {"Optimizer"} == set(TORCHS)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        *((getattr(torch.optim, name), reach) for name, reach in TORCHS.items()),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), "element"),
        (lambda p: torch.optim.AdamW(p, fused=True), "element"),
        (_scheduled, "tensor"),
        (Wrapped, "element"),
        (lambda p: Named(p, "plain"), "element"),
        (lambda p: Named(p, "trust"), "tensor"),
        (lambda p: Named(p, "late"), "tensor"),
        (lambda p: Named(p, "large"), "tensor"),
        (lambda p: Named(p, "matrices"), "tensor"),
        (lambda p: Named(p, "clip"), "model"),
        (lambda p: Named(p, "limit"), "model"),
        (lambda p: Named(p, "spike"), "model"),
        (lambda p: Named(p, "place"), "model"),
        (lambda p: ByName([("norm", *p)]), "element"),
    ],
)
def test_what_an_update_reads_is_measured(make, expected):
    param = nn.Parameter(torch.ones(4, 4))
    optimizer = make([param])
    param.grad = torch.ones(4, 4)
    before, random = dict(optimizer.state), torch.get_rng_state()
    assert reaches(optimizer) == (expected,)
    assert dict(optimizer.state) == before
    assert torch.equal(param, torch.ones(4, 4))
    assert torch.equal(torch.get_rng_state(), random)


def test_devices_are_not_seeded(monkeypatch):
    """Their random numbers are the script's, and would not be put back."""
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("seeded"))
    assert reaches(torch.optim.AdamW([nn.Parameter(torch.ones(4, 4))])) == ("element",)


def test_each_param_group_has_its_own_reach():
    groups = [
        {"params": [nn.Parameter(torch.ones(4, 4))], "kind": kind} for kind in ("trust", "plain")
    ]
    assert reaches(Named(groups, "clip")) == ("tensor", "element")


@pytest.mark.parametrize(
    ("kind", "says"), [("noise", "draws random numbers"), ("share", "exchanges tensors")]
)
def test_what_would_part_the_replicas_is_refused(kind, says):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(ModelError, match=f"Named {says}"):
        reaches(Named([nn.Parameter(torch.ones(4, 4))], kind))


def test_state_made_with_an_optimizer_takes_the_shape_of_a_piece():
    whole, piece = torch.zeros(4, 2), torch.zeros(2, 2)
    state = {"step": torch.tensor(0.0), "sum": torch.full((4, 2), 0.5)}
    found = fresh_state(state, whole, piece)
    assert torch.equal(found["sum"], torch.full((2, 2), 0.5))
    assert found["step"] == 0
    state["sum"][0, 0] = 1.0
    with pytest.raises(ValueError, match="sum is not the same everywhere"):
        fresh_state(state, whole, piece)


def test_adagrad_of_a_parameter_without_elements_begins_as_others_do():
    none = torch.nn.Parameter(torch.zeros(0, 16))
    optimizer = torch.optim.Adagrad([none], initial_accumulator_value=0.5)
    assert fresh_state(optimizer.state[none], none, none)["sum"].shape == (0, 16)
    given = torch.optim.Adagrad(
        [none, torch.nn.Parameter(torch.ones(4, 4))], initial_accumulator_value=0.5
    )
    assert reaches(given) == reaches(torch.optim.Adagrad(given.param_groups[0]["params"][1:]))
