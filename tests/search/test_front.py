"""M14: the front of a block's seconds against its bytes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from random import Random

import pytest

from profiles import load_profile
from search.op_layout.boundaries import class_groups
from search.op_layout.eliminate import solve_by_elimination
from search.op_layout.front import find_front
from search.op_layout.layouts import LayoutSolver
from tests.referees.block_ilp import solve_by_cpsat


@dataclass(frozen=True)
class Spot:
    seconds: float
    num_bytes: float


def cheapest(spots, price):
    return min(spots, key=lambda spot: (spot.seconds + price * spot.num_bytes, spot.num_bytes))


def corners_by_pairs(spots, last_price):
    """The same by trying the price between any two points: whatever is cheapest somewhere."""
    prices = {0.0, last_price}
    for spot in spots:
        for other in spots:
            if other.num_bytes < spot.num_bytes and other.seconds > spot.seconds:
                price = (other.seconds - spot.seconds) / (spot.num_bytes - other.num_bytes)
                if price <= last_price:
                    prices |= {price * (1 - 1e-9), price * (1 + 1e-9)}
    return {cheapest(spots, price) for price in prices if price <= last_price}


@pytest.mark.parametrize("seed", range(20))
def test_every_corner_is_found_and_nothing_else(seed):
    rng = Random(seed)
    spots = [Spot(rng.uniform(1, 2), rng.uniform(1, 100)) for _ in range(rng.choice((1, 5, 60)))]
    fast = cheapest(spots, 1e-15)
    last_price = rng.choice((0.1, 1, 10)) * fast.seconds / fast.num_bytes
    found = find_front(fast, lambda price: cheapest(spots, price), last_price, least_saving=0.0)
    assert set(found) == corners_by_pairs(spots, last_price)
    assert sorted(found, key=lambda spot: spot.seconds) == list(found)


def test_points_that_save_little_are_not_looked_for():
    spots = [Spot(1.0, 100.0), Spot(1.1, 96.0), Spot(1.3, 91.0)]
    required = []

    def solve(price):
        required.append(price)
        return cheapest(spots, price)

    assert list(find_front(spots[0], solve, 0.01, least_saving=0.1)) == [spots[0], spots[0]]
    assert len(required) == 1


@pytest.fixture(scope="module")
def h100():
    return load_profile("h100-sxm5-80gb")


@pytest.fixture(scope="module")
def corners(llama, h100):
    """The corners of a Llama layer on tp 8, as (problem, choice, seconds, bytes)."""
    solver = LayoutSolver(graph=llama, profile=h100)
    block = next(b for b in llama.blocks if b.name.endswith("layers.1"))
    problem = solver.at(8, 4).problem((block.class_index,))

    def solve(price):
        values = solve_by_elimination(problem, bytes_price=price).values
        return Spot(problem.value(values), problem.num_bytes(values))

    fast = solve(1e-18)
    return problem, find_front(fast, solve, fast.seconds / fast.num_bytes, least_saving=0.0)


@pytest.mark.parametrize("which", ["ends", pytest.param("all", marks=pytest.mark.slow)])
def test_a_corner_is_the_fastest_within_its_bytes(corners, which):
    """The integer program with memory as a constraint finds nothing faster in as many bytes."""
    problem, front = corners
    assert len(front) > 3
    for corner in front[1:] if which == "all" else (front[1], front[-1]):
        limited = solve_by_cpsat(problem, memory_limit_bytes=corner.num_bytes + 1)
        assert limited is not None
        assert problem.value(limited.values) == pytest.approx(corner.seconds, rel=1e-6)


def test_layouts_are_corners_of_the_whole_model(llama, h100, monkeypatch):
    """Each saves bytes against those that are faster; however little, where that is asked."""
    few = LayoutSolver(graph=llama, profile=h100).at(8, 32).worth_pricing
    monkeypatch.setattr("search.op_layout.layouts._LEAST_SAVING", 0.0)
    many = LayoutSolver(graph=llama, profile=h100).at(8, 32).worth_pricing
    assert 1 < len(few) < len(many)
    for found, saving in ((few, 0.02), (many, 0.0)):
        for fast, lean in pairwise(found):
            assert lean.seconds > fast.seconds
            assert lean.num_bytes < (1 - saving) * fast.num_bytes


def test_nothing_has_fewer_bytes_than_the_leanest(llama, h100):
    """The integer program finds nothing in a percent less."""
    solver = LayoutSolver(graph=llama, profile=h100)
    whole = solver.at(8, 4).leanest[0]
    assert whole.num_bytes < min(layout.num_bytes for layout in solver.at(8, 4).worth_pricing)
    for group in class_groups(llama, solver.shared):
        problem = solver.at(8, 4).problem(group)
        price = 1e4 * problem.value([0] * len(problem.variables)) / 1e9
        lean = solve_by_elimination(problem, bytes_price=price).values
        assert solve_by_cpsat(problem, memory_limit_bytes=0.99 * problem.num_bytes(lean)) is None
