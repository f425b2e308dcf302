"""M27: the search puts on the host what it must, and nothing where all fits without."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest

from planner.errors import LayoutError
from planner.language.graph import ModelGraph
from planner.language.plan import Plan
from profiles import Profile, load_profile
from search import SearchRequest, SearchResult, find_plan
from search.bounds.catalogue import TableBounds
from search.candidates import Candidates
from search.on_host import offload_fallbacks
from search.partition.chain_dp import solve_chain
from search.partition.chain_paths import Paths
from search.partition.chain_problem import Cut
from search.priced_configuration import PricedConfiguration
from search.report.explain import explain_saving, fullest_rank, memory_parts
from search.space.configuration import recompute_choices
from search.space.job_tables import copied_rows
from tests.builders import PlainGPT, gpt_batch
from tests.captures import capture_module
from tests.referees.cuts import all_cuts, cut_value
from tests.search.machine import Machine
from tests.search.test_referee import graph_of


@cache
def gpt() -> ModelGraph:
    return capture_module(PlainGPT(layers=4), gpt_batch(2), gpt_batch(3), precision="bf16")


@cache
def a100() -> Profile:
    return load_profile("a100-sxm4-80gb")


def asked(**choices) -> SearchResult:
    request = SearchRequest(num_devices=2, global_batch=16, precision="bf16", **choices)
    return find_plan(gpt(), a100(), request)


def offloads(plan: Plan) -> bool:
    return plan.optimizer_on_host or any(stage.activations_on_host for stage in plan.stages)


def test_a_budget_too_small_without_offload_gets_a_plan_with_it():
    """All else is given, so that nothing but offload can make room."""
    given = {"dp": 2, "tp": 1, "pp": 1, "zero": 0, "microbatch_size": 1, "recompute": "full"}
    roomy = asked(**given).plan
    assert not offloads(roomy)
    state_bytes = max(rank["optimizer_bytes"] for rank in roomy.estimate["memory"])
    limit = int(roomy.estimate["peak_bytes"] - state_bytes / 4)
    assert asked(**given, offload="none", memory_limit_bytes=limit).plan is None
    found = asked(**given, memory_limit_bytes=limit).plan
    assert found.optimizer_on_host
    assert found.estimate["peak_bytes"] <= limit
    assert max(rank["host_bytes"] for rank in found.estimate["memory"]) > 0
    assert found.estimate["step_s"] > roomy.estimate["step_s"]  # its price


def test_what_is_on_the_host_is_no_part_of_a_device():
    """The parts that are told add up to what the device needs."""
    plan = asked(dp=2, tp=1, pp=1, offload="both").plan
    fullest = fullest_rank(plan)
    assert fullest["host_bytes"] > 0
    assert sum(memory_parts(fullest).values()) == fullest["total_bytes"]
    assert explain_saving(plan, plan) == "no difference"


def test_offload_asked_for_is_honoured():
    given = {"pp": 2, "schedule": "fthenb", "microbatch_size": 2}
    plans = {way: asked(offload=way, **given).plan for way in ("none", "optimizer", "both")}
    assert [plan.optimizer_on_host for plan in plans.values()] == [False, True, True]
    assert all(stage.activations_on_host for stage in plans["both"].stages)
    peaks = [plan.estimate["peak_bytes"] for plan in plans.values()]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 3
    with pytest.raises(LayoutError, match="`offload` disk was given; use auto, none"):
        asked(offload="disk")


@pytest.mark.parametrize("way", ["optimizer", "activations", "both"])
def test_bounds_and_the_quick_price_know_what_offload_takes(way):
    """X1: the host's step and the copies beside jobs are in what the search prices; no gap."""
    for choices in (
        {"dp": 2, "zero": 1}, {"pp": 2, "schedule": "1f1b"},
        {"pp": 2, "schedule": "interleaved_1f1b", "recompute": "full"},
    ):  # fmt: skip
        request = SearchRequest(
            num_devices=2, global_batch=16, precision="bf16", offload=way, **choices
        )
        candidates = Candidates.of(gpt(), a100(), request)
        configuration = next(candidates.shapes(request)[0].configurations())
        table = candidates.tables(configuration.tp, configuration.microbatch_size)[0]
        limit = float("inf")
        priced = PricedConfiguration(candidates, configuration, table)
        cut = (
            solve_chain(priced.problem(limit)).cut
            if configuration.vpp == 1
            else priced.even_cut(limit)
        )
        answer = candidates.estimate(priced.plan(cut))
        assert priced.quick_step_s(cut) == pytest.approx(answer.step_s, rel=1e-9)
        assert cut.value <= answer.step_s * (1 + 1e-9)
        assert TableBounds(table=table).least_step_s(configuration) <= answer.step_s * (1 + 1e-9)
    assert asked(offload=way).certificate.gap == 0


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "fthenb", "eager_1f1b", "naive"])
def test_no_cut_is_faster_than_its_path_with_copies(schedule):
    """X1: of random chains on hosts near and far, all cuts under all recompute choices; the closest
    path nearly is the step."""
    rng = np.random.default_rng(17)
    closest = 0.0
    for _ in range(6):
        machine = Machine(
            context_bytes=0.0,
            flop_per_s=float(10 ** rng.uniform(6, 9)),
            bytes_per_s=float(10 ** rng.uniform(6, 9)),
        )
        pp = int(rng.integers(2, 5))
        request = SearchRequest(
            num_devices=pp, global_batch=24, microbatch_size=int(rng.integers(1, 4)), pp=pp,
            schedule=schedule, offload="activations",
        )  # fmt: skip
        graph = graph_of(str(rng.choice(["equal", "six", "tied"])))
        candidates = Candidates.of(graph, machine, request)
        configuration = next(candidates.shapes(request)[0].configurations())
        table = candidates.tables(configuration.tp, configuration.microbatch_size)[0]
        priced = PricedConfiguration(candidates, configuration, table)
        problem = priced.problem(float("inf"))
        paths = Paths.of_all(problem)
        every = list(all_cuts(problem))
        for index in rng.choice(len(every), min(20, len(every)), replace=False):
            cuts, choices = every[index]
            value = cut_value(paths, cuts, choices)
            step_s = priced.quick_step_s(Cut(cuts=cuts, choices=choices, value=value))
            assert value <= step_s * (1 + 1e-9)
            closest = max(closest, value / step_s)
    assert closest > 0.97


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zb_v", "dualpipe_v"])
@pytest.mark.parametrize("zero", [0, 1])
def test_no_virtual_stages_are_faster_than_their_bound_with_copies(schedule, zero):
    """X1: whoever recomputes; and the copies are in it."""
    machine = Machine(context_bytes=0.0, flop_per_s=1e8, bytes_per_s=2e7)
    request = SearchRequest(
        num_devices=4, global_batch=24, microbatch_size=1, pp=2, dp=2, vpp=2, zero=zero,
        schedule=schedule, offload="activations",
    )  # fmt: skip
    candidates = Candidates.of(graph_of("six"), machine, request)
    configuration = next(candidates.shapes(request)[0].configurations())
    table = candidates.tables(configuration.tp, configuration.microbatch_size)[0]
    stages = candidates.interleaved(configuration, table)
    copied = copied_rows(configuration.pipeline)
    kinds = recompute_choices(configuration.recompute)
    for by_rank in product(range(len(kinds)), repeat=configuration.pp):
        choices = tuple(by_rank[home] for home in stages.cut.homes)
        cut = Cut(cuts=stages.cut.cuts, choices=choices, value=0.0)
        priced = PricedConfiguration(candidates, configuration, table)
        recomputed = priced.recompute_by_block(cut)
        bound = stages.copied_bound(recomputed, copied)
        step_s = priced.quick_step_s(cut)
        assert stages.step_bound(stages.cut.again_s(recomputed)) < bound <= step_s * (1 + 1e-9)


def test_a_cpu_has_no_other_memory_to_move_to():
    on_cpu = replace(a100().cluster, device_type="cpu")

    class Cpu:
        cluster = on_cpu

    assert len(offload_fallbacks("auto", Cpu(), gpt())) == 1
    assert len(offload_fallbacks("auto", a100(), gpt())) == 3


def test_a_host_without_room_refuses(monkeypatch):
    small = a100().host.model_copy(update={"memory_bytes": 1000.0})
    monkeypatch.setattr(type(a100()), "host", property(lambda self: small))
    refused = asked(offload="optimizer")
    assert refused.plan is None
    assert "on each node's host" in refused.reasons[0]
