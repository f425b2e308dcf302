"""The plan that would be faster if memory were as estimated, beside one that leaves room."""

from __future__ import annotations

from dataclasses import replace

from planner.deadline import check_time
from planner.language.graph import ModelGraph
from planner.language.plan import Plan
from profiles import Profile
from search.candidates import CandidatesOf
from search.find_plan import search_among
from search.on_host import host_holds, offload_fallbacks
from search.request import LEAST_ODDS, SearchRequest, SearchResult

LEAST_GAIN = 0.005
"""Part of a step below which a faster plan is not worth a risk."""


def find_riskier(
    graph: ModelGraph,
    profile: Profile,
    request: SearchRequest,
    found: SearchResult,
    candidates_of: CandidatesOf,
) -> Plan | None:
    """Return the fastest plan whose estimate alone fits, with as little on the host as can be; None
    where it is hardly faster than what a search found that keeps memory free.

    Raises OutOfTime where a time limit leaves no time.
    """
    if found.plan is None or request.odds <= LEAST_ODDS:
        return None
    check_time()
    risky = replace(request, memory_odds=LEAST_ODDS, num_best=1)
    on_host = offload_fallbacks(request.offload, profile, graph)[0][0]
    plan = search_among(
        candidates_of(graph, profile, risky, on_host),
        risky,
        runners_up=False,
        ceiling_s=float(found.plan.estimate["step_s"]) / (1 + LEAST_GAIN),
    ).plan
    return plan if plan is not None and host_holds(plan, profile) else None
