"""Seconds of what ranks exchange outside blocks: gradients, gathered weights, activations.

All grow with bytes and are plain arithmetic, so `num_bytes` may be a numpy array where a
profile's collectives are asked one size at a time (`np.vectorize`d by the caller).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from profiles import Group, Profile

BUCKET_BYTES = 25 * 2**20
"""Gradients go out in flat messages of about this size (`planner.runtime.reduce`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelSeconds:
    """What data parallelism adds to one rank's step.

    `per_forward_s` and `per_backward_s` come with every microbatch's jobs, `first_forward_s`
    with the first, `after_s` follows the last job.
    """

    per_forward_s: float = 0.0
    per_backward_s: float = 0.0
    first_forward_s: float = 0.0
    after_s: float = 0.0


def data_parallel_seconds(
    profile: Profile, group: Group, *, zero_stage: int, param_bytes: float, num_blocks: int
) -> DataParallelSeconds:
    """Return the cost of keeping replicas equal, for one rank's parameters in one dtype.

    As the runtime does it: ZeRO 0 sums gradients in buckets after the last backward; ZeRO 1
    gathers weights once a step and reduce-scatters gradients once; ZeRO 2 reduce-scatters
    every microbatch; ZeRO 3 also gathers for every forward and backward. With ZeRO a message
    is one block's weights.
    """
    if group.size == 1 or param_bytes == 0:
        return DataParallelSeconds()

    def message(kind: str, count: int) -> float:
        count = max(1, count)
        return count * profile.collective_seconds(kind, param_bytes / count, group).seconds

    if zero_stage == 0:
        return DataParallelSeconds(after_s=message("all_reduce", ceil(param_bytes / BUCKET_BYTES)))
    gather = message("all_gather", num_blocks)
    scatter = message("reduce_scatter", num_blocks)
    if zero_stage == 1:
        return DataParallelSeconds(first_forward_s=gather, after_s=scatter)
    if zero_stage == 2:
        return DataParallelSeconds(first_forward_s=gather, per_backward_s=scatter)
    return DataParallelSeconds(per_forward_s=gather, per_backward_s=gather + scatter)


def hop_seconds(profile: Profile, group: Group, num_bytes: float) -> float:
    """Return the transfer of one microbatch's boundary tensors to the next stage's rank."""
    return profile.collective_seconds("send_recv", num_bytes, group).seconds if num_bytes else 0.0


def adamw_seconds(
    profile: Profile, *, param_bytes: float, num_tensors: int, sharded: bool = False
) -> float:
    """Return one AdamW step over local parameters; `sharded` ones are DTensors (ZeRO)."""
    return profile.optimizer_seconds(
        param_bytes=param_bytes, num_tensors=num_tensors, sharded=sharded
    ).seconds
