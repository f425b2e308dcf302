"""M16, M17: what the block program minimises is what the cost model says of lowered blocks."""

from __future__ import annotations

import numpy as np
import pytest

from costmodel.execution import find_execution
from costmodel.execution.executed_program import price_program
from costmodel.topology import group_along, lowered_groups
from planner.language.graph import TensorMeta
from planner.language.layout.axes import Degrees
from planner.language.layout.placement import Replicate, Shard
from planner.language.lowering.lowering import lower
from planner.language.plan import OURS
from search.op_layout.block_prices import OpSeconds, Prices
from search.op_layout.block_problem import BlockProblem, read_layouts
from search.op_layout.boundaries import boundary_options, class_groups
from search.op_layout.eliminate import solve_by_elimination
from search.op_layout.layouts import LayoutSolver
from search.op_layout.reshard_edges import MOVES, NO_WAY
from tests.captures import capture_tiny
from tests.search.machine import Machine

TP, SIZE = 2, 2
CLOSE = 1e-3  # chosen layouts agree to 1e-9; tiny arguments of a few ops change as they are lowered
MACHINE = Machine(context_bytes=0.0, devices_per_node=4)


def lowered_seconds(problem: BlockProblem, choice: list[int]) -> float:
    """Return the cost model's price of all blocks of a problem, lowered as chosen."""
    layouts, axes = read_layouts(problem, choice), lowered_groups(MACHINE.cluster, Degrees(tp=TP))
    total = 0.0
    for index, program in problem.programs:
        local = lower(program, layouts[index], axis_size=TP)
        price = price_program(local, MACHINE, axes=axes, execution=find_execution(OURS)).times
        total += price.forward_s + price.comm_forward_s + price.backward_s + price.comm_backward_s
    return total


def random_choice(problem: BlockProblem, best: tuple[int, ...], rng) -> list[int]:
    """Return the best choice but for one to three ops or shared parameters."""
    choice = list(best)
    for index in rng.integers(len(choice), size=rng.integers(1, 4)):
        choice[index] = int(rng.integers(len(problem.variables[index].values)))
    return choice


@pytest.mark.parametrize("name", ["gpt", "hf-gpt2", "hf-llama", "unet"])
def test_a_choice_costs_what_its_lowered_blocks_cost(name):
    """Chosen and random placements, between whole and split boundaries; tied weights once for
    each block that takes them."""
    graph = capture_tiny(name)
    solver, rng = LayoutSolver(graph=graph, profile=MACHINE), np.random.default_rng(29)
    compared = 0
    for boundary in boundary_options(graph, TP):
        for classes in class_groups(graph, solver.shared):
            problem = solver.at(TP, SIZE).problem(classes, boundary)
            best = solve_by_elimination(problem).values
            for choice in [list(best), *(random_choice(problem, best, rng) for _ in range(8))]:
                value = problem.value(choice)
                if not np.isfinite(value):
                    continue
                lowered = lowered_seconds(problem, choice)
                assert value <= lowered * (1 + CLOSE)
                compared += 1
                close = 1e-9 if choice == list(best) else CLOSE
                assert lowered == pytest.approx(value, rel=close)
    assert compared > 25


def test_a_move_costs_its_collectives():
    """There and, for a value with a gradient, back; a part of a parameter takes its part."""
    group = group_along(MACHINE.cluster, Degrees(tp=TP), "tp")
    prices = Prices(ops=OpSeconds(profile=MACHINE), group=group, axis_size=TP)
    for has_gradient in (False, True):
        for move, seconds in zip(MOVES, prices.of_moves(4096, has_gradient), strict=True):
            if move == NO_WAY:
                assert seconds == np.inf
                continue
            kinds = [kind for kind in move[: 1 + has_gradient] if kind]
            by_hand = [MACHINE.collective_seconds(kind, 4096, group).seconds for kind in kinds]
            assert seconds == pytest.approx(sum(by_hand))
    weight = TensorMeta(name="w", shape=(8, 4), dtype="float32", kind="param", requires_grad=True)
    assert prices.local_bytes(weight, Shard(0)) == weight.bytes_at(1) / TP
    assert prices.adding_s(weight, Shard(1)) == pytest.approx(
        prices.adding_s(weight, Replicate()) / TP
    )
