"""Seconds of what a rank does once a step with its own parameters: clipping and the optimizer.

    update_s = norm_s + scale_s + optimizer_s        norm_s, scale_s: where gradients are clipped

All three pass over memory. With b bytes of parameters, g the gradient precision factor and
z the shards (`planner.language.plan.replication`), a rank reads and writes g b / z bytes of
masters, gradients and AdamW's two moments. In bf16 the new masters are cast down to the weights as
well. Where the optimizer is on the host, the host makes the step (`costmodel.time.offload`).
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.time.clipping import ClipSeconds, clip_seconds
from costmodel.time.offload import host_step_seconds
from planner.language.plan import Precision
from planner.language.plan.replication import Replication, gradient_factor
from profiles import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUpdate:
    """What a rank does after its last backward; no message in it."""

    optimizer_s: float
    """Seconds of the optimizer's step, on the device or on its host."""
    clip: ClipSeconds
    """Seconds of the norm of its gradients, and of scaling them."""

    def __add__(self, other: RankUpdate) -> RankUpdate:
        """Return both updates, one after the other."""
        clip = ClipSeconds(
            norm_s=self.clip.norm_s + other.clip.norm_s,
            scale_s=self.clip.scale_s + other.clip.scale_s,
        )
        return RankUpdate(optimizer_s=self.optimizer_s + other.optimizer_s, clip=clip)

    def seconds(self, *, clips_gradients: bool) -> float:
        """Return the update's seconds on a rank that waits for no other."""
        clip_s = self.clip.norm_s + self.clip.scale_s if clips_gradients else 0.0
        return self.optimizer_s + clip_s


def rank_update(
    profile: Profile, replication: Replication, *, param_bytes: float, num_tensors: float
) -> RankUpdate:
    """Return the update of a rank that trains `param_bytes` in `num_tensors` tensors before they
    are sharded: those of all its stages.
    """
    # Each rank steps on its shard only.
    own_bytes = param_bytes / replication.shards
    sharded, on_host = replication.is_sharded, replication.optimizer_on_host
    step_seconds = host_step_seconds if on_host else adamw_seconds
    return RankUpdate(
        optimizer_s=step_seconds(
            profile,
            param_bytes=own_bytes,
            num_tensors=int(num_tensors),
            sharded=sharded,
            precision=replication.precision,
        ),
        clip=clip_seconds(
            profile,
            gradient_bytes=replication.gradient_bytes(param_bytes),
            num_tensors=int(num_tensors),
            on_host=on_host and sharded,
        ),
    )


def adamw_seconds(
    profile: Profile,
    *,
    param_bytes: float,
    num_tensors: int,
    sharded: bool = False,
    precision: Precision = "model",
) -> float:
    """Return one AdamW step over local parameters; `sharded` ones are DTensors (ZeRO).

    In bf16 the step is over fp32 masters, read again to write the weights.
    """
    stepped_bytes = gradient_factor(precision) * param_bytes
    update = profile.optimizer_seconds(
        param_bytes=stepped_bytes, num_tensors=num_tensors, sharded=sharded
    ).seconds
    if precision == "model":
        return update
    cast = profile.step_seconds("cast", num_bytes=stepped_bytes, num_tensors=num_tensors).seconds
    return update + cast
