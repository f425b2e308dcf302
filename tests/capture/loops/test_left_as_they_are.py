"""Experts of forms that are not recognised train as they are written, and messages say so."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from planner.capture.source.model_file import ModelSource
from planner.language.across import across_samples
from planner.language.graph import from_json, to_json
from planner.language.graph.called_modules import called_modules_messages
from planner.language.lowering.defaults import default_plan
from planner.language.lowering.routed_experts import routing_messages
from planner.runtime.proofs.verify import compare_with_one_process
from tests.capture.loops.looping import CHOSEN, EXPERTS, Looping, batch_of, captured
from tests.spawn import run_ranks


def by_sizes(layer, rows, weights, ids):
    """As JetMoE: rows sorted by their experts, and cut by a list of sizes."""
    order = ids.flatten().argsort(stable=True)
    sizes = F.one_hot(ids.flatten(), EXPERTS).sum(0).tolist()
    parts = rows[order // CHOSEN].split(sizes)
    made = [F.linear(F.silu(part @ layer.up[n]), layer.down[n]) for n, part in enumerate(parts)]
    weighted = torch.cat(made) * weights.flatten()[order].unsqueeze(-1)
    return torch.zeros_like(rows).index_add(0, order // CHOSEN, weighted)


def by_capacity(layer, rows, weights, ids):
    """As Switch: of an expert's rows those past a capacity are dropped."""
    out = torch.zeros_like(rows)
    for number, expert in enumerate(layer.experts):
        which, slot = torch.where(ids == number)
        which, slot = which[:3], slot[:3]
        out = out.index_add(0, which, expert(rows[which]) * weights[which, slot].unsqueeze(-1))
    return out


def by_all(layer, rows, weights, ids):
    """As Llama-4: all rows meet all matrices, and most of what they make counts nothing."""
    scores = torch.zeros(len(rows), EXPERTS, dtype=rows.dtype, device=rows.device)
    scores = scores.scatter(1, ids, weights)
    spread = rows.unsqueeze(0) * scores.t().unsqueeze(-1)
    made = torch.bmm(F.silu(torch.bmm(spread, layer.up)), layer.down.transpose(1, 2))
    return made.sum(0)


def build(loop) -> nn.Module:
    torch.manual_seed(0)
    return Looping(loop)


def batch(size: int):
    return batch_of(size, torch.float32)


def verified(loop, graph, choices):
    source = ModelSource(
        path=Path("loop.py"), build=partial(build, loop), batch=batch, loss=None, dependencies=()
    )
    graph = from_json(graph)
    plans = [default_plan(graph, microbatch_size=2, num_microbatches=2, **how) for how in choices]
    return [compare_with_one_process(plan, source, steps=2, graph=graph) for plan in plans]


@pytest.mark.parametrize(
    ("loop", "choices"),
    [(by_sizes, ({"dp": 2}, {"tp": 2}, {"pp": 2})), (by_all, ({"dp": 2}, {"tp": 2}))],
)
def test_they_train_as_one_process(loop, choices) -> None:
    graph = captured(build(loop), batch)
    for report in run_ranks(verified, 2, loop, to_json(graph), choices)[0]:
        assert report.passed, report


def test_a_list_of_sizes_is_named() -> None:
    (message,) = called_modules_messages(captured(build(by_sizes), batch))
    assert message.startswith("Layer of layers.0, layers.1 at ")
    assert "runs as it is, because its course depends on values" in message


def test_dense_products_are_named() -> None:
    graph = captured(build(by_all), batch)
    assert called_modules_messages(graph) == ()
    first, second = routing_messages(graph)
    assert first == (
        "layers.0, layers.1: all rows meet all matrices of up, whichever a router chose; tp "
        "divides them, and ep does not"
    )
    assert "matrices of down" in second


def test_a_capacity_is_named_and_its_samples_are_not_apart() -> None:
    """Which rows are dropped follows from the others of the batch: no replica has a part of it."""
    graph = captured(build(by_capacity), batch)
    (message,) = called_modules_messages(graph)
    assert message.startswith("Layer of layers.0, layers.1 at ")
    assert {finding.kind for finding in across_samples(graph)}
