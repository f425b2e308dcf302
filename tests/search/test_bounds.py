"""The catalogue of bounds: each below the cost model's answer, and adding one is one function."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest

from planner.language.schedule import find_schedule
from planner.language.schedule.job_order import RoundTrips
from search import SearchRequest, find_plan
from search.bounds.catalogue import (
    MEMORY_BOUNDS,
    STEP_BOUNDS,
    TableBounds,
    memory_bound,
    schedule_bound,
    step_bound,
)
from search.bounds.least_costs import LeastCosts
from search.bounds.round_trips import pipeline_line
from search.candidates import Candidates
from search.partition.chain_problem import Cut
from search.priced_configuration import PricedConfiguration
from search.space.configuration import Configuration, recompute_choices
from tests.builders import tiny_models
from tests.captures import capture_module
from tests.search.machine import Machine, Overlapping

MACHINES = {
    "plain": Machine(context_bytes=1e6, devices_per_node=4),
    "overlapping": Overlapping(alpha_s=1e-9, context_bytes=1e6, devices_per_node=4),
}
SAMPLES = 60


@dataclass(frozen=True)
class Sample:
    """A random plan: what is known before it is cut, and the cost model's answer."""

    costs: LeastCosts
    config: Configuration
    step_s: float
    peak_bytes: float
    quick_s: float
    """The step as the search simulates it."""


@cache
def captured(name: str):
    model = tiny_models()["gpt"]
    module = model.build()
    if name == "tied":
        module.head.weight = module.token.weight
    return capture_module(module, model.batch(2), model.batch(3), loss=model.loss, name=name)


@cache
def samples(machine: str, name: str) -> tuple[Sample, ...]:
    """Of a captured model on one of MACHINES."""
    request = SearchRequest(num_devices=8, global_batch=16, offload="none")
    return random_samples(captured(name), MACHINES[machine], request, SAMPLES)


def random_samples(graph, profile, asked: SearchRequest, most: int) -> tuple[Sample, ...]:
    """Random configurations of random schedules, each under random boundaries and recompute."""
    rng = np.random.default_rng(5)
    found: list[Sample] = []
    for schedule in (None, "fthenb", "naive", "zb_h1", "1f1b"):
        choices = {"schedule": schedule, "pp": 4} if schedule else {}
        if schedule == "zb_h1":  # under ZeRO its backwards are whole, and it is 1f1b
            choices["zero"] = 0
        request = replace(asked, **choices)
        candidates = Candidates.of(graph, profile, request)
        # Bounds are of all plans that a runtime may be priced with, of what its stack has not, too.
        candidates.expressed = candidates.layouts.expressed = None
        candidates.layouts.solver.usual = None
        shapes = [shape for shape in candidates.shapes(request) if shape.cp == 1]
        options = [config for shape in shapes for config in shape.configurations()]
        for at in rng.choice(len(options), most if schedule is None else most // 6):
            config = options[at]
            table = candidates.tables(config.tp, config.microbatch_size)[0]
            cut = random_cut(config, table.num_blocks, rng)
            priced = PricedConfiguration(candidates, config, table)
            plan = priced.plan(cut)
            answer = candidates.estimate(plan)
            inputs_s = table.least_inputs_s(config)
            costs = TableBounds(table=table)
            quick_s = priced.quick_step_s(cut) - inputs_s
            of_plan = answer.step_s - inputs_s, answer.peak_bytes, quick_s
            found.append(Sample(costs, config, *of_plan))
    return tuple(found)


def random_cut(config: Configuration, num_blocks: int, rng: np.random.Generator) -> Cut:
    """Any stage boundaries; any recompute choice of each stage, of each rank with several."""
    inner = np.sort(rng.choice(np.arange(1, num_blocks), config.pp * config.vpp - 1, replace=False))
    choices = rng.integers(len(recompute_choices(config.recompute)), size=config.pp * config.vpp)
    if config.vpp > 1:
        choices = np.repeat(choices[:1], config.pp * config.vpp)
    return Cut(cuts=(0, *inner.tolist(), num_blocks), choices=tuple(choices.tolist()), value=0)


@pytest.mark.parametrize("name", ["gpt", "tied"])
@pytest.mark.parametrize("machine", sorted(MACHINES))
@pytest.mark.parametrize("bound", [*STEP_BOUNDS, *MEMORY_BOUNDS], ids=lambda bound: bound.name)
def test_a_bound_is_never_above_the_estimate(bound, machine, name):
    """X1, M17: of every bound in the catalogue, for random plans; and each comes near to some."""
    parts = []
    for sample in samples(machine, name):
        if bound.reads_schedule and sample.config.vpp > 1:
            continue
        truth = sample.peak_bytes if bound in MEMORY_BOUNDS else sample.step_s
        parts.append(bound.formula(sample.costs, sample.config) / truth)
    assert len(parts) > SAMPLES / 2
    assert max(parts) <= 1 + 1e-9
    # Without ZeRO, stages of this size mostly wait for messages, which this bound leaves out.
    assert max(parts) > (0.02 if bound.name == "split_round_trips" else 0.2)


@pytest.fixture
def catalogue() -> Iterator[None]:
    """The catalogue is afterwards what it was."""
    kept = [*STEP_BOUNDS], [*MEMORY_BOUNDS]
    yield
    STEP_BOUNDS[:], MEMORY_BOUNDS[:] = kept


@pytest.mark.parametrize("register", [step_bound, schedule_bound, memory_bound])
def test_a_new_bound_is_one_function(catalogue, register):
    """What it says no plan can beat is left out: here the plans of the best degrees."""
    request = SearchRequest(num_devices=4, global_batch=8, vpp=1, pp=2)
    best = find_plan(captured("gpt"), MACHINES["plain"], request).plan
    assert best is not None

    @register
    def toy(costs: LeastCosts, config: Configuration) -> float:
        """Infinite for the degrees and the microbatch size of the best plan."""
        mine = config.batch_parts, config.tp, config.microbatch_size
        return float("inf") if mine == (best.dp, best.tp, best.microbatch_size) else 0.0

    found = find_plan(captured("gpt"), MACHINES["plain"], request).plan
    assert found is not None
    assert (found.dp, found.tp, found.microbatch_size) != (best.dp, best.tp, best.microbatch_size)
    assert found.estimate["step_s"] >= best.estimate["step_s"]


def test_the_highest_bound_counts():
    """Of a configuration all bounds and the inputs, of its shape those of any schedule alone."""
    sample = next(s for s in samples("plain", "gpt") if s.config.pp > 1 and s.config.vpp == 1)
    table, config = sample.costs.table, sample.config
    bounds = TableBounds(table=table)
    inputs_s = table.least_inputs_s(config)
    highest = max(bound.formula(sample.costs, config) for bound in STEP_BOUNDS)
    assert bounds.least_step_s(config) == highest + inputs_s
    assert bounds.least_peak_bytes(config) == max(
        bound.formula(sample.costs, config) for bound in MEMORY_BOUNDS
    )


def line(schedule):
    order = find_schedule(schedule).job_order(pp=4, num_microbatches=8)
    return pipeline_line(order, 4, 8)


@pytest.mark.parametrize("schedule", ["1f1b", "fthenb"])
def test_equal_stages_wait_as_the_textbook_says(schedule):
    """c = (m + pp - 1) / pp, and nothing is sent early."""
    assert line(schedule) == pytest.approx(((8 + 4 - 1) / 4, 0.0))


def test_of_an_unknown_order_only_the_way_of_one_microbatch_counts():
    """Less than of a stated one, and more than its share of the work."""
    order = find_schedule("zb_v").job_order(pp=4, num_microbatches=8)
    assert order.round_trips is RoundTrips.UNKNOWN
    unknown, _ = line("zb_v")
    assert 8 / 4 < unknown < line("1f1b")[0]
