"""A plan trains beside one process: how far losses, gradients and parameters are apart.

    alone = OneProcess(module, optimizer)               # before the engine takes the module
    engine = planner.apply(plan, module, optimizer=optimizer(module))
    gaps = train_beside(engine, alone, batches)

The one process is on rank 0, which the others hear its losses from.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.capture.source.model_file import ModelSource
from planner.language.graph.batch import call_with_batch, loss_of
from planner.language.plan import Plan
from planner.runtime.proofs.verify import VerifyReport, compare_with_one_process
from planner.runtime.step.engine import Engine
from tests.builders import gpt_batch
from tests.spawn import run_ranks

Optimizers = Callable[[nn.Module], Any]
"""Makes an optimizer for a model, or a list of some."""
Gap = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], float]
"""How far tensors are from expected ones, by name; 0 where there are none, on other ranks."""


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """A large epsilon: Adam would turn rounding where a gradient is zero into full steps."""
    return torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


class OneProcess:
    """A copy of a model that takes steps on whole batches. Mutable: it trains."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizers = lambda module: [],
        *,
        loss: Any = None,
        clip: Callable[[nn.Module], Any] = lambda module: None,
    ) -> None:
        self.module = copy.deepcopy(module)
        made = optimizer(self.module)
        self.optimizers = made if isinstance(made, list) else [made]
        self.loss, self.clip = loss, clip

    def step(self, batch: Any) -> float:
        """Train on a batch; return its loss before that."""
        return self.update([batch])[0]

    def update(self, batches: Sequence[Any], shares: Sequence[float] = ()) -> list[float]:
        """Train once on the losses of batches, each times its share: on their mean without. Return
        the losses.
        """
        for each in (self.module, *self.optimizers):
            each.zero_grad()
        losses = []
        for batch, share in zip(batches, shares or [1 / len(batches)] * len(batches), strict=True):
            loss = loss_of(call_with_batch(self.module, batch), batch, self.loss)
            (loss * share).backward()
            losses.append(float(loss.item()))
        self.clip(self.module)
        for each in self.optimizers:
            each.step()
        return losses

    def parameters(self) -> dict[str, Tensor]:
        return dict(self.module.named_parameters())

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the last step, by parameter."""
        return {n: p.grad.to_dense() for n, p in self.parameters().items() if p.grad is not None}


def sums_in_fp32(
    cast: nn.Module,
    batch: Mapping[str, Tensor],
    *,
    replicas: int,
    num_microbatches: int,
    scaled: Callable[[Tensor], Tensor] = lambda loss: loss,
) -> tuple[list[Tensor], float]:
    """What a model cast to a short dtype makes of a batch: its loss, and by parameter the fp32 sum
    of its microbatches' gradients, each replica's by itself first; of the `scaled` loss.
    """
    parts = replicas * num_microbatches
    pieces = {name: value.chunk(parts) for name, value in batch.items()}
    by_replica, total = [], 0.0
    for replica in range(replicas):
        own = [torch.zeros_like(p, dtype=torch.float32) for p in cast.parameters()]
        for m in range(num_microbatches):
            piece = m * replicas + replica
            share = cast(**{name: value[piece] for name, value in pieces.items()}) / parts
            cast.zero_grad()
            scaled(share).backward()
            for grad_sum, param in zip(own, cast.parameters(), strict=True):
                assert param.grad is not None
                grad_sum += param.grad.float()
            total += share.item()
        by_replica.append(own)
    return [sum(terms[1:], terms[0]) for terms in zip(*by_replica, strict=True)], total


class InShortDtype(OneProcess):
    """One process with a model in a short dtype beside fp32 copies, which are its `module`: they
    are what is trained, and read back into the model, which `cast` makes of a copy.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizers,
        cast: Callable[[nn.Module], nn.Module],
        *,
        replicas: int,
        num_microbatches: int,
    ) -> None:
        super().__init__(module, optimizer)
        self.cast = cast(copy.deepcopy(self.module))
        self.parts = {"replicas": replicas, "num_microbatches": num_microbatches}

    def step(self, batch: Any) -> float:
        sums, loss = sums_in_fp32(self.cast, batch, **self.parts)
        for param, grad in zip(self.module.parameters(), sums, strict=True):
            param.grad = grad
        for optimizer in self.optimizers:
            optimizer.step()
        self.read_back()
        return loss

    @torch.no_grad()
    def read_back(self) -> None:
        for param, master in zip(self.cast.parameters(), self.module.parameters(), strict=True):
            param.copy_(master)


@dataclass(frozen=True)
class Gaps:
    """The largest relative differences from one process; gradients and parameters are gathered on
    rank 0 alone, and 0.0 elsewhere. `losses` are the plan's own.
    """

    losses: tuple[float, ...]
    loss: float
    gradient: float
    parameter: float

    @property
    def largest(self) -> float:
        return max(self.loss, self.gradient, self.parameter)


def gap_by_tensor(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest difference, relative to the largest value of each tensor; tensors that are zero
    but for rounding count as if they had a millionth of the largest of all.
    """
    if not found:
        return 0.0
    largest = max(t.abs().max().item() for t in expected.values() if t.numel())
    assert all(found[n].shape == t.shape for n, t in expected.items())
    return worst(
        (found[n] - t).abs().max().item() / max(t.abs().max().item(), 1e-6 * largest)
        for n, t in expected.items()
        if t.numel()
    )


def worst(gaps: Iterable[float]) -> float:
    """The largest of gaps; NaN, which is below no tolerance, if any is (`max` may pass over it)."""
    listed = list(gaps)
    return math.nan if any(map(math.isnan, listed)) else max(listed)


def gap_to_largest(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest difference, relative to the largest of all values; 0 on ranks with nothing."""
    if not found:
        return 0.0
    largest = max(t.abs().max().item() for t in expected.values() if t.numel())
    named = ((found[n], t) for n, t in expected.items() if t.numel())
    return worst((value - t).abs().max().item() for value, t in named) / largest


def train_beside(
    engine: Engine,
    alone: OneProcess,
    batches: Iterable[Any],
    *,
    given: Callable[[Engine, Any], Any] = lambda _, batch: batch,
    evaluates: bool = False,
    gap: Gap = gap_by_tensor,
) -> Gaps:
    """Take a step on each batch under the plan and in one process.

    `given` is what this rank gives its engine of a batch; with `evaluates` the engine evaluates it
    before it trains on it, to the same loss.
    """
    is_first = dist.get_rank() == 0
    losses, loss_gap, gradient_gap = [], 0.0, 0.0
    for batch in batches:
        part = given(engine, batch)
        found = [engine.evaluate(part).item()] if evaluates else []
        losses.append(engine.step(part).item())
        told = torch.tensor(alone.step(batch) if is_first else 0.0, dtype=torch.float64)
        dist.broadcast(told, group=engine.mesh.control, group_src=0)
        expected = told.item()
        loss_gap = worst(
            [loss_gap, *(abs(loss - expected) / abs(expected) for loss in (*found, losses[-1]))]
        )
        gradients = engine.full_gradients()
        if is_first:
            wanted = alone.gradients()
            assert wanted.keys() <= gradients.keys()
            gradient_gap = worst([gradient_gap, gap(gradients, wanted)])
    state = engine.full_state_dict()
    return Gaps(tuple(losses), loss_gap, gradient_gap, gap(state, alone.parameters()))


def verify_gpt(plan: Plan, build: Callable[[], nn.Module]) -> VerifyReport | None:
    source = ModelSource(
        path=Path("gpt.py"), build=build, batch=gpt_batch, loss=None, dependencies=()
    )
    return compare_with_one_process(plan, source, steps=2)


def check_layout_in_fp64(plan: Plan, build: Callable[[], nn.Module]) -> None:
    """`verify` proves the layout of a short dtype's plan on two ranks in fp64, and says so."""
    report, other = run_ranks(verify_gpt, 2, plan, build)
    assert other is None
    assert report.passed
    assert report.largest < 1e-10
    told = f"the plan's {plan.precision} was run in fp64"
    assert any(note.startswith(told) for note in report.notes)
