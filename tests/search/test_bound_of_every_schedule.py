"""The fast bound beside the simulator, schedule by schedule."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from costmodel import CostCache
from planner.errors import ScheduleError
from planner.language.schedule import Job, forward, full_backward, register_schedule
from planner.language.schedule.job_order import RoundTrips
from planner.language.schedule.registry import SCHEDULES
from search import find_plan
from search.bounds.catalogue import TableBounds
from search.candidates import Candidates
from search.op_layout.layouts import LayoutSolver
from search.partition.chain_dp import solve_chain
from search.priced_configuration import PricedConfiguration
from search.request import SearchRequest
from search.stages.layout_candidates import LayoutCandidates
from tests.captures import capture_module
from tests.search.machine import Machine

PP, MICROBATCHES, LAYERS = 4, 32, 16
LOOSE = {"fold_all_in_all_out", "fold_first_in_first_out"}
"""Of these the bound knows the work and the way of the first microbatch only: 4.2 and 8.1% below
the simulator here, where 3% is the goal."""

MACHINE = Machine(intra_bytes_per_s=1e15, alpha_s=0.0, max_devices=PP)


class Same(nn.Module):
    """Layers that all take the same time, and a loss that takes next to none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.mean()


@pytest.fixture(scope="module")
def candidates():
    batches = ({"x": torch.randn(size, 64)} for size in (2, 3))
    graph = capture_module(Same(), *batches, name="same")
    solver = LayoutSolver(graph=graph, profile=MACHINE)
    costs = CostCache(graph, MACHINE)
    return Candidates(
        graph=graph,
        profile=MACHINE,
        costs=costs,
        layouts=LayoutCandidates(solver=solver, costs=costs),
    )


def bound_and_step(candidates, schedule):
    """The bound of the partition phase for equal stages, and what the simulator says of them."""
    vpp = 2 if SCHEDULES[schedule].max_vpp != 1 else 1
    request = SearchRequest(
        num_devices=PP, global_batch=MICROBATCHES, microbatch_size=1, pp=PP, vpp=vpp,
        schedule=schedule, recompute="none",
    )  # fmt: skip
    config = next(candidates.shapes(request)[0].configurations())
    table = candidates.tables(config.tp, config.microbatch_size)[0]
    limit = float("inf")
    priced = PricedConfiguration(candidates, config, table)
    cut = priced.even_cut(limit) if vpp > 1 else solve_chain(priced.problem(limit)).cut
    assert cut is not None
    step_s = priced.quick_step_s(cut)
    assert step_s == pytest.approx(
        candidates.estimate(priced.plan(cut)).step_s,
        rel=1e-9,
    )
    if vpp == 1:
        assert TableBounds(table=table).least_step_s(config) <= step_s * (1 + 1e-9)
    return cut.value, step_s


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_the_bound_is_close_for_equal_stages(candidates, schedule):
    """E, X1: never above the simulated step, and within 3% of it but for those of `LOOSE`."""
    bound_s, step_s = bound_and_step(candidates, schedule)
    assert bound_s <= step_s * (1 + 1e-9)
    assert (bound_s >= 0.97 * step_s) == (schedule not in LOOSE)


@pytest.fixture
def last_first():
    """A schedule in one place, with what bounds may rely on: all forwards, then newest first."""

    def all_of_them(pp: int, vpp: int, num_microbatches: int) -> tuple[int, ...]:
        return (num_microbatches,) * pp

    @register_schedule(
        "last_first",
        in_flight_limit=all_of_them,
        round_trips=RoundTrips.AFTER_LAST_FORWARD,
        search_rank=99,
    )
    def last_first(pp: int, vpp: int, num_microbatches: int) -> list[list[Job]]:
        order = range(num_microbatches)
        return [
            [forward(rank, i) for i in order] + [full_backward(rank, i) for i in reversed(order)]
            for rank in range(pp)
        ]

    yield "last_first"
    del SCHEDULES["last_first"]


def test_a_new_schedule_is_bounded_by_what_it_states(candidates, last_first):
    """E, M17: nothing outside its registration names it; unstated, the bound is looser."""
    bound_s, step_s = bound_and_step(candidates, last_first)
    assert 0.97 * step_s <= bound_s <= step_s * (1 + 1e-9)
    stated = SCHEDULES[last_first]
    SCHEDULES[last_first] = replace(stated, round_trips=RoundTrips.UNKNOWN)
    assert bound_and_step(candidates, last_first)[0] < 0.97 * bound_s


def test_a_new_schedule_is_searched(candidates, last_first):
    """By name, and unasked as it has a place among those a search tries."""
    request = SearchRequest(
        num_devices=PP, global_batch=MICROBATCHES, pp=PP, schedule=last_first, recompute="none"
    )
    result = find_plan(candidates.graph, MACHINE, request)
    assert result.plan is not None
    assert result.plan.schedule == last_first
    assert result.certificate is not None
    assert result.certificate.gap < 0.03
    unasked = SearchRequest(num_devices=PP, global_batch=MICROBATCHES, pp=PP)
    shapes = candidates.shapes(unasked)
    assert last_first in {schedule for shape in shapes for schedule, _ in shape.options}


def test_a_wait_for_round_trips_needs_a_warmup():
    with pytest.raises(ScheduleError, match="first and last round trips; give its warmup too"):
        register_schedule("no_warmup", round_trips=RoundTrips.FIRST_AND_LAST)
