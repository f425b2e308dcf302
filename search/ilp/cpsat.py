"""CP-SAT as a referee: only a proved optimum counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


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
