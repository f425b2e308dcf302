"""Runs a program of `tests/reports` on two ranks beside one process, under four layouts."""

from __future__ import annotations

import importlib
import math
import re
import sys
import types
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

import planner
from planner.capture import capture_module
from planner.errors import PlannerError
from planner.language.across.cut.batch_statistics import BatchStatisticsWarning
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from tests.runtime.beside import OneProcess
from tests.spawn import run_ranks

FOLDER = Path(__file__).parent.parent / "reports"
PROGRAMS = tuple(sorted(path.stem for path in FOLDER.glob("*.py")))
LAYOUTS: dict[str, dict[str, int]] = {
    "dp2": {"dp": 2, "num_microbatches": 2, "microbatch_size": 2},
    "dp2 at once": {"dp": 2, "num_microbatches": 1, "microbatch_size": 4},
    "pp2": {"pp": 2, "num_microbatches": 4, "microbatch_size": 2},
    "tp2": {"tp": 2, "num_microbatches": 1, "microbatch_size": 8},
}
SAMPLES, STEPS, ROUNDING = 8, 3, 1e-9

Result = Literal["equal", "told", "refused", "WRONG", "fails"]


@dataclass(frozen=True)
class Outcome:
    """What became of a program under a layout: whether it is what one process computes, or what
    was said (told: it trains, after a warning).
    """

    layout: str
    result: Result
    gap: float = 0.0
    said: str = ""

    def is_right(self, names: str) -> bool:
        """Whether it is equal, or was refused by a line in which `names` is found."""
        if self.result in ("told", "refused"):
            return bool(names) and re.search(names, self.said) is not None
        return self.result == "equal"

    def __str__(self) -> str:
        return f"{self.layout} {self.result} {self.gap:.0e} {self.said}".rstrip()


def program(name: str) -> types.ModuleType:
    """Import a program by its own name, as a training script would."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)


def outcomes(name: str) -> list[Outcome]:
    """Run a program under all layouts; a capture or layout that is refused is an outcome."""
    try:
        made = program(name)
        loss = getattr(made, "loss", None)
        graph = capture_module(made.model(), made.batch(2), made.batch(3), loss=loss)
    except PlannerError as error:
        return [Outcome("capture", "refused", said=str(error))]
    found: list[Outcome] = []
    plans: dict[str, Plan] = {}
    for layout, sizes in LAYOUTS.items():
        try:
            plans[layout] = default_plan(graph, **sizes)
        except PlannerError as error:
            found.append(Outcome(layout, "refused", said=str(error)))
    try:
        return found + _joined(run_ranks(all_trained, 2, name, plans))
    except AssertionError:  # a rank failed, under one of them
        return found + [_alone(name, layout, plan) for layout, plan in plans.items()]


def _alone(name: str, layout: str, plan: Plan) -> Outcome:
    try:
        return _joined(run_ranks(all_trained, 2, name, {layout: plan}))[0]
    except AssertionError as error:
        return Outcome(layout, "fails", math.inf, str(error).strip()[-600:])


def _joined(by_rank: list[list[Outcome]]) -> list[Outcome]:
    """Values are on rank 0; a warning comes on the rank that has the loss."""
    first, second = by_rank
    joined = []
    for one, other in zip(first, second, strict=True):
        said = one.said or other.said
        is_told = one.result == "WRONG" and said
        joined.append(replace(one, said=said, result="told" if is_told else one.result))
    return joined


def all_trained(name: str, plans: dict[str, Plan]) -> list[Outcome]:
    """Train on a rank under each plan."""
    return [trained(name, layout, plan) for layout, plan in plans.items()]


def trained(name: str, layout: str, plan: Plan) -> Outcome:
    """Train on a rank, and beside it in one process."""
    made = program(name)
    loss_function = getattr(made, "loss", None)
    module, batch = made.model(), made.batch(SAMPLES)
    alone = OneProcess(module, _sgd, loss=loss_function)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            engine = planner.apply(plan, module, optimizer=_sgd(module), loss=loss_function)
            losses = [engine.step(batch).item() for _ in range(STEPS)]
        except PlannerError as error:
            return Outcome(layout, "refused", said=str(error))
    state = engine.full_state_dict()
    expected = [alone.step(batch) for _ in range(STEPS)]
    gaps = [_gap(state[n], t) for n, t in alone.module.state_dict().items() if n in state]
    gap = max([_gap(torch.tensor(losses), torch.tensor(expected)), *gaps])
    said = [str(w.message) for w in caught if isinstance(w.message, BatchStatisticsWarning)]
    if gap < ROUNDING:
        return Outcome(layout, "equal", gap, f"(and said: {said[0]})" if said else "")
    return Outcome(layout, "told" if said else "WRONG", gap, said[0] if said else "")


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)


def _gap(found: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the largest value; what is no number differs."""
    largest = expected.abs().max().item() if expected.numel() else 0.0
    gap = (found - expected).abs().max().item() / (largest or 1.0) if expected.numel() else 0.0
    return gap if math.isfinite(gap) else math.inf


def table(found: dict[str, list[Outcome]]) -> str:
    """A line for each program and layout."""
    return "\n".join(f"{name:26} {outcome}" for name, each in found.items() for outcome in each)
