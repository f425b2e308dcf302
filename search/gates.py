"""The three gates that every configuration passes, each with a bound no smaller than the last.

    1. arithmetic (`bounds`): no stage boundaries needed; prunes by time and by memory; which
       shapes come to it at all, and with which layouts, is `first_gate`'s
    2. the chain DP (`chain_dp`): the best boundaries under the memory limit, and the
       longest path of jobs that no run of them can avoid
    3. the cost model's estimate of that plan, simulated job by job: what decides

With virtual stages (vpp > 1) gate 2 takes one cut only, stages as equal as blocks allow
(`balance`), and ranks that are too full recompute; the certificate speaks of that cut.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import ge

from costmodel import Estimate
from planner.plan import Plan
from planner.schedule import find_schedule
from search.candidates import in_flight_of
from search.ilp.joint import solve_by_joint_program
from search.partition.bisect import solve_by_bisection
from search.partition.chain_dp import solve_chain
from search.partition.chain_problem import ChainProblem, Cut, TooLarge
from search.space import Configuration
from search.stages.stage_table import StageTable
from search.walk import Entry, Finished, Unopened, Walk

Progress = Callable[[float, str], None]

_MOST_REFUSALS = 48
"""How often a configuration is cut again when its estimate is over the memory limit."""
_MOST_CAREFUL_REFUSALS = 8


def _open_shape(search: Walk, entry: Unopened) -> None:
    """Push a shape's configurations one by one, each with its own bound."""
    bounds = search.candidates.bounds(entry.table)
    learnt = search.candidates.learnt
    for one in entry.shape.configurations():
        own = bounds.least_step_s(one) if one.vpp == 1 else 0.0
        new = Entry(configuration=one, table=entry.table, bound=max(entry.bound, own))
        if learnt is not None:
            known = learnt.bounds.get(new.key, 0.0)
            refused = learnt.refused.get(new.key, ())
            new = replace(new, bound=max(new.bound, known), refused=refused)
        search.push(new)


def run_gates(search: Walk, progress: Progress | None) -> None:
    """Take configurations by bound until none can beat the best."""
    while search.heap:
        bound, _, entry = search.heap[0]
        if bound >= search.best_s * (1.0 - search.request.max_gap):
            if bound < search.best_s:
                search.stopped_early = f"`max_gap` {search.request.max_gap} reached"
            return
        if search.best is not None and search.out_of_time():
            search.stopped_early = f"`time_limit_s` {search.request.time_limit_s} s passed"
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


def _second_gate(search: Walk, entry: Entry) -> None:
    """Cut the chain; push the configuration back with its cut and a tighter bound."""
    one, table = entry.configuration, entry.table
    limit = search.memory_limit_bytes
    if one.vpp > 1 or one.pp == 1:
        if one.vpp > 1:
            least = search.candidates.even_stages(one, table).least_step_s(one)
            if least >= search.best_s:
                search.push(replace(entry, bound=least))
                return
        cut = only_cut(search, entry)
        if cut is None:
            _out(search, entry, "memory: the even cut or the whole chain does not fit")
            return
        search.push(replace(entry, bound=max(entry.bound, cut.value), cut=cut))
        return
    in_flight = in_flight_of(one)
    if search.candidates.bounds(table).kept_bound(one, in_flight) > limit:
        _out(search, entry, "memory: activations in flight")
        return
    splits = find_schedule(one.schedule).splits_backward
    key = (id(table), one.dp, one.zero, one.pp, one.recompute, splits)
    if any(all(map(ge, in_flight, least)) for least in search.too_many.get(key, ())):
        _out(search, entry, "memory: a schedule that holds less does not fit either")
        return
    problem = search.candidates.problem(
        one, table, limit, refused=entry.refused, is_careful=entry.is_careful
    )
    if search.request.solver != "dp":
        cut = SOLVERS[search.request.solver](problem)
        if cut is None:
            search.pruned[f"memory: {search.request.solver} found no stage boundaries"] += 1
            return
        bound = entry.bound if search.request.solver == "recursive" else cut.value
        search.push(replace(entry, bound=max(entry.bound, bound), cut=cut))
        return
    solved = solve_chain(problem, ceiling=search.best_s)
    if not solved.fits:
        if not entry.refused:
            search.too_many.setdefault(key, []).append(in_flight)
        _out(search, entry, "memory: no stage boundaries fit")
        return
    if solved.cut is None:
        _out(search, entry, "stage boundaries: the best cut cannot beat the best", search.best_s)
        return
    search.push(replace(entry, bound=max(entry.bound, solved.cut.value), cut=solved.cut))


def _out(search: Walk, entry: Entry, rule: str, bound: float = float("inf")) -> None:
    """Count a configuration as ruled out: nothing that fits is faster than the bound."""
    search.pruned[rule] += 1
    # A careful cut may leave out what does fit.
    if search.candidates.learnt is not None and not entry.is_careful:
        search.candidates.learnt.at_least(entry.key, bound)


SOLVERS: dict[str, Callable[[ChainProblem], Cut | None]] = {
    "recursive": solve_by_bisection,
    "ilp": solve_by_joint_program,
}
"""Searchers of stage boundaries beside the chain DP; a recursive cut proves nothing."""


def only_cut(search: Walk, entry: Entry) -> Cut | None:
    """Return the one cut there is to try: a single stage, or even virtual ones; None if too big."""
    one, table, candidates = entry.configuration, entry.table, search.candidates
    limit = search.memory_limit_bytes
    if one.vpp == 1:
        return candidates.one_stage(one, table, limit, entry.refused)
    return candidates.even_cut(one, table, limit, entry.refused, ceiling=search.best_s)


def _third_gate(search: Walk, entry: Entry, cut: Cut) -> None:
    """Simulate; estimate in full, memory included, what might be the best, or leave a gap."""
    if entry.configuration.vpp > 1:
        limit = search.memory_limit_bytes
        too_large = search.candidates.too_large_ranks(entry.configuration, entry.table, cut, limit)
        if too_large:
            _cut_again(search, entry, too_large)
            return
    step_s = search.candidates.quick_step_s(entry.configuration, entry.table, cut)
    search.simulated += 1
    # One cut stands for a configuration with virtual stages; otherwise others are still open.
    bound = step_s if entry.configuration.vpp > 1 else entry.bound
    is_slower = step_s >= search.best_s * (1 - 1e-9)
    if is_slower and bound >= search.best_s * (1 - 1e-9):
        search.losers.append((step_s, next(search.ticket), entry))
        return
    done = price(search, entry, cut)
    if done.answer.peak_bytes > search.memory_limit_bytes:
        search.simulated -= 1
        _cut_again(search, entry, too_large_of(search, entry, cut, done))
        return
    one = entry.configuration
    if one.pp > 1 and one.vpp == 1 and search.request.solver == "dp" and not entry.is_careful:
        search.open_cuts.append(entry)
    else:
        # Where skips reach past a stage the estimate knows of more than the simulation alone.
        search.open_bounds.append(done.answer.step_s if one.vpp > 1 else bound)
    if is_slower:
        search.losers.append((step_s, next(search.ticket), entry))
        return
    search.finished.append(done)
    if done.answer.step_s < search.best_s:
        search.best = done


def _cut_again(search: Walk, entry: Entry, too_large: tuple[TooLarge, ...]) -> None:
    """Push a configuration back, to be cut without those of its stages that are too large.

    Its bound, the least path of all cuts that were left, holds for those that still are.
    """
    if entry.refusals == _MOST_REFUSALS and not entry.is_careful:
        # What a careful cut leaves out, and how fast that is, nobody knows.
        search.open_bounds.append(entry.bound)
    if entry.refusals == _MOST_REFUSALS + _MOST_CAREFUL_REFUSALS:
        search.pruned["memory: the whole plan, rank by rank"] += 1
        return
    refused = (*entry.refused, *too_large)
    if search.candidates.learnt is not None:
        search.candidates.learnt.refused[entry.key] = refused
        if not entry.is_careful:
            search.candidates.learnt.at_least(entry.key, entry.bound)
    search.push(
        replace(
            entry,
            cut=None,
            refused=refused,
            refusals=entry.refusals + 1,
            is_careful=entry.refusals >= _MOST_REFUSALS,
        )
    )


def too_large_of(search: Walk, entry: Entry, cut: Cut, done: Finished) -> tuple[TooLarge, ...]:
    """Return the stages of a priced cut that are too large."""
    one, plan = entry.configuration, done.plan
    live = in_flight_of(one) if one.vpp == 1 else ()
    tables = (entry.table,) * len(plan.stages)
    limit = search.memory_limit_bytes
    return tuple(too_large_stages(plan, done.answer, cut, live, limit, tables))


def too_large_stages(
    plan: Plan,
    answer: Estimate,
    cut: Cut,
    live: Sequence[int],
    limit_bytes: float,
    tables: Sequence[StageTable],
) -> Iterator[TooLarge]:
    """Yield the stages of a plan whose ranks are over the memory limit.

    A longer run of blocks holds all that a shorter one does but for what comes and goes at its
    edges, and copies of weights whose other users it holds too; what is over by more than that
    refuses longer runs as well. `live` are the microbatches that each stage holds at most, none
    where ranks have several; `tables` are the stages'.
    """
    for index, stage in enumerate(plan.stages):
        over = int(answer.memory[stage.pp_rank].total) - limit_bytes
        if over <= 0:
            continue
        first, end = stage.first_block, stage.last_block + 1
        yield TooLarge(
            stage=index,
            first=first,
            end=end,
            choice=cut.choices[index],
            and_longer=bool(live)
            and over > tables[index].most_edge_bytes(first, end, in_flight=live[index]),
        )


def price(search: Walk, entry: Entry, cut: Cut) -> Finished:
    """Return the cost model's answer."""
    candidates, one = search.candidates, entry.configuration
    learnt = candidates.learnt
    key = (*entry.key, cut.cuts, cut.choices)
    if learnt is not None and key in learnt.priced:
        return finished(one, *learnt.priced[key])
    plan = candidates.plan(one, entry.table, cut)
    answer = candidates.estimate(plan)
    if learnt is not None:
        learnt.priced[key] = plan, answer
    return finished(one, plan, answer)


def finished(configuration: Configuration, plan: Plan, answer: Estimate) -> Finished:
    """Return a plan under its configuration, with the recompute that its stages ended up with."""
    used = {stage.recompute for stage in plan.stages}
    recompute = used.pop() if len(used) == 1 else "mixed"
    chosen = replace(configuration, recompute=recompute)
    return Finished(configuration=chosen, plan=plan, answer=answer)


def begin_with_learnt(search: Walk) -> None:
    """Begin with the fastest plan known to fit, if searches under more memory left one."""
    learnt = search.candidates.learnt
    known = learnt.fastest(search.memory_limit_bytes) if learnt is not None else None
    if known is not None:
        search.best = finished(*known)
        search.finished.append(search.best)
