"""The certificate of a finished search: what is proved, by which method, and what is not."""

from __future__ import annotations

from search.branch_and_bound import EvaluatedPlan
from search.request import Certificate
from search.search_state import SearchState

_BOUNDARIES_PROOF = {
    "dp": "chain dynamic programming, path bound",
    "ilp": "joint integer program, path bound",
    "recursive": "nobody: recursive bisection is not exact",
}


def certificate(search: SearchState, best: EvaluatedPlan) -> Certificate:
    """Return the certificate of a search whose queue is empty."""
    boundaries = _BOUNDARIES_PROOF[search.request.solver]
    if search.num_other_partitions:
        boundaries += f"; {search.num_other_partitions} more cuts simulated"
    order = "list scheduling, event simulator" if best.plan.table else "event simulator"
    return Certificate(
        best_s=search.best_s,
        lower_bound_s=search.lower_bound_s,
        considered=search.num_considered,
        evaluated=search.num_evaluated,
        unexplored=search.num_unexplored,
        pruned=tuple(sorted(search.pruned.items())),
        proved_by=(
            ("degrees, microbatches and schedules", "branch and bound"),
            ("stage boundaries", boundaries),
            *[("stages' own meshes", "branch and bound")] * (search.request.meshes == "own"),
            ("placements in blocks", search.candidates.solver.proof),
            ("order of the best", order),
        ),
        stopped_early=search.stopped_early,
        placements_gap=search.candidates.solver.gap,
    )
