"""Seconds of what the ranks of a published run exchange, by kind: the same collectives that
`costmodel.time.communication` asks of a profile, at the part of its rates that training reaches.
"""

from __future__ import annotations

from math import log2

from costmodel.table.kernels import DeviceRates
from costmodel.table.rows.run_row import RunRow
from costmodel.table.transformer import BUSIEST_RANK, Seconds
from costmodel.topology import axis_group, group_along, pipeline_group
from planner.layout.axes import Degrees
from profiles import Group, Profile


def _degrees(run: RunRow) -> Degrees:
    """Return the mesh of a stage of a run."""
    return Degrees(dp=run.dp, cp=run.cp, tp=run.tp)


def layer_tp_seconds(run: RunRow, profile: Profile, rates: DeviceRates, layer: Seconds) -> float:
    """Return what shows of the tensor-parallel collectives of one layer's forward (its backward has
    as many).
    """
    if run.tp == 1:
        return 0.0
    group = group_along(profile.cluster, _degrees(run), "tp")
    num_bytes = 2 * run.micro_batch * run.shape.seq_len * run.shape.hidden // run.cp
    if run.sequence_parallel:
        forward_s = _collective(profile, rates, "all_gather", num_bytes, group)
        forward_s += _collective(profile, rates, "reduce_scatter", num_bytes, group)
    else:
        forward_s = _collective(profile, rates, "all_reduce", num_bytes, group)
    total = 2 * forward_s
    if run.stack.overlaps_tp:
        return rates.exposed_seconds(total, behind_s=0.5 * layer.forward_s)
    return total


def layer_cp_seconds(run: RunRow, profile: Profile, rates: DeviceRates, layer: Seconds) -> float:
    """Return what shows of the exchange of keys and values of one layer, forward and backward.

    Every rank sees those of all cp ranks in the forward, again in the backward, and sends
    their gradients back. They go round a ring while attention to those at hand is computed,
    so all but the last part of each round is hidden behind as much attention.
    """
    if run.cp == 1:
        return 0.0
    group = group_along(profile.cluster, _degrees(run), "cp")
    shape = run.shape
    width = shape.qkv_width - shape.attention_width
    num_bytes = 2 * run.micro_batch * shape.seq_len * width / run.tp
    once = _collective(profile, rates, "all_gather", num_bytes, group)

    def exposed(seconds: float, attention_s: float) -> float:
        return max(seconds / run.cp, seconds - attention_s)

    there = layer.attention_forward_s
    return exposed(once, there) + exposed(2 * once, 2.5 * there)


def layer_ep_seconds(run: RunRow, profile: Profile, rates: DeviceRates) -> float:
    """Return tokens' way to their experts and back, once; a backward sends as many."""
    if run.data_ep == 1:
        return 0.0
    group = axis_group(profile.cluster, size=run.data_ep, stride=run.tp)
    shape = run.shape
    tokens = run.micro_batch * shape.seq_len / run.cp
    if run.sequence_parallel:
        tokens /= run.tp
    num_bytes = 2 * tokens * shape.experts_per_token * shape.hidden * BUSIEST_RANK
    return 2 * _collective(profile, rates, "all_to_all", num_bytes, group)


def skew_seconds(run: RunRow, rates: DeviceRates) -> float:
    """Return what tp ranks wait for the last of them at a collective that nothing overlaps."""
    return 0.0 if run.sequence_parallel else rates.skew_s * log2(run.tp)


def _collective(
    profile: Profile, rates: DeviceRates, kind: str, num_bytes: float, group: Group
) -> float:
    part = rates.network_efficiency
    if group.num_nodes == 1:
        part = rates.link_efficiency * rates.link_scale
    return profile.collective_seconds(kind, num_bytes, group).seconds / part


def hop_seconds(run: RunRow, profile: Profile, rates: DeviceRates) -> float:
    """Return what a microbatch takes from a stage to the next."""
    if run.pp == 1:
        return 0.0
    group = pipeline_group(profile.cluster, _degrees(run), pp=run.pp)
    num_bytes = 2 * run.micro_batch * run.shape.seq_len * run.shape.hidden / run.cp
    sent = _collective(profile, rates, "send_recv", num_bytes / run.tp, group)
    if run.tp > 1 and not run.sequence_parallel:
        # Each tp rank sends its part of what they all hold, and they gather it again
        # (Narayanan et al. 2021, arXiv 2104.04473, section 4.1).
        tp = group_along(profile.cluster, _degrees(run), "tp")
        sent += _collective(profile, rates, "all_gather", num_bytes, tp)
    return sent


def gather_seconds(run: RunRow, profile: Profile, rates: DeviceRates) -> float:
    """Return one all-gather of a layer's 16-bit weights over the dp ranks."""
    group = group_along(profile.cluster, _degrees(run), "data")
    if group.num_nodes > 1 and not run.stack.uses_all_links:
        group = Group(ranks_per_node=1, num_nodes=group.num_nodes)
    num_bytes = 2 * run.shape.held_params(run.data_ep) / run.tp
    return _collective(profile, rates, "all_gather", num_bytes, group)


def end_of_step_seconds(
    run: RunRow, profile: Profile, rates: DeviceRates, *, compute_s: float
) -> tuple[float, float]:
    """Return what shows of the gradients' exchange beside one microbatch's compute, and the
    optimizer, of the rank with the most parameters.
    """
    shape = run.shape
    per_rank = shape.layers / run.pp
    params = (shape.held_params(run.data_ep) * per_rank + shape.embedding_params) / run.tp
    owned = params
    if run.zero_stage:
        # Between them, dp ranks have all experts.
        owned = (shape.held_params() * per_rank + shape.embedding_params) / run.tp
        owned /= _degrees(run).along("data")
    group = group_along(profile.cluster, _degrees(run), "data")
    optimizer = rates.pass_seconds(run.stack.optimizer_pass_bytes * owned, 20)
    dp_s = 0.0
    if _degrees(run).along("data") > 1 and run.zero_stage < 3:
        num_bytes = run.stack.reduced_bytes * params
        if run.zero_stage == 0:
            dp_s = _collective(profile, rates, "all_reduce", num_bytes, group)
        else:
            scatter = _collective(profile, rates, "reduce_scatter", num_bytes, group)
            gather = _collective(profile, rates, "all_gather", 2 * params, group)
            dp_s = scatter + gather
        if run.stack.overlaps_dp:
            dp_s = rates.exposed_seconds(dp_s, behind_s=compute_s)
    if run.pp > 1:
        # The embedding is on the first and on the last rank; their gradients are summed.
        tied = axis_group(profile.cluster, size=2, stride=_degrees(run).num_ranks)
        num_bytes = run.stack.reduced_bytes * run.shape.embedding_params / run.tp
        dp_s += _collective(profile, rates, "all_reduce", num_bytes, tied)
    return dp_s, optimizer
