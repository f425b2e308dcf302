"""find_plan: branch and bound over configurations, the cost model deciding.

Shapes (`space`) are opened into configurations when their common bound is the smallest left.
Every configuration passes up to three gates, each with a lower bound of its step time that is
no smaller than the one before:

    1. arithmetic (`bounds`): no stage boundaries needed; prunes by time and by memory
    2. the chain DP (`chain_dp`): the best boundaries under the memory limit, and the
       longest path of jobs that no run of them can avoid
    3. the cost model's estimate of that plan, simulated job by job: what decides

With virtual stages (vpp > 1) gate 2 takes one cut only, stages as equal as blocks allow
(`balance`), and ranks that are too full recompute; the certificate speaks of that cut.

Configurations wait in a heap by their bound, so when the smallest bound is no less than the
best estimate the search ends and the best is proved, except for what gate 2 leaves open: other
boundaries of an estimated configuration may take as little as its DP bound. The smallest of
those is the certificate's lower bound.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate, count
from operator import ge

from costmodel import Estimate
from costmodel.cache import CostCache
from planner.graph import ModelGraph
from planner.plan import Plan
from planner.schedule import find_schedule
from planner.units import format_bytes, format_seconds
from profiles import Profile
from search.bisect import solve_by_bisection
from search.brute_force import solve_by_brute_force
from search.candidates import Candidates, in_flight_of, with_estimate
from search.chain_dp import ChainProblem, Cut, solve_chain
from search.joint import solve_by_joint_program
from search.layouts import LayoutSolver, parse_pins_of
from search.nothing_fits import explain_nothing_fits
from search.request import Certificate, RunnerUp, SearchRequest, SearchResult
from search.space import Configuration, Refusals, Shape, list_shapes
from search.stage_table import StageTable
from search.synthesis import SYNTHESISED, with_synthesised_table

Progress = Callable[[float, str], None]

MOST_RUNNERS_UP = 5
PLAIN = ("1f1b", 1)
"""The schedule and vpp that are searched first, to have something for the others to beat."""

_MOST_OWN_TABLES = 4
"""How many of the best plans get a table of their own where the request asks for one."""

_MOST_REFUSALS = 8
"""How often a configuration is cut again when its estimate is over the memory limit."""
_LEAST_TIGHTENING = 0.002

_TOO_LARGE = "memory: a smaller microbatch does not fit either"
_NO_FASTER = "microbatch: a smaller one is as fast per sample"


@dataclass(frozen=True, kw_only=True, eq=False)
class Unopened:
    """A shape with one layout, not yet taken apart into configurations."""

    shape: Shape
    table: StageTable
    bound: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Entry:
    """A configuration with one layout, at some gate; `bound` is below its step time.

    `tighter_bytes` is the memory limit to cut under where the estimate refused what was cut
    under the request's own: gate 2 counts bytes more roughly than the estimate.
    """

    configuration: Configuration
    table: StageTable
    bound: float
    cut: Cut | None = None
    tighter_bytes: float | None = None
    refusals: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Finished:
    """A configuration with its plan and estimate."""

    configuration: Configuration
    plan: Plan
    answer: Estimate


@dataclass(kw_only=True)
class _Search:
    """State of one search; mutable because branch and bound is a walk."""

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
    later: list[Unopened] = field(default_factory=list)
    losers: list[tuple[float, int, Entry | Unopened]] = field(default_factory=list)
    open_bounds: list[float] = field(default_factory=list)
    simulated: int = 0
    best: Finished | None = None
    stopped_early: str = ""

    @property
    def best_s(self) -> float:
        """Step time of the best so far."""
        return self.best.answer.step_s if self.best else float("inf")

    def push(self, entry: Entry | Unopened) -> None:
        """Add what may hold the best, unless its bound already rules it out."""
        if entry.bound >= self.best_s:
            self.pruned["bound: cannot beat the best"] += size_of(entry)
            self.losers.append((entry.bound, next(self.ticket), entry))
            return
        heapq.heappush(self.heap, (entry.bound, next(self.ticket), entry))

    def out_of_time(self) -> bool:
        """Whether the request's time limit has passed."""
        limit = self.request.time_limit_s
        return limit is not None and time.perf_counter() - self.started > limit


def find_plan(
    graph: ModelGraph,
    profile: Profile,
    request: SearchRequest,
    progress: Progress | None = None,
) -> SearchResult:
    """Return the fastest plan under the cost model that fits, with its certificate.

    When nothing fits, `plan` is None and `reasons` say what would. Raises LayoutError when
    the request itself cannot be met: degrees that do not divide, an unknown schedule.
    """
    started = time.perf_counter()
    own_table = request.schedule == SYNTHESISED
    if own_table:
        request = replace(request, schedule=None)
    solver = LayoutSolver(graph=graph, profile=profile, pins=parse_pins_of(request))
    candidates = Candidates(
        graph=graph,
        profile=profile,
        solver=solver,
        costs=CostCache(graph, profile),
        model_file=request.model_file,
        precision=request.precision,
        cuts=tuple(accumulate(request.balance, initial=0)) if request.balance else (),
    )
    refusals = Refusals()
    shapes = list_shapes(
        request, graph, profile.cluster, can_split=solver.can_split, refusals=refusals
    )
    for every_size in (False, True):
        search = _Search(
            candidates=candidates,
            request=request,
            memory_limit_bytes=float(request.memory_limit_bytes or profile.memory_bytes),
            started=started,
            every_size=every_size,
        )
        considered = _first_gate(search, shapes, progress)
        _walk(search, progress)
        for entry in search.later:
            search.push(entry)
        _walk(search, progress)
        # Larger microbatches, though no faster, may lie otherwise and be the ones that fit.
        if search.best is not None or not (search.pruned[_NO_FASTER] or search.pruned[_TOO_LARGE]):
            break
    if search.best is None:
        reasons, smallest = explain_nothing_fits(
            candidates, shapes, request, search.memory_limit_bytes
        )
        return SearchResult(
            plan=None,
            reasons=reasons,
            smallest_memory_bytes=smallest,
            search_s=time.perf_counter() - started,
        )
    if own_table:
        _take_own_table(search)
    best = search.best
    certificate = _certificate(search, best, considered, refusals)
    plan = with_estimate(best.plan, best.answer)
    plan = plan.model_copy(
        update={"estimate": {**plan.estimate, "certificate": certificate.to_dict()}}
    )
    return SearchResult(
        plan=plan,
        runners_up=_runners_up(search, best),
        certificate=certificate,
        search_s=time.perf_counter() - started,
    )


def _take_own_table(search: _Search) -> None:
    """Give the best finished plans tables of their own; the fastest, if any, becomes the best."""
    for done in sorted(search.finished, key=lambda one: one.answer.step_s)[:_MOST_OWN_TABLES]:
        made = with_synthesised_table(
            done.plan,
            done.answer,
            costs=search.candidates.costs,
            memory_limit_bytes=search.memory_limit_bytes,
        )
        if made is not None and made[1].step_s < search.best_s:
            search.best = replace(done, plan=made[0], answer=made[1])


def size_of(entry: Entry | Unopened) -> int:
    """Return how many configurations an entry stands for."""
    return entry.shape.num_configurations if isinstance(entry, Unopened) else 1


def _first_gate(search: _Search, shapes: list[Shape], progress: Progress | None) -> int:
    """Push every shape that the arithmetic bounds allow; return how many configurations it had.

    Microbatch sizes are priced in ascending order, and no further once a size does not fit,
    or is no faster per sample than a smaller one (larger ones then only fill the pipeline
    less well).
    """
    groups: dict[tuple[int, int], list[Shape]] = {}
    for shape in shapes:
        groups.setdefault((shape.tp, shape.microbatch_size), []).append(shape)
    enough: dict[int, str] = {}
    per_sample: dict[int, float] = {}
    considered = 0
    for done, (tp, size) in enumerate(sorted(groups)):
        members = groups[tp, size]
        count = sum(shape.num_configurations for shape in members)
        if progress:
            progress(0.5 * done / len(groups), f"pricing tp={tp}, microbatch size {size}")
        if tp in enough:
            considered += count
            search.pruned[enough[tp]] += count
            continue
        fitted, seconds = False, float("inf")
        for table in search.candidates.tables(tp, size):
            considered += count
            bounds = search.candidates.bounds(table)
            seconds = min(seconds, bounds.block_seconds(members[0].recompute)[0] / size)
            for shape in members:
                fitted |= _push_shape(search, shape, table)
        if not fitted and not (search.every_size and _nearly_fits(search, members)):
            enough[tp] = _TOO_LARGE
        elif not search.every_size and seconds >= per_sample.get(tp, float("inf")):
            enough[tp] = _NO_FASTER
        per_sample[tp] = min(seconds, per_sample.get(tp, float("inf")))
    return considered


def _nearly_fits(search: _Search, members: list[Shape]) -> bool:
    """Whether a larger microbatch, whose layouts may lie otherwise, is still worth a look."""
    shape = members[0]
    tables = search.candidates.tables(shape.tp, shape.microbatch_size)
    least = min(
        search.candidates.bounds(table).least_peak_bytes(one)
        for table in tables
        for shape in members
        for one in replace(shape, options=shape.options[:1]).configurations()
    )
    return least <= 2 * search.memory_limit_bytes


def _push_shape(search: _Search, shape: Shape, table: StageTable) -> bool:
    """Push a shape without the ZeRO stages that cannot fit; return whether any can."""
    bounds = search.candidates.bounds(table)
    samples = {one.zero: one for one in replace(shape, options=shape.options[:1]).configurations()}
    zeros = tuple(
        zero
        for zero, one in samples.items()
        if bounds.least_peak_bytes(one) <= search.memory_limit_bytes
    )
    gone = (len(shape.zeros) - len(zeros)) * len(shape.options)
    if gone:
        search.pruned["memory: parameters or one block alone"] += gone
    if not zeros:
        return False
    bound = bounds.least_step_of_shape(shape)
    plain = tuple(option for option in shape.options if option == PLAIN)
    other = tuple(option for option in shape.options if option != PLAIN)
    for options, push in ((plain, search.push), (other, search.later.append)):
        if options:
            part = replace(shape, zeros=zeros, options=options)
            push(Unopened(shape=part, table=table, bound=bound))
    return True


def _open_shape(search: _Search, entry: Unopened) -> None:
    """Push a shape's configurations one by one, each with its own bound."""
    bounds = search.candidates.bounds(entry.table)
    for one in entry.shape.configurations():
        own = bounds.least_step_s(one) if one.vpp == 1 else 0.0
        search.push(Entry(configuration=one, table=entry.table, bound=max(entry.bound, own)))


def _walk(search: _Search, progress: Progress | None) -> None:
    """Take configurations by bound until none can beat the best."""
    while search.heap:
        bound, _, entry = search.heap[0]
        if bound >= search.best_s * (1.0 - search.request.max_gap):
            if bound < search.best_s:
                search.stopped_early = f"--gap {search.request.max_gap} reached"
            return
        if search.best is not None and search.out_of_time():
            search.stopped_early = f"--time-limit {search.request.time_limit_s} s passed"
            return
        heapq.heappop(search.heap)
        if isinstance(entry, Unopened):
            _open_shape(search, entry)
            continue
        if progress:
            looked = search.simulated / (search.simulated + len(search.heap) + 1)
            progress(0.5 + 0.5 * looked, f"cutting {entry.configuration.label}")
        if entry.cut is None:
            _second_gate(search, entry)
        else:
            _third_gate(search, entry, entry.cut)


def _second_gate(search: _Search, entry: Entry) -> None:
    """Cut the chain; push the configuration back with its cut and a tighter bound."""
    one, table = entry.configuration, entry.table
    limit = entry.tighter_bytes or search.memory_limit_bytes
    if one.vpp > 1 or one.pp == 1:
        cut = _only_cut(search, entry)
        if cut is None:
            search.pruned["memory: the even cut or the whole chain does not fit"] += 1
            return
        search.push(replace(entry, bound=max(entry.bound, cut.value), cut=cut))
        return
    in_flight = in_flight_of(one)
    if search.candidates.bounds(table).kept_bound(one, in_flight) > limit:
        search.pruned["memory: activations in flight"] += 1
        return
    splits = find_schedule(one.schedule).splits_backward
    key = (id(table), one.dp, one.zero, one.pp, one.recompute, splits)
    if any(all(map(ge, in_flight, least)) for least in search.too_many.get(key, ())):
        search.pruned["memory: a schedule that holds less does not fit either"] += 1
        return
    problem = search.candidates.problem(one, table, limit)
    if search.request.solver != "dp":
        cut = _SOLVERS[search.request.solver](problem)
        if cut is None:
            search.pruned[f"memory: {search.request.solver} found no stage boundaries"] += 1
            return
        bound = entry.bound if search.request.solver == "recursive" else cut.value
        search.push(replace(entry, bound=max(entry.bound, bound), cut=cut))
        return
    solved = solve_chain(problem, ceiling=search.best_s)
    if not solved.fits:
        if entry.tighter_bytes is None:
            search.too_many.setdefault(key, []).append(in_flight)
        search.pruned["memory: no stage boundaries fit"] += 1
        return
    if solved.cut is None:
        search.pruned["stage boundaries: the best cut cannot beat the best"] += 1
        return
    search.push(replace(entry, bound=max(entry.bound, solved.cut.value), cut=solved.cut))


_SOLVERS: dict[str, Callable[[ChainProblem], Cut | None]] = {
    "recursive": solve_by_bisection,
    "cpsat": solve_by_joint_program,
    "brute_force": solve_by_brute_force,
}
"""Searchers of stage boundaries beside the chain DP; a recursive cut proves nothing."""


def _only_cut(search: _Search, entry: Entry) -> Cut | None:
    """Return the one cut there is to try: a single stage, or even virtual ones; None if too big."""
    one, table, candidates = entry.configuration, entry.table, search.candidates
    limit = entry.tighter_bytes or search.memory_limit_bytes
    if one.vpp == 1:
        return candidates.one_stage(one, table, limit)
    return candidates.even_cut(one, table, limit)


def _third_gate(search: _Search, entry: Entry, cut: Cut) -> None:
    """Simulate; estimate in full, memory included, what might be the best."""
    step_s = search.candidates.quick_step_s(entry.configuration, entry.table, cut)
    search.simulated += 1
    # One cut stands for a configuration with virtual stages; otherwise others are still open.
    bound = step_s if entry.configuration.vpp > 1 else entry.bound
    if step_s >= search.best_s * (1 - 1e-9):
        search.open_bounds.append(bound)
        search.losers.append((step_s, next(search.ticket), entry))
        return
    done = _price(search, entry, cut)
    over = done.answer.peak_bytes - search.memory_limit_bytes
    if over > 0:
        search.simulated -= 1
        _cut_tighter(search, entry, over)
        return
    search.open_bounds.append(bound)
    search.finished.append(done)
    if done.answer.step_s < search.best_s:
        search.best = done


def _cut_tighter(search: _Search, entry: Entry, over_bytes: float) -> None:
    """Push the configuration back, to be cut under a limit that makes up for what it was over."""
    if entry.refusals == _MOST_REFUSALS:
        search.pruned["memory: the whole plan, rank by rank"] += 1
        return
    limit = entry.tighter_bytes or search.memory_limit_bytes
    tighter = min(limit - over_bytes, limit * (1 - _LEAST_TIGHTENING))
    search.push(
        replace(entry, cut=None, tighter_bytes=max(1.0, tighter), refusals=entry.refusals + 1)
    )


def _price(search: _Search, entry: Entry, cut: Cut) -> Finished:
    """Return the cost model's answer."""
    plan = search.candidates.plan(entry.configuration, entry.table, cut)
    answer = search.candidates.estimate(plan)
    return Finished(configuration=_as_chosen(entry.configuration, plan), plan=plan, answer=answer)


def _as_chosen(configuration: Configuration, plan: Plan) -> Configuration:
    """Return the configuration with the recompute that its stages ended up with."""
    used = {stage.recompute for stage in plan.stages}
    return replace(configuration, recompute=used.pop() if len(used) == 1 else "mixed")


_PROVED = {
    "dp": "chain dynamic programming, path bound",
    "cpsat": "joint integer program, path bound",
    "brute_force": "every cut tried, path bound",
    "recursive": "nobody: recursive bisection is not exact",
}


def _certificate(
    search: _Search, best: Finished, considered: int, refusals: Refusals
) -> Certificate:
    left = [bound for bound, _, _ in search.heap]
    waiting = sum(size_of(entry) for _, _, entry in search.heap)
    ended = not search.stopped_early
    beaten = waiting if ended else 0
    if beaten:
        search.pruned["bound: cannot beat the best"] += beaten
    lower = min([search.best_s, *search.open_bounds, *(() if ended else left)])
    return Certificate(
        best_s=search.best_s,
        lower_bound_s=min(lower, search.best_s),
        considered=considered,
        evaluated=search.simulated,
        unexplored=0 if ended else waiting,
        pruned=tuple(sorted(search.pruned.items())),
        proved_by=(
            ("degrees, microbatches and schedules", "branch and bound"),
            ("stage boundaries", _PROVED[search.request.solver]),
            ("placements in blocks", "variable elimination, whole or split block boundaries"),
            (
                "order of the best",
                "list scheduling, event simulator" if best.plan.table else "event simulator",
            ),
        ),
        stopped_early=search.stopped_early,
    )


def _runners_up(search: _Search, best: Finished) -> tuple[RunnerUp, ...]:
    """Return the next best configurations with the parts that make them slower.

    Those that the bounds ruled out are estimated here, best bound first, one for each choice
    of degrees, so that the answer is not five names for one layout.
    """
    found = {_degrees_of(best.configuration): best}
    for done in sorted(search.finished, key=lambda one: one.answer.step_s):
        found.setdefault(_degrees_of(done.configuration), done)
    tries = 0
    waiting = sorted([*search.losers, *search.heap], key=lambda one: one[:2])
    for _, _, entry in waiting:
        if isinstance(entry, Unopened):
            entry = _first_of(entry)
        if len(found) > MOST_RUNNERS_UP or tries >= 2 * MOST_RUNNERS_UP:
            break
        if _degrees_of(entry.configuration) in found:
            continue
        tries += 1
        cut = entry.cut or _cut(search, entry)
        priced = _price(search, entry, cut) if cut else None
        if priced is not None and priced.answer.peak_bytes <= search.memory_limit_bytes:
            found[_degrees_of(priced.configuration)] = priced
    rest = sorted(list(found.values())[1:], key=lambda one: one.answer.step_s)
    return tuple(
        RunnerUp(
            label=done.configuration.label,
            step_s=done.answer.step_s,
            peak_bytes=float(done.answer.peak_bytes),
            reason=why_slower(done.answer, best.answer),
        )
        for done in rest[:MOST_RUNNERS_UP]
    )


def _first_of(entry: Unopened) -> Entry:
    """Return a shape's plainest configuration, to stand for it among the runners-up."""
    options = sorted(entry.shape.options, key=lambda option: (option[1], option[0] != "1f1b"))
    zero = max(entry.shape.zeros, key=lambda stage: (stage == 1, stage))
    one = next(replace(entry.shape, options=tuple(options[:1]), zeros=(zero,)).configurations())
    return Entry(configuration=one, table=entry.table, bound=entry.bound)


def _degrees_of(one: Configuration) -> tuple[int, ...]:
    return (one.dp, one.cp, one.tp, one.pp)


def _cut(search: _Search, entry: Entry) -> Cut | None:
    one = entry.configuration
    if one.vpp > 1 or one.pp == 1:
        return _only_cut(search, entry)
    problem = search.candidates.problem(one, entry.table, search.memory_limit_bytes)
    return solve_chain(problem).cut


def why_slower(answer: Estimate, best: Estimate) -> str:
    """Say by how much an estimate is slower, and through which parts, largest first."""
    extra = answer.step_s - best.step_s
    mine, theirs = answer.to_dict()["time"], best.to_dict()["time"]
    parts = sorted(((mine[name] - theirs[name], name) for name in mine), reverse=True)
    shown = [
        f"{'+' if gain > 0 else '-'}{format_seconds(abs(gain))} {name.removesuffix('_s')}"
        for gain, name in parts
        if abs(gain) > 0.02 * max(abs(extra), 1e-12)
    ]
    percent = 100.0 * extra / best.step_s if best.step_s else 0.0
    return (
        f"{percent:.1f}% slower ({format_seconds(extra)}): {', '.join(shown)}; "
        f"peak {format_bytes(answer.peak_bytes)}"
    )
