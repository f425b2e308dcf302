"""Seconds of an exchange of experts' rows on a dispatcher, nothing hidden; bytes of its buffers.

Of n places that experts lie on in equal parts, and k experts a token that are picked as if by
chance, so many places are reached, the token's own among them:

    places = n (1 - (1 - 1/n)^k)                rows = k

Between nodes the places are nodes where a token that arrives is handed on inside (DeepEP,
deepseek-ai/DeepEP README, "normal kernels"), else ranks.
"""

from __future__ import annotations

from costmodel.execution.dispatch.dispatcher import Dispatcher
from costmodel.execution.dispatch.imbalance import experts_per_token
from costmodel.topology import Axis
from planner.language.graph import Op, Program
from planner.language.layout.redistribute import (
    EXCHANGE_ROWS,
    GATHER_ROWS,
    SCATTER_ROWS,
    CollectiveKind,
    inner_collectives,
)
from planner.units import DTYPE_BYTES
from profiles import Group, Profile

EXCHANGES = (EXCHANGE_ROWS, GATHER_ROWS, SCATTER_ROWS)
"""Targets of the ops that bring tokens to experts, and back."""

MEASURED_RANKS = 8
"""Ranks of a node among which collectives were measured."""


def exchange_seconds(
    op: Op, local: Program, profile: Profile, axis: Axis, dispatcher: Dispatcher
) -> tuple[float, float]:
    """Return seconds of an exchange of rows of a rank's program, and of that of their gradients,
    which go the other way.
    """
    if axis.size == 1:
        return 0.0, 0.0
    group, (sent, sent_back) = axis.group, exchange_bytes(op, local, axis, dispatcher)
    if op.target != EXCHANGE_ROWS:
        there, back = _gathers(op, local)
        return tuple(  # type: ignore[return-value]
            sum(
                profile.collective_seconds(kind, size, group).seconds
                for kind, size in collectives
                if size
            )
            for collectives in (there, back)
        )
    is_wide = group.num_nodes == 1 and group.size > MEASURED_RANKS
    part = dispatcher.network_part if group.num_nodes > 1 else dispatcher.link_part
    part *= dispatcher.wide_part if is_wide else 1.0
    fixed_s = dispatcher.peer_s * (group.size - group.ranks_per_node)

    def seconds(num_bytes: float) -> float:
        return fixed_s + profile.collective_seconds("all_to_all", num_bytes, group).seconds / part

    return seconds(sent), seconds(sent_back)


def exchange_bytes(
    op: Op, local: Program, axis: Axis, dispatcher: Dispatcher
) -> tuple[float, float]:
    """Return the bytes of an exchange of rows of a rank's program, and of their gradients'."""
    if op.target != EXCHANGE_ROWS:
        there, back = (sum(size for _, size in each) for each in _gathers(op, local))
        return there, back
    sizes = [local.tensor[name].bytes_at(1) for name in (op.inputs[0], *op.outputs)]
    rows = max(sizes) if dispatcher.waits_for_fullest else min(sizes)
    sent = rows * sent_part(dispatcher, experts_per_token(local), axis.group)
    narrow = _narrow_part(local.tensor[op.outputs[0]].dtype, dispatcher)
    # Rows go there in fewer bytes; results, and all gradients, keep their own.
    is_there = not op.args[3]
    return (sent * narrow if is_there else sent), sent


_Gathers = list[tuple[CollectiveKind, int]]


def _gathers(op: Op, local: Program) -> tuple[_Gathers, _Gathers]:
    """Return the collectives (kind, bytes) where tokens of all ranks are gathered, or sums
    scattered, and those of the gradients: one is the other's.
    """
    *told, (kind, whole) = inner_collectives(op, local.tensor)
    back: _Gathers = [("reduce_scatter" if kind == "all_gather" else "all_gather", whole)]
    if op.target == SCATTER_ROWS:  # (Of weights; experts' numbers have no gradient.)
        back += [("reduce_scatter", size) for _, size in told]
    return [*told, (kind, whole)], back


def _narrow_part(dtype: str, dispatcher: Dispatcher) -> float:
    """Return the bytes of rows on their way to the experts over those that they have."""
    if not dispatcher.narrow_bytes:
        return 1.0
    return min(1.0, dispatcher.narrow_bytes / DTYPE_BYTES[dtype])


def sent_part(dispatcher: Dispatcher, per_token: int, group: Group) -> float:
    """Return the part of a token's rows, one for each of its experts, that goes over the links."""
    if dispatcher.sends == "expert":
        return 1.0
    if dispatcher.sends == "all":
        return group.size / per_token
    # Inside a node each rank is a place of its own.
    by_node = dispatcher.sends == "node" and group.num_nodes > 1
    places = group.num_nodes if by_node else group.size
    # Of k experts picked by chance, a place is missed by all with probability (1 - 1/n)^k.
    return places * (1 - (1 - 1 / places) ** per_token) / per_token


def exchanges_of(local: Program) -> list[Op]:
    """Return the exchanges of rows of a rank's program."""
    return [op for op in local.ops if op.target in EXCHANGES]


def buffer_bytes(local: Program, group: Group, dispatcher: Dispatcher) -> int:
    """Return the bytes of a dispatcher's own buffers for the exchanges of a rank's program."""
    widths = [local.tensor[op.outputs[0]].bytes_at(1) for op in exchanges_of(local)]
    rows = [local.tensor[op.outputs[0]].shape_at(1)[0] for op in exchanges_of(local)]
    row_bytes = max((w // max(1, r) for w, r in zip(widths, rows, strict=True)), default=0)
    places = group.ranks_per_node + (group.num_nodes if group.num_nodes > 1 else 0)
    return dispatcher.buffer_rows * places * row_bytes * (group.size > 1)
