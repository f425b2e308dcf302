"""Every plan on a cluster of several groups of devices, priced one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import permutations, product

from costmodel import Estimate
from costmodel.cache import CostCache
from costmodel.estimate import estimate, rank_bytes_by_group
from planner.errors import LayoutError
from planner.language.graph import ModelGraph
from planner.language.plan import Plan
from search import SearchRequest
from search.candidates import Candidates
from search.partition.chain_problem import Cut
from search.priced_configuration import PricedConfiguration
from search.space.configuration import Configuration, recompute_choices
from search.stages.stage_table import StageTable
from tests.referees.plans import stage_boundaries


def every_placed_plan(
    graph: ModelGraph,
    machine,
    request: SearchRequest,
    wanted: Callable[[Plan], bool] = lambda plan: True,
) -> Iterator[tuple[Plan, Estimate]]:
    """Yield all wanted plans whose pp ranks lie on one group each, the ranks of a group in a row,
    in all orders of the groups, with all cuts and recompute choices; with ``meshes="own"`` each
    stage with each tp. Layouts are those that the search has for a tp.
    """
    candidates = Candidates.of(graph, machine, request)
    for configurations in _mixable(candidates, request):
        ranks = configurations[0].degrees.num_ranks
        if any(group.num_devices % ranks for group in machine.groups):
            continue
        tables = [
            candidates.tables_of_groups(c.tp, c.microbatch_size, c.cp) for c in configurations
        ]
        for some in product(*tables):
            for order in permutations(machine.groups):
                on = [g.name for g in order for _ in range(g.num_devices // ranks)]
                for own in product(range(len(configurations)), repeat=len(on)):
                    for plan in _plans(candidates, configurations, some, on, own):
                        if wanted(plan):
                            yield plan, estimate(graph, machine, plan, costs=candidates.costs)


def every_shared_plan(
    graph: ModelGraph, machine, request: SearchRequest
) -> Iterator[tuple[Plan, Estimate]]:
    """Yield all plans each of whose stages has replicas on all groups, the groups in order, with
    all cuts, all ways to share a microbatch between the groups, and all recompute choices.
    """
    candidates = Candidates.of(graph, machine, request)
    sizes = [group.num_devices for group in machine.groups]
    for shape in candidates.shapes(request):
        ranks = shape.pp * shape.degrees.num_ranks // shape.batch_parts
        if any(size % ranks for size in sizes):
            continue
        replicas = [size // ranks for size in sizes]
        whole = shape.microbatch_size * shape.batch_parts
        for c in shape.configurations():
            if c.vpp > 1:
                continue
            for tables in candidates.tables_of_groups(c.tp, c.microbatch_size, c.cp):
                for shares in product(range(1, whole), repeat=len(sizes)):
                    dealt = [b for b, n in zip(shares, replicas, strict=True) for _ in range(n)]
                    if sum(dealt) == whole:
                        yield from _shared_plans(candidates, c, tables, dealt)


def _shared_plans(
    candidates: Candidates,
    configuration: Configuration,
    tables: Mapping[str, StageTable],
    dealt: list[int],
) -> Iterator[tuple[Plan, Estimate]]:
    """Yield the plans in which each replica takes so many samples of a microbatch."""
    table, names = next(iter(tables.values())), "+".join(tables)
    choices = range(len(recompute_choices(configuration.recompute)))
    for cuts in stage_boundaries(table.num_blocks, configuration.pp):
        for chosen in product(choices, repeat=configuration.pp):
            cut = Cut(cuts=cuts, choices=chosen, value=0.0)
            plan = PricedConfiguration(candidates, configuration, table).plan(cut)
            stages = tuple(
                stage.model_copy(update={"device_group": names}) for stage in plan.stages
            )
            plan = plan.model_copy(update={"stages": stages, "shares": tuple(dealt)})
            try:
                answer = estimate(
                    candidates.graph, candidates.profile, plan, costs=candidates.costs
                )
            except LayoutError:
                return  # a share that the layout does not divide
            yield plan, answer


def _mixable(candidates: Candidates, request: SearchRequest) -> list[list[Configuration]]:
    found: dict[tuple, list[Configuration]] = {}
    for shape in candidates.shapes(request):
        for c in shape.configurations():
            if c.pp > 1 and c.vpp == 1:
                key: tuple = (c.pp, c.cp, c.degrees["rp"], c.num_microbatches, c.schedule, c.zero)
                key += () if request.meshes == "own" else (c.tp,)
                found.setdefault(key, []).append(c)
    return list(found.values())


def _plans(
    candidates: Candidates,
    configurations: list[Configuration],
    tables: tuple[Mapping, ...],
    on: list[str],
    own: tuple[int, ...],
) -> Iterator[Plan]:
    """Yield the plans whose stage s has the own[s]-th configuration and lies on group on[s]."""
    base, base_table = configurations[own[0]], tables[own[0]][on[0]]
    choices = range(len(recompute_choices(base.recompute)))
    for cuts in stage_boundaries(base_table.num_blocks, base.pp):
        for chosen in product(choices, repeat=base.pp):
            priced = PricedConfiguration(candidates, base, base_table)
            plan = priced.plan(Cut(cuts=cuts, choices=chosen, value=0.0))
            own_tp = [
                () if configurations[at].tp == base.tp else (("tp", configurations[at].tp),)
                for at in own
            ]
            stages = tuple(
                stage.model_copy(update={"own_sizes": tp, "device_group": group})
                for stage, tp, group in zip(plan.stages, own_tp, on, strict=True)
            )
            layouts = tuple(
                layout.model_copy(update={"own_sizes": own_tp[own.index(at)]})
                for at in sorted(set(own))
                for layout in tables[at][on[0]].layouts
            )
            yield plan.model_copy(update={"stages": stages, "layouts": layouts})


def bytes_of_groups(plan: Plan, answer: Estimate, costs: CostCache) -> dict[str, float]:
    """Return the most bytes that a rank holds on each group of devices."""
    most: dict[str, float] = {}
    if any("+" in name for name in plan.device_groups):
        of_ranks = [dict(each) for each in rank_bytes_by_group(plan, costs, range(plan.pp))]
    else:
        of_ranks = [
            {name: int(parts.total)}
            for name, parts in zip(plan.device_groups, answer.memory, strict=True)
        ]
    for of_groups in of_ranks:
        for name, num_bytes in of_groups.items():
            most[name] = max(most.get(name, 0.0), float(num_bytes))
    return most


def within(most: Mapping[str, float], limits: Mapping[str, float]) -> bool:
    """Whether each rank is within the bytes of a device of its group."""
    return all(num_bytes <= limits[name] for name, num_bytes in most.items())


def with_memory(machine, group_bytes: Mapping[str, float]):
    """Return a cluster whose groups' devices have so many bytes."""
    groups = tuple(
        replace(group, profile=replace(group.profile, memory_bytes=group_bytes[group.name]))
        for group in machine.groups
    )
    return replace(machine, groups=groups)
