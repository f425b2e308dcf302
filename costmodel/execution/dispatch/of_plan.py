"""The dispatchers of a plan's blocks."""

from __future__ import annotations

from collections.abc import Iterable

from costmodel.cache import CostCache
from costmodel.execution.dispatch.choice import gathers
from costmodel.execution.dispatch.dispatcher import find_dispatcher
from costmodel.execution.dispatch.exchange import buffer_bytes, exchanges_of
from costmodel.topology import lowered_groups
from planner.language.plan import Plan


def dispatchers_of_plan(
    plan: Plan, costs: CostCache, blocks: Iterable[int] | None = None
) -> tuple[tuple[str, int], ...]:
    """Return the dispatcher that takes least and the bytes of its buffers, of each class of blocks
    whose rows are exchanged; of these `blocks` alone where given.
    """
    if plan.degrees["ep"] == 1:
        return ()
    graph = costs.graph
    chosen = range(len(graph.blocks)) if blocks is None else blocks
    axes = lowered_groups(costs.cluster, plan.degrees)
    found = []
    for index in dict.fromkeys(graph.blocks[at].class_index for at in chosen):
        layouts = tuple(layout for layout in plan.layouts if layout.class_index == index)
        of_class = index, plan.microbatch_size, plan.degrees, layouts
        local = costs.local(*of_class)
        if not exchanges_of(local):
            continue
        # Where there is no choice, there is nothing to price.
        (name, *others) = costs.execution.dispatchers
        if others or gathers(local):
            name = costs.block(*of_class).dispatcher
        found.append((name, buffer_bytes(local, axes["ep"].group, find_dispatcher(name))))
    return tuple(found)
