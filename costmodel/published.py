"""Step time and memory of a run described by a row of numbers, such as published tables.

The same parts as `estimate`: layers priced as kernels, collectives by the profile's
model, a pipeline as fill, steady state and drain (`costmodel.bound`), memory by
category. What a row leaves blank is the framework's usual choice, and is listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from costmodel.kernels import DeviceRates
from costmodel.run_memory import RunMemory, run_memory
from costmodel.stacks import STACKS, Stack
from costmodel.topology import axis_group, dp_group, hop_group, tp_group
from costmodel.transformer import (
    Seconds,
    Split,
    TransformerShape,
    embedding_seconds,
    forward_kernels,
    head_seconds,
    layer_seconds,
)
from planner.errors import PlannerError
from profiles import Group, Profile


class RowError(PlannerError):
    """A row lacks what an estimate needs, or contradicts itself."""


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """A run with every blank filled; `assumed` says with what."""

    shape: TransformerShape
    stack: Stack
    dtype: str
    global_batch: int
    micro_batch: int
    tp: int
    cp: int
    pp: int
    vpp: int
    dp: int
    sequence_parallel: bool
    zero_stage: int
    schedule: str
    recompute: str
    assumed: tuple[str, ...] = field(default=())

    @property
    def gpus(self) -> int:
        """Number of devices."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one dp replica; an uneven last one counts whole."""
        return max(1, ceil(self.global_batch / (self.dp * self.micro_batch)))


_DTYPES = {
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "fp8": "float8_e4m3fn",
    "mxfp8": "float8_e4m3fn",
}


def parse_row(row: Mapping[str, Any]) -> RunRow:
    """Fill a row's blanks with the framework's usual choices.

    Raises RowError, in one line, when the row lacks the model's size or the layout, has
    experts, or its numbers do not divide.
    """
    assumed: list[str] = []

    def number(name: str, default: int | None = None) -> int:
        value = row.get(name)
        if not _blank(value):
            return int(float(value))  # type: ignore[arg-type]
        if default is None:
            raise RowError(f"column {name} is blank; an estimate needs it")
        assumed.append(f"{name}={default}")
        return default

    if number("ep", 1) > 1:
        raise RowError("expert parallel runs are not described by these columns")
    stack_name = str(row.get("stack") or "")
    stack = STACKS.get(stack_name)
    if stack is None:
        stack = STACKS["megatron-te"]
        assumed.append("stack=megatron-te")
    hidden, heads = number("hidden"), number("heads")
    gated = bool(number("gated_ffn", 0))
    shape = TransformerShape(
        layers=number("layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=number("kv_heads", heads),
        ffn_hidden=number("ffn_hidden", 4 * hidden),
        gated=gated,
        vocab=number("vocab", 51200),
        seq_len=number("seq_len"),
    )
    tp, cp, pp = number("tp", 1), number("cp", 1), number("pp", 1)
    gpus = row.get("gpus")
    default_dp = None if _blank(gpus) else max(1, int(float(gpus)) // (tp * cp * pp))  # type: ignore[arg-type]
    dp = number("dp", default_dp)
    if not _blank(gpus) and tp * cp * pp * dp != int(float(gpus)):  # type: ignore[arg-type]
        raise RowError(
            f"tp*cp*pp*dp = {tp * cp * pp * dp} does not equal gpus={int(float(gpus))}; "  # type: ignore[arg-type]
            "the layout is incomplete"
        )
    micro_batch = number("micro_batch", 1)
    dtype_name = str(row.get("dtype") if not _blank(row.get("dtype")) else "bf16")
    if dtype_name not in _DTYPES:
        raise RowError(f"dtype {dtype_name!r} is not priced; use one of {', '.join(_DTYPES)}")
    if shape.heads % tp:
        raise RowError(f"tp={tp} does not divide heads={shape.heads}")
    schedule = row.get("schedule")
    vpp = number("vpp", 1)
    if _blank(schedule):
        schedule = "interleaved-1f1b" if vpp > 1 else "1f1b"
    recompute = row.get("recompute")
    if _blank(recompute):
        recompute = stack.recompute
        assumed.append(f"recompute={recompute}")
    return RunRow(
        shape=shape,
        stack=stack,
        dtype=_DTYPES[dtype_name],
        global_batch=number("global_batch"),
        micro_batch=micro_batch,
        tp=tp,
        cp=cp,
        pp=pp,
        vpp=vpp,
        dp=dp,
        sequence_parallel=bool(number("sp", int(stack.sequence_parallel and tp > 1))),
        zero_stage=number("zero_stage", stack.zero_stage),
        schedule=str(schedule),
        recompute=str(recompute),
        assumed=tuple(assumed),
    )


def _blank(value: Any) -> bool:
    return value is None or value == "" or value != value


@dataclass(frozen=True, kw_only=True)
class RunEstimate:
    """Predicted seconds of a step, in parts that add up, of the slowest rank."""

    compute_s: float
    host_s: float
    recompute_s: float
    tp_comm_s: float
    pp_comm_s: float
    bubble_s: float
    dp_comm_s: float
    optimizer_s: float

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return (
            self.compute_s
            + self.host_s
            + self.recompute_s
            + self.tp_comm_s
            + self.pp_comm_s
            + self.bubble_s
            + self.dp_comm_s
            + self.optimizer_s
        )


@dataclass(frozen=True, slots=True)
class _Job:
    """Seconds of one microbatch on one pp rank, forward and backward, in parts."""

    forward_s: float
    backward_s: float
    recompute_s: float
    tp_s: float
    host_s: float
    hop_s: float

    @property
    def total_s(self) -> float:
        return (
            self.forward_s
            + self.backward_s
            + self.recompute_s
            + self.tp_s
            + self.host_s
            + self.hop_s
        )


def estimate_run(run: RunRow, profile: Profile, rates: DeviceRates) -> RunEstimate:
    """Return the step time of a run on a machine."""
    cluster = profile.cluster
    split = _split(run)
    layer = layer_seconds(run.shape, split, rates, run.stack)
    head = head_seconds(run.shape, split, rates, run.stack)
    lookup = embedding_seconds(run.shape, split, rates, run.stack)
    layer_tp = _layer_tp_seconds(run, profile, rates, layer)
    fsdp = _gather_seconds(run, profile, rates) if run.zero_stage == 3 else 0.0
    hop = _hop_seconds(run, profile, rates)
    layers = _layers_of_ranks(run)

    def job(rank: int) -> _Job:
        first, last = rank == 0, rank == run.pp - 1
        extra = [lookup] * first + [head] * last
        forward = layers[rank] * layer.forward_s + sum(e.forward_s for e in extra)
        backward = layers[rank] * layer.backward_s + sum(e.backward_s for e in extra)
        again = layers[rank] * _recomputed_seconds(run, layer)
        # Forward, recomputed forward and backward each wait for the slower of host and device.
        count = layers[rank] * forward_kernels(run.shape, split, run.stack)
        count += 10 * last + 3 * first
        edge_tp = layer_tp / 2 * (first + last)
        tp_once = layers[rank] * layer_tp
        is_full = run.recompute == "full"
        phases = (
            (forward + tp_once + edge_tp, count * rates.host_op_s),
            (again + tp_once * is_full, is_full * count * rates.host_op_s),
            (backward + tp_once + edge_tp, 2 * count * rates.host_backward_op_s),
        )
        tp_s = tp_once * (2 + is_full) + 2 * edge_tp
        host = sum(max(0.0, needed - busy) for busy, needed in phases)
        device = sum(busy for busy, _ in phases)
        gathered = 0.0
        if run.zero_stage == 3:
            rounds = 3 if run.recompute == "none" else 3
            gathered = layers[rank] * fsdp * rounds
            if run.stack.overlaps_dp:
                gathered = max(gathered - device, gathered * 0.05)
        hops = 0.0 if run.pp == 1 else 2 * hop
        if run.stack.overlaps_pp and run.vpp > 1:
            hops = 0.0
        return _Job(forward, backward, again, tp_s + gathered, host, hops)

    jobs = {rank: job(rank) for rank in {0, run.pp // 2, run.pp - 1}}
    slowest = max(jobs.values(), key=lambda j: j.total_s)
    middle = jobs[run.pp // 2]
    m = run.num_microbatches
    bubble = (run.pp - 1) * (middle.total_s / run.vpp + (2 * hop if run.pp > 1 else 0.0))
    if run.schedule.startswith("zb"):
        bubble = 0.0 if run.schedule in ("zb-2p", "zb-v") else bubble / 3
    dp_s, optimizer_s = _end_of_step(run, profile, rates, slowest)
    return RunEstimate(
        compute_s=m * (slowest.forward_s + slowest.backward_s),
        host_s=m * slowest.host_s,
        recompute_s=m * slowest.recompute_s,
        tp_comm_s=m * slowest.tp_s,
        pp_comm_s=m * slowest.hop_s,
        bubble_s=bubble,
        dp_comm_s=dp_s,
        optimizer_s=optimizer_s,
    )


def _layers_of_ranks(run: RunRow) -> list[float]:
    """Layers of each pp rank; a remainder goes to the middle, as first and last hold more."""
    return [run.shape.layers / run.pp] * run.pp


def _recomputed_seconds(run: RunRow, layer: Seconds) -> float:
    if run.recompute == "full":
        return layer.forward_s
    if run.recompute == "selective" and not run.stack.flash_attention:
        return layer.attention_forward_s
    return 0.0


def _layer_tp_seconds(
    run: RunRow, profile: Profile, rates: DeviceRates, layer: Seconds
) -> float:
    """Exposed tensor-parallel collectives of one layer's forward (its backward has as many)."""
    if run.tp == 1:
        return 0.0
    group = tp_group(profile.cluster, tp=run.tp)
    num_bytes = 2 * run.micro_batch * run.shape.seq_len * run.shape.hidden // run.cp
    if run.sequence_parallel:
        one = _collective(profile, rates, "all_gather", num_bytes, group)
        one += _collective(profile, rates, "reduce_scatter", num_bytes, group)
    else:
        one = _collective(profile, rates, "all_reduce", num_bytes, group) + rates.skew_s
    total = 2 * one
    if run.stack.overlaps_tp:
        return max(total / 4, total - 0.5 * layer.forward_s)
    return total


def _collective(
    profile: Profile, rates: DeviceRates, kind: str, num_bytes: float, group: Group
) -> float:
    part = rates.link_efficiency if group.num_nodes == 1 else rates.network_efficiency
    return profile.collective_seconds(kind, num_bytes, group).seconds / part


def _hop_seconds(run: RunRow, profile: Profile, rates: DeviceRates) -> float:
    if run.pp == 1:
        return 0.0
    group = hop_group(profile.cluster, dp=run.dp, cp=run.cp, tp=run.tp, pp=run.pp)
    num_bytes = 2 * run.micro_batch * run.shape.seq_len * run.shape.hidden / run.cp
    if run.sequence_parallel:
        num_bytes /= run.tp
    return _collective(profile, rates, "send_recv", num_bytes, group)


def _gather_seconds(run: RunRow, profile: Profile, rates: DeviceRates) -> float:
    """One all-gather of a layer's 16-bit weights over the dp ranks."""
    group = dp_group(profile.cluster, dp=run.dp, cp=run.cp, tp=run.tp)
    num_bytes = 2 * run.shape.layer_params / run.tp
    return _collective(profile, rates, "all_gather", num_bytes, group)


def _end_of_step(
    run: RunRow, profile: Profile, rates: DeviceRates, slowest: _Job
) -> tuple[float, float]:
    """Exposed gradient exchange, and the optimizer, of the rank with the most parameters."""
    params = run.shape.layer_params * run.shape.layers / run.pp / run.tp
    params += run.shape.embedding_params / run.tp * (1 if run.pp > 1 else 1)
    group = dp_group(profile.cluster, dp=run.dp, cp=run.cp, tp=run.tp)
    owned = params / (run.dp * run.cp) if run.zero_stage else params
    optimizer = rates.pass_seconds(run.stack.optimizer_pass_bytes * owned, 20)
    dp_s = 0.0
    if run.dp * run.cp > 1 and run.zero_stage < 3:
        num_bytes = run.stack.reduced_bytes * params
        if run.zero_stage == 0:
            dp_s = _collective(profile, rates, "all_reduce", num_bytes, group)
            dp_s += rates.pass_seconds(4 * num_bytes)  # into a flat buffer and back
        else:
            scatter = _collective(profile, rates, "reduce_scatter", num_bytes, group)
            gather = _collective(profile, rates, "all_gather", 2 * params, group)
            dp_s = scatter + gather
        if run.stack.overlaps_dp:
            hidden_behind = slowest.forward_s + slowest.backward_s
            dp_s = max(dp_s / max(2.0, run.shape.layers / run.pp), dp_s - hidden_behind)
    if run.pp > 1:
        # The embedding is on the first and on the last rank; their gradients are summed.
        tied = axis_group(profile.cluster, size=2, stride=run.dp * run.cp * run.tp)
        num_bytes = run.stack.reduced_bytes * run.shape.embedding_params / run.tp
        dp_s += _collective(profile, rates, "all_reduce", num_bytes, tied)
    return dp_s, optimizer


def estimate_run_memory(run: RunRow) -> RunMemory:
    """Return the tensors of the rank that needs most memory."""
    return run_memory(
        run.shape,
        _split(run),
        run.stack,
        pp=run.pp,
        vpp=run.vpp,
        num_microbatches=run.num_microbatches,
        shard_ranks=run.dp * run.cp,
        zero_stage=run.zero_stage,
        schedule=run.schedule,
        recompute=run.recompute,
    )


def _split(run: RunRow) -> Split:
    return Split(
        micro_batch=run.micro_batch,
        tp=run.tp,
        cp=run.cp,
        sequence_parallel=run.sequence_parallel,
        dtype=run.dtype,
    )
