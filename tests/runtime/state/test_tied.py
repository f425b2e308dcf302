"""Copies of a parameter on several stages: which part of its gradient each rank holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from planner.errors import LayoutError
from planner.language.graph import TensorMeta
from planner.language.layout.placement import Replicate, Shard
from planner.language.layout.placements import WHOLE as WHOLE_MODEL
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.state.gradients.tied import boxes_of, tied_copies
from tests.runtime.alone import mesh_of
from tests.runtime.scenarios import capture, check_plans

WEIGHT = TensorMeta(name="w", shape=(10, 4), dtype="float32", kind="param", requires_grad=True)
ODD = replace(WEIGHT, shape=(10, 3))
"""No dim of a half of it divides by 2."""


@pytest.fixture(scope="module")
def graph():
    return capture("tied-gpt")


def boxes(
    graph, placement, *, zero_stage: int, dp: int = 2, tp: int = 2, of: TensorMeta = WEIGHT
) -> list:
    weight = replace(of, name=next(m.name for m in graph.params if m.fqn == "token.weight"))
    plan = default_plan(graph, dp=dp, tp=tp, num_microbatches=1)
    plan = plan.model_copy(update={"zero_stage": zero_stage})
    found = boxes_of(graph, plan, weight, WHOLE_MODEL.on("tp", placement), 0)
    return [found[rank] for rank in plan.mesh(0).ranks]


def test_tp_cuts_coarse_and_zero_cuts_each_piece_as_chunk_does(graph):
    whole, left, right = ((0, 10), (0, 4)), ((0, 10), (0, 2)), ((0, 10), (2, 4))
    assert boxes(graph, Replicate(), zero_stage=0) == [whole] * 4
    assert boxes(graph, Shard(1), zero_stage=0) == [left, right] * 2
    rows = [box[0] for box in boxes(graph, Shard(0), zero_stage=1, of=ODD)]
    assert rows == [(0, 3), (5, 8), (3, 5), (8, 10)]  # chunks of 3 and 2 of five rows
    quarters = boxes(graph, Shard(0), zero_stage=1)  # the second dim divides, the first does not
    assert quarters == [
        (rows, columns) for columns in ((0, 2), (2, 4)) for rows in ((0, 5), (5, 10))
    ]
    alone = boxes(graph, Shard(1), zero_stage=3, dp=1)
    assert alone == [left, right]  # one replica has nothing to shard over


def test_segments_cannot_be_matched_with_another_mesh(graph):
    with pytest.raises(LayoutError, match="give both stages the same tp"):
        boxes(graph, Shard(0, 5), zero_stage=0, tp=1)


def test_copies_on_one_rank_have_the_sum_of_their_gradients(graph):
    plan = default_plan(graph)
    half = len(graph.blocks) // 2
    stages = tuple(
        plan.stages[0].model_copy(update={"first_block": a, "last_block": b})
        for a, b in ((0, half - 1), (half, len(graph.blocks) - 1))
    )
    plan = plan.model_copy(update={"stages": stages, "vpp": 2})

    class Owner:
        def __init__(self) -> None:
            self.params = {"token.weight": nn.Parameter(torch.zeros(3))}

        def named_params(self):
            return self.params

    owners = {0: Owner(), 1: Owner()}
    (tied,) = tied_copies(graph, plan, mesh_of(plan), owners)
    first, second = (owner.params["token.weight"] for owner in owners.values())
    first.grad = torch.ones(3)
    tied.sum()
    assert torch.equal(first.grad, second.grad)
    second.grad.add_(1)
    tied.sum()
    assert torch.equal(first.grad, torch.full((3,), 3.0))


def placed_otherwise(placement: str) -> Plan:
    """Two stages of tp 2, of which the last has its product's weight, the embedding's too, so."""
    graph = capture("small-tied-gpt", torch.float64)
    plan = default_plan(graph, tp=2, pp=2, num_microbatches=2)
    last = graph.blocks[-1]
    shared = last.params.index(graph.blocks[0].params[0])
    layouts = []
    for layout in plan.layouts:
        if layout.class_index == last.class_index:
            program = graph.classes[layout.class_index]
            weight = program.params[shared]
            product = next(op.name for op in program.ops if weight in op.inputs)
            whole = {what: ("R",) * len(getattr(layout, what)) for what in ("inputs", "outputs")}
            params = tuple(placement if name == weight else "R" for name in program.params)
            ways = {"S(0)": "R,S(0)->S(2)", "S(1)": "S(2),S(1)->P", "R": "R,R->R"}
            ops = ((product, ways[placement]),)
            layout = layout.model_copy(update=whole | {"params": params, "ops": ops})
        layouts.append(layout)
    return plan.model_copy(update={"layouts": tuple(layouts)})


def test_copies_that_stages_place_otherwise_are_summed_by_their_parts():
    """Ranks at one place of two stages then hold other pieces, of one size (S(0), S(1)) or not."""
    plans = [placed_otherwise(placement) for placement in ("S(0)", "S(1)", "R")]
    check_plans(4, [("small-tied-gpt", plan) for plan in plans])
