"""Whether cutting a batch changes what a module learns from it: by running it both ways."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import planner
from planner.language.lowering.defaults import default_plan
from tests.across.constructs import Body, Model, batch
from tests.captures import capture_module

BATCH, PARTS = 8, 4


def used_parts(body: Body) -> Model:
    """A module with the parts that a body uses; export takes its time for each it has."""
    torch.manual_seed(0)
    seen: set[str] = set()

    class Watched(Model):
        def __getattr__(self, name: str) -> Tensor | nn.Module:
            seen.add(name)
            return super().__getattr__(name)

    Watched(body)(**batch(4))
    torch.manual_seed(0)
    model = Model(body)
    for held in (model._modules, model._parameters, model._buffers):
        for name in set(held) - seen:
            del held[name]
    return model


def cutting_changes(model: nn.Module) -> float:
    """The largest relative difference of a gradient or buffer, whole batch against parts, in fp64.

    Gradients are relative to the largest of all; parts' losses are averaged, and each part finds
    the buffers that the batch began with, as engines do.
    """
    whole = copy.deepcopy(model).double()
    parts = copy.deepcopy(whole)
    given = batch(BATCH, torch.float64)
    whole(**given).backward()
    size = BATCH // PARTS
    begun = copy.deepcopy(dict(parts.named_buffers()))
    for start in range(0, BATCH, size):
        parts.load_state_dict(copy.deepcopy(begun), strict=False)
        loss = parts(**{name: t[start : start + size] for name, t in given.items()})
        (loss / PARTS).backward()
    grads = [
        [torch.zeros_like(p) if p.grad is None else p.grad for p in m.parameters()]
        for m in (whole, parts)
    ]
    worst = [_gap(*grads)]
    floats = [[b for b in m.buffers() if b.is_floating_point()] for m in (whole, parts)]
    return max(*worst, _gap(*floats))


def gap_of_engine(model: nn.Module, *, parts: int) -> float:
    """The largest relative difference of a gradient, or of the loss, of an engine that goes through
    a batch in so many microbatches, and of the module on the whole batch, in fp64.
    """
    whole = copy.deepcopy(model).double()
    given = batch(BATCH, torch.float64)
    loss = whole(**given)
    loss.backward()
    graph = capture_module(whole, *(batch(size, torch.float64) for size in (2, 3)))
    plan = default_plan(graph, num_microbatches=parts, microbatch_size=-(-BATCH // parts))
    engine = planner.apply(plan, copy.deepcopy(whole))
    found = engine.step(given)
    gradients = engine.full_gradients()
    named = [(n, p.grad) for n, p in whole.named_parameters() if p.grad is not None]
    gap = _gap([grad for _, grad in named], [gradients[name] for name, _ in named])
    return max(gap, abs(found.item() / loss.item() - 1))


def _gap(ones: list[Tensor], others: list[Tensor]) -> float:
    scale = max((t.abs().max().item() for t in ones if t.numel()), default=0.0)
    gaps = [(a - b).abs().max().item() for a, b in zip(ones, others, strict=True) if a.numel()]
    return max(gaps, default=0.0) / (scale or 1.0)
