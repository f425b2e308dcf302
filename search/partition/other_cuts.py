"""The cuts of a configuration beside its best one, by bound: what closes a search's gap.

The chain DP finds the cut of the least path (`chain_paths`), which may simulate slower than
another. `OtherCuts` lists all cuts of a chain in the order of their paths, best first:

    f(cuts so far) = max(their paths, V[s, k])        V of `chain_dp`, with stage 0's tail

V is exact, so f of a partial list is the path of its best completion, none is followed in vain
and each step takes O(n) beside one pass of the chain DP for every first cut that comes up.
`close_gaps` prices those whose path is under the best step time, the least bound first, until none
is left (the best is proved) or its share of work is done.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from search.gates import price, too_large_of
from search.partition.chain_dp import chain_values, reach_windows
from search.partition.chain_paths import lanes_of
from search.partition.chain_problem import ChainProblem, Cut, Floats, TooLarge
from search.walk import Entry, Finished, Walk

_MOST_WORK = 200_000
"""Of one search, in simulated jobs: a few tenths of a second."""
_LEAST_WORK = 200
"""What the shortest simulation costs, in jobs."""
_CELLS_PER_JOB = 200
"""Runs of the chain DP looked at in the time of one simulated job."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _FirstCut:
    """A chain whose stage 0 ends at a given block: the tail it has then, and V of each stage."""

    tail: float
    values: tuple[Floats, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Partial:
    """The first stages of a cut."""

    first: _FirstCut
    cuts: tuple[int, ...]
    choices: tuple[int, ...]
    value: float


class OtherCuts:
    """All cuts of a problem whose path is under a ceiling, in the order of their paths."""

    def __init__(self, problem: ChainProblem, ceiling: float) -> None:
        self._problem, self._ceiling = problem, ceiling
        self._heap: list[tuple[float, int, int, int | _Partial]] = []
        self._ticket = count()
        windows = reach_windows(problem, ceiling)
        self._lanes = lanes_of(problem, windows) if windows else []
        # For V the quickest choices do.
        self._quickest = lanes_of(problem, windows, quickest=True) if windows else []
        self.cells = sum(lane.until.size for lane in self._lanes)
        if not self._lanes:
            return
        first = self._lanes[0]
        self._ends = first.end[:, 0]
        self._tail = first.tail[:, 0] + problem.first_weight_s[self._ends]
        values = chain_values(problem, self._quickest, first_tail=None)
        bare = self._quickest[0].own(None)[:, :, 0].min(axis=0)
        bounds = np.maximum(bare, values[1][self._ends]) + self._tail
        for row in np.flatnonzero(bounds < ceiling).tolist():
            self._push(float(bounds[row]), row)

    @property
    def bound(self) -> float:
        """The path of the next cut is no shorter; infinity when there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    def advance(self) -> Cut | None:
        """Take one step towards the next cut; return it when it is complete."""
        _, _, _, node = heapq.heappop(self._heap)
        if isinstance(node, int):
            self._open(node)
            return None
        if len(node.choices) == self._problem.num_stages:
            return Cut(cuts=node.cuts, choices=node.choices, value=node.value)
        self._extend(node)
        return None

    def is_costly(self) -> bool:
        """Whether the next step is a pass of the chain DP."""
        return bool(self._heap) and isinstance(self._heap[0][3], int)

    def _push(self, value: float, node: int | _Partial) -> None:
        # Of equal paths the longest list first, so that a cut is complete soon.
        depth = 0 if isinstance(node, int) else len(node.choices)
        heapq.heappush(self._heap, (value, -depth, next(self._ticket), node))

    def _open(self, row: int) -> None:
        """Begin all cuts whose stage 0 ends where this row of its lane does."""
        first_tail = float(self._tail[row])
        values = tuple(chain_values(self._problem, self._quickest, first_tail=first_tail))
        first = _FirstCut(tail=first_tail, values=values)
        root = _Partial(first=first, cuts=(0,), choices=(), value=0.0)
        self._extend(root, rows=slice(row, row + 1))

    def _extend(self, node: _Partial, rows: slice = slice(None)) -> None:
        """Put each run that may come next behind a partial cut."""
        stage = len(node.choices)
        lane = self._lanes[stage]
        ends = lane.end[rows, node.cuts[-1] - lane.first_start]
        own = np.maximum(lane.own_from(node.cuts[-1], node.first.tail, rows), node.value)
        bounds = np.maximum(own, node.first.values[stage + 1][ends])
        for choice, row in np.argwhere(bounds < self._ceiling).tolist():
            self._push(
                float(bounds[choice, row]),
                _Partial(
                    first=node.first,
                    cuts=(*node.cuts, int(ends[row])),
                    choices=(*node.choices, choice),
                    value=float(own[choice, row]),
                ),
            )


@dataclass(kw_only=True, eq=False)
class OpenCuts:
    """What may have cuts faster than the best plan, none of them faster than `bound`.

    `problems` list its cuts, each in one of them; `price` answers None for what is not faster
    than the best or can't be, `too_large` says which stages of an answer don't fit. One simulation
    is of `num_jobs`.
    """

    bound: float
    num_jobs: int
    problems: Callable[[], Sequence[ChainProblem]]
    price: Callable[[Cut], Finished | None]
    too_large: Callable[[Cut, Finished], Iterable[TooLarge]]
    refused: list[TooLarge] = field(default_factory=list)

    def is_refused(self, cut: Cut) -> bool:
        """Whether some stage of a cut is known not to fit."""
        return any(one.is_in(cut) for one in self.refused)


def close_gaps(search: Walk, some: Iterable[OpenCuts]) -> None:
    """Price cuts left open, the least bound first, until none is or the work is done.

    What is still open afterwards joins `open_bounds`.
    """
    heap: list[tuple[float, int, OpenCuts, OtherCuts | None]] = []

    def push(one: OpenCuts, cuts: OtherCuts | None) -> None:
        bound = max(one.bound, cuts.bound if cuts else 0.0)
        if bound < search.best_s:
            heapq.heappush(heap, (bound, next(search.ticket), one, cuts))

    for one in some:
        push(one, None)
    work = 0.0
    while heap and work < _MOST_WORK and not search.out_of_time():
        if heap[0][0] >= search.best_s * (1.0 - search.request.max_gap):
            break
        _, _, one, cuts = heapq.heappop(heap)
        if cuts is None:
            for problem in one.problems():
                cuts = OtherCuts(problem, search.best_s)
                work += cuts.cells / _CELLS_PER_JOB
                push(one, cuts)
            continue
        work += cuts.cells / _CELLS_PER_JOB if cuts.is_costly() else 1
        cut = cuts.advance()
        if cut is not None and not one.is_refused(cut):
            work += max(one.num_jobs, _LEAST_WORK)
            search.other_cuts += 1
            _try(search, one, cut)
        push(one, cuts)
    search.open_bounds += [bound for bound, *_ in heap[:1]]


def _try(search: Walk, one: OpenCuts, cut: Cut) -> None:
    """Price a cut that may be the best, and remember what does not fit."""
    done = one.price(cut)
    if done is None:
        return
    if done.answer.peak_bytes > search.memory_limit_bytes:
        one.refused += one.too_large(cut, done)
        return
    search.finished.append(done)
    if done.answer.step_s < search.best_s:
        search.best = done


def close_gap(search: Walk) -> None:
    """Price other cuts of the configurations that were left open, simulating before estimating."""
    close_gaps(search, [_open_cuts(search, entry) for entry in search.open_cuts])


def _open_cuts(search: Walk, entry: Entry) -> OpenCuts:
    one, candidates = entry.configuration, search.candidates

    def problems() -> list[ChainProblem]:
        limit = search.memory_limit_bytes
        return [candidates.problem(one, entry.table, limit, refused=entry.refused)]

    def price_faster(cut: Cut) -> Finished | None:
        step_s = candidates.quick_step_s(one, entry.table, cut)
        return price(search, entry, cut) if step_s < search.best_s * (1 - 1e-9) else None

    return OpenCuts(
        bound=entry.bound,
        num_jobs=2 * one.pp * one.num_microbatches,
        problems=problems,
        price=price_faster,
        too_large=lambda cut, done: too_large_of(search, entry, cut, done),
    )
