"""The numbers that a report of a plan draws, gathered from the cost model and the plan file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from costmodel import CostCache, Estimate
from costmodel.estimate import slowest_price
from costmodel.lanes import timeline_with_lanes
from costmodel.memory.exact.over_time import MemoryMoment, memory_over_time
from costmodel.time.roofline import RooflinePoint, roofline_points
from costmodel.uncertainty import Interval
from planner.language.graph import ModelGraph
from planner.language.layout.axes import lowered_axes
from planner.language.plan import Plan
from planner.timeline import RankTimeline
from search.report.network import NetworkView, find_network
from search.report.overview import Overview, find_overview


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldParameter:
    """A parameter of a block, and how it lies."""

    name: str
    """Its name inside the block."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    placements: tuple[tuple[str, str], ...]
    """(axis, placement) where it is split; empty: whole on each rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockView:
    """One block, as a stage holds it."""

    index: int
    """Its place in the chain."""
    name: str
    """Its name."""
    block_class: int
    """Blocks of one class compute the same on other parameters."""
    recompute: str
    """What it recomputes."""
    params: tuple[HeldParameter, ...]
    """Its parameters."""


@dataclass(frozen=True, kw_only=True)
class ReportNumbers:
    """All that a report shows."""

    plan: Plan
    """The plan."""
    overview: Overview
    """The plan and its price at a glance."""
    predicted: tuple[RankTimeline, ...]
    """The simulated step, a line for each pp rank, with what it exchanges."""
    measured: tuple[RankTimeline, ...]
    """A recorded run, a line for each rank; empty without."""
    memory: tuple[tuple[MemoryMoment, ...], ...]
    """Memory of each pp rank over the step."""
    blocks: tuple[tuple[BlockView, ...], ...]
    """Blocks of each stage."""
    roofline: tuple[RooflinePoint, ...]
    """Ops of the pp rank with the most work."""
    memory_bytes_per_s: float
    """Memory rate of its devices."""
    peak_flop_per_s: dict[str, float]
    """Their peaks, by dtype."""
    networks: tuple[NetworkView, ...]
    """Of each group of devices."""
    certificate: dict[str, Any]
    """What the search proved; empty for a plan that no search found."""
    runners_up: tuple[dict[str, Any], ...]
    """Configurations that lost, the fastest first."""
    front: tuple[dict[str, Any], ...]
    """Plans that trade time for memory, where a search sought them."""


def gather_report(
    plan: Plan,
    costs: CostCache,
    estimate: Estimate,
    interval: Interval,
    *,
    measured: Sequence[RankTimeline] = (),
) -> ReportNumbers:
    """Return what a report of a plan shows."""
    told, price = plan.estimate, slowest_price(plan, costs)
    overview = find_overview(
        plan, costs, estimate, interval, memory_limit_bytes=told.get("memory_limit_bytes")
    )
    slowest = overview.path.bottleneck
    cluster = costs.of_group(estimate.device_groups[slowest]).profile.cluster
    return ReportNumbers(
        plan=plan,
        overview=overview,
        predicted=timeline_with_lanes(plan, costs),
        measured=tuple(measured),
        memory=memory_over_time(price, costs, estimate.timeline),
        blocks=tuple(_blocks(plan, costs.graph, index) for index in range(len(plan.stages))),
        roofline=roofline_points(price, costs, slowest),
        memory_bytes_per_s=cluster.memory_bytes_per_s,
        peak_flop_per_s=dict(cluster.peak_flop_per_s),
        networks=tuple(
            find_network(plan, costs.of_group(group).profile.cluster)
            for group in dict.fromkeys(
                name for rank in plan.device_groups for name in rank.split("+")
            )
        ),
        certificate=dict(told.get("certificate", {})),
        runners_up=tuple(told.get("runners_up", ())),
        front=tuple(told.get("front", ())),
    )


def _blocks(plan: Plan, graph: ModelGraph, stage_index: int) -> tuple[BlockView, ...]:
    stage, degrees = plan.stages[stage_index], plan.stage_degrees(stage_index)
    views = []
    for index, recompute in zip(stage.blocks, stage.recompute_by_block, strict=True):
        block = graph.blocks[index]
        layouts = [
            (axis.name, layout)
            for axis in lowered_axes()
            if (layout := plan.layout(block.class_index, axis=axis.name, degrees=degrees))
        ]
        params = []
        for place, name in enumerate(block.params):
            meta = graph.tensor[name]
            if meta.kind != "param":
                continue
            lies = [(axis, layout.params[place]) for axis, layout in layouts]
            params.append(
                HeldParameter(
                    name=(meta.fqn or name).removeprefix(f"{block.name}."),
                    shape=meta.shape_at(1),
                    placements=tuple((axis, placed) for axis, placed in lies if placed != "R"),
                )
            )
        views.append(
            BlockView(
                index=index,
                name=block.name,
                block_class=block.class_index,
                recompute=recompute,
                params=tuple(params),
            )
        )
    return tuple(views)
