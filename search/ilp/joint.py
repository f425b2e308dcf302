"""Stage boundaries, recompute and memory as one integer program for OR-tools' CP-SAT.

The second, independent searcher of the problem `chain_dp` solves: small and mid-size chains,
with `solver` ilp.

Variables
    x[s, j, k, c]   1 if stage s holds blocks j .. k-1 with recompute choice c
    z               the longest path, in whole steps of 1e-9 of the largest one

Minimise    z
Subject to
    sum over k, c of x[0, 0, k, c] = 1                                 stage 0 starts the chain
    sum over j, c of x[s, j, k, c] = sum over k', c of x[s+1, k, k', c]    stages meet (s < S-1)
    sum over j, c of x[S-1, j, n, c] = 1                               the last ends it
    z >= sum over j, k, c of x[s, j, k, c] * path(s, j, k, c, tail_0)  for every s
    x = 0 where a stage does not fit the memory

The tail of stage 0 (see `chain_dp`) depends on its own cut, so the path of every other stage is
charged for each first cut in turn: one solve per first cut that is not ruled out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from search.partition.chain_paths import Paths
from search.partition.chain_problem import ChainProblem, Cut

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

_STEPS = 10**9
MOST_VARIABLES = 200_000


def solve_by_joint_program(problem: ChainProblem, *, time_limit_s: float = 60.0) -> Cut | None:
    """Return the best cut, or None when none fits.

    Raises ValueError when the program would be too large, RuntimeError when time runs out.
    """
    n, stages = problem.num_blocks, problem.num_stages
    if stages > n:
        return None
    width = n - stages + 1
    # Of each run only the fastest choice that fits has a variable, unless activations are copied.
    size = stages * n * width * (len(problem.choices) if problem.copied else problem.num_meshes)
    if size > MOST_VARIABLES:
        raise ValueError(
            f"a joint program of {n} blocks on {stages} stages needs {size} variables, more than "
            f"{MOST_VARIABLES}; use `solver` dp"
        )
    paths = Paths.of_all(problem, width)
    best: Cut | None = None
    for first_cut in range(1, width + 1):
        found = _solve(problem, paths, first_cut, time_limit_s)
        if found is not None and (best is None or found.value < best.value):
            best = found
    return best


def _solve(problem: ChainProblem, paths: Paths, first_cut: int, time_limit_s: float) -> Cut | None:
    from ortools.sat.python import cp_model

    n, stages = problem.num_blocks, problem.num_stages
    if stages == 1 and first_cut != n:
        return None
    tail = paths.first_tail(first_cut)
    own = [
        [paths.own(stage, choice, tail) for choice in range(len(problem.choices))]
        for stage in range(stages)
    ]
    finite = [table[np.isfinite(table)].max(initial=0.0) for row in own for table in row]
    scale = _STEPS / max(max(finite), 1e-30)
    model = cp_model.CpModel()
    longest = model.new_int_var(0, _STEPS + 1, "z")
    starts: dict[tuple[int, int], list] = {}
    ends: dict[tuple[int, int], list] = {}
    picks: list[tuple[int, int, int, int, cp_model.IntVar]] = []
    for stage in range(stages):
        paid = []
        for choice in range(len(problem.choices)):
            for row, first in np.argwhere(np.isfinite(own[stage][choice])):
                first, end = int(first), int(first + row + 1)
                if (stage == 0) != (first == 0) or (stage == 0 and end != first_cut):
                    continue
                x = model.new_bool_var("")
                starts.setdefault((stage, first), []).append(x)
                ends.setdefault((stage, end), []).append(x)
                picks.append((stage, first, end, choice, x))
                paid.append(int(np.ceil(own[stage][choice][row, first] * scale)) * x)
        if not paid:
            return None
        model.add(longest >= sum(paid))
    model.add(sum(starts.get((0, 0), [])) == 1)
    model.add(sum(ends.get((stages - 1, n), [])) == 1)
    for stage in range(stages - 1):
        for cut in range(1, n + 1):
            model.add(sum(ends.get((stage, cut), [])) == sum(starts.get((stage + 1, cut), [])))
    model.minimize(longest)
    solver = solve_proven(model, time_limit_s)
    if solver is None:
        return None
    chosen = sorted(pick[:4] for pick in picks if solver.boolean_value(pick[4]))
    value = max(float(own[s][c][end - first - 1, first]) for s, first, end, c in chosen)
    return Cut(
        cuts=(0, *(end for _, _, end, _ in chosen)),
        choices=tuple(c for _, _, _, c in chosen),
        value=value,
    )


def solve_proven(model: cp_model.CpModel, time_limit_s: float) -> cp_model.CpSolver | None:
    """Return the solver with an optimum, None when nothing satisfies the model.

    One worker, so that the same model gives the same answer. Raises RuntimeError when time
    runs out before a proof.
    """
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = time_limit_s
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None
    if status != cp_model.OPTIMAL:
        raise RuntimeError(f"CP-SAT stopped after {time_limit_s} s without a proved optimum")
    return solver
