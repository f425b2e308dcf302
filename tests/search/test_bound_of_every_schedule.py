"""The fast bound beside the simulator, schedule by schedule."""

import pytest
import torch
from torch import nn

from costmodel import CostCache
from planner.schedule import SCHEDULES
from search.candidates import Candidates
from search.op_layout.layouts import LayoutSolver
from search.partition.chain_dp import solve_chain
from search.request import SearchRequest
from search.space import list_configurations
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
    return Candidates(graph=graph, profile=MACHINE, solver=solver, costs=costs)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_the_bound_is_close_for_equal_stages(candidates, schedule):
    """E, X1: never above the simulated step, and within 3% of it but for those of `LOOSE`."""
    vpp = 2 if SCHEDULES[schedule].max_vpp != 1 else 1
    request = SearchRequest(
        num_devices=PP, global_batch=MICROBATCHES, microbatch_size=1, pp=PP, vpp=vpp,
        schedule=schedule, recompute="none",
    )  # fmt: skip
    one = list_configurations(
        request, candidates.graph, MACHINE.cluster, can_split=candidates.solver.can_split
    )[0]
    table = candidates.tables(one.tp, one.microbatch_size)[0]
    limit = float("inf")
    cut = (
        candidates.even_cut(one, table, limit)
        if vpp > 1
        else solve_chain(candidates.problem(one, table, limit)).cut
    )
    assert cut is not None
    step_s = candidates.quick_step_s(one, table, cut)
    assert step_s == pytest.approx(
        candidates.estimate(candidates.plan(one, table, cut)).step_s, rel=1e-9
    )
    assert cut.value <= step_s * (1 + 1e-9)
    assert (cut.value >= 0.97 * step_s) == (schedule not in LOOSE)
