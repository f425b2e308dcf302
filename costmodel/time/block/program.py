"""Seconds of one local program: a block on one rank in our own runtime.

Ops run one by one or compiled, as the profile answers:

    forward = sum of ops, times what whole blocks showed, + what the device waits for its host
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from costmodel.execution.dispatch.dispatcher import Dispatcher
from costmodel.execution.dispatch.exchange import EXCHANGES, exchange_bytes, exchange_seconds
from costmodel.memory.block.graph_bytes import graph_bytes
from costmodel.table.fusion import FUSED_TARGET, Kernels, fused_seconds, num_kernels
from costmodel.time.block.beside import Beside, beside_collectives
from costmodel.time.block.compute import (
    ProgramTimes,
    Spent,
    inner_axis,
    inner_bytes,
    inner_seconds,
    op_seconds,
    op_works,
    redistribution,
    ring_moved,
)
from costmodel.time.block.in_pieces import seconds_in_pieces
from costmodel.time.block.moved import BlockMoved, Moved, shown_s, with_waits
from costmodel.topology import Axis
from planner.language.graph import Program
from planner.language.layout.redistribute import goes_back
from planner.language.ops.call import Work
from planner.language.ops.families.losses.in_chunks import LOSS_IN_CHUNKS
from planner.language.ops.families.products.rings import RING
from planner.language.ops.flops import op_kernels
from planner.language.ops.record import why_eager, why_no_graph
from planner.language.ops.weight_products import deferrable_products, in_pieces, products_beside
from profiles import OpQuery, Profile
from profiles.records import Direction

GRAPH_LAUNCHES = 3
"""Of half a block as a CUDA graph: it, and a copy of many tensors on either side."""


def accumulate_seconds(program: Program, profile: Profile, *, cut: float = 1) -> float:
    """Return what adding a microbatch's gradients to the sum so far takes.

    With `cut`, if a rank holds only that part of every parameter.
    """
    metas = (program.tensor[name] for name in program.params)
    metas = (meta for meta in metas if meta.kind == "param" and not meta.table)
    trained = [meta.numel_at(1) for meta in metas if meta.requires_grad]
    # The fits are over fp32 tensors, 4 bytes an element.
    return profile.step_seconds(
        "accumulate", num_bytes=sum(4 * numel for numel in trained) / cut, num_tensors=len(trained)
    ).seconds


def profiled_times(
    local: Program,
    profile: Profile,
    *,
    axes: Mapping[str, Axis],
    dispatcher: Dispatcher,
    recomputed: frozenset[str],
    kernels: Kernels,
    beside: bool = False,
    pieces: int = 1,
    graphs: bool = False,
) -> ProgramTimes:
    """Return the times of a bound program that was lowered on `axes`.

    Rows of experts go by `dispatcher`. `recomputed` names the ops that run again in the backward,
    collectives among them. Fused `kernels` take less time, where a program can be compiled.
    `beside`: weight gradients are made beside collectives of the backward; in so many `pieces`
    gathers and scatters of the forward go beside products. With `graphs` each half
    of a compiled program that a CUDA graph holds is one.
    """
    if kernels == "fused" and why_eager(local) is not None:
        kernels = "eager"
    products = deferrable_products(local)
    tensor = local.tensor
    works = {
        op.name: op_works(op, tensor) for op in local.ops if op.target != "planner.redistribute"
    }
    seconds = _seconds_of_ops(local, profile, kernels, works)
    cut = in_pieces(local, pieces if kernels == "eager" else 1, recomputed)
    shown = seconds_in_pieces(local, profile, axes, cut, pieces)
    forward_s = backward_s = recomputed_s = 0.0
    weight_of: dict[str, float] = {}
    moved: list[Moved] = []
    moved_back: dict[str, Moved] = {}  # by the name of the op that it is of
    again_moved: list[Moved] = []
    forward_flop = backward_flop = 0.0
    views = backward_views = backward_ops = 0
    more = backward_more = again_more = 0
    # What takes the host longer than another op.
    moves = back_moves = again_moves = again_products = 0
    for op in local.ops:
        if op.target == "planner.redistribute":
            there, back, num_bytes = redistribution(op, tensor, profile, axes)
            axis, is_again = str(op.args[1]), op.name in recomputed
            times = pieces if op.name in shown.moved else 1
            there = shown.whole.get(op.name, there)
            if there > 0:
                moved.append(Moved(axis, times, num_bytes, there, shown.moved.get(op.name, there)))
                again_moved += moved[-1:] * is_again
                moves += times
                again_moves += times * is_again
            if back > 0:
                moved_back[op.name] = Moved(axis, 1, num_bytes, back, back)
                back_moves += 1
            continue
        if op.target.startswith("planner."):
            inner = inner_seconds(op, tensor, profile, axes)
            sent_s = sent_back_s = sum(inner)
            sent = sent_back = float(inner_bytes(op, tensor)) if inner else 0.0
            if op.target in EXCHANGES and inner:
                sent, sent_back = exchange_bytes(op, local, axes["ep"], dispatcher)
                sent_s, sent_back_s = (
                    each_s + dispatcher.call_s
                    for each_s in exchange_seconds(op, local, profile, axes["ep"], dispatcher)
                )
            axis, is_again = inner_axis(op, axes), op.name in recomputed
            if inner:  # (The host waits for each of the collectives.)
                moved.append(Moved(axis, len(inner), sent, sent_s, sent_s))
                again_moved += moved[-1:] * is_again
            if op.target == RING:
                sent_on, sent_home = ring_moved(op, tensor, profile, axes, seconds[op.name])
                moved.append(sent_on)
                moved_back[op.name] = sent_home
                again_moved += [sent_on] * is_again
                moves += sent_on.number
                back_moves += sent_home.number
                again_moves += sent_on.number * is_again
            if inner and goes_back(op, tensor):  # gradients of rows go the same way, back
                moved_back[op.name] = Moved(axis, len(inner), sent_back, sent_back_s, sent_back_s)
        there, back = seconds[op.name]
        if op.name in shown.products:
            there = shown.products[op.name]
            # A product and a copy for each piece.
            more += 2 * pieces - 1
            again_more += (2 * pieces - 1) if op.name in recomputed else 0
        forward_s += there
        backward_s += back
        recomputed_s += there if op.name in recomputed else 0.0
        if op.name in products:
            # One product for the weight, and one as large for the input if it needs one: only the
            # weight's can be deferred.
            alone = not tensor[products[op.name][0].name].requires_grad
            weight_of[op.name] = back if alone else back / 2
            again_products += op.name in recomputed
        work, back_work = works[op.name]
        forward_flop += work.flop
        backward_flop += back_work.flop
        views += there == 0.0
        needs_gradient = tensor[op.outputs[0]].requires_grad
        backward_views += there == 0.0 and needs_gradient
        backward_ops += needs_gradient
        # The host launches each kernel of an op that has several; the op's time holds one.
        launched, launched_back = op_kernels(op, tensor)
        more += launched - 1
        again_more += launched - 1 if op.name in recomputed else 0
        backward_more += launched_back - 1 if needs_gradient else 0
    # The host launches every op, a view too; compiled code launches a kernel for several ops.
    forward_ops = len(local.ops)
    if kernels == "fused":
        forward_ops, views, backward_views = num_kernels(local), 0, 0
        backward_ops = min(backward_ops, forward_ops)
    if graphs and kernels == "fused" and why_no_graph(local) is None:
        copied = graph_bytes(local)
        forward_s += _copy_seconds(local, profile, copied.taken, copied.given)
        backward_s += _copy_seconds(local, profile, copied.taken_back, copied.given_back)
        # Weight gradients of products are made outside, one by one.
        forward_ops, backward_ops = GRAPH_LAUNCHES, GRAPH_LAUNCHES + len(products)
        more = backward_more = 0
    forward = _with_host(
        profile,
        "forward",
        forward_s,
        kernels,
        ops=forward_ops + more,
        views=views + more,
        products=len(products),
        moves=moves,
    )
    backward = _with_host(
        profile,
        "backward",
        backward_s,
        kernels,
        ops=backward_ops + backward_more,
        views=backward_views + backward_more,
        products=len(products),
        moves=back_moves,
        # A compiled backward is cut at each collective beside which weight gradients are made.
        calls=len(products_beside(local)) if beside and kernels == "fused" else 0,
    )
    # What runs again is priced as a forward of these ops alone: their seconds on the device against
    # their own launches on the host.
    again = [op for op in local.ops if op.name in recomputed]
    again_views = sum(op.name not in works or works[op.name][0].num_bytes == 0 for op in again)
    again_ops = len(again)
    if kernels == "fused":
        again_ops, again_views = num_kernels(replace(local, ops=tuple(again))), 0
    again_spent = _with_host(
        profile,
        "forward",
        recomputed_s,
        kernels,
        ops=again_ops + again_more,
        views=again_views + again_more,
        products=again_products,
        moves=again_moves,
    )
    # Of corrections of the whole block, weight gradients have their share.
    share = backward.device_s / backward_s if backward_s else 1.0
    weight_of = {name: each * share for name, each in weight_of.items()}
    hides = Beside({}, 0.0)
    if beside:
        hides = beside_collectives(
            local,
            profile,
            collective_s={name: each.seconds for name, each in moved_back.items()},
            weight_s=weight_of,
        )
    shown_back = [
        each._replace(shown_s=each.shown_s - hides.hidden_s.get(name, 0.0))
        for name, each in moved_back.items()
    ]
    # Each collective waits for the slowest of its ranks.
    waited_s, waited_back_s = (
        profile.wait_seconds(
            spent.device_s + spent.host_s, sum(each.number for each in of_half), inside=True
        )
        for spent, of_half in ((forward, moved), (backward, shown_back))
    )
    weight_s = sum(weight_of.values())
    # The host waits op by op, and each product's weight gradient is one of these.
    waited = backward.host_s * len(products) / max(backward_ops, 1)
    return ProgramTimes(
        forward=forward,
        backward=backward,
        recomputed=Spent(again_spent.device_s + shown_s(again_moved), again_spent.host_s),
        weight_s=weight_s + waited,
        beside_s=hides.weight_s * (1 + waited / weight_s) if weight_s else 0.0,
        moved=BlockMoved(
            with_waits(moved, float(waited_s)),
            with_waits(shown_back, float(waited_back_s)),
            tuple(again_moved),
        ),
        forward_flop=forward_flop,
        backward_flop=backward_flop,
    )


def _copy_seconds(local: Program, profile: Profile, taken: int, given: int) -> float:
    """Return seconds of a CUDA graph's copies: what it takes once, what it gives in the graph and
    out of it.
    """
    largest = max((local.tensor[name] for name in local.inputs), key=lambda meta: meta.bytes_at(1))
    query = OpQuery(
        target=FUSED_TARGET,
        shapes=(largest.shape_at(1),),
        dtype=largest.dtype,
        direction="forward",
        flop=0,
        num_bytes=2 * (taken + 2 * given),
    )
    return profile.op_seconds(query).seconds


def _seconds_of_ops(
    local: Program,
    profile: Profile,
    kernels: Kernels,
    works: Mapping[str, tuple[Work, Work]],
) -> dict[str, tuple[float, float]]:
    """Return forward and backward seconds of every op but redistributions, by name."""
    eager = {
        op.name: op_seconds(op, local.tensor, profile, works[op.name], kernels)
        for op in local.ops
        if op.name in works
    }
    if kernels == "eager":
        return eager
    if profile.block_correction("forward", compiled=True) == 1.0:
        return fused_seconds(local, profile, eager)
    # Where whole compiled blocks were measured, that says it all, but for ops that run there as
    # they do op by op.
    directions: tuple[Direction, ...] = ("forward", "backward")
    stays = [
        profile.block_correction(direction) / profile.block_correction(direction, compiled=True)
        for direction in directions
    ]
    for op in local.ops:
        if op.target == LOSS_IN_CHUNKS:
            there, back = eager[op.name]
            eager[op.name] = there * stays[0], back * stays[1]
    return eager


def _with_host(
    profile: Profile,
    direction: Direction,
    seconds: float,
    kernels: Kernels,
    *,
    ops: int,
    views: int,
    products: int,
    moves: int,
    calls: int = 0,
) -> Spent:
    """Return the time of a whole block from the sum of its ops.

    The host feeds ops one by one: a device that computes asynchronously is never ahead of
    `Profile.host_seconds` of them, of which `products` and `moves` (redistributions) take longest;
    compiled code calls neither by itself. `calls` are those of graphs beyond the block's one, which
    no measured block has. A CPU pays `launch_overhead_s` for views, whose time no
    op lookup holds. Where
    whole blocks were measured, the ratio to their ops' sum is applied; on a CPU it has the
    views in it. Ratios of compiled blocks are those of fused kernels.
    """
    correction = profile.block_correction(direction, compiled=kernels == "fused")
    device_s = seconds * correction
    if profile.cluster.device_type != "cpu":
        # Of the host's launches only what outlasts the device's work shows.
        host_s = (
            profile.host_seconds(direction, ops=ops, products=products, redistributions=moves)
            if kernels == "eager"
            else (ops + calls) * profile.launch_overhead_s
        )
        return Spent(device_s, max(0.0, host_s - device_s))
    views = views if correction == 1.0 else 0
    return Spent(device_s, (views + calls) * profile.launch_overhead_s)
