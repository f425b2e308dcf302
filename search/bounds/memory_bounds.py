"""The bounds of the fullest rank's bytes in the catalogue, and that of activations in flight."""

from __future__ import annotations

from collections.abc import Sequence

from costmodel.time.stage_costs.load import StageLoad
from search.bounds.catalogue import memory_bound
from search.bounds.least_costs import LeastCosts
from search.space.shapes import Configuration, recompute_choices


@memory_bound
def share_of_parameters(costs: LeastCosts, config: Configuration) -> float:
    """What a rank needs for 1 / pp of the parameters: some rank holds at least its share. What
    several blocks use counts once, as its users may share a rank.
    """
    shared = sum(size for _, _, size in costs.table.ties)
    param_bytes = float(costs.table.blocks.param_bytes.sum() - shared) / config.pp
    return float(costs.rank_bytes(StageLoad(param_bytes=param_bytes), config, ("none",)))


@memory_bound
def largest_block(costs: LeastCosts, config: Configuration) -> float:
    """What a rank needs for the largest block and one microbatch of it: a block is not divided."""
    choices = recompute_choices(config.recompute)
    return float(costs.rank_bytes(costs.table.blocks, config, choices).max())


def kept_in_flight(costs: LeastCosts, config: Configuration, in_flight: Sequence[int]) -> float:
    """Context + a / sum_s (1 / k_s): activations in flight take that on some rank.

    a is what the whole chain keeps of a microbatch, a_s stage s's part, and k_s the most
    microbatches that stage s holds. If no rank takes more than L, a_s <= L / k_s, and the sum over
    stages is a <= L sum_s (1 / k_s). Not in the catalogue, as k_s may have to be read from a table.
    """
    kept = costs.chain_kept_bytes(config.recompute)
    live = map(costs.table.on_host.live, in_flight)
    return float(costs.table.profile.context_bytes) + kept / sum(1.0 / k for k in live)
