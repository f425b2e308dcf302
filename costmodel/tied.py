"""Seconds that stages which share a parameter take to sum its gradients, once a step.

A tied embedding of the first and the last stage has a copy on each; after the last backward the
ranks that hold the same piece add up their sums (`planner.runtime.tied`).
"""

from __future__ import annotations

from collections.abc import Iterator

from costmodel.communication import MASTER_FACTOR
from costmodel.topology import axis_group
from planner.graph import ModelGraph
from planner.plan import Plan, Precision
from profiles import Profile

COPIES = 8
"""Bytes that cross memory for each byte of a gradient: a sum of copies is made, laid beside
others in one message, and written back."""


def tied_seconds(plan: Plan, graph: ModelGraph, profile: Profile) -> tuple[float, ...]:
    """Return what each pp rank spends on it."""
    spent = [0.0] * plan.pp
    ranks_of_one = plan.world_size // plan.pp
    for first, second, num_bytes in _shared(plan, graph):
        seconds = exchange_seconds(
            profile, num_bytes=num_bytes, ranks_apart=abs(second - first) * ranks_of_one
        )
        spent[first] += seconds
        spent[second] += seconds
    return tuple(spent)


def exchange_seconds(profile: Profile, *, num_bytes: float, ranks_apart: int) -> float:
    """Return the sum over two ranks of a gradient of so many local bytes."""
    group = axis_group(profile.cluster, size=2, stride=ranks_apart)
    message = profile.collective_seconds("all_reduce", num_bytes, group).seconds
    return message + COPIES * num_bytes / profile.cluster.memory_bytes_per_s


def gradient_bytes(param_bytes: float, *, precision: Precision, shards: int) -> float:
    """Return the local bytes of a gradient's sum."""
    return param_bytes * (MASTER_FACTOR if precision == "bf16" else 1) / shards


def _shared(plan: Plan, graph: ModelGraph) -> Iterator[tuple[int, int, float]]:
    """Yield (pp rank, pp rank of the next block with it, local gradient bytes) of what two
    blocks share; one message has all of it.
    """
    last_user: dict[str, tuple[int, int]] = {}
    shared: dict[tuple[int, int], tuple[int, int, float]] = {}
    for s, stage in enumerate(plan.stages):
        tp = plan.stage_tp(s)
        split = {
            layout.class_index: layout
            for layout in plan.layouts
            if layout.axis == "tp" and (layout.tp or plan.tp) == tp > 1
        }
        shards = plan.stage_dp(s) * plan.cp if plan.zero_stage else 1
        for index in stage.blocks:
            block = graph.blocks[index]
            layout = split.get(block.class_index)
            for position, name in enumerate(block.params):
                meta = graph.tensor[name]
                if meta.kind != "param" or not meta.requires_grad:
                    continue
                before, rank = last_user.get(name, (index, stage.pp_rank))
                if rank != stage.pp_rank:
                    sharded = layout is not None and layout.params[position].startswith("S")
                    size = gradient_bytes(
                        meta.bytes_at(1) // (tp if sharded else 1),
                        precision=plan.precision,
                        shards=shards,
                    )
                    known = shared.get((before, index), (0, 0, 0.0))[2]
                    shared[before, index] = (rank, stage.pp_rank, known + size)
                last_user[name] = (index, stage.pp_rank)
    yield from shared.values()
