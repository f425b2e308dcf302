"""What a runtime's replicas exchange, before compute hides any of it.

    ZeRO 0      gradients are summed: beside the last backward, or after it
    ZeRO 1, 2   gradients are reduce-scattered, weights gathered for the next step's first forward;
                some runtimes sum gradients on all replicas instead
    ZeRO 3      weights are gathered for each forward and each backward, gradients scattered

What a runtime does not overlap comes after the last job, or in the way of each.
"""

from __future__ import annotations

from costmodel.execution.executed import ExecutedProfile
from costmodel.execution.execution import Execution
from costmodel.time.communication import ALONE, DataParallelSeconds
from planner.language.plan.replication import Replication
from profiles import Group

WEIGHT_BYTES = 2
"""Bytes of a weight in bf16."""

NARROW_BYTES = 1
"""Bytes of a weight in 8 bits."""


def executed_exchange(
    profile: ExecutedProfile,
    execution: Execution,
    group: Group,
    replication: Replication,
    *,
    copies: Group = ALONE,
    param_bytes: float,
    num_blocks: int,
    num_tensors: int,
    frozen_bytes: float = 0.0,
    frozen_backward_bytes: float = 0.0,
) -> DataParallelSeconds:
    """Return what keeping the replicas of a rank's parameters equal takes, nothing hidden.

    ZeRO 3 alone shards frozen parameters: `frozen_bytes` are gathered for every forward,
    `frozen_backward_bytes` of them again for every backward. `group` is of the ranks that share
    (without ZeRO all of them), `copies` of those with the same shards.
    """
    if group.size == 1 or param_bytes + frozen_bytes == 0:
        return DataParallelSeconds()
    if replication.zero_stage == 3 and group.num_nodes > 1 and not execution.uses_all_links:
        # On a single link of each node its ranks together are no faster than a lone rank.
        group = Group(ranks_per_node=1, num_nodes=group.num_nodes)
    # ZeRO 3 sends block by block; sums go tensor by tensor, or in buckets as good as one message.
    pieces = 1
    if replication.zero_stage == 3:
        pieces = max(1, num_blocks)
    elif not replication.is_sharded and execution.sums_tensors:
        pieces = max(1, num_tensors)

    def seconds(kind: str, num_bytes: float, group: Group = group) -> float:
        if not num_bytes:
            return 0.0
        return pieces * profile.collective_seconds(kind, num_bytes / pieces, group).seconds

    # Of bf16 weights the record says how wide gradients travel; others travel as they are.
    is_cast = replication.gradient_factor > 1
    reduced = param_bytes * (execution.reduced_bytes / WEIGHT_BYTES if is_cast else 1)
    if not replication.is_sharded:
        sum_s = seconds("all_reduce", reduced)
        # Hidden sums run beside the last backward: gradients are complete only there.
        if "sums" in execution.overlaps:
            return DataParallelSeconds(last_backward_s=sum_s)
        return DataParallelSeconds(after_s=sum_s)
    across_s = seconds("all_reduce", reduced / group.size, copies) if copies.size > 1 else 0.0
    if replication.zero_stage < 3:
        gather_s = seconds("all_gather", param_bytes)
        gather_s += execution.unpack_s * num_tensors * group.size
        scatter_s = seconds("reduce_scatter" if execution.scatters else "all_reduce", reduced)
        scatter_s += across_s
        if "scatters" in execution.overlaps:
            return DataParallelSeconds(first_forward_s=gather_s, last_backward_s=scatter_s)
        return DataParallelSeconds(after_s=gather_s + scatter_s)
    scatter_s = seconds("reduce_scatter", reduced)
    # Embedding and head, which are gathered as they are, are counted with the layers here.
    sent = NARROW_BYTES / WEIGHT_BYTES if profile.casts and profile.casts.gathers_narrow else 1.0
    gather_s = seconds("all_gather", sent * (param_bytes + frozen_bytes))
    again_s = seconds("all_gather", sent * (param_bytes + frozen_backward_bytes))
    # A ZeRO 3 scatter moves as many bytes as a gather where gradients are as wide as weights.
    # `host_` seconds are those that nothing hides: they lengthen each job as they are.
    if "gathers" not in execution.overlaps:
        return DataParallelSeconds(
            host_forward_s=gather_s, host_backward_s=again_s + scatter_s, after_s=across_s
        )
    if "scatters" not in execution.overlaps:
        return DataParallelSeconds(
            forward_s=gather_s, backward_s=again_s, host_backward_s=scatter_s, after_s=across_s
        )
    return DataParallelSeconds(
        forward_s=gather_s, backward_s=again_s + scatter_s, last_backward_s=across_s
    )
