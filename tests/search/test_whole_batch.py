"""N1: the search of models that compute across samples: what it leaves out, and what it prices."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from planner.errors import LayoutError
from planner.language.graph import ModelGraph
from search import SearchRequest, find_plan
from search.candidates import Candidates
from tests.captures import capture_module
from tests.referees.plans import best_within, check_against, every_answer, seconds_and_bytes
from tests.runtime.whole_batch_models import MODELS, Tower, batch
from tests.search.machine import Machine


class Dropped(Tower):
    """Draws numbers where samples are compared, which every replica would draw for itself."""

    def forward(self, x, y):
        similar = super().forward(x) @ super().forward(y).T
        return F.cross_entropy(F.dropout(similar), torch.arange(len(x), device=x.device))


@cache
def graph_of(name: str) -> ModelGraph:
    model: type[nn.Module] = {**MODELS, "Dropped": Dropped}[name]
    small = (tuple(t.float() for t in batch(size)) for size in (2, 3))
    return capture_module(model(), *small, name=name)


REQUEST = SearchRequest(num_devices=4, global_batch=8, offload="none")


def shapes_of(name: str, **changes: object) -> set[tuple[int, int]]:
    """Return the (dp, microbatches) that are searched."""
    request = replace(REQUEST, **changes)
    shapes = Candidates.of(graph_of(name), Machine(), request).shapes(request)
    return {(shape.degrees["dp"], shape.num_microbatches) for shape in shapes}


def test_replicas_share_one_microbatch_where_ops_run_on_the_whole_batch():
    assert shapes_of("Clip") == {(1, 1), (2, 1), (4, 1)}
    assert {(4, 2), (1, 8)} < shapes_of("Clip", accept=("local-samples",))


def test_a_batch_stays_whole_where_ops_cannot_run_on_it_by_replicas():
    assert shapes_of("Dropped") == {(1, 1)}
    with pytest.raises(LayoutError, match="`dp` 2 was given, which would cut the batch of 8 sam"):
        shapes_of("Dropped", dp=2)
    with pytest.raises(LayoutError, match=r"the batch is one microbatch: samples are"):
        shapes_of("Clip", dp=2, microbatch_size=2)
    with pytest.raises(LayoutError, match="use `schedule` naive or no pipeline, or accept it"):
        shapes_of("Clip", pp=2, schedule="1f1b")


def test_why_is_part_of_the_answer():
    told = find_plan(graph_of("Clip"), Machine(), REQUEST).whole_batch
    assert told.startswith("the batch is one microbatch: samples are compared with each other (mat")
    assert told.endswith("; `accept` local-samples lets it be cut")
    told = find_plan(graph_of("Dropped"), Machine(), REQUEST).whole_batch
    assert told.startswith("the batch stays whole: samples are compared")
    accepted = replace(REQUEST, accept=("local-samples",))
    assert not find_plan(graph_of("Clip"), Machine(), accepted).whole_batch


def test_what_replicas_send_and_compute_twice_is_priced():
    """Between nodes of one device, an all-gather and its gradient cost two messages a tensor."""
    request = replace(REQUEST, dp=4, tp=1, pp=1, zero=0, recompute="none")
    near = find_plan(graph_of("Clip"), Machine(alpha_s=0.0), request).plan
    far = find_plan(graph_of("Clip"), Machine(alpha_s=1e-3), request).plan
    alone = find_plan(
        graph_of("Clip"), Machine(alpha_s=1e-3), replace(request, accept=("local-samples",))
    ).plan
    assert near is not None
    assert far is not None
    assert alone is not None
    assert far.estimate["step_s"] - alone.estimate["step_s"] > 4 * 1e-3
    assert near.estimate["step_s"] > 0


@pytest.mark.parametrize("name", ["Clip", "Routed"])
def test_the_best_equals_trying_everything(name):
    rng = np.random.default_rng(5)
    for _ in range(2):
        machine = Machine(
            context_bytes=0.0,
            devices_per_node=int(rng.choice([2, 4])),
            flop_per_s=float(10 ** rng.uniform(6, 10)),
            bytes_per_s=float(10 ** rng.uniform(6, 10)),
            intra_bytes_per_s=float(10 ** rng.uniform(6, 10)),
            inter_bytes_per_s=float(10 ** rng.uniform(6, 9)),
            alpha_s=float(10 ** rng.uniform(-7, -4)),
        )
        allow = ("recompute", "none"), ("zero", "0"), ("zero", "3"), ("pp", "1"), ("pp", "2")
        request = replace(REQUEST, allow=allow)
        every = seconds_and_bytes(every_answer(graph_of(name), machine, request))
        limit = int(min(every)[1] * rng.choice([0.8, 0.95, 2.0]))
        found = find_plan(graph_of(name), machine, replace(request, memory_limit_bytes=limit))
        check_against(best_within(limit, every), limit, found)
