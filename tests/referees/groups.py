"""Every plan on a cluster of several groups of devices, priced one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import permutations, product

from costmodel import Estimate
from costmodel.estimate import estimate
from planner.errors import LayoutError
from planner.graph import ModelGraph
from planner.plan import Plan
from search import SearchRequest
from search.candidates import Candidates
from search.partition.chain_problem import Cut
from search.priced_configuration import PricedConfiguration
from search.space.configuration import Configuration, recompute_choices
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
    """Yield all plans without a pipeline whose replicas lie on all groups, the groups in order,
    with all ways to share a microbatch between the groups, and all recompute choices.
    """
    candidates = Candidates.of(graph, machine, request)
    sizes = [group.num_devices for group in machine.groups]
    for shape in candidates.shapes(request):
        ranks = shape.degrees.num_ranks // shape.batch_parts
        if shape.pp > 1 or any(size % ranks for size in sizes):
            continue
        replicas = [size // ranks for size in sizes]
        whole = shape.microbatch_size * shape.batch_parts
        for c in shape.configurations():
            for tables in candidates.tables_of_groups(c.tp, c.microbatch_size, c.cp):
                table = next(iter(tables.values()))
                for shares in product(range(1, whole), repeat=len(sizes)):
                    dealt = [b for b, n in zip(shares, replicas, strict=True) for _ in range(n)]
                    if sum(dealt) != whole:
                        continue
                    for choice in range(len(recompute_choices(c.recompute))):
                        cut = Cut(cuts=(0, table.num_blocks), choices=(choice,), value=0.0)
                        plan = PricedConfiguration(candidates, c, table).plan(cut)
                        names = "+".join(group.name for group in machine.groups)
                        stage = plan.stages[0].model_copy(update={"device_group": names})
                        plan = plan.model_copy(update={"stages": (stage,), "shares": tuple(dealt)})
                        try:
                            yield plan, estimate(graph, machine, plan, costs=candidates.costs)
                        except LayoutError:
                            continue  # a share that the layout does not divide


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


def fits(plan: Plan, answer: Estimate, limits: Mapping[str, float]) -> bool:
    """Whether each rank is within the bytes of a device of its group."""
    return all(
        parts.total <= limits[group]
        for parts, group in zip(answer.memory, plan.device_groups, strict=True)
    )


def with_memory(machine, group_bytes: Mapping[str, float]):
    """Return a cluster whose groups' devices have so many bytes."""
    groups = tuple(
        replace(group, profile=replace(group.profile, memory_bytes=group_bytes[group.name]))
        for group in machine.groups
    )
    return replace(machine, groups=groups)
