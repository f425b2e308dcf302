"""Runners-up: the next best configurations, with the parts that make them slower."""

from __future__ import annotations

import heapq
from contextlib import suppress
from dataclasses import replace

from costmodel import Estimate
from planner.deadline import OutOfTime, is_late
from planner.language.schedule.registry import DEFAULT_SCHEDULE
from planner.units import format_bytes, format_seconds
from search.branch_and_bound import EvaluatedPlan, Node, Wave
from search.nodes.configurations import ConfigurationNode, ShapeNode
from search.nodes.partitions import PartitionedNode
from search.partition.chain_dp import solve_chain
from search.partition.chain_problem import Cut
from search.partition.least_recompute import with_recompute
from search.request import RunnerUp
from search.search_state import SearchState
from search.space.configuration import Configuration, Shape

MOST_RUNNERS_UP = 5
_NEAR = 1.5
"""Times the best step: slower ones are evaluated only where there is no other."""
_MOST_CUTS = 16
_MOST_ESTIMATES = 2 * MOST_RUNNERS_UP
_MOST_WORK = 10_000
"""Of all estimates, in jobs: about a tenth of a second."""


def find_runners_up(search: SearchState, best: EvaluatedPlan) -> tuple[RunnerUp, ...]:
    """Return the next best configurations with the parts that make them slower.

    There is one for each choice of degrees, so that the answer is not five names for one layout.
    Those that a bound pruned are partitioned and evaluated here, the least bound first.
    """
    found = {_degrees_of(best.configuration): best}
    for done in sorted(search.evaluated, key=lambda done: done.step_s):
        found.setdefault(_degrees_of(done.configuration), done)
    with suppress(OutOfTime):
        _evaluate_set_aside(search, found, _NEAR * search.best_s)
        # Nothing is near: the best of what is far is shown rather than none.
        if len(found) == 1:
            _evaluate_set_aside(search, found, float("inf"))
    rest = sorted(list(found.values())[1:], key=lambda done: done.step_s)
    return tuple(
        RunnerUp(
            label=done.configuration.label,
            step_s=done.step_s,
            peak_bytes=float(done.estimate.peak_bytes),
            reason=why_slower(done.estimate, best.estimate),
            differences=differences_of(done.estimate, best.estimate),
        )
        for done in rest[:MOST_RUNNERS_UP]
    )


def _evaluate_set_aside(
    search: SearchState, found: dict[tuple[int, ...], EvaluatedPlan], ceiling: float
) -> None:
    """Add what fits and is faster than a ceiling, of degrees that were not found yet.

    Two queues, the least bound first: nodes to partition, and partitions to evaluate.
    """
    waiting: list[tuple[float, Wave, tuple[int, int], Waiting]] = [
        (bound, wave, (ticket, 0), node)
        for bound, wave, ticket, lost in search.set_aside
        if isinstance(node := _unpartitioned(lost), ShapeNode | ConfigurationNode)
    ]
    heapq.heapify(waiting)
    partitioned: list[tuple[float, Wave, tuple[int, int], ConfigurationNode, Cut]] = []
    work, cuts, estimates = _MOST_WORK, 0, 0
    while len(found) <= MOST_RUNNERS_UP and estimates < _MOST_ESTIMATES and not is_late():
        limit = partitioned[0][0] if partitioned else ceiling
        # A node is partitioned while its bound is no more
        # than that of the next partition to evaluate.
        if waiting and waiting[0][0] <= limit and cuts < _MOST_CUTS:
            bound, wave, ticket, waited = heapq.heappop(waiting)
            if _degrees_of(_choices_of(waited)) in found or _num_jobs(waited) > work:
                continue
            if waited.num_tables > 1:
                every: list[Waiting] = [*waited.apart(search)]
                for at, own in enumerate(every, 1):
                    heapq.heappush(waiting, (max(bound, own.bound), wave, (ticket[0], at), own))
                continue
            cuts += 1
            node = _configuration_of(waited)
            if cut := _cut(search, node, ceiling):
                heapq.heappush(partitioned, (max(bound, cut.value), wave, ticket, node, cut))
            continue
        if not partitioned:
            return
        _, wave, ticket, node, cut = heapq.heappop(partitioned)
        configuration = node.configuration
        work -= _num_jobs(node)
        if _degrees_of(configuration) in found or work < 0:
            continue
        if node.simulate(search, cut) > ceiling:
            continue
        if not (too_large := node.infeasible_ranks(search, cut)):
            estimates += 1
            done = node.evaluate(search, cut)
            if search.fits(done):
                found[_degrees_of(done.configuration)] = done
                continue
            too_large = node.infeasible_stages(search, cut, done)
        # As in the search itself: cut again, with more recomputation where it did not fit.
        for again in node.again_without(search, too_large):
            assert isinstance(again, ConfigurationNode), "a node is cut again as a node"
            heapq.heappush(waiting, (again.bound, wave, ticket, again))


Waiting = ShapeNode | ConfigurationNode


def _unpartitioned(lost: Node) -> Node:
    """Return a node without its partition."""
    return lost.of if isinstance(lost, PartitionedNode) else lost


def _configuration_of(node: Waiting) -> ConfigurationNode:
    """Return a node's configuration; a shape is represented by its plainest one."""
    if isinstance(node, ConfigurationNode):
        return node
    options = sorted(
        node.shape.options, key=lambda option: (option[1], option[0] != DEFAULT_SCHEDULE)
    )
    # ZeRO 1 where there is a choice, else the highest stage.
    zero = max(node.shape.zeros, key=lambda stage: (stage == 1, stage))
    plain = replace(node.shape, options=tuple(options[:1]), zeros=(zero,))
    return ConfigurationNode(
        bound=node.bound,
        wave=node.wave,
        configuration=next(plain.configurations()),
        table=node.table,
    )


def _choices_of(node: Waiting) -> Configuration | Shape:
    return node.shape if isinstance(node, ShapeNode) else node.configuration


def _num_jobs(node: Waiting) -> int:
    vpp = 1 if isinstance(node, ShapeNode) else node.configuration.vpp
    configuration = _choices_of(node)
    return 2 * configuration.pp * vpp * configuration.num_microbatches


def _degrees_of(configuration: Configuration | Shape) -> tuple[int, ...]:
    sequences = configuration.cp, configuration.degrees["hp"]
    return (configuration.batch_parts, *sequences, configuration.tp, configuration.pp)


def _cut(search: SearchState, node: ConfigurationNode, ceiling: float) -> Cut | None:
    """Return the partition to show.

    None where it is known without an estimate that none fits, or that it is slower than a ceiling.
    """
    priced, limit = node.priced(search), search.memory_limit_bytes
    if node.configuration.vpp == 1 and node.configuration.pp > 1:
        problem = priced.problem(limit, infeasible=node.infeasible)
        found = solve_chain(problem, ceiling=ceiling).cut
        return found and with_recompute(problem, found)
    return priced.only_cut(limit, node.infeasible, ceiling=search.to_beat_s)


def why_slower(answer: Estimate, best: Estimate) -> str:
    """Say by how much an estimate is slower, and through which parts, largest first."""
    extra = answer.step_s - best.step_s
    shown = [
        f"{'+' if gain > 0 else '-'}{format_seconds(abs(gain))} {name.removesuffix('_s')}"
        for name, gain in differences_of(answer, best)
    ]
    percent = 100.0 * extra / best.step_s if best.step_s else 0.0
    return (
        f"{percent:.1f}% slower ({format_seconds(extra)}): {', '.join(shown)}; "
        f"peak {format_bytes(answer.peak_bytes)}"
    )


def differences_of(answer: Estimate, best: Estimate) -> tuple[tuple[str, float], ...]:
    """Return by how many seconds each part is longer, those that matter, the largest first."""
    extra = answer.step_s - best.step_s
    mine, theirs = answer.to_dict()["time"], best.to_dict()["time"]
    parts = sorted(((mine[name] - theirs[name], name) for name in mine), reverse=True)
    # Parts of less than a fiftieth of the difference are left out.
    least = 0.02 * max(abs(extra), 1e-12)
    return tuple((name, gain) for gain, name in parts if abs(gain) > least)
