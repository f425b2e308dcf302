"""Memory of NCCL's communicators: those of this runtime on a rank, beyond what its context has.

A communicator keeps buffers for each rank that it is connected to, on each of its channels:

    bytes = sum over communicators of channels * CONNECTION_BYTES

A shipped profile's context is assumed to have those of an axis each ("a few NCCL groups"), and not
those of messages, of which a rank in the middle of a pipeline has four: two neighbours, two
directions. A measured profile's context has that of all ranks alone, through which it was measured.
On CPUs gloo keeps no such buffers.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        return 0
    ways = directions(edges, rank.plan.stage_to_pp_rank)
    channels = MESSAGE_BLOCKS * sum(rank.pp_rank in way for way in ways)
    if rank.costs.profile.source == "measured":
        degrees = rank.plan.stage_degrees(min(rank.stages))
        sizes = [degrees.along(name) for name in (*(a.name for a in lowered_axes()), "data")]
        if degrees["ep"] > 1:
            sizes += [degrees["ep"], degrees.expert_replicas]
        channels += LINE_CHANNELS * sum(size > 1 for size in sizes)
    return channels * CONNECTION_BYTES
