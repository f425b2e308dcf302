"""Which communicators messages go through, and which ranks greet each other before a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from planner.language.lowering.defaults import default_plan
from planner.language.lowering.routes import Routes, directions, in_rounds, rank_pairs
from planner.language.lowering.wiring import build_edges
from planner.language.plan.schedule_of import schedule_of
from planner.language.templates import Transformer, build_transformer
from tests.runtime.scenarios import capture

GRAPH = build_transformer(
    Transformer(layers=6, hidden=8, heads=4, kv_heads=4, ffn_hidden=8, vocab=16, seq_len=4)
)


def test_stages_of_one_rank_hand_over_in_place():
    """The fold of a V is between two stages of the last rank."""
    for name, pp in (("zb_v", 2), ("dualpipe_v", 3)):
        plan = default_plan(GRAPH, pp=pp, vpp=2, schedule=name)
        home = schedule_of(plan).stage_to_pp_rank
        found = directions(build_edges(GRAPH, plan), home)
        steps = [(r, r + 1) for r in range(pp - 1)]
        assert found == sorted([*steps, *((b, a) for a, b in steps)])


def test_a_direction_without_a_gradient_has_no_communicator():
    """The mask of the encoder goes to the decoder's stages, and no gradient comes back from it."""
    plan = default_plan(capture("encoder-decoder", torch.float64), pp=3)
    edges = build_edges(capture("encoder-decoder", torch.float64), plan)
    ways = {(e.producer, e.consumer) for e in edges}
    back = {(e.consumer, e.producer) for e in edges if e.requires_grad}
    assert directions(edges, (0, 1, 2)) == sorted(ways | back)


def test_directions_of_a_round_share_no_rank():
    chain = [(a, a + step) for a in range(8) for step in (1, -1) if 0 <= a + step < 8]
    rounds = in_rounds(sorted(chain))
    assert sorted(way for each in rounds for way in each) == sorted(chain)
    for each in rounds:
        ends = [end for way in each for end in way]
        assert len(set(ends)) == len(ends)
    assert len(rounds) == 4  # for 14 directions of a pipeline of 8


@pytest.mark.parametrize("by_stage", [(2, 1), (1, 2), (4, 2), (1, 4)])
def test_between_unlike_meshes_all_pairs_greet(by_stage):
    """Whatever a batch's cut, ranks that exchange are connected."""
    sizes: dict[str, Any] = {"pp": 2, "tp": max(by_stage), "by_stage": {"tp": by_stage}}
    plan = default_plan(GRAPH, num_microbatches=2, microbatch_size=4, **sizes)
    greeted = set(rank_pairs(plan.mesh(0), plan.mesh(1)))
    assert len(greeted) == max(by_stage) ** 2
    back = set(rank_pairs(plan.mesh(1), plan.mesh(0)))
    routes, edges = Routes(plan=plan), build_edges(GRAPH, plan)
    parts = len(plan.split.sizes[0])
    cuts = [tuple(int(at == part) for at in range(parts)) for part in range(parts)]
    for cut in [*cuts, (1,) * parts, (3, *(0,) * (parts - 1))]:
        for edge in edges:
            forward = routes.parts(edge, cut, is_grad=False)
            assert {(part.source, part.target) for part in forward} <= greeted
            backward = routes.parts(edge, cut, is_grad=True)
            assert {(part.source, part.target) for part in backward} <= back


def test_between_meshes_of_one_shape_ranks_at_one_place_greet():
    plan = default_plan(GRAPH, pp=2, tp=2, dp=2)
    assert rank_pairs(plan.mesh(0), plan.mesh(1)) == [(0, 4), (1, 5), (2, 6), (3, 7)]
