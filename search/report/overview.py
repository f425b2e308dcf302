"""A plan at a glance: what it decides, what it should cost and why, as data for a page or a screen.

Comes from a plan, its prices and its estimate; `commands/render` turns it into text and pictures.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from costmodel import CostCache, Estimate
from costmodel.estimate import plan_job_seconds
from costmodel.time.step_path import StepPath
from costmodel.uncertainty import Interval, MemoryInterval, memory_interval
from costmodel.utilization import model_flop_utilization, product_dtype
from planner.language.graph import ModelGraph
from planner.language.graph.batch import tokens_per_sample
from planner.language.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StageView:
    """One stage of a plan."""

    stage: int
    """Its index, in forward order."""
    pp_rank: int
    """The pp rank that holds it."""
    first_block: int
    """Its first block."""
    last_block: int
    """Its last block, inclusive."""
    blocks: str
    """Its blocks by name, such as ``model.layers.0..7``."""
    first_rank: int
    """The first of its ranks."""
    last_rank: int
    """The last of its ranks, inclusive."""
    device_group: str
    """The group of devices that it lies on; empty where all are equal."""
    mesh: tuple[tuple[str, int], ...]
    """Axes of its mesh with more than one rank, and their sizes."""
    recompute: str
    """What its blocks recompute, in words."""
    num_params: int
    """Trained parameters of all its ranks together, copies counted once."""
    forward_s: float
    """A forward of one microbatch, with what it waits for."""
    backward_s: float
    """A backward of one microbatch, with recomputation and what it waits for."""
    share: float
    """Part of the step in which it runs its jobs."""


@dataclass(frozen=True, kw_only=True)
class Overview:
    """A plan and its price."""

    model: str
    """Name of the model."""
    device: str
    """The devices by name, as the profile has them."""
    num_devices: int
    """All of them."""
    step_s: float
    """Seconds of a step."""
    interval: Interval
    """Where it lies in four of five cases."""
    samples_per_s: float
    """Samples of all ranks together."""
    tokens_per_s: float
    """Tokens of all ranks together; 0 for a model that takes none."""
    mfu: float | None
    """Model flop utilization, of the peak of `dtype`; None where that is not told."""
    dtype: str
    """In which most parameters are held, and multiplied."""
    peak_flop_per_s: tuple[tuple[str, float], ...]
    """Peaks of one device, by dtype."""
    peak_bytes: int
    """Memory of the fullest device."""
    limit_bytes: tuple[float, ...]
    """What a device of each pp rank may hold: its memory, or the limit of the search."""
    device_bytes: tuple[float, ...]
    """What a device of each pp rank has; never less than its limit."""
    memory: tuple[dict[str, int], ...]
    """Bytes of each pp rank by part."""
    memory_intervals: tuple[MemoryInterval, ...]
    """Where the bytes of each pp rank lie in four of five cases."""
    path: StepPath
    """The step by cause."""
    stages: tuple[StageView, ...]
    """Its stages."""
    source: str
    """``measured`` or ``shipped``: what the profile stands on."""
    device_type: str
    """``cpu`` or ``cuda``."""

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON data."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {
            **data,
            "interval": {**asdict(self.interval), "relative": self.interval.relative},
            "memory_intervals": [asdict(interval) for interval in self.memory_intervals],
            "peak_flop_per_s": dict(self.peak_flop_per_s),
            "path": self.path.to_dict(),
            "stages": [asdict(stage) | {"mesh": dict(stage.mesh)} for stage in self.stages],
        }

    @property
    def fullest(self) -> int:
        """The pp rank that is nearest to its limit."""
        part = [parts["total_bytes"] / limit for parts, limit in zip(
            self.memory, self.limit_bytes, strict=True)]  # fmt: skip
        return max(range(len(part)), key=part.__getitem__)

    def told(self) -> dict[str, Any]:
        """Return what a plan's file says of how sure its estimate is."""
        rank = self.fullest
        return {
            "relative_error": self.interval.relative,
            "memory_interval": {
                "pp_rank": rank,
                "total_bytes": self.memory[rank]["total_bytes"],
                **asdict(self.memory_intervals[rank]),
                "limit_bytes": round(self.limit_bytes[rank]),
                "device_bytes": round(self.device_bytes[rank]),
            },
        }

    @property
    def bottleneck(self) -> list[StageView]:
        """The stages of the pp rank with the most work."""
        return [stage for stage in self.stages if stage.pp_rank == self.path.bottleneck]


def find_overview(
    plan: Plan,
    costs: CostCache,
    estimate: Estimate,
    interval: Interval,
    *,
    memory_limit_bytes: float | None = None,
) -> Overview:
    """Return a plan at a glance; `memory_limit_bytes` where the profile's own does not hold."""
    graph = costs.graph
    # Of each pp rank the devices of its fullest replica.
    profiles = [costs.of_group(group).profile for group in estimate.device_groups]
    tokens = plan.global_batch * tokens_per_sample(graph)
    groups = [name for rank in plan.device_groups for name in rank.split("+")]
    devices = dict.fromkeys(costs.of_group(name).profile.cluster.device for name in groups)
    return Overview(
        model=graph.name,
        device=" and ".join(devices),
        num_devices=plan.world_size,
        step_s=estimate.step_s,
        interval=interval,
        samples_per_s=plan.global_batch / estimate.step_s,
        tokens_per_s=tokens / estimate.step_s,
        mfu=model_flop_utilization(estimate.flop, estimate.step_s, plan, costs),
        dtype=product_dtype(costs),
        peak_flop_per_s=costs.profile.cluster.peak_flop_per_s,
        peak_bytes=estimate.peak_bytes,
        limit_bytes=tuple(memory_limit_bytes or profile.memory_bytes for profile in profiles),
        device_bytes=tuple(
            max(memory_limit_bytes or 0.0, profile.memory_bytes) for profile in profiles
        ),
        memory=tuple(parts.to_dict() for parts in estimate.memory),
        memory_intervals=tuple(
            memory_interval(parts, profile, costs.execution)
            for parts, profile in zip(estimate.memory, profiles, strict=True)
        ),
        path=estimate.path,
        stages=_stages(plan, costs, estimate.step_s),
        source=estimate.source,
        device_type=costs.profile.cluster.device_type,
    )


def _stages(plan: Plan, costs: CostCache, step_s: float) -> tuple[StageView, ...]:
    jobs = plan_job_seconds(plan, costs)
    ranks = plan.degrees.num_ranks
    views = []
    for index, stage in enumerate(plan.stages):
        degrees = plan.stage_degrees(index)
        forward_s = float(jobs.forward_s[index])
        backward_s = float(jobs.backward_input_s[index] + jobs.backward_weight_s[index])
        views.append(
            StageView(
                stage=index,
                pp_rank=stage.pp_rank,
                first_block=stage.first_block,
                last_block=stage.last_block,
                blocks=blocks_spelled([costs.graph.blocks[block].name for block in stage.blocks]),
                first_rank=stage.pp_rank * ranks,
                last_rank=(stage.pp_rank + 1) * ranks - 1,
                device_group=stage.device_group,
                mesh=tuple((axis, size) for axis, size in degrees.items() if size > 1),
                recompute=recompute_spelled(Counter(stage.recompute_by_block)),
                num_params=num_params(costs.graph, stage.blocks),
                forward_s=forward_s,
                backward_s=backward_s,
                share=(forward_s + backward_s) * plan.num_microbatches / step_s,
            )
        )
    return tuple(views)


def blocks_spelled(names: list[str]) -> str:
    """Return names of blocks in order, runs of numbers as one: ``embed, layers.0..7``."""
    runs: list[tuple[str, str, str]] = []
    for name in names:
        found = re.fullmatch(r"(.*?)(\d+)([^\d]*)", name)
        stem, number = (found[1], found[2]) if found and not found[3] else (name, "")
        if runs and number and runs[-1][0] == stem and int(runs[-1][2]) + 1 == int(number):
            runs[-1] = stem, runs[-1][1], number
        else:
            runs.append((stem, number, number))
    return ", ".join(
        f"{stem}{first}" + (f"..{last}" if last != first else "") for stem, first, last in runs
    )


def recompute_spelled(counts: Counter[str]) -> str:
    """Say what blocks recompute: ``none``, ``full``, ``full in 2, selective in 7 of 9 blocks``."""
    chosen = sorted((name, count) for name, count in counts.items() if name != "none")
    if not chosen:
        return "none"
    if len(counts) == 1:
        return chosen[0][0]
    named = ", ".join(f"{name} in {count}" for name, count in chosen)
    return f"{named} of {counts.total()} blocks"


def num_params(graph: ModelGraph, blocks: range) -> int:
    """Return the number of trained entries of some blocks' parameters."""
    names = {name for block in blocks for name in graph.blocks[block].params}
    tensors = (graph.tensor[name] for name in names)
    return sum(meta.numel_at(1) for meta in tensors if meta.kind == "param" and meta.requires_grad)
