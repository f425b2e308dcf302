"""Pictures that the page draws itself: the model over its devices, and the network."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from commands.render.html.chart import Table
from commands.render.plans.words import compact
from planner.units import format_seconds
from search.report.network import LinkView, NetworkView
from search.report.overview import StageView
from search.report.report_numbers import BlockView, ReportNumbers

MOST_CELLS = 64
"""Devices of one stage that are drawn."""
MOST_INSIDE = 4
"""Domains inside another that are drawn."""


def model_picture(numbers: ReportNumbers) -> dict[str, Any]:
    """Return the rows of the picture: pp ranks with their devices and their stages' blocks."""
    plan, overview = numbers.plan, numbers.overview
    classes = {view.block_class for blocks in numbers.blocks for view in blocks}
    shade = {index: number % 6 for number, index in enumerate(sorted(classes))}
    details: list[str] = []
    rows = []
    for pp_rank in range(plan.pp):
        stages = [view for view in overview.stages if view.pp_rank == pp_rank]
        rows.append(
            {
                "name": f"pipeline rank {pp_rank}",
                "devices": _ranks(stages[0]),
                "mesh": " x ".join(f"{axis} {size}" for axis, size in stages[0].mesh)
                or "one device",
                "is_slowest": pp_rank == overview.path.bottleneck and plan.pp > 1,
                "cells": _cells(numbers, pp_rank),
                "columns": _columns(numbers, pp_rank),
                "more_cells": max(0, plan.degrees.num_ranks - MOST_CELLS),
                "stages": [
                    {
                        "name": f"stage {view.stage}",
                        "blocks": [
                            _box(view, block, shade, details)
                            for block in numbers.blocks[view.stage]
                        ],
                    }
                    for view in stages
                ],
            }
        )
    return {
        "rows": rows,
        "details": details,
        "summary": _in_words(numbers),
        "table": _table(numbers),
    }


def _in_words(numbers: ReportNumbers) -> str:
    plan, stages = numbers.plan, numbers.overview.stages
    blocks = sum(len(held) for held in numbers.blocks)
    split = sum(
        any(param.placements for param in block.params) for held in numbers.blocks for block in held
    )
    told = (
        f"{blocks} blocks in {len(stages)} stages on {plan.pp} pipeline ranks of "
        f"{plan.degrees.num_ranks} devices. "
        if len(stages) > 1
        else f"All {blocks} blocks on {plan.degrees.num_ranks} devices. "
    )
    if split:
        return told + f"Parameters of {split} blocks are split inside a stage."
    return told + "Each device of a stage holds its blocks whole when it computes."


def _table(numbers: ReportNumbers) -> Table:
    return Table(
        columns=("stage", "pipeline rank", "devices", "blocks", "parameters", "recomputes",
                 "forward", "backward", "of the step"),
        rows=tuple(
            (
                str(view.stage),
                str(view.pp_rank),
                _ranks(view),
                view.blocks,
                compact(view.num_params),
                view.recompute,
                format_seconds(view.forward_s),
                format_seconds(view.backward_s),
                f"{view.share:.1%}",
            )
            for view in numbers.overview.stages
        ),
    )  # fmt: skip


def _ranks(view: StageView) -> str:
    if view.first_rank == view.last_rank:
        name = f"rank {view.first_rank}"
    else:
        name = f"ranks {view.first_rank} to {view.last_rank}"
    return name + (f" on {view.device_group}" if view.device_group else "")


def _columns(numbers: ReportNumbers, pp_rank: int) -> int:
    """Return how many devices lie side by side: those of the innermost axis that has some."""
    mesh = numbers.plan.mesh(pp_rank)
    inner = next((size for size in reversed(mesh.shape) if size > 1), 1)
    return min(inner, 16)


def _cells(numbers: ReportNumbers, pp_rank: int) -> list[str]:
    """Return what is told of each device of a pp rank: where it is in the mesh."""
    mesh = numbers.plan.mesh(pp_rank)
    per_node = numbers.networks[0].devices_per_node
    told = []
    for place, rank in enumerate(mesh.ranks[:MOST_CELLS]):
        rest, where = place, []
        for axis, size in reversed([*zip(mesh.axes, mesh.shape, strict=True)]):
            rest, coordinate = divmod(rest, size)
            if size > 1:
                where.append(f"{axis} {coordinate}")
        told.append(
            f"rank {rank}, node {rank // per_node}: {', '.join(reversed(where)) or 'alone'}"
        )
    return told


def _box(
    view: StageView, block: BlockView, shade: dict[int, int], details: list[str]
) -> dict[str, Any]:
    lines = [f"{block.name}: block {block.index}, stage {view.stage}, {_ranks(view)}"]
    lines.append(f"recomputes: {block.recompute}")
    for param in block.params:
        shape = " x ".join(map(str, param.shape)) or "a number"
        placed = ", ".join(f"{_placed(placed)} over {axis}" for axis, placed in param.placements)
        lines.append(f"{param.name} ({shape}): {placed or 'whole on each device'}")
    text = "\n".join(lines)
    if text not in details:
        details.append(text)
    short = block.name.rsplit(".", 1)[-1]
    return {
        "label": short if short.isdecimal() else short[:14],
        "name": block.name,
        "shade": shade[block.block_class],
        "detail": details.index(text),
        "recompute": block.recompute,
    }


def _placed(placement: str) -> str:
    """Spell a placement: ``S(0)`` is ``dim 0 split``."""
    return f"dim {placement[2:-1]} split" if placement.startswith("S(") else placement


def network_picture(network: NetworkView) -> dict[str, Any]:
    """Return nested boxes, the outermost first, with the links that join what is in them."""
    levels = [_level(link) for link in reversed(network.links)]
    sizes = [link.reaches for link in network.links]
    counts = [
        sizes[0],
        *(-(-outer // inner) for inner, outer in pairwise(sizes)),
    ]
    counts.reverse()
    for level, count in zip(levels, counts, strict=True):
        most = 16 if level is levels[-1] else MOST_INSIDE
        level["shown"], level["more"] = min(count, most), max(0, count - most)
        level["count"] = count
    used = [link for link in network.links if link.axes]
    told = "; ".join(f"{_joined(link.axes)} over {link.name} ({_rate(link)})" for link in used)
    return {
        "name": network.name,
        "device": network.device,
        "levels": levels,
        "per_node": network.devices_per_node,
        "summary": f"{network.num_devices} x {network.device}, {network.devices_per_node} to a "
        "node." + (f" {told[0].upper()}{told[1:]}." if told else ""),
        "table": Table(
            columns=("link", "joins", "rate of a device", "latency", "carries"),
            rows=tuple(
                (
                    link.name,
                    f"{link.reaches} devices",
                    _rate(link),
                    format_seconds(link.latency_s),
                    ", ".join(link.axes) or "nothing of this plan",
                )
                for link in network.links
            ),
        ),
    }


def _joined(axes: Sequence[str]) -> str:
    return " and ".join(axes)


def _level(link: LinkView) -> dict[str, Any]:
    return {
        "link": link.name,
        "rate": _rate(link),
        "latency": format_seconds(link.latency_s),
        "axes": link.axes,
    }


def _rate(link: LinkView) -> str:
    if link.bytes_per_s == float("inf"):
        return "free"
    if link.bytes_per_s < 1e9:
        return f"{link.bytes_per_s / 1e6:.3g} MB/s"
    return f"{link.bytes_per_s / 1e9:.3g} GB/s"
