"""Model flop utilization (MFU; Chowdhery et al. 2022, PaLM, appendix B): a step's model flop over
what all devices could do in that time.
"""

from __future__ import annotations

from costmodel.cache import CostCache
from costmodel.time.replica_views import ranks_on_groups
from planner.language.plan import Plan
from planner.units import DTYPE_BYTES


def product_dtype(costs: CostCache) -> str:
    """Return the dtype in which most of a model's trained parameters are multiplied."""
    held: dict[str, int] = {}
    for meta in costs.graph.tensors:
        if meta.kind == "param":
            held[meta.dtype] = held.get(meta.dtype, 0) + meta.numel_at(1) * DTYPE_BYTES[meta.dtype]
    return max(held, key=held.__getitem__, default="float32")


def model_flop_utilization(
    flop: float, step_s: float, plan: Plan, costs: CostCache
) -> float | None:
    """Return MFU: a step's model flop (recomputation not counted) over what all devices could do.

    Peaks are those of the dtype of most parameters, of each pp rank's own devices; None where the
    profile has no peak of that dtype.
    """
    dtype, peak = product_dtype(costs), 0.0
    for pp_rank in range(plan.pp):
        for group, num_ranks in ranks_on_groups(plan, pp_rank, costs).items():
            known = dict(costs.of_group(group).profile.cluster.peak_flop_per_s)
            if dtype not in known:
                return None
            peak += known[dtype] * num_ranks
    return flop / (step_s * peak)
