"""CP-SAT within a time limit: as a referee only a proved optimum counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


def solve_proven(model: cp_model.CpModel, time_limit_s: float) -> cp_model.CpSolver | None:
    """Return the solver with an optimum, None when nothing satisfies the model.

    Raises RuntimeError when time runs out before a proof.
    """
    best = solve_best(model, time_limit_s)
    if best is None:
        return None
    solver, gap = best
    if gap:
        raise RuntimeError(f"CP-SAT stopped after {time_limit_s} s without a proved optimum")
    return solver


def solve_best(
    model: cp_model.CpModel, time_limit_s: float
) -> tuple[cp_model.CpSolver, float] | None:
    """Return the solver with the best it found, and the part of it that may be too much.

    That part is 0 when the optimum is proved. None when nothing satisfies the model. One
    worker, so that the same model gives the same proved answer. Raises RuntimeError when
    nothing was found in time.
    """
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = time_limit_s
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None
    if status == cp_model.OPTIMAL:
        return solver, 0.0
    if status != cp_model.FEASIBLE:
        raise RuntimeError(f"CP-SAT found nothing in {time_limit_s} s")
    found = solver.objective_value
    return solver, (found - solver.best_objective_bound) / max(found, 1e-30)
