"""Two fidelities of memory: the closed form never exceeds the walk; both read one table."""

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from benchmarks.runtime.layers import LayerChain
from costmodel import CostCache, StageLoad, estimate
from costmodel.execution import find_execution
from costmodel.memory.bound import NOTHING, OnHost, RankBound, kept_bytes
from costmodel.memory.part_table import PARTS, Part, State
from costmodel.memory.parts import Ranks
from costmodel.time.plan_price import price_plan
from planner.language.lowering.defaults import default_plan
from planner.language.plan import recompute_fields
from planner.language.plan.replication import Replication
from planner.language.plan.schedule_of import schedule_of
from planner.language.schedule.timing.in_flight import most_kept
from profiles import load_profile
from search import SearchRequest, find_plan
from tests.builders import tiny_models
from tests.captures import capture_module
from tests.costmodel.loads import stage_loads
from tests.cpu_profile import CpuProfile
from tests.frozen import frozen_models
from tests.search.machine import Machine

H100 = load_profile("h100-sxm5-80gb")
PLANS_A_MODEL = 30


def random_chain(rng):
    """A chain of transformer layers of random depth and width."""
    width = 16 * rng.randint(1, 4)
    two, three = (dict.fromkeys(("x", "target"), torch.zeros(n, 8, width)) for n in (2, 3))
    return capture_module(LayerChain(rng.randint(4, 7), hidden=width, heads=2), two, three)


def tiny(name):
    model = (tiny_models() | frozen_models())[name]
    return capture_module(model.build(), model.batch(2), model.batch(3), loss=model.loss, name=name)


def random_recompute(stage, rng):
    """What the stage's blocks recompute: alike, or half the time each as a die falls."""
    choices = ["none", "selective", "full"]
    alike = [rng.choice(choices)] * len(stage.blocks)
    apart = [rng.choice(choices) for _ in stage.blocks]
    return recompute_fields(rng.choice([alike, apart]), first_block=stage.first_block)


def random_plan(graph, rng):
    """A plan of one stage a rank: random degrees, schedule, recompute, ZeRO and offload."""
    pp = rng.randint(1, min(4, len(graph.blocks)))
    cuts = sorted(rng.sample(range(1, len(graph.blocks)), pp - 1))
    edges = [0, *cuts, len(graph.blocks)]
    dp = rng.choice([1, 2, 4])
    plan = default_plan(
        graph,
        rp=rng.choice([1, 1, 2]),
        dp=dp,
        pp=pp,
        balance=[end - start for start, end in pairwise(edges)],
        microbatch_size=dp * rng.randint(1, 3),
        num_microbatches=rng.randint(pp, 3 * pp),
        schedule=rng.choice(["1f1b", "fthenb", "zb_h1"]) if pp > 1 else "1f1b",
        zero_stage=rng.randint(0, 3),
    )
    on_host = OnHost(optimizer=rng.random() < 0.3, activations=rng.random() < 0.3)
    stages = tuple(
        stage.model_copy(
            update={
                **random_recompute(stage, rng),
                "recompute_last": rng.random() < 0.5,
                "activations_on_host": on_host.activations,
            }
        )
        for stage in plan.stages
    )
    changed = {
        "stages": stages,
        "optimizer_on_host": on_host.optimizer,
        "precision": rng.choice(["model", "bf16"]),
        "receive_ahead": rng.randint(0, 2),
        "logit_rows": rng.choice([0, 3]),
    }
    return plan.model_copy(update=changed), on_host


def bounds_of(plan, costs, on_host):
    """The bound of each rank of a plan, and how many microbatches it has in flight."""
    live = most_kept(schedule_of(plan), [1.0] * len(plan.stages))
    price = price_plan(plan, costs)
    return [
        (
            RankBound(
                **kept_by(price, s, load),
                num_microbatches=plan.num_microbatches,
                ranks=Ranks.under(Replication.of(plan, s), costs.execution, costs.profile),
                profile=costs.profile,
                splits_backward=plan.schedule == "zb_h1",
                activations_on_host=on_host.activations,
            ),
            int(live[stage.pp_rank]),
        )
        for s, (load, stage) in enumerate(zip(stage_loads(price), plan.stages, strict=True))
    ]


def kept_by(price, s, load):
    """A stage's load with its one choice, or with what its blocks keep by theirs."""
    stage, runs = price.plan.stages[s], price.meshes[s].runs
    by_block = price.plan.recompute_by_block
    kept = runs.chain.loads.kept(runs.start[s : s + 1], runs.end[s : s + 1], by_block).item()
    if stage.recompute_blocks:
        return {"load": replace(load, saved_bytes=kept), "recompute": "none"}
    assert kept_bytes(load, recompute=stage.recompute) == pytest.approx(
        kept + load.side_bytes, rel=1e-12
    )
    return {"load": load, "recompute": stage.recompute}


@pytest.mark.parametrize(
    "name",
    [
        "gpt",
        "mlp",
        "chain-1",
        pytest.param("chain-2", marks=pytest.mark.slow),
        "gpt-second-half",
        "gpt-tied-norms",
    ],
)
@pytest.mark.parametrize("profile", [H100, CpuProfile()], ids=["gpu", "cpu"])
def test_the_bound_never_exceeds_the_walk(name, profile):
    """M17: for random models, plans, recomputation, ZeRO, precision and offload."""
    rng = random.Random(f"{name} {profile.cluster.device_type}")
    graph = random_chain(rng) if name.startswith("chain") else tiny(name)
    costs = CostCache(graph, profile)
    closest = 0.0
    for _ in range(PLANS_A_MODEL):
        plan, on_host = random_plan(graph, rng)
        exact = estimate(graph, profile, plan, costs=costs).memory
        for (rank, in_flight), parts in zip(bounds_of(plan, costs, on_host), exact, strict=True):
            least, total = float(rank.least(in_flight)), float(parts.total)
            assert least <= total * (1 + 1e-9), plan.model_dump_json(exclude={"layouts", "model"})
            assert rank.may_fit(in_flight, total * (1 + 1e-9))
            context = float(profile.context_bytes)
            closest = max(closest, (least - context) / (total - context))
    assert closest > 0.8, "a bound that is never near says nothing"


@pytest.mark.parametrize("name", ["gpt", "vit"])
def test_the_bound_holds_for_compiled_blocks(name):
    """Of which fewer gradients have memory, and under selective recomputation less is kept."""
    rng = random.Random(f"compiled {name}")
    graph = tiny(name)
    costs = CostCache(graph, H100, execution=find_execution("ours-compiled"))
    for _ in range(PLANS_A_MODEL):
        plan, on_host = random_plan(graph, rng)
        exact = estimate(graph, H100, plan, costs=costs).memory
        for (rank, in_flight), parts in zip(bounds_of(plan, costs, on_host), exact, strict=True):
            assert float(rank.least(in_flight)) <= float(parts.total) * (1 + 1e-9)


KEEPS_SUMS = replace(find_execution("ours-eager"), sums_stay=True, bucket_bytes=2, adds_late=True)


def test_the_bound_holds_for_a_runtime_whose_sums_of_gradients_stay():
    """With buckets beside them, and gradients that are added late, as nanotron's."""
    rng = random.Random("sums stay")
    graph = tiny("gpt")
    costs, ours = CostCache(graph, H100, execution=KEEPS_SUMS), CostCache(graph, H100)
    more = 0
    for _ in range(PLANS_A_MODEL):
        plan, on_host = random_plan(graph, rng)
        exact = estimate(graph, H100, plan, costs=costs).memory
        least = estimate(graph, H100, plan, costs=ours).memory
        bounds = bounds_of(plan, costs, on_host)
        for (rank, in_flight), parts, of_ours in zip(bounds, exact, least, strict=True):
            assert float(rank.least(in_flight)) <= float(parts.total) * (1 + 1e-9)
            if plan.zero_stage < 2:
                assert parts.total >= of_ours.total * (1 - 1e-9)
            more += parts.total > of_ours.total
    assert more > PLANS_A_MODEL / 2


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("on_host", [NOTHING, OnHost(optimizer=True)], ids=str)
def test_lines_say_what_fits(zero, on_host):
    """A load fits a limit where it is below each of the lines of a rank without a load."""
    rng = np.random.default_rng(zero)
    replication = Replication(
        replicas=2, zero_stage=zero, precision="bf16", optimizer_on_host=on_host.optimizer
    )
    options = {
        "num_microbatches": 4, "recompute": "none", "profile": H100, "batch_bytes": 10**6,
        "ranks": Ranks.under(replication, find_execution("ours-eager"), H100),
    }  # fmt: skip
    load = StageLoad(saved_bytes=rng.uniform(0, 1e10, 99), param_bytes=rng.uniform(0, 1e10, 99))
    for in_flight in (1, 3, 4):
        limit = float(np.median(RankBound(load=load, **options).least(in_flight))) + 1.0
        lines = RankBound(load=StageLoad(), **options).lines(in_flight, limit)
        below = [
            live * load.saved_bytes + slope * load.param_bytes + fixed <= 0
            for live, slope, fixed in lines
        ]
        fits = RankBound(load=load, **options).may_fit(in_flight, limit)
        assert 0 < fits.sum() < 99
        assert np.array_equal(np.all(below, axis=0), fits)


COMPRESSION_FACTOR = 0.5
"""The toy part: an error-feedback buffer of gradient compression, half as large as parameters."""


def add_toy_part(monkeypatch):
    """Add a part of memory: an entry of `PARTS`."""

    def times(ranks, phase):
        return State(trained=COMPRESSION_FACTOR)

    monkeypatch.setitem(PARTS, "error_feedback", Part("communication_bytes", times))


def test_a_new_part_of_memory_is_an_entry(monkeypatch):
    """The estimate, the bound and a search all count it, and the bound still is one."""
    graph = tiny("gpt")
    machine = Machine(context_bytes=0.0, devices_per_node=4)
    costs = CostCache(graph, machine)
    plan = default_plan(graph, pp=2, num_microbatches=4)
    fixed = SearchRequest(
        num_devices=2, global_batch=8, dp=2, zero=0, recompute="none", microbatch_size=4,
        offload="none",
    )  # fmt: skip
    limit = find_plan(graph, machine, fixed).plan.estimate["peak_bytes"]
    limited = replace(fixed, memory_limit_bytes=limit)

    def counted():
        exact = estimate(graph, machine, plan, costs=costs).memory
        least = [
            float(rank.least(in_flight)) for rank, in_flight in bounds_of(plan, costs, NOTHING)
        ]
        return [float(parts.total) for parts in exact], least

    exact_before, least_before = counted()
    assert find_plan(graph, machine, limited).plan is not None
    add_toy_part(monkeypatch)
    exact_after, least_after = counted()
    overhead = 1 + machine.allocator_overhead_fraction
    for rank, load in enumerate(stage_loads(price_plan(plan, costs))):
        more = COMPRESSION_FACTOR * load.param_bytes * overhead
        assert exact_after[rank] - exact_before[rank] == pytest.approx(more, rel=1e-6)
        assert least_after[rank] - least_before[rank] == pytest.approx(more, rel=1e-6)
        assert least_after[rank] <= exact_after[rank]
    assert find_plan(graph, machine, limited).plan is None
