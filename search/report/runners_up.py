"""Runners-up: the next best configurations, with the parts that make them slower."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress

from costmodel import Estimate
from planner.deadline import OutOfTime, is_late
from planner.units import format_bytes, format_seconds
from search.branch_and_bound import EvaluatedPlan, Node
from search.nodes.configurations import ConfigurationNode, ShapeNode
from search.nodes.even_pipelines import EvenPipeline, plain_configurations, plans_that_fit
from search.nodes.partitions import PartitionedNode
from search.priced_configuration import PricedConfiguration
from search.request import RunnerUp
from search.search_state import SearchState
from search.space.configuration import Configuration, Shape

MOST_RUNNERS_UP = 5
_NEAR = 1.25
"""Times the best step: slower ones are evaluated only where there is no other."""
_MOST_DEGREES = 3 * MOST_RUNNERS_UP
_MOST_OF_DEGREES = 2
"""Nodes that are looked at of the same degrees."""
_MOST_ESTIMATES = 2 * MOST_RUNNERS_UP
_MOST_WALKS = 2 * _MOST_ESTIMATES
_MOST_JOBS = 10_000
"""Of a configuration: what has more takes long to simulate."""

Degrees = tuple[int, ...]


def find_runners_up(search: SearchState, best: EvaluatedPlan) -> tuple[RunnerUp, ...]:
    """Return the next best configurations with the parts that make them slower.

    There is one for each choice of degrees, so that the answer is not five names for one layout.
    Those that a bound pruned are cut evenly and evaluated here: each stands for its degrees, and
    stages less even may be somewhat faster.
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
    search: SearchState, found: dict[Degrees, EvaluatedPlan], ceiling_s: float
) -> None:
    """Add what fits and is faster than a ceiling, of degrees that were not found yet."""
    plans = plans_that_fit(
        search,
        _pipelines_of_others(search, found, ceiling_s),
        ceiling_s=ceiling_s,
        most_estimates=_MOST_ESTIMATES,
        most_walks=_MOST_WALKS,
        # (Past the limit of time nothing is begun.)
        is_wanted=lambda configuration: _degrees_of(configuration) not in found and not is_late(),
    )
    for done in plans:
        found[_degrees_of(done.configuration)] = done
        if len(found) > MOST_RUNNERS_UP:
            return


def _pipelines_of_others(
    search: SearchState, found: Collection[Degrees], ceiling_s: float
) -> Iterator[EvenPipeline]:
    """Yield pipelines of what lost, of degrees that were not found, the least bounds first."""
    nodes = (
        (bound, wave, ticket, node)
        for bound, wave, ticket, lost in search.set_aside
        if bound < ceiling_s
        and isinstance(node := _unpartitioned(lost), ShapeNode | ConfigurationNode)
        and _degrees_of(_choices_of(node)) not in found
    )
    num_of: Counter[Degrees] = Counter()
    for *_, node in sorted(nodes, key=lambda entry: entry[:3]):
        if is_late():
            return
        degrees = _degrees_of(_choices_of(node))
        if num_of[degrees] == _MOST_OF_DEGREES:
            continue
        if degrees not in num_of and len(num_of) == _MOST_DEGREES:
            continue
        num_of[degrees] += 1
        for configuration in _configurations_of(node):
            if configuration.num_jobs > _MOST_JOBS:
                continue
            for table in node.table.members:
                priced = PricedConfiguration(search.candidates, configuration, table)
                yield EvenPipeline(priced=priced, limit_bytes=search.memory_limit_bytes)


def _unpartitioned(lost: Node) -> Node:
    """Return a node without its partition."""
    return lost.of if isinstance(lost, PartitionedNode) else lost


def _configurations_of(node: ShapeNode | ConfigurationNode) -> Iterator[Configuration]:
    """Yield a node's configuration; of a shape its plain ones."""
    if isinstance(node, ConfigurationNode):
        yield node.configuration
    else:
        yield from plain_configurations(node.shape)


def _choices_of(node: ShapeNode | ConfigurationNode) -> Configuration | Shape:
    return node.shape if isinstance(node, ShapeNode) else node.configuration


def _degrees_of(configuration: Configuration | Shape) -> Degrees:
    sequences = configuration.cp, configuration.degrees["hp"]
    return (configuration.batch_parts, *sequences, configuration.tp, configuration.pp)


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
