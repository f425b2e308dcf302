"""Branch and bound over stages' own meshes, after all plans whose stages share one.

What may be mixed are the shapes of equal pp and microbatches: they differ in how a pp rank's
devices are cut into dp and tp. A mix passes the chain DP and the estimate, as a configuration of
one mesh does (`gates`), against the best plan found so far; its bounds join the certificate's.

Mixed are only stages that a rank holds one of, without cp, and microbatch sizes that the search
has looked at for one mesh.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np

from planner.errors import LayoutError
from search.bounds import pipeline_line
from search.candidates import in_flight_of
from search.chain_dp import Solved, solve_chain
from search.chain_problem import ChainProblem, Cut, TooLarge
from search.gates import SOLVERS, Progress, too_large_stages
from search.other_cuts import OpenCuts, close_gaps
from search.own_meshes import (
    Member,
    by_first_mesh,
    member_problem,
    mixed_problem,
    plan_of_mix,
)
from search.space import Configuration, Shape
from search.walk import BEATEN, Finished, Walk

_MOST_REFUSALS = 24
"""How often a mix is cut again when its estimate is over the memory limit."""

_JOBS_PER_ESTIMATE = 2000
"""What an estimate costs beside its simulation, in simulated jobs."""

MIXED = "own meshes: the best cut cannot beat the best"
APART = "own meshes: stages cannot hand samples over, or share weights, between them"
UNFIT = "own meshes, memory: no stage boundaries fit"


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


def search_own_meshes(search: Walk, shapes: Sequence[Shape], progress: Progress | None) -> int:
    """Look for plans whose stages have meshes of their own; return how many mixes there were."""
    heap: list[tuple[float, int, Mix]] = []
    open_mixes: list[Mix] = []
    considered = 0
    for mix in _mixes(search, shapes):
        considered += 1
        _push(search, heap, replace(mix, bound=mix.least_step_s))
    while heap:
        bound, _, mix = heapq.heappop(heap)
        if bound >= search.best_s * (1.0 - search.request.max_gap) or (
            search.best is not None and search.out_of_time()
        ):
            _stop(search, bound, 1 + len(heap))
            break
        if progress:
            progress(1.0, f"stages' own meshes: pp={mix.one.pp} {mix.one.schedule}")
        if mix.cut is None:
            _cut(search, heap, mix)
        else:
            left = _estimate(search, heap, mix, mix.cut)
            open_mixes += [left] if left else []
    if search.request.solver == "dp":
        close_gaps(search, [_open_cuts(search, mix) for mix in open_mixes])
    else:
        search.open_bounds += [mix.bound for mix in open_mixes]
    return considered


def _stop(search: Walk, bound: float, count: int) -> None:
    """Leave what waits: beaten, or within the gap asked for, or without the time."""
    if bound >= search.best_s:
        search.pruned[BEATEN] += count
        return
    search.left_out += count
    search.open_bounds.append(bound)
    if bound >= search.best_s * (1.0 - search.request.max_gap):
        search.stopped_early = f"--gap {search.request.max_gap} reached"
    else:
        search.stopped_early = f"--time-limit {search.request.time_limit_s} s passed"


def _push(search: Walk, heap: list[tuple[float, int, Mix]], mix: Mix) -> None:
    if mix.bound >= search.best_s:
        search.pruned[BEATEN] += 1
        return
    heapq.heappush(heap, (mix.bound, next(search.ticket), mix))


def _mixes(search: Walk, shapes: Sequence[Shape]) -> Iterator[Mix]:
    """Yield every choice of two or more meshes' tables with a schedule and a ZeRO stage."""
    groups: dict[tuple[int, int], list[Shape]] = {}
    for shape in shapes:
        looked_at = search.candidates.drafts.was_asked(shape.tp, shape.microbatch_size)
        if shape.pp > 1 and shape.cp == 1 and looked_at:
            groups.setdefault((shape.pp, shape.num_microbatches), []).append(shape)
    for group in groups.values():
        options = sorted({o for shape in group for o in shape.options if o[1] == 1})
        zeros = sorted({zero for shape in group for zero in shape.zeros})
        if len(group) < 2 or not options:
            continue
        tables = [search.candidates.tables(one.tp, one.microbatch_size) for one in group]
        for some, (schedule, _), zero in product(product(*tables), options, zeros):
            members = tuple(
                Member(configuration=_configured(shape, schedule, zero), table=table)
                for shape, table in zip(group, some, strict=True)
            )
            yield Mix(
                members=members,
                problems=tuple(
                    member_problem(search.candidates, one, search.memory_limit_bytes)
                    for one in members
                ),
            )


def _configured(shape: Shape, schedule: str, zero: int) -> Configuration:
    plain = replace(shape, options=((schedule, 1),), zeros=(zero,))
    return next(plain.configurations())


def _cut(search: Walk, heap: list[tuple[float, int, Mix]], mix: Mix) -> None:
    """Cut the chain and choose meshes; push the mix back with a tighter bound."""
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
    _push(search, heap, replace(mix, cut=solved.cut, bound=bound))


def _solved(search: Walk, problem: ChainProblem, ceiling: float) -> Solved:
    if search.request.solver == "dp":
        return solve_chain(problem, ceiling=ceiling)
    cut = SOLVERS[search.request.solver](problem)
    return Solved(cut=cut, fits=cut is not None)


def _price(search: Walk, mix: Mix, cut: Cut) -> Finished | None:
    """Return a cut's estimate; None where stages cannot hand over what the cut asks of them."""
    one, plan = plan_of_mix(search.candidates, mix.members, cut, mix.kinds)
    try:
        return Finished(configuration=one, plan=plan, answer=search.candidates.estimate(plan))
    except LayoutError:
        return None


def _too_large(search: Walk, mix: Mix, cut: Cut, done: Finished) -> tuple[TooLarge, ...]:
    tables = [mix.members[choice // mix.kinds].table for choice in cut.choices]
    live, limit = in_flight_of(mix.one), search.memory_limit_bytes
    return tuple(too_large_stages(done.plan, done.answer, cut, live, limit, tables))


def _estimate(search: Walk, heap: list[tuple[float, int, Mix]], mix: Mix, cut: Cut) -> Mix | None:
    """Price a cut: the best so far, or a loser, or cut again without what is too large. Return
    the mix if other cuts of it may be faster.
    """
    done = _price(search, mix, cut)
    if done is None:
        search.pruned[APART] += 1
        return mix
    if done.answer.peak_bytes > search.memory_limit_bytes:
        if mix.refusals == _MOST_REFUSALS:
            search.pruned[UNFIT] += 1
            return mix
        refused = (*mix.refused, *_too_large(search, mix, cut, done))
        again = replace(mix, cut=None, refused=refused, refusals=mix.refusals + 1)
        _push(search, heap, again)
        return None
    search.simulated += 1
    search.finished.append(done)
    if done.answer.step_s < search.best_s:
        search.best = done
    return mix


def _open_cuts(search: Walk, mix: Mix) -> OpenCuts:
    """Return the cuts of a mix that were not priced."""
    problem = replace(mixed_problem(mix.problems), refused=mix.refused)
    return OpenCuts(
        bound=mix.bound,
        num_jobs=_JOBS_PER_ESTIMATE + 2 * mix.one.pp * mix.one.num_microbatches,
        problems=lambda: by_first_mesh(problem),
        price=lambda cut: _price(search, mix, cut),
        too_large=lambda cut, done: _too_large(search, mix, cut, done),
    )
