"""What offload takes: copies between device and host, and the optimizer's step on the host.

Without ZeRO the runtime steps bucket by bucket (`planner.runtime.state.optimizers.host_optimizer`):
gradients come down, the host updates, weights go up, and the three run beside each other:

    seconds = max(down, update, up) + (down + up) / num_buckets

as the first bucket's way down and the last one's way up have nothing to hide behind. Where
device and host are one CPU they share its memory, and seconds = down + update + up. With ZeRO,
FSDP2 copies shards up as it gathers them and gradients down as it has reduced them, so these
hide behind compute with their collectives; the update waits for all of them and is bare.

Activations leave while the job after their forward runs and return while the one before their
backward does (`planner.language.schedule.timing.offloads`), so a job takes as long as the copies
beside it, if that is longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil

import numpy as np

from planner.language.plan import Precision
from planner.language.plan.replication import gradient_factor
from planner.language.schedule.timing.offloads import Offload
from profiles import Profile
from profiles.records import StepWork

HOST_BUCKET_BYTES = 32 * 2**20
"""Of gradients, in one bucket (`planner.runtime.state.optimizers.host_optimizer`)."""


def host_step_seconds(
    profile: Profile,
    *,
    param_bytes: float,
    num_tensors: int,
    sharded: bool,
    precision: Precision,
) -> float:
    """Return one step of AdamW on the host for a rank that trains `param_bytes` of weights
    (its shard of them, if `sharded`), copies included as far as nothing hides them.
    """
    factor = gradient_factor(precision)
    update = profile.host_optimizer_seconds(
        param_bytes=factor * param_bytes,
        weight_bytes=param_bytes,
        num_tensors=num_tensors,
        sharded=sharded,
    ).seconds
    if sharded:
        return update
    # Gradients come down as wide as their sums; weights go up in their own dtype.
    down = copy_seconds(profile, factor * param_bytes, num_tensors, to_host=True)
    up = copy_seconds(profile, param_bytes, num_tensors, to_host=False)
    if profile.cluster.device_type == "cpu":
        return down + update + up
    # The slowest of three sets the pace; filling and draining the chain costs a bucket each way.
    num_buckets = max(1, ceil(factor * param_bytes / HOST_BUCKET_BYTES))
    return max(down, update, up) + (down + up) / num_buckets


def copy_seconds(
    profile: Profile, num_bytes: float, num_tensors: int = 1, *, to_host: bool
) -> float:
    """Return a copy between a device and its host."""
    work: StepWork = "device_to_host" if to_host else "host_to_device"
    return profile.step_seconds(work, num_bytes=num_bytes, num_tensors=num_tensors).seconds


def least_job_seconds(
    profile: Profile, num_jobs: int, found: Iterable[Offload], moved_bytes: Mapping[int, float]
) -> np.ndarray:
    """Return, by position in a rank's row, what the copies beside each job take: [num_jobs].

    `moved_bytes[stage]` are what one microbatch of a stage sends; the two directions of a
    link do not slow each other.
    """
    down, up = np.zeros(num_jobs), np.zeros(num_jobs)
    copies = {
        stage: [copy_seconds(profile, num_bytes, to_host=to_host) for to_host in (True, False)]
        for stage, num_bytes in moved_bytes.items()
    }
    for offload in found:
        leaving_s, arriving_s = copies[offload.stage_index]
        down[offload.leaving] += leaving_s
        up[offload.arriving] += arriving_s
    return np.maximum(down, up)
