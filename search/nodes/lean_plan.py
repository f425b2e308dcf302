"""A plan to show where memory rules out what is tried first."""

from __future__ import annotations

from search.branch_and_bound import evaluated_plan
from search.report.infeasible import find_fitting
from search.search_state import SearchState

MOST_TOO_LARGE = 16
"""So many partitions are found too large before a lean plan is sought, to have one."""
_MOST_TRIES = 32
"""Configurations tried for it; where it is not among the leanest, it is seldom anywhere."""


def note_too_large(search: SearchState) -> None:
    """Count what did not fit. Where much did not and nothing has, take a lean plan that does,
    however slow: it is one to show, and prunes. The best may be long in coming.
    """
    search.num_too_large += 1
    is_free = "" in search.limits and search.request.split_rank is None
    if search.num_too_large == MOST_TOO_LARGE and search.best is None and is_free:
        shapes, limit = search.candidates.shapes(search.request), search.memory_limit_bytes
        lean = find_fitting(search.candidates, shapes, limit, most_tries=_MOST_TRIES)
        if lean is not None:
            search.take(evaluated_plan(lean.configuration, lean.plan, lean.estimate))
