"""Step time and memory of a run described by a row of numbers, such as published tables.

The same parts as `estimate`: layers priced as kernels, collectives by the profile's model,
a pipeline as the steady state of its slowest rank plus fill and drain of the others,

    step_s = m * t_slowest + sum of t_others / vpp + end of step,

which for equal stages is what the simulator finds for 1F1B, and for others its critical path:
the slowest rank works without a pause once a microbatch came through those before it, and is
waited for by one more through all others. Then what is waited for the slowest of many nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil, log2

from costmodel.execution import Execution
from costmodel.execution.host import host_seconds
from costmodel.table.kernels import DeviceRates
from costmodel.table.rows.run_row import RowError, RunRow, parse_row
from costmodel.table.run_exchange import (
    end_of_step_seconds,
    gather_seconds,
    hop_seconds,
    layer_cp_seconds,
    layer_ep_seconds,
    layer_tp_seconds,
    skew_seconds,
)
from costmodel.table.run_memory import RunMemory, run_memory
from costmodel.table.transformer import (
    Seconds,
    embedding_seconds,
    forward_kernels,
    head_seconds,
    layer_seconds,
)
from profiles import Profile

__all__ = ["RowError", "RunEstimate", "RunRow", "estimate_run", "estimate_run_memory", "parse_row"]

TP_COLLECTIVES = 2
"""Tensor-parallel collectives of a layer's forward, and of its backward."""

EMBEDDING_KERNELS = 3
"""Launches of the lookup in a forward."""


@dataclass(frozen=True, kw_only=True)
class RunEstimate:
    """Predicted seconds of a step, in parts that add up, of the slowest rank."""

    compute_s: float
    host_s: float
    recompute_s: float
    tp_comm_s: float
    cp_comm_s: float
    ep_comm_s: float
    pp_comm_s: float
    bubble_s: float
    dp_comm_s: float
    optimizer_s: float
    straggler_s: float

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return sum(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Microbatch:
    """Seconds of one microbatch on one pp rank, forward and backward, in parts."""

    compute_s: float
    recompute_s: float
    tp_s: float
    cp_s: float
    ep_s: float
    gather_s: float
    host_s: float
    hop_s: float

    @property
    def total_s(self) -> float:
        return sum(getattr(self, name) for name in self.__dataclass_fields__)


def estimate_run(run: RunRow, profile: Profile, rates: DeviceRates) -> RunEstimate:
    """Return the step time of a run on a machine."""
    layer = layer_seconds(run.shape, run.split, rates, run.stack)
    layer_tp = layer_tp_seconds(run, profile, rates, layer)
    hop = hop_seconds(run, profile, rates)
    gather = gather_seconds(run, profile, rates) if run.zero_stage == 3 else 0.0
    layer_cp = layer_cp_seconds(run, profile, rates, layer)
    layer_ep = layer_ep_seconds(run, profile, rates)
    layers = _layers_of_ranks(run)
    by_rank = {
        rank: _microbatch(
            run, rates, rank, layers[rank], layer, layer_tp, layer_cp, layer_ep, gather, hop
        )
        for rank in {0, run.pp // 2, run.pp - 1}
    }
    slowest = max(by_rank.values(), key=lambda microbatch: microbatch.total_s)
    # Ranks between the first and the last are alike.
    inner_s = (run.pp - 2) * by_rank[run.pp // 2].total_s if run.pp > 2 else 0.0
    ends_s = sum(by_rank[rank].total_s for rank in {0, run.pp - 1})
    others_s = ends_s + inner_s - slowest.total_s
    m = run.num_microbatches
    dp_s, optimizer_s = end_of_step_seconds(run, profile, rates, compute_s=slowest.compute_s)
    bubble_s = _bubble_seconds(run, others_s, hop)
    nodes = ceil(run.gpus / profile.cluster.devices_per_node)
    working_s = m * (slowest.compute_s + slowest.host_s + slowest.recompute_s) + bubble_s
    return RunEstimate(
        compute_s=m * slowest.compute_s,
        host_s=m * slowest.host_s,
        recompute_s=m * slowest.recompute_s,
        tp_comm_s=m * slowest.tp_s,
        cp_comm_s=m * slowest.cp_s,
        ep_comm_s=m * slowest.ep_s,
        pp_comm_s=m * slowest.hop_s,
        bubble_s=bubble_s,
        dp_comm_s=dp_s + m * slowest.gather_s,
        optimizer_s=optimizer_s,
        straggler_s=rates.node_spread * log2(nodes) * working_s,
    )


def _microbatch(
    run: RunRow,
    rates: DeviceRates,
    rank: int,
    layers: float,
    layer: Seconds,
    layer_tp: float,
    layer_cp: float,
    layer_ep: float,
    gather: float,
    hop: float,
) -> _Microbatch:
    """Price one microbatch on a rank. Its forward, its recomputed forward and its backward
    each take as long as the slower of device and host, and more where both are about as slow.
    """
    first, last = rank == 0, rank == run.pp - 1
    ends = [embedding_seconds(run.shape, run.split, rates, run.stack)] * first
    ends += [head_seconds(run.shape, run.split, rates, run.stack)] * last
    forward = layers * layer.forward_s + sum(end.forward_s for end in ends)
    backward = layers * layer.backward_s + sum(end.backward_s for end in ends)
    again = layers * _recomputed_seconds(run, layer)
    is_full = run.recompute == "full"
    kernels = layers * forward_kernels(run.shape, run.split, run.stack)
    kernels += run.stack.head_kernels * last + EMBEDDING_KERNELS * first
    if run.tp > 1:
        kernels += TP_COLLECTIVES * layers
    # What ranks wait for each other grows with their number, whoever is the limit.
    skew = TP_COLLECTIVES * layers * skew_seconds(run, rates)
    tp_once = layers * layer_tp
    # The lookup sums its rows over tp ranks, and the head does so in backward.
    tp_ends = layer_tp / 2 * (first + last)
    wait = rates.launch_wait_s if run.stack.launches_block else 0.0
    # The head comes last in the forward: no launch is left to hide behind it.
    head_s = ends[-1].forward_s if last else 0.0
    phases = (
        (forward - head_s + tp_once + tp_ends, kernels * (rates.host_op_s + wait)),
        (again + tp_once * is_full, is_full * kernels * (rates.host_op_s + wait)),
        (backward + tp_once + tp_ends, 2 * kernels * (rates.host_backward_op_s + wait)),
    )
    return _Microbatch(
        compute_s=forward + backward,
        recompute_s=again,
        tp_s=(tp_once + skew) * (2 + is_full) + 2 * tp_ends,
        cp_s=layers * layer_cp * (1 + is_full / 3),
        ep_s=layers * layer_ep * (2 + is_full),
        gather_s=_sharded_seconds(
            run.stack,
            rates,
            layers * gather,
            forward_s=phases[0][0] + head_s,
            backward_s=phases[1][0] + phases[2][0],
        ),
        host_s=sum(host_seconds(run.stack, busy, needed) for busy, needed in phases),
        hop_s=_hops(run) * hop,
    )


def _hops(run: RunRow) -> int:
    """Return how often a rank waits for what another stage sends it, for one microbatch.

    Once forward and once backward for each of its virtual stages; zero-bubble tables have
    weight gradients to do meanwhile, but for one of each.
    """
    if run.hides_hops:
        return 0
    return 2 if run.schedule.startswith("zb") else 2 * run.vpp


def _sharded_seconds(
    stack: Execution, rates: DeviceRates, gather_s: float, *, forward_s: float, backward_s: float
) -> float:
    """Exposed exchange of ZeRO 3 for one microbatch: weights gathered for the forward and
    for the backward, and the gradients' scatter, which takes as long.
    """

    def exposed(seconds: float, behind_s: float) -> float:
        return rates.exposed_seconds(seconds, behind_s=behind_s)

    if not stack.overlaps_gathers:
        return 3 * gather_s
    if not stack.overlaps_dp:
        return exposed(gather_s, forward_s) + exposed(gather_s, backward_s) + gather_s
    return exposed(gather_s, forward_s) + exposed(2 * gather_s, backward_s)


def _bubble_seconds(run: RunRow, others_s: float, hop: float) -> float:
    """Fill and drain: one microbatch through all ranks but the slowest, `others_s`.

    Zero-bubble tables with twice the memory (or a V) have none, the one with 1F1B's memory a
    third (Qi et al. 2023, arXiv 2401.10241).
    """
    if run.schedule in ("zb-2p", "zb-v"):
        return 0.0
    bubble = others_s / run.vpp
    if run.hides_hops:
        # Nothing is computed yet, or any more, beside these.
        bubble += (run.pp - 1) * 2 * hop
    return bubble / 3 if run.schedule.startswith("zb") else bubble


def _layers_of_ranks(run: RunRow) -> list[float]:
    """Layers of each pp rank.

    Where they do not divide, the first and the last rank hold fewer, as they also hold the
    embedding and the head: the usual choice, and that of the zero-bubble papers' tables.
    """
    layers, pp = run.shape.layers, run.pp
    if pp == 1 or layers % pp == 0:
        return [layers / pp] * pp
    inner = -(-layers // pp)
    missing = inner * pp - layers
    ends = [float(inner - missing + missing // 2), float(inner - missing // 2)]
    if min(ends) < 0 or missing > pp:
        return [layers / pp] * pp
    return [ends[1], *[float(inner)] * (pp - 2), ends[0]]


def _recomputed_seconds(run: RunRow, layer: Seconds) -> float:
    if run.recompute == "full":
        return layer.forward_s
    if run.recompute == "selective":
        if run.stack.selective_skips_layers:
            return layer.forward_s / 2
        if not run.stack.flash_attention:
            return layer.attention_forward_s
    return 0.0


def estimate_run_memory(run: RunRow) -> RunMemory:
    """Return the tensors of the rank that needs most memory."""
    return run_memory(
        run.shape,
        run.split,
        run.stack,
        pp=run.pp,
        vpp=run.vpp,
        num_microbatches=run.num_microbatches,
        shard_ranks=run.dp * run.cp,
        zero_stage=run.zero_stage,
        schedule=run.schedule,
        recompute=run.recompute,
    )
