"""Price of one local program (a block on one tp rank): time, kept bytes, peaks, parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from costmodel.execution.executed import ExecutedProfile
from costmodel.execution.executed_program import executed_times
from costmodel.memory.block.block_bytes import peak_bytes
from costmodel.memory.block.recomputed import selective_bytes
from costmodel.memory.saved import saved_tensors
from costmodel.table.fusion import Kernels, fused_seconds, num_kernels
from costmodel.time.compute import inner_seconds, op_seconds, op_works, redistribute_seconds
from costmodel.time.program_times import ProgramTimes, Spent
from costmodel.topology import Axis
from planner.graph import Program
from planner.ops.flops import Work
from planner.ops.weight_products import ProductArgs, deferrable_products
from planner.units import DTYPE_BYTES
from profiles import Profile
from profiles.records import Direction


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCost:
    """One forward and one backward of a program on one rank.

    Seconds: `forward_s` and `backward_s` are compute, with `host_*_s` the part of them the
    device waits for the host; `weight_s` is the part of the backward that makes weight
    gradients, where a job table has them made later; `remade_s` what selective recomputation
    adds to the backward; `*_comm_s` are collectives, which run exposed, and what ranks wait for
    each other at them. `has_backward` says whether a gradient arrives at all: before a model's
    first trained parameter none does, and nothing is recomputed there.
    Bytes: `saved_bytes` are kept from forward to backward, activation inputs included and
    `saved_output_bytes` (outputs that this program itself keeps) too; `side_bytes` are kept
    inputs that need no gradient (rotary tables, masks; at `side_positions`), which all blocks
    of a stage share and `saved_bytes` leaves out; `input_bytes` are its activation inputs,
    all that full recompute keeps, and `selective_bytes` what selective recompute keeps
    besides (see `recomputed.selective_bytes`); peaks as in `block_bytes.peak_bytes`.
    Params are local: trainable elements' bytes and those of frozen ones and buffers
    (`frozen_param_bytes` without buffers and constants).
    """

    forward_s: float
    backward_s: float
    weight_s: float
    remade_s: float
    forward_comm_s: float
    backward_comm_s: float
    host_forward_s: float
    host_backward_s: float
    forward_flop: float
    backward_flop: float
    has_backward: bool
    saved_bytes: int
    saved_input_bytes: int
    saved_output_bytes: int
    side_bytes: int
    side_positions: tuple[int, ...]
    input_bytes: int
    selective_bytes: int
    selective_unsaved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    param_bytes: int
    frozen_bytes: int
    frozen_param_bytes: int
    num_params: int


def price_program(
    local: Program,
    profile: Profile,
    *,
    axes: Mapping[str, Axis],
    remade: frozenset[str] = frozenset(),
    kernels: Kernels = "eager",
    polls: bool = False,
) -> ProgramCost:
    """Price a bound program that `planner.layout.lowering.lower` made local.

    `axes` are those it was lowered on; `remade` names the ops that run again under selective
    recomputation. Collectives run on the compute stream's time, as the
    runtime waits for each. Fused `kernels` take less time; bytes are those of eager ones.
    `polls`: as in `Split`.
    """
    tensor = local.tensor
    has_backward = any(tensor[name].requires_grad for name in local.outputs)
    remade = remade if has_backward else frozenset()
    products = deferrable_products(local)
    trainable = [n for n in local.params if _is_trainable(local, n)]
    frozen = [n for n in local.params if not _is_trainable(local, n)]
    accumulate_s = accumulate_seconds(local, profile)
    saved = saved_tensors(local, device_type=profile.cluster.device_type)
    if isinstance(profile, ExecutedProfile):
        times = executed_times(
            local, profile, axes=axes, saved=saved, recomputed=remade, polls=polls
        )
    else:
        times = _program_times(local, profile, axes, remade, kernels, products)
    forward_peak, backward_peak = peak_bytes(saved, products)
    selective_kept, unsaved = selective_bytes(saved, remade)
    activations = [n for n in local.inputs if tensor[n].requires_grad]
    side_bytes = _bytes(local, [n for n in saved.inputs if n not in activations])
    return ProgramCost(
        forward_s=times.forward.device_s + times.forward.host_s,
        backward_s=times.backward.device_s + times.backward.host_s + accumulate_s,
        weight_s=times.weight_s + accumulate_s,
        remade_s=times.recomputed.device_s + times.recomputed.host_s,
        forward_comm_s=times.forward_comm_s,
        backward_comm_s=times.backward_comm_s,
        host_forward_s=times.forward.host_s,
        host_backward_s=times.backward.host_s,
        forward_flop=times.forward_flop,
        backward_flop=times.backward_flop,
        has_backward=has_backward,
        saved_bytes=saved.num_bytes - side_bytes,
        saved_input_bytes=_bytes(local, [n for n in saved.inputs if n in activations]),
        saved_output_bytes=_bytes(local, saved.outputs),
        side_bytes=side_bytes,
        side_positions=tuple(
            position
            for position, name in enumerate(local.inputs)
            if name in saved.inputs and name not in activations
        ),
        input_bytes=_bytes(local, activations),
        selective_bytes=selective_kept,
        selective_unsaved_bytes=unsaved,
        forward_peak_bytes=forward_peak,
        backward_peak_bytes=backward_peak - side_bytes,
        param_bytes=_bytes(local, trainable),
        frozen_bytes=_bytes(local, frozen),
        frozen_param_bytes=_bytes(local, [n for n in frozen if tensor[n].kind == "param"]),
        num_params=len(trainable),
    )


def _program_times(
    local: Program,
    profile: Profile,
    axes: Mapping[str, Axis],
    remade: frozenset[str],
    kernels: Kernels,
    products: Mapping[str, ProductArgs],
) -> ProgramTimes:
    """Sum up ops and collectives, and put the host's part on top."""
    tensor = local.tensor
    works = {
        op.name: op_works(op, tensor) for op in local.ops if op.target != "planner.redistribute"
    }
    seconds = _seconds_of_ops(local, profile, kernels, works)
    forward_s = backward_s = weight_s = recomputed_s = forward_comm_s = backward_comm_s = 0.0
    forward_flop = backward_flop = 0.0
    views = backward_views = backward_ops = forward_waits = backward_waits = 0
    for op in local.ops:
        if op.target == "planner.redistribute":
            there, back = redistribute_seconds(op, tensor, profile, axes)
            forward_comm_s += there
            backward_comm_s += back
            forward_waits += there > 0
            backward_waits += back > 0
            continue
        if op.target.startswith("planner."):
            inner = inner_seconds(op, tensor, profile, axes)
            forward_comm_s += sum(inner)
            forward_waits += len(inner)
        there, back = seconds[op.name]
        forward_s += there
        backward_s += back
        recomputed_s += there if op.name in remade else 0.0
        if op.name in products:
            # One product for the weight, and one as large for the input if it needs one.
            weight_s += back / 2 if tensor[products[op.name][0].name].requires_grad else back
        work, back_work = works[op.name]
        forward_flop += work.flop
        backward_flop += back_work.flop
        views += there == 0.0
        needs_gradient = tensor[op.outputs[0]].requires_grad
        backward_views += there == 0.0 and needs_gradient
        backward_ops += needs_gradient
    # The host launches every op, a view too; compiled code launches a kernel for several ops.
    forward_ops = len(local.ops)
    if kernels == "fused":
        forward_ops, views, backward_views = num_kernels(local), 0, 0
        backward_ops = min(backward_ops, forward_ops)
    forward = _with_host(profile, "forward", forward_s, kernels, ops=forward_ops, views=views)
    backward = _with_host(
        profile, "backward", backward_s, kernels, ops=backward_ops, views=backward_views
    )
    # Each collective waits for the slowest of its ranks.
    forward_comm_s += profile.wait_seconds(
        forward.device_s + forward.host_s, forward_waits, inside=True
    )
    backward_comm_s += profile.wait_seconds(
        backward.device_s + backward.host_s, backward_waits, inside=True
    )
    again = [op for op in local.ops if op.name in remade]
    again_views = sum(op.name not in works or works[op.name][0].num_bytes == 0 for op in again)
    recomputed = _with_host(
        profile, "forward", recomputed_s, kernels, ops=len(again), views=again_views
    )
    # Of corrections of the whole block, weight gradients have their share.
    if backward_s:
        waited = backward.host_s * len(products) / max(backward_ops, 1)
        weight_s = weight_s * backward.device_s / backward_s + waited
    return ProgramTimes(
        forward=forward,
        backward=backward,
        recomputed=recomputed,
        weight_s=weight_s,
        forward_comm_s=forward_comm_s,
        backward_comm_s=backward_comm_s,
        forward_flop=forward_flop,
        backward_flop=backward_flop,
    )


def accumulate_seconds(program: Program, profile: Profile, *, cut: float = 1) -> float:
    """Return what adding a microbatch's gradients to the sum so far takes.

    With `cut`, if a rank holds only that part of every parameter.
    """
    trainable = [n for n in program.params if _is_trainable(program, n)]
    return profile.step_seconds(
        "accumulate",
        num_bytes=sum(4 * prod(program.tensor[name].shape_at(1)) for name in trainable) / cut,
        num_tensors=len(trainable),
    ).seconds


def _seconds_of_ops(
    local: Program,
    profile: Profile,
    kernels: Kernels,
    works: Mapping[str, tuple[Work, Work]],
) -> dict[str, tuple[float, float]]:
    """Return forward and backward seconds of every op but redistributions, by name."""
    eager = {
        op.name: op_seconds(op, local.tensor, profile, works[op.name])
        for op in local.ops
        if op.name in works
    }
    measured = profile.block_correction("forward", compiled=True) != 1.0
    # Where whole compiled blocks were measured, that says it all.
    return eager if kernels == "eager" or measured else fused_seconds(local, profile, eager)


def _with_host(
    profile: Profile,
    direction: Direction,
    seconds: float,
    kernels: Kernels,
    *,
    ops: int,
    views: int,
) -> Spent:
    """Return the time of a whole block from the sum of its ops.

    The host feeds ops one by one: a device that computes asynchronously is never ahead of
    `launch_overhead_s` per op; a CPU pays it for views, whose time no op lookup holds. Where
    whole blocks were measured, the ratio to their ops' sum is applied; on a CPU it has the
    views in it. Ratios of compiled blocks are those of fused kernels.
    """
    correction = profile.block_correction(direction, compiled=kernels == "fused")
    device_s = seconds * correction
    if profile.cluster.device_type != "cpu":
        return Spent(device_s, max(0.0, ops * profile.launch_overhead_s - device_s))
    return Spent(device_s, views * profile.launch_overhead_s if correction == 1.0 else 0.0)


def _is_trainable(program: Program, name: str) -> bool:
    meta = program.tensor[name]
    return meta.kind == "param" and meta.requires_grad


def _bytes(program: Program, names: tuple[str, ...] | list[str]) -> int:
    metas = (program.tensor[name] for name in names)
    return sum(prod(meta.shape_at(1)) * DTYPE_BYTES[meta.dtype] for meta in metas)
