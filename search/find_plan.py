"""find_plan: branch and bound over configurations, the cost model deciding.

Shapes (`space`) are opened into configurations when their common bound is the smallest left.
Every configuration passes up to three gates (`gates`), each with a lower bound of its step time
that is no smaller than the one before; the last one is the cost model's estimate.

Configurations wait in a heap by their bound, so when the smallest bound is no less than the
best estimate the search ends and the best is proved, except for what gate 2 leaves open: other
boundaries of an estimated configuration may take as little as its DP bound. Those are simulated
in the order of their bounds (`other_cuts`); where some are left, the smallest bound of these is
the certificate's lower bound.
"""

from __future__ import annotations

import time
from dataclasses import replace

from planner.collector import no_gc
from planner.graph import ModelGraph
from profiles import Profile
from search.candidates import Candidates, with_estimate
from search.first_gate import NO_FASTER, TOO_LARGE, first_gate
from search.gates import Progress, begin_with_learnt, run_gates
from search.host_room import host_holds, too_large_for_host
from search.meshes.own_mesh_walk import search_own_meshes
from search.on_host import tiers
from search.partition.other_cuts import close_gap
from search.report.nothing_fits import explain_nothing_fits, find_leanest
from search.report.runners_up import find_runners_up
from search.request import Certificate, SearchRequest, SearchResult
from search.space import Refusals
from search.synthesis import SYNTHESISED, with_synthesised_table
from search.walk import BEATEN, Finished, Walk, size_of

_MOST_OWN_TABLES = 4
"""How many of the best plans get a table of their own where the request asks for one."""


def find_plan(
    graph: ModelGraph,
    profile: Profile,
    request: SearchRequest,
    progress: Progress | None = None,
) -> SearchResult:
    """Return the fastest plan under the cost model that fits, with its certificate.

    When nothing fits, `plan` is None and `reasons` say what would. Raises LayoutError when
    the request itself cannot be met: degrees that do not divide, an unknown schedule.
    """
    refused: list[SearchResult] = []
    for tier in tiers(request.offload, profile):
        results = [
            search_among(Candidates.of(graph, profile, request, on_host), request, progress)
            for on_host in tier
        ]
        refused += results
        fitting = {
            result.plan.estimate["step_s"]: result
            for result in results
            if result.plan is not None and host_holds(result.plan, profile)
        }
        if fitting:
            return fitting[min(fitting)]
    for result in refused:
        if result.plan is not None:
            return too_large_for_host(result, profile)
    return min(refused, key=lambda result: result.smallest_memory_bytes or 0)


@no_gc()
def search_among(
    candidates: Candidates,
    request: SearchRequest,
    progress: Progress | None = None,
    *,
    runners_up: bool = True,
) -> SearchResult:
    """Return `find_plan`'s answer for one of several requests that share their candidates.

    They may differ in all but pins, balance and precision. Without runners-up, which may be
    priced only to be told of, it is quicker.
    """
    started = time.perf_counter()
    own_table = request.schedule == SYNTHESISED
    if own_table:
        request = replace(request, schedule=None)
    profile = candidates.profile
    refusals = Refusals()
    shapes = candidates.shapes(request, refusals)
    learnt = candidates.learnt
    for every_size in (False, True)[learnt is not None and learnt.needs_every_size :]:
        search = Walk(
            candidates=candidates,
            request=request,
            memory_limit_bytes=float(request.memory_limit_bytes or profile.memory_bytes),
            started=started,
            every_size=every_size,
        )
        begin_with_learnt(search)
        # What is quick to cut first, to have something for the others to beat.
        considered = 0
        for with_cp in (False, True):
            some = [shape for shape in shapes if (shape.cp > 1) == with_cp]
            considered += first_gate(search, some, progress)
            search.open_pipelines()
            run_gates(search, progress)
        # Larger microbatches, though no faster, may lie otherwise and be the ones that fit.
        if search.best is not None or not (search.pruned[NO_FASTER] or search.pruned[TOO_LARGE]):
            break
        if learnt is not None:
            learnt.needs_every_size = True
    close_gap(search)
    if request.meshes == "own":
        considered += search_own_meshes(search, shapes, progress)
    if search.best is None:
        leanest = find_leanest(candidates, shapes)
        reasons, smallest = explain_nothing_fits(leanest, request, search.memory_limit_bytes)
        return SearchResult(
            plan=None,
            reasons=reasons,
            smallest_memory_bytes=smallest,
            leanest=leanest.plan,
            search_s=time.perf_counter() - started,
        )
    if own_table:
        _take_own_table(search)
    best = search.best
    certificate = _certificate(search, best, considered, refusals)
    plan = with_estimate(best.plan, best.answer)
    plan = plan.model_copy(
        update={"estimate": {**plan.estimate, "certificate": certificate.to_dict()}}
    )
    return SearchResult(
        plan=plan,
        runners_up=find_runners_up(search, best) if runners_up else (),
        certificate=certificate,
        search_s=time.perf_counter() - started,
    )


def _take_own_table(search: Walk) -> None:
    """Give the best finished plans tables of their own; the fastest, if any, becomes the best."""
    for done in sorted(search.finished, key=lambda one: one.answer.step_s)[:_MOST_OWN_TABLES]:
        made = with_synthesised_table(
            done.plan,
            done.answer,
            costs=search.candidates.costs,
            memory_limit_bytes=search.memory_limit_bytes,
        )
        if made is not None and made[1].step_s < search.best_s:
            search.best = replace(done, plan=made[0], answer=made[1])


_PROVED = {
    "dp": "chain dynamic programming, path bound",
    "ilp": "joint integer program, path bound",
    "recursive": "nobody: recursive bisection is not exact",
}


def _certificate(search: Walk, best: Finished, considered: int, refusals: Refusals) -> Certificate:
    left = [bound for bound, _, _ in search.heap]
    waiting = sum(size_of(entry) for _, _, entry in search.heap)
    ended = not search.stopped_early
    beaten = waiting if ended else 0
    if beaten:
        search.pruned[BEATEN] += beaten
    lower = min([search.best_s, *search.open_bounds, *(() if ended else left)])
    cuts_proof = _PROVED[search.request.solver]
    if search.other_cuts:
        cuts_proof += f"; {search.other_cuts} more cuts simulated"
    return Certificate(
        best_s=search.best_s,
        lower_bound_s=min(lower, search.best_s),
        considered=considered,
        evaluated=search.simulated,
        unexplored=search.left_out + (0 if ended else waiting),
        pruned=tuple(sorted(search.pruned.items())),
        proved_by=(
            ("degrees, microbatches and schedules", "branch and bound"),
            ("stage boundaries", cuts_proof),
            *[("stages' own meshes", "branch and bound")] * (search.request.meshes == "own"),
            ("placements in blocks", search.candidates.solver.proof),
            (
                "order of the best",
                "list scheduling, event simulator" if best.plan.table else "event simulator",
            ),
        ),
        stopped_early=search.stopped_early,
        placements_gap=search.candidates.solver.gap,
    )
