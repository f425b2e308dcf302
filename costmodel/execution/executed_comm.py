"""Collectives of a block as a runtime runs it: what of them compute hides, and waits at them.

Rows of experts go to their ranks and back, in the forward and in the backward, by a dispatcher
(`costmodel.execution.dispatch`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from costmodel.execution.dispatch.beside import shown_rows_s
from costmodel.execution.dispatch.exchange import exchange_seconds
from costmodel.execution.executed import ExecutedProfile, KernelSeconds
from costmodel.time.block.compute import bytes_of, inner_seconds, redistribute_seconds
from costmodel.topology import Axis
from planner.language.graph import Program
from planner.language.layout.redistribute import (
    DEAL_RUNS,
    EXCHANGE_ROWS,
    GATHER_SAMPLES,
    REDISTRIBUTE,
    goes_back,
)
from planner.language.ops.families.products.rings import RING


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
    """Part of the forward that sends rows to their experts and back."""
    rows_back_s: float
    """Part of the backward that sends their gradients."""
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
    shared: KernelSeconds,
) -> ExposedComm:
    """Return the collectives of a bound program as far as compute does not hide them.

    `compute` is of all its kernels, `attention` of those of attention, `shared` of the experts that
    every token goes through.
    """
    execution = profile.execution
    there_s = back_s = 0.0
    ring_s = ring_back_s = rows_s = rows_back_s = 0.0
    count = exchanges = 0
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
            there, back = exchange_seconds(op, local, profile, axes["ep"], profile.dispatcher)
            rows_s += there
            rows_back_s += back
            exchanges += 1
            continue
        if op.target != REDISTRIBUTE:
            if op.target.startswith("planner."):
                inner_s = sum(inner_seconds(op, local.tensor, profile, axes))
                if op.target == GATHER_SAMPLES:
                    there_s += inner_s
                    back_s += inner_s if goes_back(op, local.tensor) else 0.0
                elif goes_back(op, local.tensor):
                    rows_s += inner_s
                    rows_back_s += inner_s
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
    rows_s = shown_rows_s(profile, rows_s, shared_s=shared.forward_s, compute=compute)
    rows_back_s = shown_rows_s(profile, rows_back_s, shared_s=shared.backward_s, compute=compute)
    # Each call keeps the host, which issues what would run beside it.
    calls_s = exchanges * profile.dispatcher.call_s
    rows_s, rows_back_s = rows_s + calls_s, rows_back_s + calls_s
    # Experts have nothing to do before their rows are there; gradients go the same ways, back.
    there_s += rows_s
    back_s += rows_back_s
    return ExposedComm(
        forward_s=there_s,
        backward_s=back_s,
        skew_s=sums * profile.skew_seconds(size) + count * execution.crossing_late_s * (nodes - 1),
        rows_s=rows_s,
        rows_back_s=rows_back_s,
        kernels=count,
        size=size,
    )
