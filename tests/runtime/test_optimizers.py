"""Optimizers that read whole matrices, or make their state early, train as in one process (fp64).

The plan cuts their parameters: over tp, over replicas (ZeRO), over both, and into stages.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import planner
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from tests.runtime.beside import OneProcess, train_beside
from tests.runtime.scenarios import build, capture
from tests.spawn import run_ranks

STEPS = 2


class Shampoo(torch.optim.Optimizer):
    """A user's own: both sides of each matrix are preconditioned (Gupta et al. 2018)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                grad = param.grad.reshape(len(param), -1)
                state = self.state[param]
                if not state:
                    state["left"], state["right"] = (torch.eye(size) for size in grad.shape)
                state["left"] += grad @ grad.T
                state["right"] += grad.T @ grad
                left, right = (_root(state[side]) for side in ("left", "right"))
                param.sub_((left @ grad @ right).view_as(param), alpha=group["lr"])


def _root(matrix: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ (values**-0.25).diag() @ vectors.T


def make(name: str, module: torch.nn.Module) -> Any:
    params = list(module.parameters())
    if name == "muon":
        matrices = [p for p in params if p.dim() == 2]
        others = [p for p in params if p.dim() != 2]
        return [
            torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1),
            torch.optim.AdamW(others, lr=1e-2, eps=1e-3),
        ]
    if name == "adagrad":
        return torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1, eps=1e-3)
    if name == "adafactor":
        # (Else gradients that are zero but for rounding become full steps.)
        return torch.optim.Adafactor(params, lr=1e-2, eps=(1e-5, 1e-3))
    return Shampoo(params)


def train(cases: list[tuple[str, str, Plan]], folder: str) -> list[tuple[float, float, int]]:
    """Return gaps of losses and gradients, gaps of parameters, and held numbers, by case.

    Some are saved half-way, and gone on with by another engine of the same plan.
    """
    torch.set_default_dtype(torch.float64)
    found = []
    for number, (model, name, plan) in enumerate(cases):
        tiny, module = build(model)

        def made(module: torch.nn.Module, name: str = name) -> Any:
            return make(name, module)

        alone = OneProcess(module, made, loss=tiny.loss)
        engine = planner.apply(plan, module, optimizer=made(module))
        loss_gap = 0.0
        for step in range(STEPS):
            batch = tiny.batch(plan.global_batch * (step + 1))
            batch = {k: v[plan.global_batch * step :] for k, v in batch.items()}
            gaps = train_beside(engine, alone, [batch])
            loss_gap = max(loss_gap, gaps.loss, gaps.gradient)
            if step == 0 and plan.pp == 1 and (plan.tp > 1 or plan.zero_stage == 3):
                engine.save(f"{folder}/{number}")
                engine.close()
                _, again = build(model)
                engine = planner.apply(plan, again, optimizer=made(again))
                engine.load(f"{folder}/{number}")
        held = engine.optimizer.state if engine.optimizer else {}
        numbers = sum(t.numel() for s in held.values() for t in s.values() if t.dim() > 1)
        engine.close()
        found.append((loss_gap, gaps.parameter, numbers))
    return found


def check(
    world_size: int, cases: list[tuple[str, str, dict[str, Any]]], folder: str
) -> list[list[int]]:
    plans = [
        (model, name, default_plan(capture(model, torch.float64), **choices))
        for model, name, choices in cases
    ]
    by_rank = run_ranks(train, world_size, plans, folder)
    for (model, name, choices), (loss_gap, param_gap, _) in zip(cases, by_rank[0], strict=True):
        assert loss_gap < 1e-10, (model, name, choices)
        assert param_gap < 1e-8, (model, name, choices)
    return [[numbers for _, _, numbers in each] for each in zip(*by_rank, strict=True)]


def test_whole_matrices_on_two_ranks(tmp_path):
    held = check(
        2,
        [
            ("small-gpt", "muon", {"tp": 2}),
            ("small-gpt", "muon", {"dp": 2, "zero_stage": 3}),
            ("small-gpt", "adafactor", {"tp": 2}),
            ("small-gpt", "shampoo", {"dp": 2, "zero_stage": 2}),
            ("small-gpt", "adagrad", {"dp": 2, "zero_stage": 3}),
            # (A matrix of all experts is cut; one of an expert's own is whole on its rank.)
            ("routed-gpt", "adafactor", {"dp": 2, "ep": 2}),
            ("biased-modules-gpt", "muon", {"dp": 2, "ep": 2}),
        ],
        str(tmp_path),
    )
    # Momentum of whole matrices is dealt: a rank has about half of what one process has.
    matrices = [p.numel() for p in build("small-gpt")[1].parameters() if p.dim() == 2]
    first, second = held[1]
    assert first + second == sum(matrices)
    assert max(first, second) < 0.6 * sum(matrices)


@pytest.mark.slow
def test_whole_matrices_cut_by_two_axes(tmp_path):
    cases = [
        ("small-gpt", "muon", {"tp": 2, "dp": 2, "zero_stage": 2}),
        ("small-tied-gpt", "muon", {"pp": 2, "tp": 2}),
    ]
    check(4, cases, str(tmp_path))
