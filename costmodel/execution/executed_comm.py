"""Collectives of a block as a runtime runs it: what of them compute hides, and waits at them.

Rows of experts (`planner.language.lowering.experts`) go to their ranks and back, in the forward and
in the backward. A runtime sends a row for each expert of a token, or a token once to each place
that has any of its experts. Of n places that experts lie on in equal parts, and k experts a token
that are picked as if by chance, so many are reached, the token's own among them:

    places = n (1 - (1 - 1/n)^k)                rows = k

Inside a node the places are its ranks, between nodes the nodes: a token that arrives is handed on
inside (DeepEP, deepseek-ai/DeepEP README, "normal kernels").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from costmodel.execution.executed import ExecutedProfile, KernelSeconds
from costmodel.time.block.compute import bytes_of, inner_seconds, redistribute_seconds
from costmodel.topology import Axis
from planner.language.graph import Op, Program
from planner.language.layout.redistribute import (
    DEAL_RUNS,
    EXCHANGE_ROWS,
    GATHER_SAMPLES,
    REDISTRIBUTE,
    goes_back,
    inner_collectives,
)
from planner.language.ops.families.products.rings import RING
from planner.language.ops.record import packet_of
from profiles import Group

MEASURED_RANKS = 8
"""Most ranks of a node of which shipped profiles have an all-to-all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExposedComm:
    """What shows of a block's collectives; seconds."""

    forward_s: float
    """Of the forward."""
    backward_s: float
    """Of the backward."""
    skew_s: float
    """Waits for the last rank and for the network's threads, in each of both."""
    rows_s: float
    """Part of each of both that sends rows to their experts and back."""
    kernels: int
    """Collectives of the forward."""
    size: int
    """Ranks of the largest group."""


def exposed_comm(
    local: Program,
    profile: ExecutedProfile,
    axes: Mapping[str, Axis],
    compute: KernelSeconds,
    attention: KernelSeconds,
) -> ExposedComm:
    """Return the collectives of a bound program as far as compute does not hide them.

    `compute` is of all its kernels, `attention` of those of attention.
    """
    execution = profile.execution
    there_s = back_s = 0.0
    ring_s = ring_back_s = rows_s = 0.0
    count = 0
    sums = 0
    size = nodes = 1
    for op in local.ops:
        if op.target == RING:
            # Rounds of a part each move what an all-gather of that much moves.
            num_bytes = len(op.args[11]) * bytes_of(local, op.inputs[1:3])  # type: ignore[arg-type]
            group = axes[str(op.args[13])].group
            round_s = profile.collective_seconds("all_gather", num_bytes, group).seconds
            ring_s += round_s
            # The backward sees the keys and values of all ranks again, and sends gradients.
            back = profile.collective_seconds("reduce_scatter", num_bytes, group).seconds
            ring_back_s += round_s + back
            continue
        if op.target == DEAL_RUNS:  # a part of the exchange's own cost
            continue
        if op.target == EXCHANGE_ROWS:
            rows_s += _rows_seconds(op, local, profile, axes["ep"])
            continue
        if op.target != REDISTRIBUTE:
            if op.target.startswith("planner."):
                inner_s = sum(inner_seconds(op, local.tensor, profile, axes))
                if op.target == GATHER_SAMPLES:
                    there_s += inner_s
                    back_s += inner_s if goes_back(op, local.tensor) else 0.0
                elif goes_back(op, local.tensor):
                    rows_s += inner_s
                else:
                    there_s += inner_s
            continue
        if local.tensor[op.inputs[0]].kind == "param":
            # Gradients of parameters that all ranks have are summed once a step, with the others.
            continue
        forward, backward = redistribute_seconds(op, local.tensor, profile, axes)
        there_s += forward
        back_s += backward
        count += forward > 0
        # (Ranks tell each other numbers of rows as they sum terms.)
        sums += forward > 0 and str(op.args[2])[0] in "PO" and op.args[3] == "R"
        axis = axes[str(op.args[1])]
        size = max(size, axis.size)
        nodes = max(nodes, axis.group.num_nodes)
    if count > 1:  # A lone one has nothing beside it.
        # A convention of the model: half of the block's forward runs beside them, either way.
        half_s = 0.5 * compute.forward_s
        there_s = profile.shown_seconds("tp", there_s, behind_s=half_s)
        back_s = profile.shown_seconds("tp", back_s, behind_s=half_s)
    # Keys and values go round a ring beside the attention to those at hand.
    there_s += profile.rates.exposed_seconds(ring_s, behind_s=attention.forward_s)
    back_s += profile.rates.exposed_seconds(ring_back_s, behind_s=attention.backward_s)
    # A forward's rows go beside another microbatch's backward, and the other way round.
    half_s = (compute.forward_s + compute.backward_s) / 2
    rows_s = profile.shown_seconds("rows", rows_s, behind_s=half_s)
    # Experts have nothing to do before their rows are there; gradients go the same ways, back.
    there_s += rows_s
    back_s += rows_s
    return ExposedComm(
        forward_s=there_s,
        backward_s=back_s,
        skew_s=sums * profile.skew_seconds(size) + count * execution.crossing_late_s * (nodes - 1),
        rows_s=rows_s,
        kernels=count,
        size=size,
    )


def _rows_seconds(op: Op, local: Program, profile: ExecutedProfile, axis: Axis) -> float:
    """Return the seconds of one exchange of experts' rows."""
    if axis.size == 1:
        return 0.0
    group, part = axis.group, 1.0
    if profile.execution.sends_tokens:
        per_token = experts_per_token(local)
        gathers = profile.execution.gathers_tokens
        part = group.size / per_token if gathers else sent_part(per_token, group)
    is_wide = group.num_nodes == 1 and group.size > MEASURED_RANKS
    reached = profile.execution.wide_exchange_part if is_wide else 1.0
    return sum(
        profile.collective_seconds(kind, part * num_bytes, group).seconds / reached
        for kind, num_bytes in inner_collectives(op, dict(local.tensor))
    )


def sent_part(per_token: int, group: Group) -> float:
    """Return the part of a token's rows that is sent where it goes to each place once."""
    places = group.num_nodes if group.num_nodes > 1 else group.size
    # Of k experts picked by chance, a place is missed by all with probability (1 - 1/n)^k.
    return places * (1 - (1 - 1 / places) ** per_token) / per_token


def experts_per_token(local: Program) -> int:
    """Return how many experts a block's router picks for each token; 1 where it has none."""
    picks = [op for op in local.ops if packet_of(op.target) == "topk"]
    return int(local.tensor[picks[-1].outputs[0]].shape_at(1)[-1]) if picks else 1
