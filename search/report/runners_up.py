"""What nearly won: the next best configurations, with the parts that make them slower."""

from __future__ import annotations

import heapq
from dataclasses import replace

from costmodel import Estimate
from planner.schedule import DEFAULT_SCHEDULE
from planner.units import format_bytes, format_seconds
from search.gates import only_cut, price
from search.partition.chain_dp import solve_chain
from search.partition.chain_problem import Cut
from search.request import RunnerUp
from search.space import Configuration, Shape
from search.walk import Entry, Finished, Unopened, Walk

MOST_RUNNERS_UP = 5
_NEAR = 1.5
"""Times the best step: slower ones are looked for only where there is no other."""
_MOST_CUTS = 16
_MOST_ESTIMATES = 2 * MOST_RUNNERS_UP
_MOST_WORK = 10_000
"""Of all estimates, in jobs: about a tenth of a second."""


def find_runners_up(search: Walk, best: Finished) -> tuple[RunnerUp, ...]:
    """Return the next best configurations with the parts that make them slower.

    One for each choice of degrees, so that the answer is not five names for one layout. Those
    that the bounds ruled out are cut and estimated here, the least bound first.
    """
    found = {_degrees_of(best.configuration): best}
    for done in sorted(search.finished, key=lambda one: one.answer.step_s):
        found.setdefault(_degrees_of(done.configuration), done)
    _find_among_losers(search, found, _NEAR * search.best_s)
    if len(found) == 1:
        _find_among_losers(search, found, float("inf"))
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


def _find_among_losers(
    search: Walk, found: dict[tuple[int, ...], Finished], ceiling: float
) -> None:
    """Add what fits and is faster than a ceiling, of degrees that were not found yet."""
    waiting = [*search.losers, *search.heap]
    heapq.heapify(waiting)
    cut_ones: list[tuple[float, int, Entry, Cut]] = []
    work, cuts, estimates = _MOST_WORK, 0, 0
    while len(found) <= MOST_RUNNERS_UP and estimates < _MOST_ESTIMATES:
        limit = cut_ones[0][0] if cut_ones else ceiling
        if waiting and waiting[0][0] <= limit and cuts < _MOST_CUTS:
            bound, ticket, one = heapq.heappop(waiting)
            if _degrees_of(_stood_for(one)) in found or _num_jobs(one) > work:
                continue
            cuts += 1
            entry = _first_of(one) if isinstance(one, Unopened) else one
            if cut := _cut(search, entry, ceiling):
                heapq.heappush(cut_ones, (max(bound, cut.value), ticket, entry, cut))
            continue
        if not cut_ones:
            return
        _, _, entry, cut = heapq.heappop(cut_ones)
        work -= _num_jobs(entry)
        if _degrees_of(entry.configuration) in found or work < 0:
            continue
        if search.candidates.quick_step_s(entry.configuration, entry.table, cut) > ceiling:
            continue
        estimates += 1
        priced = price(search, entry, cut)
        if priced.answer.peak_bytes <= search.memory_limit_bytes:
            found[_degrees_of(priced.configuration)] = priced


def _first_of(entry: Unopened) -> Entry:
    """Return a shape's plainest configuration, to stand for it among the runners-up."""
    options = sorted(
        entry.shape.options, key=lambda option: (option[1], option[0] != DEFAULT_SCHEDULE)
    )
    zero = max(entry.shape.zeros, key=lambda stage: (stage == 1, stage))
    one = next(replace(entry.shape, options=tuple(options[:1]), zeros=(zero,)).configurations())
    return Entry(configuration=one, table=entry.table, bound=entry.bound)


def _stood_for(entry: Entry | Unopened) -> Configuration | Shape:
    return entry.shape if isinstance(entry, Unopened) else entry.configuration


def _num_jobs(entry: Entry | Unopened) -> int:
    vpp = 1 if isinstance(entry, Unopened) else entry.configuration.vpp
    one = _stood_for(entry)
    return 2 * one.pp * vpp * one.num_microbatches


def _degrees_of(one: Configuration | Shape) -> tuple[int, ...]:
    return (one.dp, one.cp, one.tp, one.pp)


def _cut(search: Walk, entry: Entry, ceiling: float) -> Cut | None:
    """Return the cut to show; None where it is known without an estimate that it does not fit, or
    is slower than a ceiling.
    """
    one, limit = entry.configuration, search.memory_limit_bytes
    if one.vpp == 1 and one.pp > 1:
        problem = search.candidates.problem(one, entry.table, limit, is_careful=True)
        return solve_chain(problem, ceiling=ceiling).cut
    cut = only_cut(search, entry)
    if cut and one.vpp > 1 and not search.candidates.seems_to_fit(one, entry.table, cut, limit):
        return None
    return cut


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
