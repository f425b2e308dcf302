"""Issue 19, point 3: HSDP is chosen where what leaves nodes is worth more than memory."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from planner.language.layout.axes import Degrees
from search import SearchRequest, find_plan
from search.candidates import Candidates
from search.priced_configuration import PricedConfiguration
from tests.search.machine import Machine
from tests.search.test_bounds import random_cut
from tests.search.test_referee import graph_of

NUM_DEVICES = 8


def machine(inter_bytes_per_s: float) -> Machine:
    """Two devices a node, so that shards lie in a node with four copies."""
    return Machine(
        context_bytes=0.0,
        devices_per_node=2,
        flop_per_s=1e9,
        alpha_s=0.0,
        intra_bytes_per_s=1e8,
        inter_bytes_per_s=inter_bytes_per_s,
    )


def request(rp: int | None = None, *, microbatches: int = 4) -> SearchRequest:
    return SearchRequest(
        num_devices=NUM_DEVICES,
        global_batch=NUM_DEVICES * microbatches,
        tp=1,
        pp=1,
        cp=1,
        zero=3,
        rp=rp,
        microbatch_size=1,
        recompute="none",
        offload="none",
    )


def test_copies_lie_in_nodes_where_links_between_them_are_slow():
    """ZeRO 3 of one copy gathers and scatters b + b + b bytes over nodes for each of the four
    microbatches, twelve in all; copies in nodes sum 2 b once a step.
    """
    graph, slow = graph_of("equal"), machine(1e5)
    plan = find_plan(graph, slow, request()).plan
    assert plan is not None
    assert (plan.degrees["rp"], plan.dp) == (4, 2)
    alone = find_plan(graph, slow, request(1)).plan
    assert alone is not None
    assert alone.estimate["step_s"] > 3 * plan.estimate["step_s"]


def test_one_copy_where_more_do_not_fit():
    """A copy's shards are a half in a node, an eighth over all."""
    graph, slow = graph_of("equal"), machine(1e5)
    least = {}
    for rp in (1, 4):
        plan = find_plan(graph, slow, request(rp)).plan
        assert plan is not None
        least[rp] = plan.estimate["peak_bytes"]
    between = replace(request(), memory_limit_bytes=int((least[1] + least[4]) / 2))
    plan = find_plan(graph, slow, between).plan
    assert plan is not None
    assert plan.degrees["rp"] < 4


def test_a_group_of_one_replica_has_nothing_to_copy():
    """Eight copies of a whole model are dp 8 without ZeRO; only who gives `rp` gets them so."""
    for between in (1e5, 1e8):
        plan = find_plan(graph_of("equal"), machine(between), request(microbatches=1)).plan
        assert plan is not None
        assert plan.dp > 1


@pytest.mark.parametrize("inter_bytes_per_s", [1e5, 3e6, 1e8])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_the_choice_is_the_least_of_every_number_of_copies(inter_bytes_per_s, microbatches):
    graph, between = graph_of("equal"), machine(inter_bytes_per_s)
    found = find_plan(graph, between, request(microbatches=microbatches)).plan
    assert found is not None
    each = {}
    for rp in (1, 2, 4):  # with 8 nothing is sharded
        plan = find_plan(graph, between, request(rp, microbatches=microbatches)).plan
        assert plan is not None
        each[rp] = plan.estimate["step_s"]
    assert found.estimate["step_s"] == pytest.approx(min(each.values()), rel=1e-9)


@pytest.mark.parametrize("zero", [1, 3])
def test_more_copies_need_no_less_memory(zero):
    """M17: what is too large with larger groups of shards is left out with smaller ones unasked."""
    graph, rng = graph_of("equal"), np.random.default_rng(31)
    asked = replace(request(), pp=None, zero=zero, recompute=None, schedule=None)
    candidates = Candidates.of(graph, machine(1e6), asked)
    by_copies = defaultdict(dict)
    for shape in candidates.shapes(asked):
        for configuration in shape.configurations():
            alike = replace(configuration, degrees=Degrees())
            by_copies[alike][configuration.degrees["rp"]] = configuration
    compared = 0
    for of_copies in by_copies.values():
        one = of_copies.pop(1)
        table = candidates.tables(1, one.microbatch_size)[0]
        if not of_copies or one.pp * one.vpp > table.num_blocks:
            continue
        cut = random_cut(one, table.num_blocks, rng)
        bytes_of = [
            [int(parts.total) for parts in candidates.estimate(plan).memory]
            for plan in (
                PricedConfiguration(candidates, each, table).plan(cut)
                for each in (one, *of_copies.values())
            )
        ]
        assert all(
            least <= more for least, *others in zip(*bytes_of, strict=True) for more in others
        )
        compared += len(of_copies)
    assert compared > 4
