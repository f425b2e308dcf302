"""M17: strategies that only cut in more segments are left out, and the optimum stays."""

from __future__ import annotations

import pytest

from planner.language.layout.placement import OpSharding, Shard
from search.op_layout import block_build
from search.op_layout.boundaries import boundary_options, class_groups
from search.op_layout.eliminate import solve_by_elimination
from search.op_layout.layouts import LayoutSolver
from search.op_layout.reshard_edges import Strategies, shared_strategies
from search.op_layout.segments import kept_segments, without
from tests.captures import capture_tiny
from tests.search.machine import Machine


def keep_all(ops):
    """Keep the segments of every placement that an op is offered."""
    return tuple(
        frozenset(
            (at, place)
            for strategy in strategies.values
            for at, place in enumerate((*strategy.inputs, *strategy.outputs))
            if isinstance(place, Shard)
        )
        for _, strategies in ops
    )


@pytest.mark.parametrize("name", ["gpt", "hf-gpt2", "hf-llama"])
def test_the_best_choice_needs_no_segments_that_lead_nowhere(name, monkeypatch):
    """For time alone and with a price of bytes, with fused projections and flattened batches."""
    graph = capture_tiny(name)
    machine = Machine(context_bytes=0.0, devices_per_node=4)

    def solved(tp: int, size: int) -> tuple[int, list[float]]:
        """Return how many strategies there were, and the costs of the best choices."""
        solver = LayoutSolver(graph=graph, profile=machine)
        problems = [
            solver.at(tp, size).problem(classes, boundary)
            for boundary in boundary_options(graph, tp)
            for classes in class_groups(graph, solver.shared)
        ]
        count = sum(len(v.values) for problem in problems for v in problem.variables)
        prices = (1e-18, 1e-9)
        return count, [
            solve_by_elimination(problem, bytes_price=price).cost
            for problem in problems
            for price in prices
        ]

    left_out = 0
    for degrees in ((2, 2), (2, 4)):
        fewer, found = solved(*degrees)
        with monkeypatch.context() as patch:
            patch.setattr(block_build, "kept_segments", keep_all)
            every, best = solved(*degrees)
        left_out += every - fewer
        assert found == pytest.approx(best, rel=1e-12)
    assert left_out > 0


def strategies(*pairs: tuple[Shard, Shard]) -> Strategies:
    """Of an op with one input and one output."""
    return shared_strategies(tuple(OpSharding(inputs=(i,), outputs=(o,)) for i, o in pairs))


def test_segments_go_where_the_plain_shard_does_as_well():
    """b -> c cuts the fused dim in its parts alone, so b keeps them; a has both and drops them."""
    plain, cut = Shard(0), Shard(0, 2)
    free = strategies((plain, plain), (cut, cut))
    bound = strategies((cut, plain))
    kept = kept_segments([(("a", "b"), free), (("b", "c"), bound), (("d", "e"), free)])
    assert kept[1] == {(0, cut)}
    assert kept[0] == {(0, cut), (1, cut)}, "what makes b so must take a so"
    assert kept[2] == frozenset()
    left, which = without(free, kept[2])
    assert (left.values, which.tolist()) == (free.values[:1], [0])
    assert without(free, kept[0])[0] is free
