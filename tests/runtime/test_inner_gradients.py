"""B8: Models whose forward takes a gradient train as in one process, under every plan (fp64)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.capture.source.model_file import ModelSource
from planner.language.graph import ModelGraph
from planner.language.lowering.defaults import default_plan
from planner.runtime.proofs.verify import VerifyReport, compare_with_one_process
from tests.captures import capture_module
from tests.spawn import run_ranks

WIDTH, ATOMS = 8, 4


class Layers(nn.Module):
    """Residual layers between two linear ones."""

    def __init__(self, entries: int, num: int = 3) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(entries, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(num)
        )

    def output(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.leave(x).squeeze(-1)


class Critic(Layers):
    """A penalty on the gradient between real and made samples."""

    def forward(self, real: Tensor, made: Tensor) -> Tensor:
        mixed = (0.4 * real + 0.6 * made).requires_grad_()
        (gradient,) = torch.autograd.grad(self.output(mixed).sum(), mixed, create_graph=True)
        penalty = (gradient.norm(2, dim=1) - 1).square().mean()
        return (self.output(made) - self.output(real)).mean() + 10 * penalty


class ForceField(Layers):
    """The energy of atoms by their distances, and forces on them: its gradient by positions."""

    def forward(self, positions: Tensor, forces: Tensor) -> Tensor:
        positions = positions.view(-1, ATOMS, 3).requires_grad_()
        apart = (positions[:, :, None] - positions[:, None]).square().sum(-1)
        energy = self.output(torch.exp(-apart)).sum(1)
        (found,) = torch.autograd.grad(
            energy, positions, torch.ones_like(energy), create_graph=True
        )
        return F.mse_loss(-found.flatten(1), forces) + 0.01 * energy.square().mean()


class Physics(Layers):
    """An equation with second derivatives of the output by the inputs."""

    def forward(self, points: Tensor, source: Tensor) -> Tensor:
        x, y = (points[:, k : k + 1].detach().requires_grad_() for k in range(2))
        u = self.output(torch.cat([x, y, points[:, 2:]], dim=1))
        residual = -source[:, 0]
        for at in (x, y):
            (first,) = torch.autograd.grad(u.sum(), at, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), at, create_graph=True)
            residual = residual + second[:, 0]
        return residual.square().mean() + 0.1 * (u - source[:, 1]).square().mean()


MODELS = {"critic": (Critic, 6), "forces": (ForceField, ATOMS), "physics": (Physics, 4)}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "ZeRO 1": {"dp": 2, "zero_stage": 1},
    "ZeRO 3": {"dp": 2, "zero_stage": 3},
    "pp": {"pp": 2},
    "split backward": {"pp": 2, "schedule": "zb_h1"},
    "virtual stages": {"pp": 2, "vpp": 2, "schedule": "interleaved_1f1b"},
    "tp": {"tp": 2},
    "full": {"dp": 2, "recompute": "full"},
    "selective": {"tp": 2, "recompute": "selective"},
}
QUICK = [("critic", "ZeRO 1"), ("critic", "pp"), ("forces", "tp"), ("physics", "dp")]
REST = [(what, name) for what in MODELS for name in LAYOUTS if (what, name) not in QUICK]


def build(what: str) -> nn.Module:
    torch.manual_seed(0)
    kind, entries = MODELS[what]
    return kind(entries)


def batch(what: str, size: int) -> tuple[Tensor, Tensor]:
    width = {"critic": 6, "forces": 3 * ATOMS, "physics": 4}[what]
    return torch.randn(size, width), torch.randn(size, width)


def graph_of(what: str) -> ModelGraph:
    return capture_module(build(what), batch(what, 2), batch(what, 3))


def compare(cases: list[tuple[str, Any]]) -> list[VerifyReport | None]:
    return [
        compare_with_one_process(
            plan,
            ModelSource(
                path=Path("layers.py"),
                build=partial(build, what),
                batch=partial(batch, what),
                loss=None,
                dependencies=(),
            ),
            steps=2,
        )
        for what, plan in cases
    ]


def check(names: list[tuple[str, str]]) -> None:
    cases = []
    for what, layout in names:
        graph = graph_of(what)
        plan = default_plan(graph, num_microbatches=2, microbatch_size=2, **LAYOUTS[layout])
        cases.append((what, plan))
    for (what, layout), report in zip(names, run_ranks(compare, 2, cases)[0], strict=True):
        assert report is not None
        assert report.passed, f"{what}, {layout}: {report}"


def test_plans_of_every_kind_equal_one_process():
    check(QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("what", MODELS)
def test_all_models_under_all_plans(what):
    check([case for case in REST if case[0] == what])
