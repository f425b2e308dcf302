"""Whether a program's loss trains on parts of a batch as on the whole: by running it both ways.

The whole batch goes through the plain module, parts as microbatches through an engine of one rank.
A program is fine where both are equal and nothing is said, or where the plan is told or refused.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import tempfile
import types
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from planner import OwnPart, apply
from planner.capture import capture_module
from planner.errors import LayoutError, PlanError, PlannerError
from planner.language.across.cut.batch_statistics import BatchStatisticsWarning
from planner.language.across.cut.whole_batch import refuse_cut
from planner.language.graph.batch import call_with_batch, loss_of
from planner.language.lowering.defaults import default_plan
from planner.runtime.process.groups.mesh import build_mesh
from planner.runtime.step.engine import Engine
from tests.across.random_losses import RandomProgram, random_program

ROUNDING = 1e-9
SIZES = (6, 7, 8)
"""Samples of a batch; a seed takes one."""
CUTS = (2, 3)
"""In how many parts a batch is cut; those of three are uneven."""
TRIES = 3
"""Batches by which one is found that has a loss, and that is told in vain on all of them."""

Kind = Literal["equal", "told", "refused", "void", "silent", "alarm", "crash"]
FAULTS: tuple[Kind, ...] = ("silent", "alarm", "crash")
_CPU = torch.device("cpu")
_numbers = itertools.count()


@dataclass(frozen=True)
class Verdict:
    """What became of a program; `gap` is the largest relative difference of its cuts."""

    program: RandomProgram
    kind: Kind
    said: str = ""
    gap: float = 0.0

    @property
    def is_fault(self) -> bool:
        return self.kind in FAULTS

    def __str__(self) -> str:
        said = f": {self.said}" if self.said else ""
        return (
            f"seed {self.program.seed} {self.kind}, gap {self.gap:.1e}{said}\n"
            f"    {', '.join(self.program.tags)}"
        )


@dataclass(frozen=True)
class _Said:
    messages: tuple[str, ...]
    gap: float


def load_program(source: str, folder: Path) -> types.ModuleType:
    """Import a model file's text, which lies in a file: findings name its lines."""
    name = f"random_loss_{next(_numbers)}"
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def judge(program: RandomProgram) -> Verdict:
    """Return what becomes of a program whose batch is cut."""
    with tempfile.TemporaryDirectory() as folder:
        made = load_program(program.source, Path(folder))
        batches = [seed for seed in range(TRIES) if _has_loss(made, program.seed, seed)]
        if not batches:
            return Verdict(program, "void")
        try:
            return _judged(program, made, batches)
        except PlannerError as error:
            # (One rank has no layout that a user could have chosen wrongly.)
            kind: Kind = "crash" if isinstance(error, LayoutError) else "refused"
            return Verdict(program, kind, str(error))
        except Exception as error:
            return Verdict(program, "crash", f"{type(error).__name__}: {error}", math.inf)


def _judged(program: RandomProgram, made: Any, batches: list[int]) -> Verdict:
    graph = capture_module(
        made.model(), made.batch(2), made.batch(3), loss=getattr(made, "loss", None)
    )
    said: list[str] = []
    worst = 0.0
    for seed in batches:
        found = [_cut(made, graph, program.seed, seed, parts) for parts in CUTS]
        worst = max(worst, *(each.gap for each in found))
        silent = [each for each in found if not each.messages and not each.gap < ROUNDING]
        said += [message for each in found for message in each.messages]
        if silent:
            return Verdict(program, "silent", gap=max(each.gap for each in silent))
        if not said:
            return Verdict(program, "equal", gap=worst)
        if worst > ROUNDING:
            return Verdict(program, "told", said[0], worst)
    # Told on every batch, and equal on each: in vain, but where another batch could differ.
    kind: Kind = "told" if program.may_coincide else "alarm"
    return Verdict(program, kind, said[0], worst)


def _size(program_seed: int) -> int:
    return SIZES[program_seed % len(SIZES)]


def _whole(made: Any, program_seed: int, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one process on a whole batch."""
    module, batch = made.model(seed), made.batch(_size(program_seed), seed)
    torch.manual_seed(0)
    loss = loss_of(call_with_batch(module, batch), batch, getattr(made, "loss", None))
    loss.backward()
    return loss.detach(), {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in module.named_parameters()
    }


def _has_loss(made: Any, program_seed: int, seed: int) -> bool:
    """Whether one process could train on it."""
    try:
        loss, gradients = _whole(made, program_seed, seed)
    except RuntimeError:  # of a batch without what it takes a gradient of
        return False
    largest = max((g.abs().max().item() for g in gradients.values()), default=0.0)
    return math.isfinite(loss.item()) and math.isfinite(largest) and largest > 1e-6


def _cut(made: Any, graph: Any, program_seed: int, seed: int, parts: int) -> _Said:
    """Train on parts of a batch that is given whole; in most parts, also as this replica's own."""
    size, weight = _size(program_seed), getattr(made, "loss_weight", None)
    plan = default_plan(graph, num_microbatches=parts, microbatch_size=-(-size // parts))
    messages: tuple[str, ...] = ()
    try:
        refuse_cut(graph, plan, weighted_loss=callable(weight))
    except PlanError as error:
        messages = (str(error),)  # (The engine trains it all the same, which shows why.)
    batch = made.batch(size, seed)
    gaps = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # (A step moves the weights.)
        for given in (batch, OwnPart(batch)) if parts == CUTS[-1] else (batch,):
            mesh = build_mesh(plan, _CPU)
            engine = Engine(plan, graph, made.model(seed), mesh, loss_weight=weight)
            evaluated = engine.evaluate(given).item()
            loss = engine.step(given).item()
            gaps.append(abs(evaluated - loss) / max(abs(loss), 1e-3))
            gaps.append(_gap(loss, engine.full_gradients(), *_whole(made, program_seed, seed)))
    told = [str(w.message) for w in caught if isinstance(w.message, BatchStatisticsWarning)]
    return _Said((*messages, *told), _largest(gaps))


def _gap(
    loss: float, found: dict[str, Tensor], expected_loss: Tensor, expected: dict[str, Tensor]
) -> float:
    """The largest difference of a gradient and of the loss, relative to the largest gradient."""
    largest = max(g.abs().max().item() for g in expected.values())
    gaps = [abs(loss - expected_loss.item()) / max(abs(expected_loss.item()), largest)]
    for name, gradient in expected.items():
        difference = gradient - found[name] if name in found else gradient
        gaps.append(difference.abs().max().item() / largest)
    return _largest(gaps)


def _largest(gaps: list[float]) -> float:
    """The largest of them; a maximum passes over what is no number."""
    return max(gaps) if all(map(math.isfinite, gaps)) else math.inf


def judged_on_rank(seeds: range) -> list[tuple[int, Kind, float, str]]:
    """Train programs on two replicas, each with its part of the batch; rank 0 has the verdicts."""
    found: list[tuple[int, Kind, float, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            program = random_program(seed)
            made = load_program(program.source, Path(folder))
            if _has_loss(made, seed, 0):
                found.append((seed, *_on_ranks(made, program)))
    return found


def _on_ranks(made: Any, program: RandomProgram) -> tuple[Kind, float, str]:
    loss_function, weight = getattr(made, "loss", None), getattr(made, "loss_weight", None)
    module, size = made.model(), _size(program.seed)
    cut = {"dp": 2, "num_microbatches": 1, "microbatch_size": -(-size // 2)}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            graph = capture_module(module, made.batch(2), made.batch(3), loss=loss_function)
            if program.seed % 2 and len(graph.blocks) > 1:
                cut = {"pp": 2, "num_microbatches": 2, "microbatch_size": -(-size // 2)}
            engine = apply(
                default_plan(graph, **cut), module, loss=loss_function, loss_weight=weight
            )
            loss = engine.step(made.batch(size)).item()
    except PlannerError as error:
        return "refused", 0.0, str(error)
    gradients = engine.full_gradients()
    if not gradients:
        return "equal", 0.0, ""
    gap = _gap(loss, gradients, *_whole(made, program.seed, 0))
    told = [str(w.message) for w in caught if isinstance(w.message, BatchStatisticsWarning)]
    if gap < ROUNDING:
        return "equal", gap, ""
    return ("told", gap, told[0]) if told else ("silent", gap, "")
