"""Integer programs, all by OR-tools, one model a file: with `solver` ilp they are the searchers.

blocks    placements of the ops of a block (GLOP, and SCIP where its optimum is not whole); also
          what is too wide for elimination whatever the solver
joint     stage boundaries, meshes, recompute and memory (CP-SAT)
"""

from __future__ import annotations

from importlib.util import find_spec

from planner.errors import PlannerError


def has_ortools() -> bool:
    """Whether OR-tools is installed."""
    return find_spec("ortools") is not None


def check_ortools() -> None:
    """Raise PlannerError where OR-tools is not installed."""
    if not has_ortools():
        raise PlannerError(
            "`solver` ilp was given, and OR-tools, which solves integer programs, is not "
            "installed; install ortools, or use `solver` dp"
        )
