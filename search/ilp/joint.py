"""Stage boundaries, meshes, recompute and memory as one integer program for OR-tools' CP-SAT.

With `solver` ilp it takes the place of `partition.chain_dp`, whose problem it solves.

Variables
    x[s, j, k, c]   1 if stage s holds blocks j .. k-1 with choice c (recompute, of a mesh)
    z               the longest path, in steps of 1e-13 of the longest there may be

Minimise    z
Subject to
    sum over k, c of x[0, 0, k, c] = 1                                     stage 0 starts the chain
    sum over j, c of x[s, j, k, c] = sum over k', c of x[s+1, k, k', c]    stages meet (s < S-1)
    sum over j, c of x[S-1, j, n, c] = 1                                   the last ends it
    z >= sum over j, k, c of x[s, j, k, c] * (until + tail)                the stage's own tail, and
    z >= sum over j, k, c of x[s, j, k, c] * (until + back) + first        the way back to stage 0
    first = sum over k, c of x[0, 0, k, c] * tail                          and what follows there
    z <= ceiling
    x = 0 where a stage does not fit the memory, or its path is over the ceiling

until, back and tail of a run on a stage are those of `chain_paths.StageRuns`. The ceiling leaves
few x: that, not the size of the chain, makes the program small.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from planner.deadline import check_time, left_s
from search.partition.chain_paths import StageRuns, runs_by_stage
from search.partition.chain_problem import ChainProblem, Cut, Floats
from search.partition.chain_reach import possible_starts, reach_windows

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

_STEPS = 10**13
_ROUNDED = 2
"""Steps by which a path may be too long: a run's and a tail's are each rounded up."""
MOST_VARIABLES = 200_000
_SLACK = 1e-9
"""Relative: the ceiling may be the very value of a cut."""


class NoAnswer(Exception):
    """The program is too large, or its time ran out before it had any cut."""


def solve_by_joint_program(
    problem: ChainProblem,
    *,
    ceiling: float = np.inf,
    hint: Cut | None = None,
    time_limit_s: float = 60.0,
) -> Cut | None:
    """Return the best cut, or None when none of at most `ceiling` fits.

    `hint` is a cut that is known. Where time runs out before a proof the best so far is returned,
    and its value is what no cut is below. Raises NoAnswer where there is none so far.
    """
    ceiling *= 1 + _SLACK
    # Starts that the ceiling and memory rule out have no variable: few are left.
    starts = possible_starts(problem, ceiling)
    windows = reach_windows(problem, ceiling, starts) if starts else None
    if windows is None:
        return None
    # Of each run only the fastest choice that fits has a variable, unless activations are copied.
    kinds = len(problem.choices) if problem.copied else problem.num_meshes
    size = kinds * sum(window.num_cells for window in windows)
    if size > MOST_VARIABLES:
        raise NoAnswer(f"{size} variables, more than {MOST_VARIABLES}")
    return _solve(problem, runs_by_stage(problem, windows), ceiling, hint, time_limit_s)


def _solve(
    problem: ChainProblem,
    stage_runs: Sequence[StageRuns],
    ceiling: float,
    hint: Cut | None,
    time_limit_s: float,
) -> Cut | None:
    """Return the best cut of these runs."""
    from ortools.sat.python import cp_model

    first = _first_tails(problem, stage_runs[0])
    ways = [_ways(runs) for runs in stage_runs]
    # No path can be longer than the longest of any stage with the longest tail.
    if not np.isfinite(ceiling):
        ceiling = max(_largest(own) for way in ways for own in way) + _largest(first)
    scale = _STEPS / max(ceiling, 1e-30)

    def steps(seconds: float) -> int:
        """Return whole steps, rounded up: no path is longer than the program has it."""
        return int(np.ceil(seconds * scale))

    model = cp_model.CpModel()
    # In whole steps: CP-SAT takes integers alone.
    longest = model.new_int_var(0, _STEPS + _ROUNDED, "z")
    starts: dict[tuple[int, int], list] = defaultdict(list)
    ends: dict[tuple[int, int], list] = defaultdict(list)
    picks: list[tuple[int, int, int, int, cp_model.IntVar]] = []
    first_tail: list = []
    for stage, (runs, (there_and_own, there_and_back)) in enumerate(
        zip(stage_runs, ways, strict=True)
    ):
        check_time()
        own, back = [], []
        # Without stage 0's tail, which is not negative: what is over the ceiling here is in no cut.
        may_be = (there_and_own <= ceiling) & (there_and_back <= ceiling)
        for choice, row, column in np.argwhere(may_be).tolist():
            x = model.new_bool_var("")
            start, end = runs.first_start + column, int(runs.end[row, column])
            starts[stage, start].append(x)
            ends[stage, end].append(x)
            picks.append((stage, end, choice, row, x))
            if hint is not None:
                is_in = (start, end) == hint.cuts[stage : stage + 2]
                model.add_hint(x, is_in and choice == hint.choices[stage])
            # Two rows a stage: the path with its own tail, and the way back to stage 0.
            own.append(steps(float(there_and_own[choice, row, column])) * x)
            back.append(steps(float(there_and_back[choice, row, column])) * x)
            if stage == 0:
                first_tail.append(steps(float(first[row])) * x)
        if not own:
            return None
        model.add(longest >= sum(own))
        model.add(longest >= sum(back) + sum(first_tail))
    model.add(sum(starts[0, 0]) == 1)
    model.add(sum(ends[len(stage_runs) - 1, problem.num_blocks]) == 1)
    for stage in range(len(stage_runs) - 1):
        check_time()
        # The next stage starts where this one ends.
        for cut in range(1, problem.num_blocks + 1):
            model.add(sum(ends[stage, cut]) == sum(starts[stage + 1, cut]))
    model.minimize(longest)
    found = solve_model(model, time_limit_s)
    if found is None:
        return None
    solver, is_proved = found
    chosen = [pick[:4] for pick in picks if solver.boolean_value(pick[4])]
    cuts = (0, *(end for _, end, _, _ in chosen))
    tail = float(first[chosen[0][3]])
    # Of the very cut, in seconds: the program has it in rounded steps.
    value = max(
        float(stage_runs[stage].own_from(cuts[stage], tail)[choice, row])
        for stage, _, choice, row in chosen
    )
    if not is_proved:
        value = min(value, solver.best_objective_bound / scale)
    # Steps are rounded: a cut left out may be shorter by so much.
    value -= _ROUNDED / scale
    return Cut(cuts=cuts, choices=tuple(choice for _, _, choice, _ in chosen), value=value)


def _ways(runs: StageRuns) -> tuple[Floats, Floats]:
    """Return each run's path with its own tail, and that back to stage 0 without what follows."""
    return runs.until + runs.tail, runs.own(None)


def _first_tails(problem: ChainProblem, runs: StageRuns) -> Floats:
    """Return what follows at stage 0 when its last input gradient is made, by the row of its run:
    one for all choices.
    """
    tails: Floats = runs.tail[:, 0] + problem.first_weight_s[runs.end[:, 0]]
    return tails


def _largest(seconds: Floats) -> float:
    return float(seconds[np.isfinite(seconds)].max(initial=0.0))


def solve_model(
    model: cp_model.CpModel, time_limit_s: float
) -> tuple[cp_model.CpSolver, bool] | None:
    """Return the solver with the best there is and whether it is proved, None when nothing
    satisfies the model.

    One worker, so that the same model gives the same answer. Raises NoAnswer when time runs out
    before there is any.
    """
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = min(time_limit_s, left_s())
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        check_time()
        raise NoAnswer(f"{time_limit_s:g} s")
    return solver, status == cp_model.OPTIMAL
