"""The state of a search: what waits, what was priced, what was ruled out by which rule.

A shape with one layout (`Unopened`) is taken apart into configurations (`Entry`) when its bound
is the smallest left; an entry goes back to the heap after each gate (`gates`) with a bound that
is no smaller than before.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from costmodel import Estimate
from planner.plan import Plan
from search.candidates import Candidates
from search.partition.chain_problem import Cut, TooLarge
from search.request import SearchRequest
from search.space import Configuration, Shape
from search.stages.learnt import Key
from search.stages.stage_table import StageTable

BEATEN = "bound: cannot beat the best"


@dataclass(frozen=True, kw_only=True, eq=False)
class Unopened:
    """A shape with one layout, not yet taken apart into configurations.

    A layout that was beaten before it was found is found where its table is asked for.
    """

    shape: Shape
    find_table: Callable[[], StageTable]
    bound: float

    @property
    def table(self) -> StageTable:
        """The layout's table."""
        return self.find_table()


@dataclass(frozen=True, kw_only=True, eq=False)
class Entry:
    """A configuration with one layout, at some gate; `bound` is below its step time.

    Gate 2 cuts by the bytes that a stage needs at least; `refused` are the stages of earlier cuts
    that the estimate found too large. After too many of those the cut is a careful one.
    """

    configuration: Configuration
    table: StageTable
    bound: float
    cut: Cut | None = None
    refused: tuple[TooLarge, ...] = ()
    refusals: int = 0
    is_careful: bool = False

    @property
    def key(self) -> Key:
        """What names the configuration with its layout."""
        return self.configuration, id(self.table)


@dataclass(frozen=True, kw_only=True, eq=False)
class Finished:
    """A configuration with its plan and estimate."""

    configuration: Configuration
    plan: Plan
    answer: Estimate


@dataclass(kw_only=True)
class Walk:
    """State of one search; mutable because branch and bound is a walk.

    `pipelines` are put off until what has none, quicker to price, is searched.
    `open_bounds` are step times that something left open may have, `open_cuts` priced
    configurations of which other cuts may be as fast as their bound.
    `skipped_sizes` are microbatch sizes left out by rule, as (cp, tp, size).
    `per_sample` are the least seconds of a sample through all blocks by (cp, tp), and
    `least_per_sample` those with what was never priced at its bound; `left_out` counts
    configurations that a time limit left without a price, `other_cuts` cuts simulated beside
    each configuration's best.
    """

    candidates: Candidates
    request: SearchRequest
    memory_limit_bytes: float
    started: float
    every_size: bool
    heap: list[tuple[float, int, Entry | Unopened]] = field(default_factory=list)
    ticket: count[int] = field(default_factory=count)
    pruned: Counter[str] = field(default_factory=Counter)
    too_many: dict[tuple, list[tuple[int, ...]]] = field(default_factory=dict)
    finished: list[Finished] = field(default_factory=list)
    pipelines: list[Unopened] = field(default_factory=list)
    losers: list[tuple[float, int, Entry | Unopened]] = field(default_factory=list)
    open_bounds: list[float] = field(default_factory=list)
    open_cuts: list[Entry] = field(default_factory=list)
    per_sample: dict[tuple[int, int], float] = field(default_factory=dict)
    least_per_sample: dict[tuple[int, int], float] = field(default_factory=dict)
    left_out: int = 0
    simulated: int = 0
    other_cuts: int = 0
    skipped_sizes: set[tuple[int, int, int]] = field(default_factory=set)
    best: Finished | None = None
    stopped_early: str = ""

    @property
    def best_s(self) -> float:
        """Step time of the best so far."""
        return self.best.answer.step_s if self.best else float("inf")

    def push(self, entry: Entry | Unopened) -> None:
        """Add what may hold the best, unless its bound already rules it out."""
        if entry.bound >= self.best_s:
            self.pruned[BEATEN] += size_of(entry)
            self.losers.append((entry.bound, next(self.ticket), entry))
            return
        heapq.heappush(self.heap, (entry.bound, next(self.ticket), entry))

    def open_pipelines(self) -> None:
        """Push what was put off."""
        for entry in self.pipelines:
            self.push(entry)
        self.pipelines.clear()

    def leave_out(self, bound: float, count: int) -> None:
        """Leave configurations that may be as fast as `bound` without a look: time is up."""
        self.left_out += count
        self.open_bounds.append(bound)
        self.stopped_early = f"`time_limit_s` {self.request.time_limit_s} s passed"

    def out_of_time(self) -> bool:
        """Whether the request's time limit has passed."""
        limit = self.request.time_limit_s
        return limit is not None and time.perf_counter() - self.started > limit


def size_of(entry: Entry | Unopened) -> int:
    """Return how many configurations an entry stands for."""
    return entry.shape.num_configurations if isinstance(entry, Unopened) else 1
