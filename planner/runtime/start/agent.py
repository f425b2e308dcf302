"""The agent of a node: torchelastic's own, told which failures a run goes on after.

torchelastic starts the ranks of a node, ends all when one fails, and meets the agents of other
nodes to start again (Rendezvous: a round has the nodes that are there). What is added here is what
it can't know: which failures would only come again, and under which plan the ranks of a round
train. With fewer ranks in a plan than the round has, the last ranks wait as spares.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import Store
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from planner.errors import PlannerError
from planner.nodes.interface import address_towards
from planner.nodes.waiting import REACHED_S, described, is_here, reach, waiting_at
from planner.runtime.process.environment import PLAN
from planner.runtime.start.course import Course
from planner.runtime.start.node_order import InOrder
from planner.runtime.start.node_watch import NodeWatch, lost_after_s

_PLAN_KEY, _DONE_KEY, _WATCH_KEY = "planner/plan", "planner/done", "planner/watch"
_READ_S = 20
"""Seconds that the store of all nodes may take to answer a question."""
_LONGEST_SEARCH_S, _LOOK_S = 3600, 0.2


class Agent(LocalElasticAgent):
    """Starts the ranks of this node, again and again. Mutable: the round it is in."""

    _watch: NodeWatch | None = None

    def __init__(self, *args: Any, course: Course, meeting: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._course, self._meeting = course, meeting

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._watch is not None and self._watch.lost:
            if not self._course.goes_on_without(self._watch.lost):
                self._remaining_restarts = 0
            return RunResult(state=WorkerState.FAILED)
        if not worker_group.workers:
            return self._watch_as_spare(worker_group)
        result = super()._monitor_workers(worker_group)
        # (torchelastic has ended the node's other ranks: what they left is complete.)
        if result.is_failed() and not self._course.goes_on(result.failures):
            self._remaining_restarts = 0
        return result

    def _begin_watch(self, worker_group: WorkerGroup) -> None:
        """Watch the nodes of this round."""
        self.end_watch()
        count = worker_group.group_world_size
        if count is None or count < 2 or not lost_after_s():
            return
        store, number = worker_group.store, worker_group.group_rank
        assert store is not None
        assert number is not None
        if number == 0:
            store.set(_WATCH_KEY, uuid.uuid4().hex)  # a round's own
        room = store.get(_WATCH_KEY).decode()
        self._watch = NodeWatch(self._meeting, room, number=number, count=count)
        self._watch.start()

    def end_watch(self) -> None:
        """Watch the other nodes no more."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._stop_workers(worker_group)
        worker_group.state = WorkerState.STOPPED
        limit = worker_group.spec.max_restarts
        self._course.begin_again(limit - self._remaining_restarts, limit)
        self._initialize_workers(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._begin_watch(worker_group)
        if not self._course.is_elastic:
            return dict(super()._start_workers(worker_group))
        store = worker_group.store
        assert store is not None
        total = worker_group.workers[0].world_size
        if worker_group.group_rank == 0:  # chooses for all nodes of the round
            num_ranks, plan = self._choose_for_all(store, total)
        else:
            chosen = chosen_for_all(store, lambda: self._watch.lost if self._watch else "")
            # Without ranks, this node waits for the next round, which its monitoring begins.
            num_ranks, plan = chosen or (0, "")
        worker_group.workers = [w for w in worker_group.workers if w.global_rank < num_ranks]
        os.environ[PLAN] = plan
        if not worker_group.workers:
            self._pcontext = None
            return {}
        for worker in worker_group.workers:
            worker.world_size = worker.role_world_size = num_ranks
        return dict(super()._start_workers(worker_group))

    def _choose_for_all(self, store: Store, total: int) -> tuple[int, str]:
        """Return the plan's number of ranks and its path, told to the other nodes; where there is
        no plan they are told why, and end as this node does.
        """
        try:
            num_ranks, plan = self._course.plan_for(total)
        except PlannerError as error:
            store.set(_PLAN_KEY, f"0\n{error}")
            raise
        store.set(_PLAN_KEY, f"{num_ranks}\n{plan}")
        return num_ranks, str(plan)

    def _watch_as_spare(self, worker_group: WorkerGroup) -> RunResult:
        """The state of a node without ranks is that of the others."""
        handler, store = worker_group.spec.rdzv_handler, worker_group.store
        assert store is not None
        try:
            if store.check([_DONE_KEY]):
                return RunResult(state=WorkerState.SUCCEEDED)
            is_over = handler.is_closed()
        except (RendezvousConnectionError, RuntimeError):  # the node that has the store is gone
            is_over = True
        if is_over:
            self._remaining_restarts = 0
        return RunResult(state=WorkerState.FAILED if is_over else WorkerState.HEALTHY)

    def _exit_barrier(self) -> None:
        store = self._worker_group.store
        if store is not None and self._worker_group.group_rank == 0:
            store.set(_DONE_KEY, "1")
        super()._exit_barrier()


def chosen_for_all(store: Store, lost: Callable[[], str]) -> tuple[int, str] | None:
    """Return what the first node chose: the ranks and the path of a plan; None where a node was
    lost while it searched (`lost` says which, and is empty until then).

    Raises PlannerError where it found no plan, or the store is gone.
    """
    until = time.monotonic() + _LONGEST_SEARCH_S
    try:
        while not store.check([_PLAN_KEY]):
            if lost():
                return None
            if time.monotonic() > until:
                raise RuntimeError(f"it searched for {_LONGEST_SEARCH_S} s")
            time.sleep(_LOOK_S)
        told = store.get(_PLAN_KEY).decode()
    except RuntimeError as error:  # of the store, which may have been on that node
        raise PlannerError(
            f"the first node told no plan for the nodes that are left ({error}); see what it wrote"
        ) from None
    num_ranks, _, plan = told.partition("\n")
    if num_ranks == "0":
        raise PlannerError(plan)
    return int(num_ranks), plan


def run_agent(
    command: Sequence[str],
    *,
    course: Course,
    ranks_here: int,
    nodes: tuple[int, int],
    node_rank: int | None,
    rendezvous: str,
    run_id: str,
    max_restarts: int,
    is_host: bool | None = None,
) -> RunResult:
    """Run a command on every rank of this node until the run is over; return how it ended.

    `nodes` are the fewest and the most that the run may have; `node_rank` is the number that this
    one was told, if any. `is_host` says whether the rendezvous is here, where a launcher told it
    (None: torch compares addresses). Raises SignalException when
    this process is told to end, PlannerError when the rendezvous can't be reached in a minute.
    """
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    host, _, _ = rendezvous.rpartition(":")
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=rendezvous,
        run_id=run_id,
        min_nodes=nodes[0],
        max_nodes=nodes[1],
        # A node is gone after 10 s without a sign, and the others wait 5 s for more to come.
        timeout=900,
        last_call_timeout=5,
        keep_alive_interval=2,
        keep_alive_max_attempt=5,
        read_timeout=_READ_S,
        # The address that ranks of other nodes are told: torch's own is what this host's name
        # stands for, which may be its loopback. On the node of the rendezvous that is its name.
        local_addr=address_towards(host) or host,
        **({} if is_host is None else {"is_host": str(is_host).lower()}),
    )
    with waiting_at(rendezvous, "this node"):
        if nodes[1] > 1 and not (is_here(host) or is_host):
            reach(rendezvous, REACHED_S)
        handler = InOrder(get_rendezvous_handler(parameters), node_rank)
    spec = WorkerSpec(
        role="default_role",
        local_world_size=ranks_here,
        entrypoint=command[0],
        args=tuple(command[1:]),
        rdzv_handler=handler,
        max_restarts=max_restarts,
        monitor_interval=0.1,
    )
    agent = Agent(spec=spec, logs_specs=DefaultLogsSpecs(), start_method="spawn", course=course,
                  meeting=rendezvous)  # fmt: skip
    leaves_alone = False
    try:
        return agent.run()
    except SignalException:
        # A node that leaves does not end the run of the others.
        leaves_alone = True
        raise
    except RendezvousError as error:
        leaves_alone = True
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise PlannerError(
            f"this node has lost the one that all meet at, {described(rendezvous)}: {reason}"
        ) from error
    finally:
        agent.end_watch()
        if not leaves_alone:
            handler.shutdown()
