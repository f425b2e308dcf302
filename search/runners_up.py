"""What nearly won: the next best configurations, with the parts that make them slower."""

from __future__ import annotations

from dataclasses import replace

from costmodel import Estimate
from planner.units import format_bytes, format_seconds
from search.chain_dp import solve_chain
from search.chain_problem import Cut
from search.gates import only_cut, price
from search.request import RunnerUp
from search.space import Configuration, Shape
from search.walk import Entry, Finished, Unopened, Walk

MOST_RUNNERS_UP = 5


def find_runners_up(search: Walk, best: Finished) -> tuple[RunnerUp, ...]:
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
        if len(found) > MOST_RUNNERS_UP or tries >= 2 * MOST_RUNNERS_UP:
            break
        if _degrees_of(_stood_for(entry)) in found:
            continue
        tries += 1
        if isinstance(entry, Unopened):
            entry = _first_of(entry)
        cut = _cut(search, entry)
        priced = price(search, entry, cut) if cut else None
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


def _stood_for(entry: Entry | Unopened) -> Configuration | Shape:
    return entry.shape if isinstance(entry, Unopened) else entry.configuration


def _degrees_of(one: Configuration | Shape) -> tuple[int, ...]:
    return (one.dp, one.cp, one.tp, one.pp)


def _cut(search: Walk, entry: Entry) -> Cut | None:
    """Return the cut to show; None where it is known without an estimate that it does not fit."""
    one, limit = entry.configuration, search.memory_limit_bytes
    if one.vpp == 1 and one.pp > 1:
        problem = search.candidates.problem(one, entry.table, limit)
        return entry.cut or solve_chain(problem).cut
    cut = entry.cut or only_cut(search, entry)
    if cut and one.vpp > 1 and search.candidates.too_large_ranks(one, entry.table, cut, limit):
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
