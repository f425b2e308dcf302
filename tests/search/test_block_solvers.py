"""Elimination, the integer program, CP-SAT and brute force agree on small block problems."""

import time
from dataclasses import replace

import numpy as np
import pytest

from planner.errors import ProfileError
from profiles import load_profile
from search.ilp.blocks import solve_by_integer_program
from search.op_layout import decompose, layouts
from search.op_layout.block_problem import BlockProblem, ReshardEdge, Variable
from search.op_layout.boundaries import boundary_options, class_groups
from search.op_layout.decompose import solve_by_decomposition
from search.op_layout.eliminate import (
    TooWide,
    minimise_tables,
    problem_tables,
    solve_by_elimination,
)
from search.op_layout.layouts import solve_block
from tests.captures import capture_tiny
from tests.referees.block_ilp import solve_by_cpsat
from tests.referees.blocks import best_by_brute_force


def random_problem(rng: np.random.Generator) -> BlockProblem:
    """A random chain with skips: each tensor is made by one variable and used by later ones."""
    count = int(rng.integers(2, 7))
    sizes = rng.integers(1, 5, count)
    variables = tuple(
        Variable(
            name=str(i),
            values=tuple(range(size)),
            seconds=rng.uniform(0, 5, size),
            num_bytes=rng.uniform(0, 9, size),
        )
        for i, size in enumerate(sizes)
    )
    edges = []
    for maker in range(-1, count - 1):
        rows, columns = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        seconds = rng.uniform(0, 4, (rows, columns)) * rng.integers(0, 2, (rows, columns))
        if rng.random() < 0.2:
            seconds[0, -1] = np.inf
        later = [i for i in range(maker + 1, count) if rng.random() < 0.6]
        uses = [(i, tuple(rng.integers(0, columns, sizes[i]).tolist())) for i in later]
        if rng.random() < 0.2:
            uses.append((None, (int(rng.integers(0, columns)),)))
        if not uses:
            continue
        made = 1 if maker < 0 else sizes[maker]
        edges.append(
            ReshardEdge(
                tensor=f"t{maker}",
                producer=None if maker < 0 else maker,
                source=tuple(rng.integers(0, rows, made).tolist()),
                uses=tuple(uses),
                seconds=seconds,
            )
        )
    return BlockProblem(axis_size=2, variables=variables, edges=tuple(edges), programs=())


def test_elimination_equals_brute_force_on_300_random_problems():
    """M19: folding nodes, edges and branches leaves the optimum unchanged."""
    rng = np.random.default_rng(3)
    for _ in range(300):
        problem = random_problem(rng)
        price = float(rng.choice([0.0, 0.5]))
        best, _ = best_by_brute_force(problem, price)
        found = solve_by_elimination(problem, bytes_price=price)
        assert found.cost == pytest.approx(best, rel=1e-12)
        if np.isfinite(best):
            assert problem.value(found.values, price) == pytest.approx(best, rel=1e-12)


def test_cpsat_equals_elimination():
    """M17: two solvers with nothing in common but the problem agree."""
    rng = np.random.default_rng(5)
    for _ in range(40):
        problem = random_problem(rng)
        folded = solve_by_elimination(problem)
        solved = solve_by_cpsat(problem)
        if not np.isfinite(folded.cost):
            assert solved is None
            continue
        assert solved is not None
        assert solved.cost == pytest.approx(folded.cost, rel=1e-6)


def test_the_integer_program_equals_brute_force():
    """M17: whole optima of the relaxation, or branching where it has none; at one price after
    another, as the program is kept.
    """
    rng = np.random.default_rng(5)
    for _ in range(200):
        problem = random_problem(rng)
        for price in rng.choice([0.0, 0.5, 30.0], size=2):
            best, _ = best_by_brute_force(problem, float(price))
            solved = solve_by_integer_program(problem, bytes_price=float(price))
            if not np.isfinite(best):
                assert solved is None
                continue
            assert solved is not None
            assert (solved.cost, solved.gap) == (pytest.approx(best, rel=1e-9), 0.0)


@pytest.mark.parametrize("price", [1e-18, 1e-12])
def test_the_integer_program_equals_elimination_on_blocks_of_models(price):
    """Each class of a small GPT on 2 and 4 ranks, between whole and between split blocks."""
    graph = capture_tiny("gpt")
    solver = layouts.LayoutSolver(graph=graph, profile=load_profile("h100-sxm5-80gb"))
    for tp in (2, 4):
        boundaries = boundary_options(graph, tp)
        for classes in class_groups(graph, solver.shared):
            for boundary in boundaries:
                problem = solver.at(tp, 2).problem(classes, boundary)
                exact = solve_by_elimination(problem, bytes_price=price)
                found, name = solve_block(problem, price, prefers_ilp=True)
                assert (name, found.gap) == ("integer programs", 0.0)
                assert found.cost == pytest.approx(exact.cost, rel=1e-12)


def test_a_fractional_relaxation_is_branched_on():
    """Three choices, each unlike the other two for nothing, but there are two values.

    Halves cost the relaxation nothing; of whole choices two must be alike, for 1 s.
    """
    values = Variable(name="v", values=(0, 1), seconds=np.zeros(2), num_bytes=np.zeros(2))
    edges = tuple(
        ReshardEdge(
            tensor=f"t{a}{b}",
            producer=a,
            source=(0, 1),
            uses=((b, (0, 1)),),
            seconds=np.eye(2),
        )
        for a, b in ((0, 1), (0, 2), (1, 2))
    )
    problem = BlockProblem(axis_size=2, variables=(values,) * 3, edges=edges, programs=())
    solved = solve_by_integer_program(problem)
    assert solved is not None
    assert (solved.cost, solved.gap) == (pytest.approx(1.0), 0.0)


def test_cpsat_keeps_a_memory_limit():
    """Two ops, each fast and big (1 s, 10 B) or slow and small (3 s, 4 B).

    14 B leave one op fast: 1 + 3 = 4 s. 8 B leave none: 6 s. 7 B are too few.
    """
    op = Variable(
        name="op", values=(0, 1), seconds=np.array([1.0, 3.0]), num_bytes=np.array([10.0, 4.0])
    )
    problem = BlockProblem(axis_size=2, variables=(op, op), edges=(), programs=())
    for limit, seconds in ((20, 2.0), (14, 4.0), (8, 6.0)):
        solved = solve_by_cpsat(problem, memory_limit_bytes=limit)
        assert solved is not None
        assert solved.cost == pytest.approx(seconds)
        assert problem.num_bytes(solved.values) <= limit
    assert solve_by_cpsat(problem, memory_limit_bytes=7) is None


def test_a_tensor_of_many_uses_is_eliminated():
    """Each ask is paid once, whether uses share one table or each has its own with what is paid."""
    rng = np.random.default_rng(7)
    for _ in range(100):
        problem = random_problem(rng)
        apart, sizes = problem_tables(problem, 0.5, most_edge_cells=0)
        _, cost = minimise_tables(apart, sizes, 10**6)
        assert cost == pytest.approx(solve_by_elimination(problem, bytes_price=0.5).cost, rel=1e-12)


def test_a_hundred_uses_of_one_tensor_are_eliminated():
    """More than an array has dims; all but the first use ask 1 for nothing, which costs 3 once."""
    user = Variable(name="use", values=(0, 1), seconds=np.array([0.1, 0.0]), num_bytes=np.zeros(2))
    only = Variable(name="only", values=(0,), seconds=np.zeros(1), num_bytes=np.zeros(1))
    for maker in (only, user):
        edge = ReshardEdge(
            tensor="t",
            producer=0,
            source=(0,) * len(maker.values),
            uses=tuple((i, (0, 1)) for i in range(1, 101)),
            seconds=np.array([[0.0, 3.0]]),
        )
        variables = (maker, *(user,) * 100)
        problem = BlockProblem(axis_size=2, variables=variables, edges=(edge,), programs=())
        assert solve_by_elimination(problem).cost == pytest.approx(3.0)
        few = BlockProblem(
            axis_size=2,
            variables=(maker, *(user,) * 20),
            edges=(replace(edge, uses=edge.uses[:20]),),
            programs=(),
        )
        assert solve_by_elimination(few).cost == pytest.approx(2.0)


def wide_problem(rng: np.random.Generator, count: int) -> BlockProblem:
    """A random DAG with long live ranges: tensors have up to a dozen uses anywhere later."""
    variables = []
    for index in range(count):
        size = int(rng.integers(1, 8))
        variables.append(
            Variable(
                name=str(index),
                values=tuple(range(size)),
                seconds=rng.uniform(0, 1, size),
                num_bytes=rng.uniform(0, 9, size),
            )
        )
    edges = []
    for maker in range(count - 1):
        rows, columns = (int(n) for n in rng.integers(1, 5, 2))
        num_uses = int(rng.integers(1, 13)) if rng.random() < 0.3 else 1
        uses = {
            min(maker + 1 + int(rng.exponential(count / 5)), count - 1) for _ in range(num_uses)
        }
        edges.append(
            ReshardEdge(
                tensor=f"t{maker}",
                producer=maker,
                source=tuple(rng.integers(0, rows, len(variables[maker].values)).tolist()),
                uses=tuple(
                    (i, tuple(rng.integers(0, columns, len(variables[i].values)).tolist()))
                    for i in sorted(uses)
                ),
                seconds=rng.uniform(0, 1, (rows, columns)) * rng.integers(0, 2, (rows, columns)),
            )
        )
    return BlockProblem(axis_size=2, variables=tuple(variables), edges=tuple(edges), programs=())


def test_decomposition_bounds_the_optimum(monkeypatch):
    """N1: bound <= optimum <= cost, on problems that elimination can solve and it can't."""
    monkeypatch.setattr(decompose, "_MOST_CELLS", 40)
    rng = np.random.default_rng(11)
    gaps = []
    for _ in range(40):
        problem = wide_problem(rng, int(rng.integers(2, 25)))
        price = float(rng.choice([0.0, 0.1]))
        best = solve_by_elimination(problem, bytes_price=price).cost
        found = solve_by_decomposition(problem, bytes_price=price)
        assert found is not None
        assert found.cost == pytest.approx(problem.value(found.values, price), rel=1e-12)
        assert found.cost * (1 - found.gap) <= best * (1 + 1e-9)
        assert best <= found.cost * (1 + 1e-9)
        gaps.append(found.gap)
    assert 0 < max(gaps) < 0.5
    assert min(gaps) == 0


@pytest.mark.parametrize("count", [300, 1000])
def test_a_wide_problem_always_has_a_choice(count):
    """N1: with hardly any time, too: what comes of the first round, and how sure that is."""
    problem = wide_problem(np.random.default_rng(count), count)
    with pytest.raises(TooWide):
        solve_by_elimination(problem)
    began = time.process_time()
    found, solver = solve_block(problem, 0.01, time_limit_s=0.001)
    assert time.process_time() - began < 30
    assert solver == "Lagrangian decomposition"
    assert found.cost == pytest.approx(problem.value(found.values, 0.01))
    cheapest = sum(float((v.seconds + 0.01 * v.num_bytes).min()) for v in problem.variables)
    assert cheapest <= found.cost * (1 - found.gap) <= found.cost
    assert found.gap < 0.5


def test_problems_too_wide_share_a_budget(monkeypatch):
    """N6: each may take a part of what those before left, so that hundreds end, too."""
    limits = []

    def slow(problem, price, *, prefers_ilp, time_limit_s):
        limits.append(time_limit_s)
        time.sleep(0.01)
        return solve_block(problem, price)[0], "Lagrangian decomposition"

    monkeypatch.setattr(layouts, "solve_block", slow)
    monkeypatch.setattr(layouts, "_WIDE_S", 0.04)
    graph = capture_tiny("gpt")
    solver = layouts.LayoutSolver(graph=graph, profile=load_profile("h100-sxm5-80gb"))
    _ = solver.at(2, 1).worth_pricing
    assert limits[0] == pytest.approx(0.005)
    assert limits == sorted(limits, reverse=True)
    assert limits[-1] == 0.0


def test_infinite_prices_are_refused():
    """N1: there is nothing to choose where everything takes for ever; in one line."""
    never = Variable(name="v", values=(0,), seconds=np.array([np.inf]), num_bytes=np.zeros(1))
    problem = BlockProblem(axis_size=2, variables=(never,), edges=(), programs=())
    with pytest.raises(ProfileError, match="takes a finite time"):
        solve_block(problem, 0.0)


def test_the_exact_solver_that_suits_a_problem_is_the_first(monkeypatch):
    """1 s and 2 bytes against 3 s and none: which is less depends on the price of a byte. What has
    too many pairs for an integer program is decomposed, and the answer is the same."""
    only = Variable(
        name="v", values=(0, 1), seconds=np.array([1.0, 3.0]), num_bytes=np.array([2.0, 0.0])
    )
    problem = BlockProblem(axis_size=2, variables=(only,), edges=(), programs=())

    def solved(bytes_price):
        choice, solver = solve_block(problem, bytes_price)
        return tuple(choice.values), choice.cost, solver

    assert solved(0.5) == ((0,), 2.0, "variable elimination")
    assert solved(1.5) == ((1,), 3.0, "variable elimination")

    def too_wide(*_args, **_options):
        raise TooWide

    monkeypatch.setattr(layouts, "solve_by_elimination", too_wide)
    assert solved(1.5) == ((1,), pytest.approx(3.0), "integer programs")
    monkeypatch.setattr(layouts, "_MOST_PAIRS", -1)
    assert solved(1.5) == ((1,), pytest.approx(3.0), "Lagrangian decomposition")


def test_a_block_too_wide_for_elimination_is_an_integer_program(monkeypatch):
    """X1: and the certificate says who proved it, and what part of it nobody did."""
    rng = np.random.default_rng(5)
    problem = next(
        p
        for p in iter(lambda: random_problem(rng), None)
        if np.isfinite(solve_by_elimination(p).cost)
    )

    def too_wide(*_args, **_options):
        raise TooWide

    monkeypatch.setattr(layouts, "solve_by_elimination", too_wide)
    best, solver = solve_block(problem, 0.0)
    assert (best.gap, solver) == (0.0, "integer programs")
    solver = layouts.LayoutSolver(graph=None, profile=None)
    solver._solvers, solver.gap = {"integer programs"}, 0.25
    assert solver.proof == (
        "integer programs, whole or split block boundaries, "
        "up to 0.25 of a block's seconds unproved"
    )
