"""A plan at a glance: names of blocks in short, stages, and links by tier."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from costmodel import CostCache, estimate
from costmodel.uncertainty import Interval
from planner.cluster import Link, Tier
from profiles import load_profile
from search.report.network import find_network
from search.report.overview import blocks_spelled, find_overview, recompute_spelled
from search.report.report_numbers import gather_report
from tests.builders import SEQUENCE, tiny_models
from tests.captures import capture_module
from tests.costmodel.test_estimate import make_plan

INTERVAL = Interval(low_s=1.0, high_s=2.0, basis="a test")


@pytest.fixture(scope="module")
def graph():
    model = tiny_models()["gpt"]
    return capture_module(model.build(), model.batch(2), model.batch(3), name="gpt")


@pytest.fixture(scope="module")
def profile():
    return load_profile("h100-sxm5-80gb")


def test_runs_of_blocks_are_named_once():
    names = ["embed", "layers.0", "layers.1", "layers.2", "layers.7", "norm"]
    assert blocks_spelled(names) == "embed, layers.0..2, layers.7, norm"
    assert blocks_spelled(["h.3.attn", "h.3.mlp"]) == "h.3.attn, h.3.mlp"


def test_recomputation_in_words():
    assert recompute_spelled(Counter(none=3)) == "none"
    assert recompute_spelled(Counter(full=3)) == "full"
    assert recompute_spelled(Counter(none=1, full=2, selective=3)) == (
        "full in 2, selective in 3 of 6 blocks"
    )


def test_an_overview_has_rates_stages_and_limits(graph, profile):
    plan, costs = make_plan(graph, pp=2, dp=2, m=4), CostCache(graph, profile)
    found = estimate(graph, profile, plan, costs=costs)
    view = find_overview(plan, costs, found, INTERVAL, memory_limit_bytes=2.0**30)
    assert view.tokens_per_s == pytest.approx(plan.global_batch * SEQUENCE / found.step_s)
    assert view.limit_bytes == (2.0**30, 2.0**30)
    assert [(s.first_rank, s.last_rank) for s in view.stages] == [(0, 1), (2, 3)]
    assert sum(s.num_params for s in view.stages) == sum(
        meta.numel_at(1) for meta in graph.tensors if meta.kind == "param"
    )
    assert [s.stage for s in view.bottleneck] == [view.path.bottleneck]
    for stage in view.stages:  # without a schedule's wait a rank's share is its own work
        assert stage.share <= 1.0


def test_links_carry_the_axes_whose_groups_cross_them(graph, profile):
    plan = make_plan(graph, dp=8, tp=4, size=4)
    spine = Tier(devices=16, link=Link(name="spine", alpha_s=1e-5, beta_s_per_byte=1e-9))
    found = find_network(plan, replace(profile.cluster, tiers=(spine,)))
    assert [(link.name, link.reaches, link.axes) for link in found.links] == [
        ("NVLink4+NVSwitch", 8, ("tp",)),
        ("InfiniBand NDR 400", 16, ()),
        ("spine", 32, ("dp",)),
    ]
    assert find_network(make_plan(graph, tp=4), profile.cluster).links[0].reaches == 4


def test_a_report_gathers_each_block_with_where_its_parameters_lie(graph, profile):
    plan, costs = make_plan(graph, tp=2, pp=2), CostCache(graph, profile)
    found = estimate(graph, profile, plan, costs=costs)
    numbers = gather_report(plan, costs, found, INTERVAL)
    assert [block.index for held in numbers.blocks for block in held] == list(
        range(len(graph.blocks))
    )
    split = [p for held in numbers.blocks for b in held for p in b.params if p.placements]
    assert split
    assert all(axis == "tp" for param in split for axis, _ in param.placements)
    assert numbers.certificate == {}
