"""The dispatchers of a plan's blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from costmodel.cache import CostCache
from costmodel.execution.dispatch.choice import dispatchers_of, gathers
from costmodel.execution.dispatch.dispatcher import find_dispatcher
from costmodel.execution.dispatch.exchange import (
    buffer_bytes,
    exchange_seconds,
    exchanges_of,
)
from costmodel.topology import lowered_groups
from planner.language.layout.axes import Degrees
from planner.language.plan import ClassLayout, Plan


def exchanges_s(
    costs: CostCache, microbatch_size: int, degrees: Degrees, layouts: tuple[ClassLayout, ...]
) -> float:
    """Return the seconds of the exchanges of all blocks for a microbatch, there and back, forward
    and backward, nothing hidden.
    """
    axes, total = lowered_groups(costs.cluster, degrees), 0.0
    uses = Counter(block.class_index for block in costs.graph.blocks)
    for index, count in uses.items():
        if costs.has_experts(index):
            own = tuple(layout for layout in layouts if layout.class_index == index)
            local = costs.local(index, microbatch_size, degrees, own)
            device = costs.profile.cluster.device
            dispatcher, *_ = dispatchers_of(costs.execution, local, device, axes)
            for op in exchanges_of(local):
                found = exchange_seconds(op, local, costs.profile, axes["ep"], dispatcher)
                total += count * (sum(found) + 2 * dispatcher.call_s)
    return total


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
