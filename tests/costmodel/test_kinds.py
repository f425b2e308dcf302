"""Stages that differ in names only share what they hold: the same bytes as each on its own."""

from itertools import count

import numpy as np
import pytest

from costmodel import CostCache, estimate
from costmodel.memory.exact.stage.placed_stage import PlacedStages
from planner.language.lowering.defaults import default_plan
from planner.language.lowering.wiring import build_edges
from tests.builders import PlainGPT, gpt_batch, tiny_models
from tests.captures import capture_module
from tests.search.machine import Machine

SCHEDULES = [("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("zb_v", 2), ("fthenb", 1)]


def _plans(graph, rng, *, pp):
    """Return plans of several schedules, their stages recomputed as drawn."""
    plans = []
    for schedule, vpp in SCHEDULES:
        if len(graph.blocks) < pp * vpp:
            continue
        plan = default_plan(
            graph, dp=2, pp=pp, vpp=vpp, schedule=schedule, num_microbatches=4,
            zero_stage=int(rng.integers(4)),
        )  # fmt: skip
        stages = tuple(
            stage.model_copy(
                update={
                    "recompute": str(rng.choice(["none", "full"])),
                    "recompute_last": bool(rng.integers(2)),
                    "activations_on_host": bool(rng.integers(2)),
                }
            )
            for stage in plan.stages
        )
        plans.append(plan.model_copy(update={"stages": stages}))
    return plans


@pytest.mark.parametrize("name", ["gpt", "hf-gpt2", "unet"])
def test_kinds_hold_what_each_stage_would(name, monkeypatch):
    """M17: with tied parameters and skips too, for plans one after the other."""
    model = tiny_models()[name]
    if model.needs_transformers:
        pytest.importorskip("transformers")
    graph = capture_module(
        model.build(), model.batch(2), model.batch(3), loss=model.loss, name=name
    )
    rng = np.random.default_rng(5)
    plans = [plan for pp in (2, 3) for plan in _plans(graph, rng, pp=pp)]
    machine = Machine()
    costs = CostCache(graph, machine)
    shared = [estimate(graph, machine, plan, costs=costs).memory for plan in plans]
    number = count()
    monkeypatch.setattr(PlacedStages, "kind", lambda stages, index: (next(number),))
    apart = CostCache(graph, machine)
    assert shared == [estimate(graph, machine, plan, costs=apart).memory for plan in plans]


def test_a_repeated_block_makes_few_kinds_of_stages():
    """M17: six stages of two blocks each are three kinds: the first, the last and the rest."""
    graph = capture_module(PlainGPT(10), gpt_batch(2), gpt_batch(3), name="gpt10")
    plan = default_plan(graph, pp=6, balance=(2,) * 6, num_microbatches=6)
    costs = CostCache(graph, Machine())
    estimate(graph, Machine(), plan, costs=costs)
    placed = PlacedStages(plan, costs, build_edges(graph, plan))
    assert len(placed.known) == len({placed.kind(stage) for stage in range(6)}) == 3
