"""Seconds of clipping gradients by one norm over the whole model
(`planner.runtime.state.gradients.clip`).

Each rank reads its gradients for their norm, all ranks sum one number, and each scales its
gradients in place. So all ranks wait for the last to have its gradients, and the step ends

    step_s = max over ranks r of (ready(r) + norm(r)) + sum of one number
             + max over ranks r of (scale(r) + update(r))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from costmodel.topology import axis_group
from profiles import Profile
from profiles.hosts import REACHED_FRACTION

NORM_CALLS = 8
"""Launches of a norm beside those that read gradients: they put the norms of tensors together."""

SCALAR_BYTES = 8
"""Of the squared norm that ranks sum, in float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipSeconds:
    """What one rank does about its norm and about scaling, no message in it."""

    norm_s: float = 0.0
    scale_s: float = 0.0


def clip_seconds(
    profile: Profile, *, gradient_bytes: float, num_tensors: int, on_host: bool = False
) -> ClipSeconds:
    """Return what a rank does that holds so many bytes of gradients in so many tensors.

    `on_host`: the shards that rest there (ZeRO with the optimizer on the host), where all devices
    of a node are at it at once. On a CPU each tensor is a call of its own; on a GPU one call
    takes many.
    """
    rate = profile.cluster.memory_bytes_per_s
    if on_host and profile.cluster.device_type != "cpu":
        share = profile.host.memory_bytes_per_s * REACHED_FRACTION
        # The node's devices divide what the host's memory reaches.
        rate = share / profile.cluster.devices_per_node
    one_by_one = on_host or profile.cluster.device_type == "cpu"
    each = profile.launch_overhead_s * num_tensors if one_by_one else 0.0
    return ClipSeconds(
        # A norm reads each gradient once; scaling in place reads and writes it.
        norm_s=gradient_bytes / rate + each + NORM_CALLS * profile.launch_overhead_s,
        scale_s=2 * gradient_bytes / rate + each,
    )


def norm_sum_seconds(profile: Profile, num_ranks: int) -> float:
    """Return the sum of one number over all ranks."""
    world = axis_group(profile.cluster, size=num_ranks, stride=1)
    return profile.collective_seconds("all_reduce", SCALAR_BYTES, world).seconds


def update_starts(
    ready_s: Sequence[float], clips: Sequence[ClipSeconds], *, norm_sum_s: float
) -> list[float]:
    """Return when each rank begins its update: once it is ready, or where `clips` are given, once
    all ranks' norms are there and its own gradients are scaled.
    """
    if not clips:
        return list(ready_s)
    norms = [ready + clip.norm_s for ready, clip in zip(ready_s, clips, strict=True)]
    return [max(norms) + norm_sum_s + clip.scale_s for clip in clips]


def last_rank(
    ready_s: Sequence[float],
    update_s: Sequence[float],
    clips: Sequence[ClipSeconds],
    *,
    norm_sum_s: float,
) -> tuple[int, float]:
    """Return the rank whose seconds make the step, and what it takes between having its
    gradients and its update: nothing where no `clips` are given.

    Without clipping it is the rank that ends last. With it, the rank that the others wait for;
    it counts what a slower update than its own takes longer, too.
    """
    ranks = range(len(ready_s))
    if not clips:
        return max(ranks, key=lambda r: ready_s[r] + update_s[r]), 0.0
    last = max(ranks, key=lambda r: ready_s[r] + clips[r].norm_s)
    # After the sum of norms all ranks start together, so the slowest scale and update end the step.
    to_end = max(clips[r].scale_s + update_s[r] for r in ranks)
    return last, clips[last].norm_s + norm_sum_s + to_end - update_s[last]
