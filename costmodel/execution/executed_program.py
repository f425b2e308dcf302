"""What a block takes as a runtime executes it: kernels, collectives that show, and the host.

Of an execution that is priced with a profile (ours), ops are added up
(`costmodel.time.block.program`). Of those priced with rates (others):

forward  = products + attention + passes over memory         (device, `executed_kernels`)
host     = what issuing the kernels adds where the device does not keep it busy
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from costmodel.execution.dispatch.choice import dispatchers_of
from costmodel.execution.dispatch.exchange import exchanges_of
from costmodel.execution.executed import (
    ExecutedProfile,
    KernelSeconds,
    host_seconds,
    rated_profile,
)
from costmodel.execution.executed_comm import exposed_comm
from costmodel.execution.executed_kernels import (
    LOSSES,
    UNFUSED_SOFTMAX,
    adds_last,
    forked_bytes,
    is_attention,
    is_product,
    kernel_seconds,
    kernels_of,
    multiplies_weights,
    products_of_head,
    ring_rounds,
)
from costmodel.execution.execution import Execution
from costmodel.memory.saved import saved_tensors
from costmodel.table.fusion import Kernels
from costmodel.time.block.compute import ProgramTimes, Spent, op_works
from costmodel.time.block.moved import BlockMoved, with_waits
from costmodel.time.block.program import accumulate_seconds, profiled_times
from costmodel.time.stage_costs.times import RunTimes
from costmodel.topology import Axis
from planner.language.graph import Op, Program
from planner.language.layout.redistribute import REDISTRIBUTE
from planner.language.lowering.experts import grouped_products
from planner.language.ops.flops import needing_gradient
from planner.language.ops.record import family_of, packet_of
from profiles import Profile

NORMS = ("layer_norm", "rms_norm")
"""Ops that are a module each."""

SHARED_EXPERTS = "shared_expert"
"""Part of what modules are called that every token goes through beside the experts (Megatron-Core,
Hugging Face's library)."""

FILLED_PART = 0.2
"""Part of an op's time on the host that it takes to fill the tensors which the op allocates, where
runs must be deterministic (torch.utils.deterministic.fill_uninitialized_memory): a launch without
Python. Goldens of Megatron-LM that are asked to be take 0.18 to 0.22 longer in a layer than those
that are not, on A100, H100 and GB200."""

PLAIN_MODULES = 6
"""Products with weights and norms of a plain layer: queries, keys and values; what attention gives;
a feed-forward's two; a norm ahead of attention and feed-forward. A layer with experts has its
router's product in place of the feed-forward's."""


class PricedProgram(NamedTuple):
    """A run of one block, and what brings rows to its experts."""

    times: RunTimes
    """Its seconds."""
    dispatcher: str
    """The dispatcher's name; "" where no rows are exchanged."""
    moved: BlockMoved
    """Its collectives."""


def price_program(
    local: Program,
    profile: Profile,
    *,
    axes: Mapping[str, Axis],
    execution: Execution,
    recomputed: frozenset[str] = frozenset(),
    polls: bool = False,
    beside: bool = False,
    pieces: int = 1,
) -> PricedProgram:
    """Price a bound program that `planner.language.lowering.lowering.lower` made local: a run of
    one block, on the dispatcher that takes least.

    `axes` are those it was lowered on, `execution` the runtime that runs it; `recomputed` names the
    ops that run again under selective recomputation. Collectives run on the compute stream's time,
    as the runtime waits for each, but for what our runtime hides in a backward where weight
    gradients are made `beside` them, and in a forward where these go in `pieces`. `polls`: as in
    `Split`. Before a model's first trained
    parameter no gradient arrives, and nothing is recomputed.
    """
    has_backward = any(local.tensor[name].requires_grad for name in local.outputs)
    recomputed = recomputed if has_backward else frozenset()
    kernels: Kernels = "fused" if execution.kernels == "fused" else "eager"
    found = []
    for dispatcher in dispatchers_of(execution, local, profile.cluster.device, axes):
        if execution.prices == "rates":
            rated = rated_profile(profile).with_dispatcher(dispatcher)
            times = executed_times(local, rated, axes=axes, recomputed=recomputed, polls=polls)
        else:
            times = profiled_times(
                local,
                profile,
                axes=axes,
                dispatcher=dispatcher,
                recomputed=recomputed,
                kernels=kernels,
                beside=beside,
                pieces=pieces,
                graphs=execution.graphs,
            )
        name = dispatcher.name if exchanges_of(local) else ""
        run = _run_times(local, profile, times, has_backward)
        found.append(PricedProgram(run, name, times.moved))
    return min(
        found, key=lambda priced: priced.times.whole_forward_s + priced.times.whole_backward_s
    )


def _run_times(
    local: Program, profile: Profile, times: ProgramTimes, has_backward: bool
) -> RunTimes:
    accumulate_s = accumulate_seconds(local, profile)
    forward_s = sum(times.forward)
    deferrable = 1 - times.beside_s / times.weight_s if times.weight_s else 1.0
    return RunTimes(
        forward_s=forward_s,
        backward_s=sum(times.backward) + accumulate_s,
        # Adding to the sums is deferred with the weight gradients it adds; those that are made
        # beside collectives are not.
        weight_s=(times.weight_s + accumulate_s) * deferrable,
        recomputed_s=sum(times.recomputed),
        rerun_s=has_backward * (forward_s + times.forward_comm_s),
        rerun_host_s=has_backward * times.forward.host_s,
        rerun_comm_s=has_backward * times.forward_comm_s,
        comm_forward_s=times.forward_comm_s,
        comm_backward_s=times.backward_comm_s,
        host_forward_s=times.forward.host_s,
        host_backward_s=times.backward.host_s,
        forward_flop=times.forward_flop,
        backward_flop=times.backward_flop,
    )


def executed_times(
    local: Program,
    profile: ExecutedProfile,
    *,
    axes: Mapping[str, Axis],
    recomputed: frozenset[str],
    polls: bool = False,
) -> ProgramTimes:
    """Return the times of a bound program that was lowered on `axes`.

    `polls` says that messages between stages cross nodes (`Execution.polled_late_s`).
    """
    execution, rates = profile.execution, profile.rates
    # What ops save one by one: kernels that save less read what they take in its place.
    saved = saved_tensors(local, device_type=profile.cluster.device_type)
    forward_s = backward_s = weight_s = recomputed_s = 0.0
    forward_flop = backward_flop = 0.0
    kernels = unfused = again = regions = 0
    is_again = False
    # Flash attention computes its scores again in any case.
    is_whole = all(op.name in recomputed for op in local.ops if op.target != REDISTRIBUTE)
    is_flash = execution.flash_attention
    in_head = products_of_head(local)
    attention = shared = KernelSeconds(forward_s=0.0, backward_s=0.0)
    kernel_ops = kernels_of(local, execution)
    for ops in kernel_ops:
        seconds = kernel_seconds(ops, local, profile, saved, in_head)
        forward_s += seconds.forward_s
        backward_s += seconds.backward_s
        kernels += seconds.kernels
        unfused += seconds.kernels - 1 if seconds.kernels == UNFUSED_SOFTMAX.kernels else 0
        first = ops[0]
        was_again = is_again
        is_again = first.name in recomputed and not (
            is_flash and is_attention(first) and not is_whole
        )
        if is_again:
            recomputed_s += seconds.forward_s
            again += 1
            regions += not was_again
        if is_attention(first):
            attention = attention.with_other(seconds)
        if SHARED_EXPERTS in first.module:
            shared = shared.with_other(seconds)
        weight_s += seconds.weight_s
    for op in local.ops:
        if op.target != REDISTRIBUTE:
            work, back = op_works(op, local.tensor)
            forward_flop += work.flop
            backward_flop += back.flop
    # Of these additions bytes are counted, and no launches.
    backward_s += profile.pass_seconds(forked_bytes(local, kernel_ops), 0)
    compute = KernelSeconds(forward_s=forward_s, backward_s=backward_s)
    comm = exposed_comm(local, profile, axes, compute, attention, shared)
    wait = rates.launch_wait_s if execution.launches_block else 0.0
    in_rings = sum(rounds for rounds in map(ring_rounds, local.ops) if rounds > 1)
    issued = _host_ops(local, execution, kernel_ops, kernels) + comm.kernels + unfused
    issued += execution.ring_kernels * in_rings
    filling = execution.deterministic * FILLED_PART * issued
    if recomputed and not is_whole and execution.selective_by_op:
        recomputed_s = forward_s / 2
    # Every host of a group reaches a collective late at times, and all wait for the last.
    polled_s = polls * execution.polled_late_s * comm.kernels * comm.size
    # Where the host reads how many rows go where before it sends them, it has nothing queued then.
    sent_s, sent_back_s = (comm.rows_s, comm.rows_back_s) if execution.dropless else (0.0, 0.0)
    forward_host = (issued + filling) * (rates.issue_s + wait) + polled_s
    forward_busy_s = forward_s + comm.forward_s - sent_s
    forward_wait_s = host_seconds(execution, forward_busy_s, forward_host)
    has_backward = any(local.tensor[name].requires_grad for name in local.outputs)
    # A backward issues twice as many ops as a forward, as a product has a gradient for each of its
    # factors; each factor without a gradient takes an op off.
    issued_back = max(0, 2 * issued - _without_gradient(local)) + 2 * filling
    backward_host = has_backward * (issued_back * (rates.issue_back_s + wait) + polled_s)
    backward_busy_s = backward_s + comm.backward_s - sent_back_s
    backward_wait_s = host_seconds(execution, backward_busy_s, backward_host)
    # What runs again is issued again, in the backward, its part of a layer's ops; each region of
    # it is a function of its own, also in the forward.
    around = execution.region_kernels * regions
    issued_again = execution.forward_kernels * again / max(1, len(kernel_ops))
    again_host = (around + issued_again) * (rates.issue_s + wait)
    again_host += 2 * around * (rates.issue_back_s + wait)
    # The device's part hides where the host sets the pace of the backward.
    both_s = backward_busy_s + recomputed_s
    again_wait_s = host_seconds(execution, both_s, backward_host + again_host) - backward_wait_s
    # (Ranks that wait in a backward do so where they exchange in the forward.)
    axis = next((each.axis for each in comm.forward), "")
    forward = with_waits(comm.forward, comm.skew_s, axis=axis)
    backward = with_waits(comm.backward, has_backward * comm.skew_s, axis=axis)
    return ProgramTimes(
        forward=Spent(forward_s, forward_wait_s),
        backward=Spent(backward_s, backward_wait_s),
        recomputed=Spent(
            recomputed_s,
            forward_wait_s + comm.forward_s + comm.skew_s if is_whole else again_wait_s,
        ),
        weight_s=weight_s,
        beside_s=0.0,
        moved=BlockMoved(forward, backward, forward if is_whole else ()),
        forward_flop=forward_flop,
        backward_flop=backward_flop,
    )


def _host_ops(
    local: Program, execution: Execution, kernel_ops: list[tuple[Op, ...]], kernels: int
) -> int:
    """Return how many ops the host issues: an `Execution` counts those of a layer and of a head."""
    if any(packet_of(op.target) in LOSSES for op in local.ops):
        return execution.head_kernels
    if any(is_product(op) for op in local.ops):
        grouped = grouped_products(local)
        experts = local.tensor[grouped[0].inputs[1]].shape_at(1)[0] if grouped else 0
        biased = any(adds_last(op, local) for op in local.ops)
        each = execution.expert_kernels + biased * execution.bias_kernels
        routed = execution.router_kernels + each * experts if grouped else 0
        modules = sum(multiplies_weights(ops[0], local) for ops in kernel_ops)
        modules += sum(packet_of(op.target) in NORMS for op in local.ops)
        more = max(0, modules - (PLAIN_MODULES - bool(grouped)))
        return execution.forward_kernels + execution.module_kernels * more + routed
    return kernels


def _without_gradient(local: Program) -> int:
    """Return how many factors of products get no gradient: where weights are frozen, or nothing
    before them is trained.
    """
    count = 0
    for op in local.ops:
        if is_product(op):
            first, needing = family_of(op.target).first_factor, needing_gradient(op, local.tensor)
            count += sum(name not in needing for name in op.inputs[first : first + 2])
    return count
