"""find_plan: the fastest plan of a model on a cluster, found by branch and bound.

    find_plan          for each choice of what is on the host, the fewest first:
      search_among       run the queue of nodes; then certificate and runners-up

The queue is generic (`branch_and_bound`). Its nodes (`nodes/`, `meshes/`) are sets of plans, each
split into smaller ones, down to a plan that the cost model estimates:

    degrees -> microbatch sizes -> shapes with a layout -> configurations -> partitions -> plans

    bound phase       arithmetic on the blocks' seconds and bytes        (`nodes/sizes`, `bounds/`)
    partition phase   dynamic program over stage boundaries              (`partition/`)
    estimate phase    the cost model, simulated job by job               (`costmodel`)

The search ends when no bound is under the best estimate; the certificate's lower bound is the least
bound that was left open. docs/search.md has the mathematics and a picture of the nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf

from planner.collector import no_gc
from planner.deadline import OutOfTime, is_interrupted, within
from planner.errors import LayoutError
from planner.language.across.cut.whole_batch import one_microbatch, spell_accept, stays_whole
from planner.language.graph import ModelGraph
from planner.language.stacks import expressed_of
from profiles import Profile
from search.branch_and_bound import Node, Progress, evaluated_plan
from search.candidates import Candidates, CandidatesOf, with_estimate
from search.meshes.roots import device_groups_nodes, meshes_node, why_on_no_groups
from search.nodes.first_plan import take_first_plan
from search.nodes.lean_plan import find_leanest
from search.nodes.replicas_on_groups import replicas_nodes
from search.nodes.sizes import NO_FASTER, TOO_LARGE, push_degrees
from search.on_host import host_holds, offload_fallbacks, too_large_for_host
from search.report.infeasible import (
    explain_infeasible,
    explain_infeasible_groups,
    memory_limit,
    nothing_fits,
    or_less_fixed,
)
from search.report.runners_up import find_runners_up
from search.request import SearchRequest, SearchResult
from search.search_state import SearchState, WarmStart
from search.space.configuration import Shape
from search.space.outdone import OUTDONE, without_outdone
from search.space.request_checks import check_expressed
from search.synthesis import SYNTHESISED, with_synthesised_table

_MOST_OWN_TABLES = 4
"""How many of the best plans get a table of their own where the request is for synthesised ones."""


@dataclass(kw_only=True)
class FirstLook:
    """Shows the best plan so far of a search that lasts, once; then the search goes on."""

    after_s: float
    """Seconds of the search."""
    show: Callable[[SearchResult], None]
    """Called with the best so far, without runners-up; its certificate has the gap that is left."""
    is_taken: bool = False
    """Whether it was called."""

    def take(self, search: SearchState) -> None:
        """Show the best so far, if it is time and there is a plan."""
        if self.is_taken or search.best is None:
            return
        if time.perf_counter() - search.started < self.after_s:
            return
        result = _result_of(search, runners_up=False)
        if result.plan is not None and host_holds(result.plan, search.candidates.profile):
            self.is_taken = True
            with suppress(OutOfTime):  # the answer comes at once
                self.show(result)


def find_plan(
    graph: ModelGraph,
    profile: Profile,
    request: SearchRequest,
    progress: Progress | None = None,
    *,
    candidates_of: CandidatesOf = Candidates.of,
    first_look: FirstLook | None = None,
) -> SearchResult:
    """Return the fastest plan under the cost model that fits, with its certificate.

    When nothing fits, `plan` is None and `reasons` say what would. Raises LayoutError when
    the request itself cannot be met: degrees that do not divide, an unknown schedule.
    `candidates_of` may return those of an earlier search (`KeptCandidates`).
    `first_look` gets the best so far where the search lasts.
    """
    with within(request.time_limit_s):
        return _find_plan(graph, profile, request, progress, candidates_of, first_look)


def _find_plan(
    graph: ModelGraph,
    profile: Profile,
    request: SearchRequest,
    progress: Progress | None,
    candidates_of: CandidatesOf,
    first_look: FirstLook | None,
) -> SearchResult:
    started = time.perf_counter()
    infeasible: list[tuple[Candidates, SearchResult]] = []
    expressed = expressed_of(request.execution, graph, request.accept)
    for fallback in offload_fallbacks(request.offload, profile, graph, expressed):
        tried = [candidates_of(graph, profile, request, on_host) for on_host in fallback]
        if infeasible:  # a stack may have nothing on the host beside what the request fixes
            tried = [
                candidates
                for candidates in tried
                if candidates.has_shapes(_without_own_table(request))
            ]
        results = [
            search_among(candidates, request, progress, first_look=first_look)
            for candidates in tried
        ]
        # What a plan puts on the host has to fit the host, too.
        fitting = [
            (result.plan.estimate["step_s"], order)
            for order, result in enumerate(results)
            if result.plan is not None and host_holds(result.plan, profile)
        ]
        if fitting:
            result = _with_bound_of_all(results[min(fitting)[1]], results)
            others = tuple(plan for plan in result.next_best if host_holds(plan, profile))
            return replace(result, next_best=others)
        # Whether something fits here is not certain, so more on the host is no answer yet.
        if unfinished := [result for result in results if result.is_out_of_time]:
            return unfinished[0]
        infeasible += zip(tried, results, strict=True)
    for _, result in infeasible:
        if result.plan is not None:
            return too_large_for_host(result, profile)
    # Once all have been searched: what would fit takes long to tell, and a plan makes it needless.
    result = _why_nothing_fits([candidates for candidates, _ in infeasible], request)
    return replace(result, search_s=time.perf_counter() - started)


def _with_bound_of_all(result: SearchResult, results: Sequence[SearchResult]) -> SearchResult:
    """Return the result with the least lower bound of those that were stopped early, too: they may
    have left a plan that is faster than the best of another.
    """
    proof = result.certificate
    assert result.plan is not None, "the result has a plan"
    assert proof is not None, "a plan has its proof"
    unproved = [(proof.lower_bound_s, proof.stopped_early)]
    for other in results:
        if other.is_out_of_time:
            # No plan and no end: nothing is proved of what it left.
            unproved.append((0.0, other.reasons[0]))
        elif other.certificate is not None and other.certificate.stopped_early:
            unproved.append((other.certificate.lower_bound_s, other.certificate.stopped_early))
    bound_s, why = min(unproved)
    if bound_s >= proof.lower_bound_s:
        return result
    proof = replace(proof, lower_bound_s=bound_s, stopped_early=proof.stopped_early or why)
    estimate = {**result.plan.estimate, "certificate": proof.to_dict()}
    return replace(
        result, certificate=proof, plan=result.plan.model_copy(update={"estimate": estimate})
    )


@no_gc()
def search_among(
    candidates: Candidates,
    request: SearchRequest,
    progress: Progress | None = None,
    *,
    warm_start: WarmStart | None = None,
    runners_up: bool = True,
    first_look: FirstLook | None = None,
    ceiling_s: float = inf,
) -> SearchResult:
    """Return the fastest plan of these candidates.

    Without a plan the result has no reasons, unless time is up (`find_plan` finds them). Requests
    that share candidates may differ in all but pins, solver, balance and precision.
    `warm_start` is what earlier searches of the candidates under more memory left behind.
    Without runners-up, some of which are evaluated only to be named, the search is quicker, and
    under a `ceiling_s`, a step that a plan must be faster than, which prunes from the start.
    """
    started = time.perf_counter()
    synthesises = request.schedule == SYNTHESISED
    if candidates.expressed is not None:
        check_expressed(request, candidates.expressed, candidates.smallest_nodes)
    request = _without_own_table(request)
    candidates = candidates.under(request)
    shapes = candidates.shapes(request)

    def explore(*, every_size: bool) -> SearchState:
        search = SearchState(
            candidates=candidates,
            request=request,
            num_best=request.num_best,
            memory_limit_bytes=memory_limit(candidates, request),
            limits=candidates.limits(request),
            max_gap=request.max_gap,
            ceiling_s=ceiling_s,
            time_limit_s=request.time_limit_s,
            started=started,
            every_size=every_size,
            warm_start=warm_start if warm_start is not None else WarmStart(),
        )

        def tell(fraction: float, doing: str) -> None:
            if progress is not None:
                progress(fraction, doing)
            if first_look is not None:
                first_look.take(search)

        search.progress = tell
        _explore(search, shapes)
        return search

    groups = candidates.profile.groups
    if groups and synthesises:
        raise LayoutError(
            f"`schedule` {SYNTHESISED} was given for a cluster of several groups of devices; "
            "tables of their own are made on equal devices only: leave `schedule` out"
        )
    # Larger microbatches that are no faster are no answer, but may be second best.
    needs_every_size = warm_start is not None and warm_start.needs_every_size
    search = explore(every_size=needs_every_size or request.num_best > 1)
    skipped = not search.every_size and _has_skipped_sizes(search)
    if search.best is None and ceiling_s == inf and skipped and not search.is_out_of_time:
        # Larger microbatches, though no faster, may lie otherwise and be the ones that fit.
        search = explore(every_size=True)
        search.warm_start.needs_every_size = True
    if request.meshes == "own" and not groups:
        # Last, as the best plan of equal meshes prunes most mixes.
        search.push(meshes_node(_worth_trying(search, shapes)))
        search.run()
    if search.best is None:
        reasons = (_why_no_plan_yet(request),) if search.is_out_of_time else ()
        return SearchResult(
            plan=None,
            reasons=reasons,
            is_out_of_time=search.is_out_of_time,
            search_s=time.perf_counter() - started,
        )
    if synthesises:
        with suppress(OutOfTime):  # the best so far keep the tables of their schedules
            _synthesise_tables(search)
    return _result_of(search, runners_up=runners_up)


def _result_of(search: SearchState, *, runners_up: bool) -> SearchResult:
    """Return the best plan of a search that has found some."""
    best = search.best
    assert best is not None, "there is a plan"
    proof = search.certificate(best)
    plan = with_estimate(best.plan, best.estimate)
    plan = plan.model_copy(update={"estimate": {**plan.estimate, "certificate": proof.to_dict()}})
    return SearchResult(
        plan=plan,
        next_best=tuple(
            with_estimate(done.plan, done.estimate)
            for done in search.leaders()
            if done.configuration != best.configuration
        ),
        runners_up=find_runners_up(search, best) if runners_up else (),
        certificate=proof,
        whole_batch=_why_whole(search.candidates, search.request),
        not_written=_why_not_written(search.candidates),
        search_s=time.perf_counter() - search.started,
    )


def _why_whole(candidates: Candidates, request: SearchRequest) -> str:
    """Say why no plan of a search cuts the batch; nothing where plans may."""
    across = candidates.across_samples
    if not across or request.global_batch == 1:
        return ""
    graph, found = candidates.captured or candidates.graph, across.of_microbatches
    told = stays_whole if across.of_replicas else one_microbatch
    return f"{told(graph, found)}; {spell_accept(found)} lets it be cut"


def _why_not_written(candidates: Candidates) -> str:
    """Say why the stack that plans are for can't be told of the model; nothing where it can."""
    expressed = candidates.expressed
    if expressed is None or not expressed.why_no_model:
        return ""
    return (
        f"plans for {expressed.stack.title} are priced, and can't be written for it: "
        f"{expressed.why_no_model}"
    )


def _explore(search: SearchState, shapes: Sequence[Shape]) -> None:
    """Run the queue over all shapes, from the fastest known plan that fits, if any."""
    tried = _worth_trying(search, shapes)
    if groups := search.candidates.profile.groups:
        own_meshes = search.request.meshes == "own"
        roots: list[Node[SearchState]] = [
            *device_groups_nodes(tried, groups, own_meshes=own_meshes),
            *replicas_nodes(tried, groups),
        ]
        if not roots:
            raise LayoutError(why_on_no_groups(groups))
        for root in roots:
            search.push(root)
        search.run()
        return
    # A plan of an earlier search that still fits prunes from the start.
    known = search.warm_start.fastest(search.memory_limit_bytes)
    if known is not None:
        search.take(evaluated_plan(*known))
    elif _may_begin_anywhere(search):
        with suppress(OutOfTime):  # what is left open is told by the search itself
            take_first_plan(search, tried)
    outdone = sum(shape.num_configurations for shape in {*shapes} - {*tried})
    search.num_considered += outdone
    search.prune(OUTDONE, outdone)
    push_degrees(search, tried)
    search.run()


def _may_begin_anywhere(search: SearchState) -> bool:
    """Whether a first plan of even cuts is an answer that prunes: no encoder is kept apart, a
    single best plan is sought that nothing is known of, and it was not sought before in vain.
    """
    is_free = search.request.split_rank is None
    return is_free and search.ceiling_s == inf and not search.every_size


def _worth_trying(search: SearchState, shapes: Sequence[Shape]) -> Sequence[Shape]:
    """Return the shapes that may be the best; where others are sought too, all."""
    # (A batch that is computed across is no matter of replicas and microbatches.)
    every = search.every_size or search.candidates.across_samples
    return shapes if every else without_outdone(shapes)


def _has_skipped_sizes(search: SearchState) -> bool:
    return bool(search.pruned[NO_FASTER] or search.pruned[TOO_LARGE])


def _without_own_table(request: SearchRequest) -> SearchRequest:
    """Return the request that is searched before tables are synthesised."""
    return replace(request, schedule=None) if request.schedule == SYNTHESISED else request


def _why_no_plan_yet(request: SearchRequest) -> str:
    time_limit_s = request.time_limit_s
    limit = f"in `time_limit_s` {time_limit_s:g} s" if time_limit_s else ""
    when = "before the search was interrupted" if is_interrupted() else limit
    free = " and ".join(f"`{name}`" for name in ("tp", "pp") if getattr(request, name) is None)
    return f"no plan was found {when}, and it is not known whether any fits; give more time" + (
        f", or fix {free}" if free else ""
    )


def _why_nothing_fits(tried: Sequence[Candidates], request: SearchRequest) -> SearchResult:
    """Return why nothing fits, with what would in the least memory, as far as there is time."""
    found: list[SearchResult] = []
    with suppress(OutOfTime):
        found += (_infeasible_result(candidates, request) for candidates in tried)
    if not found:
        reasons = (
            f"{nothing_fits(request, memory_limit(tried[0], request))}; no time was left to find "
            f"what would: give more time{or_less_fixed(request, 'more devices')}",
        )
        return SearchResult(plan=None, reasons=reasons, is_out_of_time=True)
    return min(found, key=lambda result: result.smallest_memory_bytes or 0)


def _infeasible_result(candidates: Candidates, request: SearchRequest) -> SearchResult:
    if candidates.profile.groups:
        return SearchResult(
            plan=None, reasons=explain_infeasible_groups(candidates.limits(request), request)
        )
    candidates = candidates.under(request)
    leanest = find_leanest(candidates, candidates.shapes(_without_own_table(request)))
    limit = memory_limit(candidates, request)
    reasons, smallest = explain_infeasible(leanest, request, candidates.profile, limit)
    return SearchResult(
        plan=None,
        reasons=reasons,
        smallest_memory_bytes=smallest,
        leanest=with_estimate(leanest.plan, leanest.estimate),
    )


def _synthesise_tables(search: SearchState) -> None:
    """Build a job table of its own for each of the best plans; the fastest may become the best."""
    fastest = sorted(search.evaluated, key=lambda done: done.step_s)[:_MOST_OWN_TABLES]
    for done in fastest:
        made = with_synthesised_table(
            done.plan,
            done.estimate,
            costs=search.candidates.costs,
            memory_limit_bytes=search.memory_limit_bytes,
        )
        if made is not None and made[1].step_s < search.best_s:
            search.best = replace(done, plan=made[0], estimate=made[1])
