"""The k best partitions of a chain, beside a list of every partition there is."""

from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

from planner.deadline import OutOfTime, within
from search.branch_and_bound import BranchAndBound
from search.nodes.partitions import FirstStagesNode, PartitionableNode, PartitionsNode
from search.partition.chain_dp import solve_chain
from search.partition.chain_paths import Paths
from search.partition.chain_problem import ChainProblem, Cut
from search.partition.k_best import KBestPartitions
from tests.referees.cuts import all_cuts, cut_value
from tests.search.chains import random_chain, uniform_chain


@dataclass(frozen=True, kw_only=True, eq=False)
class Chain(PartitionableNode):
    """A chain whose partitions are written down instead of evaluated."""

    problem: ChainProblem
    found: list[Cut]

    def refine(self, search):
        raise NotImplementedError

    def problems(self, search):
        return [self.problem]

    def simulate(self, search, cut):
        return 0.0

    def evaluate(self, search, cut):
        self.found.append(cut)

    def tables(self, cut):
        raise NotImplementedError

    @property
    def num_jobs(self):
        return 1


def searched(problem, ceiling):
    """The search of all partitions of a problem under a ceiling, and those it came to, in order."""
    search = BranchAndBound(best=SimpleNamespace(step_s=ceiling))
    search.num_other_partitions = 0
    chain = Chain(bound=0.0, wave=(0,), configuration=None, problem=problem, found=[])
    search.push(PartitionsNode(bound=0.0, wave=(0,), of=chain))
    search.run()
    assert search.num_other_partitions == len(chain.found)
    return search, chain.found


def listed(problem, ceiling):
    """All partitions of a problem under a ceiling, in the order in which the queue takes them."""
    return searched(problem, ceiling)[1]


def test_every_partition_comes_once_in_the_order_of_its_bound(monkeypatch):
    monkeypatch.setattr("search.branch_and_bound.MOST_EXTRA_WORK", float("inf"))
    rng = np.random.default_rng(17)
    most = 0
    for _ in range(60):
        problem = random_chain(rng)
        paths = Paths.of_all(problem)
        values = {(*cut,): cut_value(paths, *cut) for cut in all_cuts(problem)}
        fitting = sorted(value for value in values.values() if value < np.inf)
        ceiling = fitting[len(fitting) // 2] * (1 + 1e-9) if fitting else 1e9
        found = listed(problem, ceiling)
        assert [cut.value for cut in found] == pytest.approx(
            [value for value in fitting if value < ceiling], rel=1e-12
        )
        assert len({(cut.cuts, cut.choices) for cut in found}) == len(found)
        assert all(
            values[cut.cuts, cut.choices] == pytest.approx(cut.value, rel=1e-12) for cut in found
        )
        best = solve_chain(problem).cut
        assert (best is None) == (not fitting)
        if best is not None:
            assert found[0].value == pytest.approx(best.value, rel=1e-12)
        most = max(most, len(found))
    assert most > 10


def test_a_set_is_not_faster_than_the_set_it_was_split_from(monkeypatch):
    monkeypatch.setattr("search.branch_and_bound.MOST_EXTRA_WORK", float("inf"))
    bounds = []
    refine = FirstStagesNode.refine

    def recorded(node, search):
        for child in refine(node, search):
            bounds.append((node.bound, child.bound))
            yield child

    monkeypatch.setattr(FirstStagesNode, "refine", recorded)
    rng = np.random.default_rng(18)
    for _ in range(60):
        listed(random_chain(rng), 1e9)
    assert len(bounds) > 50
    assert all(parent <= child for parent, child in bounds)


def test_extra_work_ends_and_leaves_the_least_bound_open(monkeypatch):
    problem = next(
        problem
        for problem in map(random_chain, map(np.random.default_rng, range(100)))
        if len(listed(problem, 1e9)) > 20
    )
    values = [cut.value for cut in listed(problem, 1e9)]
    monkeypatch.setattr("search.branch_and_bound.MOST_EXTRA_WORK", 1000.0)
    search, found = searched(problem, 1e9)
    assert 0 < len(found) < len(values)
    assert [cut.value for cut in found] == values[: len(found)]
    assert search.least_open_s == pytest.approx(values[len(found)], rel=1e-12)
    assert not search.stopped_early


def test_sets_of_first_stages_lead_to_the_best_partition():
    """No set that holds the best partition has a larger bound, and splitting all ends at it."""
    rng = np.random.default_rng(19)
    followed = 0
    for problem in (random_chain(rng) for _ in range(40)):
        best = solve_chain(problem).cut
        if best is None:
            continue
        partitions = KBestPartitions(problem, best.value * (1 + 1e-9))
        sets = list(partitions.by_first_end())
        assert min(some.bound for some in sets) <= best.value * (1 + 1e-12)
        found = []
        while sets:
            some = sets.pop()
            cut = partitions.partition(some)
            if cut is None:
                sets += partitions.split(some)
            else:
                found.append(cut.value)
        assert min(found) == pytest.approx(best.value, rel=1e-12)
        followed += 1
    assert followed > 10


def test_each_stage_is_a_place_where_time_may_be_up():
    """N6: of a thousand blocks a stage takes a tenth of a second, and a chain has dozens."""
    problem = uniform_chain(200, 16, 16)
    for readings in (8, 24):  # while stages are priced, and while partitions are valued
        with within(readings, clock=count().__next__), pytest.raises(OutOfTime):
            list(KBestPartitions(problem, np.inf).by_first_end())
