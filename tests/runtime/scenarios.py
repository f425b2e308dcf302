"""What test ranks run: train a tiny model under a plan and beside it in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_map

import planner
from planner.language.graph import ModelGraph
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.step.engine import Engine
from tests.builders import PlainGPT, TinyModel, gpt_batch, tiny_models
from tests.captures import capture_module
from tests.empty import EmptyGPT
from tests.experts import ExpertModules, RoutedGPT
from tests.frozen import TiedGPT, frozen_models
from tests.runtime.beside import Gaps, OneProcess, adamw, gap_by_tensor, train_beside
from tests.spawn import run_ranks
from tests.stacked import StackedGPT

STEPS = 2
RTOL = 1e-10


def models() -> dict[str, TinyModel]:
    """Tiny models by name; "small" GPTs have two layers: a step takes as long as it has ops."""
    more = {
        "deep-gpt": lambda: PlainGPT(layers=8),
        "small-gpt": lambda: PlainGPT(layers=2),
        "tied-gpt": TiedGPT,
        "small-tied-gpt": lambda: TiedGPT(layers=2),
        "empty-gpt": EmptyGPT,
        "routed-gpt": RoutedGPT,
        "biased-routed-gpt": lambda: RoutedGPT(bias=True),
        "modules-gpt": lambda: RoutedGPT(kind=ExpertModules, shut=True),
        "biased-modules-gpt": lambda: RoutedGPT(kind=ExpertModules, bias=True),
        "stacked-gpt": StackedGPT,
    }
    gpts = {name: TinyModel(name, build, gpt_batch) for name, build in more.items()}
    return tiny_models() | frozen_models() | gpts


@dataclass(frozen=True)
class Outcome:
    """What one rank saw: how far from one process it trained, and names of the parameters that it
    has, and of those that trained in one process, which rank 0 is beside.
    """

    gaps: Gaps
    params_held: frozenset[str]
    params_trained: frozenset[str]


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
    alone = OneProcess(module, adamw, loss=tiny.loss)
    engine = planner.apply(plan, module, optimizer=adamw(module))
    batches = [
        {k: v[: plan.global_batch] for k, v in tiny.batch(plan.global_batch * (step + 1)).items()}
        for step in range(STEPS)
    ]
    gaps = train_beside(engine, alone, batches)
    state = engine.full_state_dict()
    if state:
        assert set(state) == set(alone.module.state_dict())
    return Outcome(gaps, held_params(engine), frozenset(alone.gradients()))


def train_many(cases: list[tuple[str, Plan]]) -> list[Outcome]:
    """Train several (model, plan) one after the other in this process group."""
    return [train_beside_one_process(name, plan) for name, plan in cases]


def assert_alike(outcomes: Sequence[Outcome], case: str) -> None:
    """All ranks trained as one process, with equal losses; what trains is on one of them."""
    told = f"{case}: {outcomes[0].gaps}"
    assert max(outcome.gaps.largest for outcome in outcomes) < RTOL, told
    assert len({outcome.gaps.losses for outcome in outcomes}) == 1, f"ranks differ: {told}"
    held = frozenset().union(*(outcome.params_held for outcome in outcomes))
    assert outcomes[0].params_trained <= held, told


def check_plans(
    world_size: int, cases: Sequence[tuple[str, Plan]], **how: Any
) -> list[tuple[Outcome, ...]]:
    """Train each (model, plan) on ranks, of which `how` is told to `run_ranks`, and hold them to
    one process. Return outcomes as [case][rank].
    """
    by_case = list(zip(*run_ranks(train_many, world_size, cases, **how), strict=True))
    for (name, plan), outcomes in zip(cases, by_case, strict=True):
        assert_alike(outcomes, f"{name} {plan.model_dump(exclude={'layouts', 'model'})}")
    return by_case


def check(
    world_size: int, cases: Sequence[tuple[str, Mapping[str, Any]]], **how: Any
) -> list[tuple[Outcome, ...]]:
    """`check_plans` of default plans of each (model, choices)."""
    plans = [
        (name, default_plan(capture(name, torch.float64), **choices)) for name, choices in cases
    ]
    return check_plans(world_size, plans, **how)


def held_params(engine: Engine) -> frozenset[str]:
    """The user's names of the parameters this rank holds a piece of."""
    return frozenset(fqn for stage in engine.stages.values() for fqn in stage.named_params())


def clip_many(cases: list[tuple[str, Plan]], max_norm: float) -> list[tuple[float, float, float]]:
    """Norm before clipping under each plan, in one process, and the gap of clipped gradients."""
    torch.set_default_dtype(torch.float64)
    result = []
    for name, plan in cases:
        tiny, module = build(name)
        norms: list[float] = []

        def clip(each: torch.nn.Module, norms: list[float] = norms) -> None:
            norms.append(torch.nn.utils.clip_grad_norm_(each.parameters(), max_norm).item())

        alone = OneProcess(module, loss=tiny.loss, clip=clip)
        engine = planner.apply(plan, module, max_grad_norm=max_norm)
        batch = tiny.batch(plan.global_batch)
        engine.step(batch)
        alone.step(batch)
        gap = gap_by_tensor(engine.full_gradients(), alone.gradients())
        result.append((engine.grad_norm.item(), *norms, gap))
    return result
