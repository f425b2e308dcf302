"""The agent of a node: which failures end a run, under which plan ranks start, and spares."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from planner.errors import PlannerError
from planner.runtime.process.environment import PLAN
from planner.runtime.start.agent import Agent, chosen_for_all


class Course:
    """Goes on as it is told to; plans are for so many ranks."""

    def __init__(self, *, goes_on: bool = True, num_ranks: int | None = None) -> None:
        self.is_elastic, self._num_ranks = num_ranks is not None, num_ranks
        self._goes_on = goes_on
        self.asked: list[object] = []

    def goes_on(self, failures) -> bool:
        self.asked.append(failures)
        return self._goes_on

    def plan_for(self, total: int):
        self.asked.append(total)
        return self._num_ranks, "plan of two.json"


def agent_of(course: Course) -> Agent:
    agent = Agent.__new__(Agent)
    agent._course, agent._remaining_restarts = course, 3
    return agent


def group_of(*ranks: int, store=None, number: int = 0, closed=lambda: False) -> SimpleNamespace:
    workers = [SimpleNamespace(global_rank=r, world_size=4, role_world_size=4) for r in ranks]
    spec = SimpleNamespace(rdzv_handler=SimpleNamespace(is_closed=closed))
    return SimpleNamespace(
        workers=workers, group_rank=number, group_world_size=1, store=store, spec=spec
    )


@pytest.mark.parametrize(
    ("state", "goes_on", "left"),
    [
        (WorkerState.FAILED, True, 3),
        (WorkerState.FAILED, False, 0),  # it would only come again
        (WorkerState.HEALTHY, False, 3),
    ],
)
def test_a_failure_that_would_come_again_leaves_no_restart(monkeypatch, state, goes_on, left):
    result = RunResult(state=state, failures={0: "died"})
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda self, group: result)
    course = Course(goes_on=goes_on)
    agent = agent_of(course)
    assert agent._monitor_workers(group_of(0)) is result
    assert agent._remaining_restarts == left
    assert course.asked == ([{0: "died"}] if state == WorkerState.FAILED else [])


@pytest.fixture
def started(monkeypatch):
    monkeypatch.setenv(PLAN, "before")  # and put back afterwards
    found: list[tuple[int, int]] = []

    def start(self, group):
        found.extend((w.global_rank, w.world_size) for w in group.workers)
        return dict(enumerate(group.workers))

    monkeypatch.setattr(LocalElasticAgent, "_start_workers", start)
    return found


def test_ranks_beyond_the_plan_do_not_start_and_a_node_of_them_waits(started):
    """Three nodes of two ranks, a plan of three: the second has a spare, the third is one."""
    store, course = dist.HashStore(), Course(num_ranks=3)
    agent = agent_of(course)
    agent._start_workers(group_of(0, 1, store=store))
    agent._start_workers(group_of(2, 3, store=store, number=1))
    spare = group_of(4, 5, store=store, number=2)
    assert agent._start_workers(spare) == {}
    assert started == [(0, 3), (1, 3), (2, 3)]
    assert course.asked == [4]  # a single node chooses, for all ranks of the round
    assert os.environ[PLAN] == "plan of two.json"
    assert spare.workers == []


def test_a_plan_that_is_given_starts_all(started):
    assert len(agent_of(Course())._start_workers(group_of(0, 1))) == 2
    assert started == [(0, 4), (1, 4)]
    assert os.environ[PLAN] == "before"


def test_a_spare_ends_as_the_others_do():
    store = dist.HashStore()
    agent = agent_of(Course())
    assert agent._monitor_workers(group_of(store=store)).state == WorkerState.HEALTHY
    assert agent._remaining_restarts == 3
    store.set("planner/done", "1")
    assert agent._monitor_workers(group_of(store=store)).state == WorkerState.SUCCEEDED


def gone():
    raise RuntimeError("Connection reset by peer")


@pytest.mark.parametrize("closed", [lambda: True, gone])
def test_a_spare_of_a_run_that_is_over_does_not_start_again(closed):
    agent = agent_of(Course())
    group = group_of(store=dist.HashStore(), closed=closed)
    assert agent._monitor_workers(group).state == WorkerState.FAILED
    assert agent._remaining_restarts == 0


def test_without_a_plan_for_those_left_every_node_ends_with_the_reason(started, monkeypatch):
    store, course = dist.HashStore(), Course(num_ranks=3)

    def nothing_fits(total):
        raise PlannerError("no plan fits 2 ranks; give more memory")

    monkeypatch.setattr(course, "plan_for", nothing_fits)
    for number in (0, 1):  # the first chooses, the other reads
        with pytest.raises(PlannerError, match="no plan fits 2 ranks; give more memory"):
            agent_of(course)._start_workers(group_of(number, store=store, number=number))
    assert not started


def test_the_store_lost_with_the_first_node_is_told(started):
    class Lost(dist.HashStore):
        def check(self, keys):
            raise dist.DistNetworkError("Connection reset by peer")

    with pytest.raises(PlannerError, match=r"told no plan .*Connection reset by peer"):
        agent_of(Course(num_ranks=3))._start_workers(group_of(0, store=Lost(), number=1))


def test_a_lost_node_ends_the_round():
    """Issue 19, 1: with restarts left where the course goes on without it, else with none."""
    for goes_on, left in ((True, 3), (False, 0)):
        course = Course()
        course.goes_on_without = lambda lost, goes_on=goes_on: goes_on
        agent = agent_of(course)
        agent._watch = SimpleNamespace(lost="node-b gave no sign for 30 s")
        assert agent._monitor_workers(group_of(0)).state is WorkerState.FAILED
        assert agent._remaining_restarts == left


def test_a_node_lost_while_it_searches_ends_the_round(started):
    """The others waited for its plan an hour; they start no rank, and meet again."""
    store = dist.HashStore()
    looks = iter(["", "", "node 0 (host a) gave no sign for 30 s"])
    assert chosen_for_all(store, lambda: next(looks)) is None
    agent = agent_of(Course(num_ranks=2))
    group = group_of(2, 3, store=store, number=1)
    agent._begin_watch = lambda worker_group: None
    agent._watch = SimpleNamespace(lost="node 0 (host a) gave no sign for 30 s")
    assert agent._start_workers(group) == {}
    assert started == []
    agent._course.goes_on_without = lambda lost: agent._course.asked.append(lost) or True
    assert agent._monitor_workers(group).state == WorkerState.FAILED
    assert agent._course.asked == ["node 0 (host a) gave no sign for 30 s"]
    assert agent._remaining_restarts == 3


def test_what_the_first_node_chose_is_read():
    store = dist.HashStore()
    store.set("planner/plan", "2\nplan.json")
    assert chosen_for_all(store, lambda: "") == (2, "plan.json")
    store.set("planner/plan", "0\nno plan of 3 ranks")
    with pytest.raises(PlannerError, match="no plan of 3 ranks"):
        chosen_for_all(store, lambda: "")
