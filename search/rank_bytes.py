"""Peak bytes of a rank with one stage, before there is a job table to play.

The cost model plays a rank's row job by job; this looks at the two moments that can be the
worst. Gradients kept in buckets (replicas without ZeRO) exist all the time. Others appear
with the first backward, so a stage that holds every microbatch before it has none at its
fullest, and one microbatch less when it has them. Loads may be arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from costmodel import StageLoad, rank_memory
from costmodel.memory import job_peak_bytes, kept_bytes
from planner.plan import Precision, Recompute
from profiles import Profile


def peak_bytes(
    load: StageLoad,
    *,
    in_flight: int,
    num_microbatches: int,
    recompute: Recompute,
    replicas: int,
    zero: int,
    profile: Profile,
    precision: Precision = "model",
    receive_bytes: Any = 0,
    batch_bytes: int = 0,
    splits_backward: bool = False,
) -> Any:
    """Return the bytes of a rank whose stage holds `in_flight` microbatches at most.

    Where backward is split, gradients may come when most activations are gone: less is
    counted then, and the cost model has the last word.
    """
    kept = kept_bytes(load, recompute=recompute)
    top = np.maximum(job_peak_bytes(load, recompute=recompute), kept) - kept

    def moment(live: int, gradients: Any) -> Any:
        return rank_memory(
            load,
            kept=live * kept,
            transient=top,
            dp=replicas,
            zero_stage=zero,
            profile=profile,
            receive_bytes=receive_bytes,
            batch_bytes=batch_bytes,
            gradients_then=gradients,
            precision=precision,
        ).total

    in_buckets = zero == 0 and replicas > 1
    if in_buckets or in_flight < num_microbatches:
        return moment(in_flight, None)
    fullest = moment(in_flight, 0)
    if splits_backward:
        return fullest
    return np.maximum(fullest, moment(in_flight - 1, None)) if in_flight > 1 else fullest
