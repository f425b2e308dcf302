"""Memory of NCCL's communicators: those of this runtime on a rank, beyond what its context has.

A communicator keeps buffers for each rank that it is connected to, on each of its channels:

    bytes = sum over communicators of channels * CONNECTION_BYTES

A shipped profile's context is assumed to have those of an axis each ("a few NCCL groups"), and not
those of messages, of which a rank in the middle of a pipeline has four: two neighbours, two
directions. A measured profile's context has that of all ranks alone, through which it was measured.
On CPUs gloo keeps no such buffers. Dispatchers of experts' rows keep buffers of their own for each
rank of a node and each node (`Dispatcher.buffer_rows`).
"""

from __future__ import annotations

from collections.abc import Sequence

from costmodel.execution.dispatch.of_plan import dispatchers_of_plan
from costmodel.memory.exact.resident import RankState
from planner.language.layout.axes import lowered_axes
from planner.language.lowering.routes import directions
from planner.language.lowering.wiring import Edge
from planner.nodes.nccl import CONNECTION_BYTES, LINE_CHANNELS, MESSAGE_BLOCKS


def has_communicators(rank: RankState) -> bool:
    """Whether a rank communicates on streams of its device, as this runtime does on GPUs."""
    costs = rank.costs
    return costs.profile.cluster.device_type != "cpu" and costs.execution.name.startswith("ours-")


def communicator_bytes(rank: RankState, edges: Sequence[Edge]) -> int:
    """Return the bytes of a rank's communicators that the profile's context has not."""
    if not has_communicators(rank):
        return _exchange_buffer_bytes(rank)
    ways = directions(edges, rank.plan.stage_to_pp_rank)
    channels = MESSAGE_BLOCKS * sum(rank.pp_rank in way for way in ways)
    if rank.costs.profile.source == "measured":
        degrees = rank.plan.stage_degrees(min(rank.stages))
        sizes = [degrees.along(name) for name in (*(a.name for a in lowered_axes()), "data")]
        if degrees["ep"] > 1:
            sizes += [degrees["ep"], degrees.expert_replicas]
        channels += LINE_CHANNELS * sum(size > 1 for size in sizes)
    return channels * CONNECTION_BYTES + _exchange_buffer_bytes(rank)


def _exchange_buffer_bytes(rank: RankState) -> int:
    """Return the bytes that a dispatcher of experts' rows keeps outside of the allocator: one
    buffer, as large as the widest block takes it.
    """
    stages = [rank.plan.stages[index] for index in rank.stages]
    blocks = [b for stage in stages for b in range(stage.first_block, stage.last_block + 1)]
    found = dispatchers_of_plan(rank.plan, rank.costs, blocks)
    return max((held for _, held in found), default=0)
