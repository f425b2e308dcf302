"""What test ranks run: train a tiny model under a plan and beside it in one process."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

import planner
from planner.language.graph import ModelGraph
from planner.language.graph.batch import call_with_batch, loss_of
from planner.language.plan import Plan
from planner.runtime.step.engine import Engine
from tests.builders import PlainGPT, TinyModel, gpt_batch, tiny_models
from tests.captures import capture_module
from tests.empty import EmptyGPT
from tests.frozen import TiedGPT, frozen_models

STEPS = 2


def models() -> dict[str, TinyModel]:
    """Tiny models by name; "small" GPTs have two layers: a step takes as long as it has ops."""
    more = {
        "deep-gpt": lambda: PlainGPT(layers=8),
        "small-gpt": lambda: PlainGPT(layers=2),
        "tied-gpt": TiedGPT,
        "small-tied-gpt": lambda: TiedGPT(layers=2),
        "empty-gpt": EmptyGPT,
    }
    gpts = {name: TinyModel(name, build, gpt_batch) for name, build in more.items()}
    return tiny_models() | frozen_models() | gpts


@dataclass(frozen=True)
class Outcome:
    """What one rank saw. Gaps are relative to one process, which rank 0 is beside; those of
    gradients and parameters are known there only.
    """

    losses: tuple[float, ...]
    loss_gap: float
    gradient_gap: float
    param_gap: float
    params_held: frozenset[str]
    all_params: frozenset[str]


@cache
def capture(name: str, dtype: torch.dtype = torch.float32) -> ModelGraph:
    """The graph of a tiny model made with this default dtype."""
    tiny = models()[name]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        two, three = (tree_map(lambda t: _cast(t, dtype), tiny.batch(n)) for n in (2, 3))
        return capture_module(tiny.build(), two, three, loss=tiny.loss, name=name)
    finally:
        torch.set_default_dtype(before)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def build(name: str) -> tuple[TinyModel, torch.nn.Module]:
    """A tiny model and its module with seeded weights."""
    tiny = models()[name]
    torch.manual_seed(0)
    return tiny, tiny.build()


def train_beside_one_process(name: str, plan: Plan) -> Outcome:
    """Train a few steps in fp64 under a plan, and in one process on the whole batch."""
    torch.set_default_dtype(torch.float64)
    tiny, module = build(name)
    alone = copy.deepcopy(module)
    # A large epsilon: Adam would turn rounding where a gradient is zero into full steps.
    settings = {"lr": 1e-2, "eps": 1e-3}
    engine = planner.apply(
        plan, module, optimizer=torch.optim.AdamW(module.parameters(), **settings)
    )
    optimizer = torch.optim.AdamW(alone.parameters(), **settings)
    losses, loss_gap, gradient_gap = [], 0.0, 0.0
    for step in range(STEPS):
        batch = tiny.batch(plan.global_batch * (step + 1))
        batch = {k: v[: plan.global_batch] for k, v in batch.items()}
        losses.append(engine.step(batch).item())
        expected = torch.zeros((), dtype=torch.float64)
        if dist.get_rank() == 0:  # one process, not as many as there are ranks
            optimizer.zero_grad()
            expected = loss_of(call_with_batch(alone, batch), batch, tiny.loss)
            expected.backward()
        grads = engine.full_gradients()
        if dist.get_rank() == 0:
            named = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
            gradient_gap = max(gradient_gap, _gap(grads, named))
            optimizer.step()
        expected = expected.detach().double().cpu()
        dist.broadcast(expected, group=engine.mesh.control, group_src=0)
        loss_gap = max(loss_gap, abs(losses[-1] - expected.item()) / abs(expected.item()))
    state = engine.full_state_dict()
    if state:
        assert set(state) == set(alone.state_dict())
    return Outcome(
        losses=tuple(losses),
        loss_gap=loss_gap,
        gradient_gap=gradient_gap,
        param_gap=_gap(state, dict(alone.named_parameters())),
        params_held=held_params(engine),
        all_params=frozenset(n for n, _ in alone.named_parameters()),
    )


def train_many(cases: list[tuple[str, Plan]]) -> list[Outcome]:
    """Train several (model, plan) one after the other in this process group."""
    return [train_beside_one_process(name, plan) for name, plan in cases]


def held_params(engine: Engine) -> frozenset[str]:
    """The user's names of the parameters this rank holds a piece of."""
    return frozenset(fqn for stage in engine.stages.values() for fqn in stage.named_params())


def _gap(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    if not found:
        return 0.0
    largest = max(t.abs().max().item() for t in expected.values() if t.numel())
    assert all(found[n].shape == t.shape for n, t in expected.items())
    return max(
        (found[n] - t).abs().max().item() / max(t.abs().max().item(), 1e-6 * largest)
        for n, t in expected.items()
        if t.numel()
    )


def gap_to_largest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference, relative to the largest of all values; 0 on ranks with nothing."""
    if not found:
        return 0.0
    largest = max(t.abs().max().item() for t in expected.values() if t.numel())
    named = ((found[n], t) for n, t in expected.items() if t.numel())
    return max((value - t).abs().max().item() for value, t in named) / largest


def clip_many(cases: list[tuple[str, Plan]], max_norm: float) -> list[tuple[float, float, float]]:
    """Norm before clipping under each plan, in one process, and the gap of clipped gradients."""
    torch.set_default_dtype(torch.float64)
    result = []
    for name, plan in cases:
        tiny, module = build(name)
        alone = copy.deepcopy(module)
        engine = planner.apply(plan, module, max_grad_norm=max_norm)
        batch = tiny.batch(plan.global_batch)
        engine.step(batch)
        loss_of(call_with_batch(alone, batch), batch, tiny.loss).backward()
        expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), max_norm)
        named = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
        gap = _gap(engine.full_gradients(), named)
        result.append((engine.grad_norm.item(), expected.item(), gap))
    return result
