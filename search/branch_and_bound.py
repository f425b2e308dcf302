"""Branch and bound: one queue of nodes, and the bookkeeping of the certificate.

A node stands for a set of plans. Its bound is a step time that no plan of the set beats. `refine`
replaces the node by nodes of smaller sets, or by an evaluated plan:

    take the node of the smallest bound
      bound >= best                  the node and all behind it are pruned: they cannot win
      bound >= best * (1 - gap)      they stay unexplored: the request accepts this gap
      the time limit has passed      they stay unexplored
      else                           refine it: push its nodes, compare its plan with the best

The time limit also ends a refinement (`planner.deadline`): its node stays unexplored with the bound
that it has, whatever of its nodes were pushed before.

What is quick to evaluate runs first, in an earlier *wave*, so that a good plan prunes the rest.
Waves follow each other in order; inside a wave the smallest bound is first.

Where the best K plans are sought, a node is compared with the K-th best of other configurations.

Every configuration that was considered ends as evaluated, pruned by a named rule, or unexplored.
"""

from __future__ import annotations

import heapq
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf
from typing import Any, Generic, TypeVar

from costmodel import Estimate
from planner.deadline import OutOfTime, check_time, is_interrupted, is_late
from planner.language.plan import Plan
from planner.units import format_seconds
from search.space.configuration import Configuration

BEATEN = "bound: cannot beat the best"

MOST_EXTRA_WORK = 200_000
"""Of one wave, in simulated jobs (a few tenths of a second), for nodes that only close the gap."""

Progress = Callable[[float, str], None]
Wave = tuple[int, ...]
"""The order in which sets of nodes are searched, compared like a version number."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluatedPlan:
    """A plan that fits, or may fit, with the cost model's estimate."""

    configuration: Configuration
    plan: Plan
    estimate: Estimate

    @property
    def step_s(self) -> float:
        """Estimated step time."""
        return self.estimate.step_s


def evaluated_plan(configuration: Configuration, plan: Plan, estimate: Estimate) -> EvaluatedPlan:
    """Return a plan under its configuration, with the recompute that its stages ended up with."""
    used = set(plan.recompute_by_block)
    recompute = used.pop() if len(used) == 1 else "mixed"
    chosen = replace(configuration, recompute=recompute)
    return EvaluatedPlan(configuration=chosen, plan=plan, estimate=estimate)


State = TypeVar("State", bound="BranchAndBound")


@dataclass(frozen=True, kw_only=True, eq=False)
class Node(ABC, Generic[State]):
    """A set of plans, none faster than `bound` (seconds)."""

    bound: float
    wave: Wave

    @property
    def num_configurations(self) -> int:
        """How many configurations of the certificate end with this node; 0: counted elsewhere."""
        return 0

    @property
    def depth(self) -> int:
        """Of equal bounds the deepest node is first, so that a plan is complete soon."""
        return 0

    @property
    def label(self) -> str:
        """What the user reads while the node is refined."""
        return "searching"

    @abstractmethod
    def refine(self, search: State) -> Iterator[Node[State] | EvaluatedPlan]:
        """Yield nodes that cover all plans of this node, or its plan."""


Entry = tuple[float, int, int, Node[Any]]
"""(bound, -depth, ticket, node): heap order; the ticket is the order of arrival."""


@dataclass(kw_only=True)
class BranchAndBound:
    """The queue, and what became of all nodes; mutable because a search advances.

    Attributes:
        num_best: how many plans of different configurations are sought, the best one first.
        ceiling_s: step time that a plan must be under to be of any use.
        max_gap: relative gap at which the search may stop, 0 for a proof.
        time_limit_s: the limit that the search runs in, as it is told; None for none.
        started: time of the start (`time.perf_counter`).
        progress: receives a fraction and a label before each node, if given.
        best: the fastest plan that fits, so far.
        evaluated: all plans that fit, in order of evaluation.
        num_considered: configurations that the search had to decide about.
        num_evaluated: configurations of which a plan was simulated.
        num_unexplored: configurations that a gap or time limit left without a decision.
        pruned: number of configurations by the rule that excluded them.
        set_aside: (bound, wave, ticket, node) of nodes that lost: candidates for runners-up.
        least_open_s: least step time that something unexplored may have.
        stopped_early: why the search stopped before its proof, empty if it did not.
        is_out_of_time: whether a refinement was cut short; then all that is left stays open.
        extra_work: simulated jobs spent in this wave on nodes that only close the gap.
    """

    num_best: int = 1
    max_gap: float = 0.0
    ceiling_s: float = float("inf")
    time_limit_s: float | None = None
    started: float = field(default_factory=time.perf_counter)
    progress: Progress | None = None
    best: EvaluatedPlan | None = None
    evaluated: list[EvaluatedPlan] = field(default_factory=list)
    num_considered: int = 0
    num_evaluated: int = 0
    num_unexplored: int = 0
    pruned: Counter[str] = field(default_factory=Counter)
    set_aside: list[tuple[float, Wave, int, Node[Any]]] = field(default_factory=list)
    least_open_s: float = float("inf")
    stopped_early: str = ""
    is_out_of_time: bool = False
    extra_work: float = 0.0
    _queue: dict[Wave, list[Entry]] = field(default_factory=dict)
    """Nodes that wait, a heap for each wave."""
    _ticket: count[int] = field(default_factory=count)
    """Numbers nodes in the order of arrival, so that entries never compare nodes."""
    _refined: int = 0
    """Nodes refined so far."""
    _last_of_leaders_s: float = float("inf")
    """Step time of the last of the `num_best` plans; infinite before there are so many."""

    @property
    def best_s(self) -> float:
        """Step time of the best plan so far, else what a plan must be faster than."""
        return self.best.step_s if self.best else self.ceiling_s

    @property
    def to_beat_s(self) -> float:
        """Step time that a plan must be under to be one of the `num_best`."""
        return self.best_s if self.num_best == 1 else self._last_of_leaders_s

    def leaders(self) -> list[EvaluatedPlan]:
        """Return the fastest plans of different configurations so far, at most `num_best`."""
        fastest: dict[Configuration, EvaluatedPlan] = {}
        for done in sorted(self.evaluated, key=lambda done: done.step_s):
            # Sorted: the first plan of a configuration is its fastest.
            fastest.setdefault(done.configuration, done)
        return list(fastest.values())[: self.num_best]

    @property
    def lower_bound_s(self) -> float:
        """A step time that no plan of the space beats, whatever waits in the queue."""
        return min(self.best_s, self.least_waiting_s)

    @property
    def least_waiting_s(self) -> float:
        """Least step time that something unexplored, or waiting in the queue, may have."""
        return min(self.least_open_s, *(heap[0][0] for heap in self._queue.values() if heap), inf)

    @property
    def num_waiting(self) -> int:
        """Configurations that wait in the queue."""
        return sum(node.num_configurations for heap in self._queue.values() for *_, node in heap)

    def push(self, node: Node[Any]) -> None:
        """Add a node to its wave, unless its bound already prunes it."""
        entry = (node.bound, -node.depth, next(self._ticket), node)
        # What cannot win is counted at once, and set aside for the runners-up.
        if node.bound >= self.to_beat_s:
            self._prune_all([entry])
        else:
            heapq.heappush(self._queue.setdefault(node.wave, []), entry)

    def run(self) -> None:
        """Refine nodes, wave by wave, until the queue is empty."""
        while self._queue:
            # Nodes may push into a wave before others that wait: waves are chosen anew each time.
            wave = min(self._queue)
            # Each wave may spend as much on nodes that only close the gap.
            self.extra_work = 0.0
            self._run_wave(self._queue[wave])
            if self.is_out_of_time:
                return
            del self._queue[wave]

    def _run_wave(self, heap: list[Entry]) -> None:
        while heap:
            bound, _, _, node = heap[0]
            # The heap's least bound: all behind it are no better.
            if bound >= self.to_beat_s:
                self._prune_all(heap)
                return
            if why := self._why_stop(bound):
                self._leave_all(heap, why)
                return
            if node.num_configurations == 0 and self.extra_work >= MOST_EXTRA_WORK:
                # Nodes that decide about a configuration go on; the others leave a gap.
                self.leave_open(bound)
                heap[:] = [entry for entry in heap if entry[-1].num_configurations]
                heapq.heapify(heap)
                continue
            self._tell(node)  # while it still waits: what is open counts it
            heapq.heappop(heap)
            try:
                check_time()
                for child in node.refine(self):
                    self.push(child) if isinstance(child, Node) else self.take(child)
            except OutOfTime:
                self._stop_in(node)
                return

    def _why_stop(self, bound: float) -> str:
        """Say why a node that may win is not refined; empty if it is."""
        # What is left is at most the accepted gap faster than the best plan.
        if bound >= self.to_beat_s * (1.0 - self.max_gap):
            return f"`max_gap` {self.max_gap} reached"
        # Without a bound of its own a node is refined even late: its nodes have bounds.
        if self.best is not None and bound > 0 and is_late():
            return self._time_passed
        return ""

    @property
    def _time_passed(self) -> str:
        if is_interrupted():
            return "it was interrupted"
        return f"`time_limit_s` {self.time_limit_s} s passed"

    def _stop_in(self, node: Node[Any]) -> None:
        """Leave open a node whose refinement was cut short, and all that waits."""
        self.is_out_of_time, self.stopped_early = True, self._time_passed
        self.leave_open(node.bound)
        for heap in self._queue.values():
            if heap:
                self.leave_open(heap[0][0])
                self._set_aside_all(heap)
        self._queue.clear()
        # Some nodes of the one cut short have been pushed, and some of its configurations decided.
        decided = self.num_evaluated + self.pruned.total()
        self.num_unexplored = self.num_considered - decided

    def _prune_all(self, entries: list[Entry]) -> None:
        self.prune(BEATEN, sum(node.num_configurations for *_, node in entries))
        self._set_aside_all(entries)

    def _leave_all(self, entries: list[Entry], why: str) -> None:
        self.leave_open(entries[0][0])
        self.num_unexplored += sum(node.num_configurations for *_, node in entries)
        self.stopped_early = why
        self._set_aside_all(entries)

    def _set_aside_all(self, entries: list[Entry]) -> None:
        # Nodes that only close a gap stand for no configuration of their own, so for no runner-up.
        self.set_aside += [
            (bound, node.wave, ticket, node)
            for bound, _, ticket, node in entries
            if node.num_configurations
        ]

    def _tell(self, node: Node[Any]) -> None:
        self._refined += 1
        if self.progress:
            waiting = sum(map(len, self._queue.values()))
            self.progress(self._refined / (self._refined + waiting), self._so_far() + node.label)

    def _so_far(self) -> str:
        """Say how fast the best plan is, and how far from it anything open may be."""
        if self.best is None:
            return ""
        least_s = self.least_waiting_s
        best = f"best {format_seconds(self.best_s)}"
        if 0 < least_s < self.best_s:
            best += f", gap {1 - least_s / self.best_s:.1%}"
        return f"{best}; "

    def prune(self, rule: str, num_configurations: int = 1) -> None:
        """Count configurations as excluded by a rule."""
        if num_configurations:
            self.pruned[rule] += num_configurations

    def leave_open(self, bound: float) -> None:
        """Note that something unexplored may be as fast as `bound`."""
        self.least_open_s = min(self.least_open_s, bound)

    def lose(self, node: Node[Any], step_s: float) -> None:
        """Keep a node whose simulated plan is slower than the best, for the runners-up."""
        self.set_aside.append((step_s, node.wave, next(self._ticket), node))

    def take(self, done: EvaluatedPlan) -> None:
        """Note a plan that fits; it is the best if it is faster than the best so far."""
        self.evaluated.append(done)
        if done.step_s < self.best_s:
            self.best = done
        if self.num_best > 1 and done.step_s < self._last_of_leaders_s:
            leaders = self.leaders()
            if len(leaders) == self.num_best:
                self._last_of_leaders_s = leaders[-1].step_s
