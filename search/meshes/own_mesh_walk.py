"""Branch and bound over stages' own meshes, after all plans whose stages share one.

What may be mixed are the shapes of equal cp, pp and microbatches: they differ in how a pp rank's
devices are cut into dp and tp. A mix passes the chain DP and the estimate, as a configuration of
one mesh does (`gates`), against the best plan found so far; its bounds join the certificate's.
With several stages a rank the ranks' choices are listed instead (`own_mesh_even`).

Not mixed are microbatch sizes that the search left out for one mesh (`Walk.skipped_sizes`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

import numpy as np

from search.bounds.pipeline_line import pipeline_line
from search.candidates import in_flight_of
from search.gates import SOLVERS, Progress, too_large_stages
from search.meshes.own_mesh_even import Assignments, EvenMix, even_mixes
from search.meshes.own_meshes import (
    Member,
    by_first_mesh,
    least_of_blocks,
    member_problems,
    mixed_problem,
    price_mix,
)
from search.partition.chain_dp import Solved, solve_chain
from search.partition.chain_problem import ChainProblem, Cut, TooLarge
from search.partition.other_cuts import OpenCuts, close_gaps
from search.space import Configuration, Shape
from search.walk import BEATEN, Finished, Walk

_MOST_REFUSALS = 24
"""How often a mix is cut again when its estimate is over the memory limit."""

_JOBS_PER_ESTIMATE = 2000
"""What an estimate costs beside its simulation, in simulated jobs."""
_MOST_WORK = 200_000
"""Of one search, in simulated jobs, on what is listed of mixes beside their best choices."""

MIXED = "own meshes: the best cut cannot beat the best"
MIXED_EVEN = "own meshes: the even cut cannot beat the best"
APART = "own meshes: stages cannot hand samples over, or share weights, between them"
UNFIT = "own meshes, memory: no stage boundaries fit"
UNFIT_EVEN = "own meshes, memory: the even cut does not fit"


@dataclass(frozen=True, kw_only=True, eq=False)
class Mix:
    """Meshes that stages may choose from, under one schedule and ZeRO stage."""

    members: tuple[Member, ...]
    problems: tuple[ChainProblem, ...]
    bound: float = 0.0
    cut: Cut | None = None
    refused: tuple[TooLarge, ...] = ()
    refusals: int = 0

    @property
    def one(self) -> Configuration:
        """What the members agree about."""
        return self.members[0].configuration

    @property
    def kinds(self) -> int:
        """How many recompute choices a stage of each mesh has."""
        return len(self.problems[0].choices)

    @cached_property
    def least_step_s(self) -> float:
        """A step time that no mix can beat, as `bounds` has it of one mesh."""
        block = np.min([p.block_forward_s + p.block_backward_s for p in self.problems], axis=0)
        ahead = np.max([p.block_weight_s for p in self.problems], axis=0)
        m, pp = self.one.num_microbatches, self.one.pp
        bound = m * max(block.sum() / pp, block.max())
        if not self.problems[0].splits_backward:
            part = float((ahead / np.where(ahead > 0, block, 1.0)).max())
            part = min(round(part, 6) + 1e-6, 1.0) if part else 0.0
            if part < 1.0:
                factor, firsts = pipeline_line(self.one.schedule, pp, m, part)
                bound = max(bound, block.sum() * factor - firsts * ahead[1:].max(initial=0.0))
        return float(bound)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Listed:
    """A mix of virtual stages, once it is listed with its list; `priced` are lists of choices."""

    mix: EvenMix
    bound: float
    assignments: Assignments | None = None
    priced: frozenset[tuple[int, ...]] = frozenset()
    refusals: int = 0

    @property
    def one(self) -> Configuration:
        """What the members agree about."""
        return self.mix.members[0].configuration


def search_own_meshes(search: Walk, shapes: Sequence[Shape], progress: Progress | None) -> int:
    """Look for plans whose stages have meshes of their own; return how many mixes there were."""
    walk = _MixWalk(search=search)
    walk.push_all(shapes)
    walk.run(progress)
    return walk.considered


@dataclass(kw_only=True)
class _MixWalk:
    """What waits of one search's mixes; `work` is done on choices beside the best of each."""

    search: Walk
    heap: list[tuple[float, int, Mix | _Listed]] = field(default_factory=list)
    open_mixes: list[Mix] = field(default_factory=list)
    considered: int = 0
    work: float = 0.0

    def push_all(self, shapes: Sequence[Shape]) -> None:
        """Push every choice of two or more meshes' tables with a schedule and a ZeRO stage."""
        for group in _groups(self.search, shapes):
            options = sorted({option for shape in group for option in shape.options})
            zeros = sorted({zero for shape in group for zero in shape.zeros})
            if group[0].cp > 1 and self._least_with_cp(group) >= self.search.best_s:
                self._beaten(len(options) * len(zeros))
                continue
            for members in _members(self.search, group):
                self._push_mixes(members, options, zeros)

    def _least_with_cp(self, group: Sequence[Shape]) -> float:
        """Return a step time that no mix can beat if cp divides all that blocks do without it."""
        tables = self.search.candidates.tables
        without = [
            Member(configuration=_configured(shape), table=table)
            for shape in group
            for table in tables(shape.tp, shape.microbatch_size)
        ]
        return least_of_blocks(without) / group[0].cp

    def _push_mixes(
        self, members: tuple[Member, ...], options: list[tuple[str, int]], zeros: list[int]
    ) -> None:
        least = least_of_blocks(members)
        limit = self.search.memory_limit_bytes
        for (schedule, vpp), zero in product(options, zeros):
            some = tuple(_with(member, schedule, vpp, zero) for member in members)
            if least >= self.search.best_s:
                self._beaten(1)
            elif vpp > 1:
                for even in even_mixes(self.search.candidates, some, limit):
                    self.considered += 1
                    self.push(_Listed(mix=even, bound=even.step_bound(even.least_s)))
            else:
                self.considered += 1
                mix = Mix(
                    members=some, problems=member_problems(self.search.candidates, some, limit)
                )
                self.push(replace(mix, bound=mix.least_step_s))

    def _beaten(self, count: int) -> None:
        self.considered += count
        self.search.pruned[BEATEN] += count

    def push(self, mix: Mix | _Listed) -> None:
        """Let a mix wait, unless its bound already rules it out."""
        if mix.bound >= self.search.best_s:
            self._end(mix, BEATEN)
            return
        heapq.heappush(self.heap, (mix.bound, next(self.search.ticket), mix))

    def _end(self, mix: Mix | _Listed, rule: str) -> None:
        """Count a mix as ruled out, if nothing of it was priced."""
        if isinstance(mix, Mix) or not mix.priced:
            self.search.pruned[rule] += 1

    def run(self, progress: Progress | None) -> None:
        """Take mixes by bound until none can beat the best."""
        search = self.search
        while self.heap:
            bound, _, mix = heapq.heappop(self.heap)
            if bound >= search.best_s * (1.0 - search.request.max_gap) or (
                search.best is not None and search.out_of_time()
            ):
                self._stop(bound, [mix, *(one for _, _, one in self.heap)])
                break
            if progress:
                progress(1.0, f"stages' own meshes: pp={mix.one.pp} {mix.one.schedule}")
            if isinstance(mix, _Listed):
                self._list(mix)
            elif mix.cut is None:
                self._cut(mix)
            else:
                self._estimate(mix, mix.cut)
        if search.request.solver == "dp":
            close_gaps(search, [_open_cuts(search, mix) for mix in self.open_mixes])
        else:
            search.open_bounds += [mix.bound for mix in self.open_mixes]

    def _stop(self, bound: float, left: Sequence[Mix | _Listed]) -> None:
        """Leave what waits: beaten, or within the gap asked for, or without the time."""
        search = self.search
        if bound >= search.best_s:
            for mix in left:
                self._end(mix, BEATEN)
            return
        search.left_out += sum(isinstance(mix, Mix) or not mix.priced for mix in left)
        search.open_bounds.append(bound)
        if bound >= search.best_s * (1.0 - search.request.max_gap):
            search.stopped_early = f"`max_gap` {search.request.max_gap} reached"
        else:
            search.stopped_early = f"`time_limit_s` {search.request.time_limit_s} s passed"

    def _cut(self, mix: Mix) -> None:
        """Cut the chain and choose meshes; push the mix back with a tighter bound."""
        search = self.search
        problem = replace(mixed_problem(mix.problems), refused=mix.refused)
        solved = _solved(search, problem, search.best_s)
        if solved.cut is not None:
            ceiling, best = search.best_s, None
            for one in by_first_mesh(problem):
                cut = _solved(search, one, ceiling).cut
                if cut is not None and (best is None or cut.value < best.value):
                    ceiling, best = min(ceiling, cut.value), cut
            solved = replace(solved, cut=best)
        if solved.cut is None:
            search.pruned[MIXED if solved.fits else UNFIT] += 1
            return
        proves = search.request.solver != "recursive"
        bound = max(mix.bound, solved.cut.value) if proves else mix.bound
        self.push(replace(mix, cut=solved.cut, bound=bound))

    def _estimate(self, mix: Mix, cut: Cut) -> None:
        """Price a cut: the best so far, or a loser, or cut again without what is too large."""
        search = self.search
        done = price_mix(search.candidates, mix.members, cut, mix.kinds)
        if done is None:
            search.pruned[APART] += 1
        elif done.answer.peak_bytes > search.memory_limit_bytes:
            if mix.refusals < _MOST_REFUSALS:
                refused = (*mix.refused, *_too_large(search, mix, cut, done))
                self.push(replace(mix, cut=None, refused=refused, refusals=mix.refusals + 1))
                return
            search.pruned[UNFIT] += 1
        else:
            search.simulated += 1
            self._take(done)
        # Other cuts may be faster.
        self.open_mixes.append(mix)

    def _take(self, done: Finished) -> None:
        self.search.finished.append(done)
        if done.answer.step_s < self.search.best_s:
            self.search.best = done

    def _list(self, listed: _Listed) -> None:
        """Take a step in the list of a mix's choices; price those that are complete."""
        mix, assignments = listed.mix, listed.assignments
        if assignments is None:
            assignments = Assignments(mix, self.search.best_s)
            if not assignments.fits:
                self._end(listed, UNFIT_EVEN)
                return
        else:
            cut = assignments.advance()
            if cut is not None and cut.choices not in listed.priced and not mix.is_known(cut):
                listed = self._price_listed(listed, cut)
                if listed.assignments is None:
                    self.push(listed)
                    return
        if assignments.bound == float("inf"):
            self._end(listed, MIXED_EVEN)
        elif self.work > _MOST_WORK and listed.priced:
            self.search.open_bounds.append(assignments.bound)
        else:
            bound = max(listed.bound, assignments.bound)
            self.push(replace(listed, assignments=assignments, bound=bound))

    def _price_listed(self, listed: _Listed, cut: Cut) -> _Listed:
        """Price one choice; return the mix without its list where some of it is too large."""
        search, mix, one = self.search, listed.mix, listed.one
        if listed.priced:
            self.work += _JOBS_PER_ESTIMATE + 2 * one.pp * one.vpp * one.num_microbatches
            search.other_cuts += 1
        done = price_mix(search.candidates, mix.members, cut, mix.kinds)
        if done is not None and done.answer.peak_bytes > search.memory_limit_bytes:
            tables = [mix.members[choice // mix.kinds].table for choice in cut.choices]
            limit = search.memory_limit_bytes
            refused = too_large_stages(done.plan, done.answer, cut, (), limit, tables)
            return replace(listed, mix=mix.without(tuple(refused)), assignments=None)
        if not listed.priced:
            if done is None:
                search.pruned[APART] += 1
            else:
                search.simulated += 1
        if done is not None:
            self._take(done)
        return replace(listed, priced=listed.priced | {cut.choices})


def _groups(search: Walk, shapes: Sequence[Shape]) -> Iterator[list[Shape]]:
    """Yield shapes that stages of one plan may have."""
    groups: dict[tuple[int, int, int], list[Shape]] = {}
    for shape in shapes:
        if shape.pp > 1 and (shape.cp, shape.tp, shape.microbatch_size) not in search.skipped_sizes:
            key = shape.cp, shape.pp, shape.num_microbatches
            groups.setdefault(key, []).append(shape)
    yield from (group for group in groups.values() if len(group) > 1)


def _members(search: Walk, group: Sequence[Shape]) -> Iterator[tuple[Member, ...]]:
    """Yield every choice of a table for each shape that has any."""
    by_shape = [
        [
            Member(configuration=_configured(shape), table=table)
            for table in search.candidates.tables(shape.tp, shape.microbatch_size, shape.cp)
        ]
        for shape in group
    ]
    some = [members for members in by_shape if members]
    if len(some) > 1:
        yield from product(*some)


def _configured(shape: Shape) -> Configuration:
    return next(shape.configurations())


def _with(member: Member, schedule: str, vpp: int, zero: int) -> Member:
    configuration = replace(member.configuration, schedule=schedule, vpp=vpp, zero=zero)
    return replace(member, configuration=configuration)


def _solved(search: Walk, problem: ChainProblem, ceiling: float) -> Solved:
    if search.request.solver == "dp":
        return solve_chain(problem, ceiling=ceiling)
    cut = SOLVERS[search.request.solver](problem)
    return Solved(cut=cut, fits=cut is not None)


def _too_large(search: Walk, mix: Mix, cut: Cut, done: Finished) -> tuple[TooLarge, ...]:
    tables = [mix.members[choice // mix.kinds].table for choice in cut.choices]
    live, limit = in_flight_of(mix.one), search.memory_limit_bytes
    return tuple(too_large_stages(done.plan, done.answer, cut, live, limit, tables))


def _open_cuts(search: Walk, mix: Mix) -> OpenCuts:
    """Return the cuts of a mix that were not priced."""
    problem = replace(mixed_problem(mix.problems), refused=mix.refused)
    return OpenCuts(
        bound=mix.bound,
        num_jobs=_JOBS_PER_ESTIMATE + 2 * mix.one.pp * mix.one.num_microbatches,
        problems=lambda: by_first_mesh(problem),
        price=lambda cut: price_mix(search.candidates, mix.members, cut, mix.kinds),
        too_large=lambda cut, done: _too_large(search, mix, cut, done),
    )
