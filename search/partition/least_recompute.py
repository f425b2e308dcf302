"""The recomputation of a cut's stages: each takes the fastest that may fit its rank.

A stage's memory depends on its own recomputation alone, and its jobs are the shorter the less it
recomputes. So of a given cut the stages' fastest choices make the best plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from search.partition.chain_problem import ChainProblem, Cut

Run = tuple[int, int, int]
"""A stage, its first block and the block after its last."""


def with_recompute(problem: ChainProblem, cut: Cut) -> Cut | None:
    """Return a cut with the fastest choice of each stage that may fit; None where none may."""
    runs = [(s, cut.cuts[s], cut.cuts[s + 1]) for s in range(len(cut.choices))]
    known = problem.least_recompute
    # Neighbouring cuts share most stages: each run is priced once for all of them.
    _find(problem, [run for run in runs if run not in known])
    if any(known[run] is None for run in runs):
        return None
    choices, until = zip(*(found for run in runs if (found := known[run])), strict=True)
    return replace(cut, choices=choices, until=until)


def _find(problem: ChainProblem, runs: Sequence[Run]) -> None:
    """Find the choice of each of these stages."""
    if not runs:
        return
    _, start, end = np.array(runs).T
    window = problem.stages.costs_of(start, end)
    for at, run in enumerate(runs):
        stage = run[0]
        rank = problem.limit_of(stage)
        seconds, fits = (of_runs[:, at] for of_runs in window.on_rank(rank, ...))
        choice = int(np.where(fits, seconds, np.inf).argmin())
        until = int(window.until(rank, choice, ...)[at]) if fits[choice] else 0
        problem.least_recompute[run] = (choice, until) if fits[choice] else None
