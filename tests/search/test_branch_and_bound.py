"""The queue, on a problem small enough to see: the least sum of a number from each row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, product
from typing import Any

import numpy as np
import pytest

from planner.deadline import check_time, within
from search.branch_and_bound import BEATEN, BranchAndBound, Node


@dataclass(frozen=True)
class Done:
    """What takes the place of an evaluated plan."""

    step_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Sum(Node[Any]):
    """All sums that begin with these numbers; each row's least is the bound of the rest."""

    rows: tuple[tuple[float, ...], ...]
    chosen: tuple[float, ...] = ()

    @property
    def num_configurations(self) -> int:
        return int(np.prod([len(row) for row in self.rows[len(self.chosen) :]], dtype=int))

    @property
    def depth(self) -> int:
        return len(self.chosen)

    def refine(self, search: BranchAndBound) -> Iterator[Node[Any] | Any]:
        if len(self.chosen) == len(self.rows):
            search.num_evaluated += 1
            yield Done(sum(self.chosen))
            return
        for number in self.rows[len(self.chosen)]:
            yield sums(self.rows, (*self.chosen, number), wave=self.wave)


def sums(rows, chosen=(), wave=(0,)):
    bound = sum(chosen) + sum(min(row) for row in rows[len(chosen) :])
    return Sum(bound=bound, wave=wave, rows=rows, chosen=chosen)


def random_rows(rng):
    shape = int(rng.integers(2, 5)), int(rng.integers(2, 5))
    return tuple(map(tuple, rng.integers(1, 30, size=shape).astype(float).tolist()))


def searched(rows, **settings):
    search = BranchAndBound(num_considered=int(np.prod([len(row) for row in rows])), **settings)
    search.push(sums(rows))
    search.run()
    counted = search.num_evaluated + search.num_unexplored + search.pruned.total()
    assert counted == search.num_considered
    return search


def test_the_best_is_that_of_trying_all_and_every_configuration_is_counted_once():
    rng = np.random.default_rng(3)
    for _ in range(50):
        rows = random_rows(rng)
        best = min(sum(numbers) for numbers in product(*rows))
        search = searched(rows)
        assert search.best_s == search.lower_bound_s == best
        assert search.num_evaluated == 1, "the bound is exact"
        assert set(search.pruned) == {BEATEN}
        assert not search.stopped_early


def test_a_gap_stops_early_and_the_lower_bound_says_so():
    # Of the first wave 10 is the best; of the second nothing is below 9, within a quarter of 10.
    search = BranchAndBound(max_gap=0.25, num_considered=5)
    search.push(sums(((10.0,),)))
    search.push(sums(((9.0, 12.0), (0.0, 5.0)), wave=(1,)))
    search.run()
    assert search.best_s == 10.0
    assert search.lower_bound_s == 9.0
    assert search.num_unexplored == 4
    assert search.stopped_early == "`max_gap` 0.25 reached"


def test_a_time_limit_ends_what_has_a_bound_once_there_is_a_plan():
    search = BranchAndBound(time_limit_s=20.0, num_considered=3)
    search.push(sums(((10.0,),)))
    search.push(sums(((1.0, 2.0),), wave=(1,)))
    now = iter([0.0])
    with within(20.0, clock=lambda: next(now, 20.4)):  # late, and in the grace of 0.5 s
        search.run()
    assert (search.best_s, search.lower_bound_s) == (10.0, 1.0)
    assert search.num_unexplored == 2
    assert search.stopped_early == "`time_limit_s` 20.0 s passed"


@dataclass(frozen=True, kw_only=True, eq=False)
class SlowSum(Sum):
    """Reads the clock before each node that it yields."""

    def refine(self, search: BranchAndBound) -> Iterator[Node[Any] | Any]:
        for child in super().refine(search):
            check_time()
            yield (
                replace(self, bound=child.bound, chosen=child.chosen)
                if isinstance(child, Sum)
                else child
            )


def test_a_refinement_cut_short_leaves_its_bound_and_all_its_configurations_open():
    rng = np.random.default_rng(5)
    for readings in range(40):
        rows = random_rows(rng)
        best = min(sum(numbers) for numbers in product(*rows))
        root = sums(rows)
        search = BranchAndBound(time_limit_s=readings, num_considered=root.num_configurations)
        search.push(SlowSum(bound=root.bound, wave=root.wave, rows=rows))
        with within(readings, clock=count().__next__):
            search.run()
        counted = search.num_evaluated + search.num_unexplored + search.pruned.total()
        assert counted == search.num_considered
        assert search.lower_bound_s <= best <= search.best_s
        assert search.is_out_of_time == (search.best is None or search.num_unexplored > 0)
        assert bool(search.stopped_early) == search.is_out_of_time


def test_an_earlier_wave_is_searched_first_and_prunes_the_later_one():
    search = BranchAndBound()
    search.push(sums(((5.0, 6.0),), wave=(1, 0)))
    search.push(sums(((4.0, 7.0),), wave=(0, 9)))
    search.run()
    assert [done.step_s for done in search.evaluated] == [4.0]
    assert search.pruned[BEATEN] == 3
    assert sorted(bound for bound, *_ in search.set_aside) == [5.0, 7.0]


def test_progress_tells_the_best_so_far_and_the_gap_to_what_is_open():
    """A first wave finds 10; the second is open at 8, so a fifth may be gained."""
    told = []
    search = BranchAndBound(progress=lambda fraction, label: told.append(label))
    search.push(sums(((4.0,), (6.0,)), wave=(0,)))
    search.push(sums(((8.0, 9.0),), wave=(1,)))
    search.run()
    assert told[0] == "searching"  # nothing is known
    assert told[3] == "best 10 s, gap 20.0%; searching"
    assert search.best_s == 8.0
    assert all("gap 0" not in label for label in told)


def test_progress_is_a_fraction_of_what_is_known():
    told = []
    searched(
        ((1.0, 2.0), (3.0, 4.0)), progress=lambda fraction, label: told.append((fraction, label))
    )
    assert all(0 < fraction < 1 for fraction, _ in told)
    assert {label for _, label in told} == {"searching"}


@pytest.mark.parametrize("bound", [10.0, 11.0])
def test_a_node_no_faster_than_the_best_is_not_refined(bound):
    search = BranchAndBound(best=Done(10.0))
    search.push(Sum(bound=bound, wave=(0,), rows=((1.0,),)))
    search.run()
    assert search.best_s == 10.0
    assert search.pruned[BEATEN] == 1
