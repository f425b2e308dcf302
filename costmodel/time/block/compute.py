"""Seconds of one op on one device, and of one redistribution on one mesh axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Literal, NamedTuple

from costmodel.time.block.in_chunks import seconds_in_chunks
from costmodel.time.block.moved import BlockMoved, Moved, shown_s
from costmodel.time.block.narrow import narrow_seconds
from costmodel.time.communication import beside_seconds
from costmodel.topology import Axis, axis_group, neighbours
from planner.deadline import check_time
from planner.language.graph import Op, Program, TensorMeta
from planner.language.layout.redistribute import (
    GATHER_SAMPLES,
    inner_collectives,
    op_collectives,
    replicas_of,
)
from planner.language.ops.call import Call, Work
from planner.language.ops.families.losses.in_chunks import LOSS_IN_CHUNKS
from planner.language.ops.flops import backward_work, op_work
from planner.language.ops.record import family_of
from profiles import Group, OpQuery, Profile
from profiles.records import Direction


def op_works(op: Op, tensor: Mapping[str, TensorMeta]) -> tuple[Work, Work]:
    """Return the forward and the backward work of an op of a bound program."""
    forward = op_work(op, tensor)
    return forward, backward_work(op, tensor, forward)


def bytes_of(local: Program, names: Iterable[str]) -> float:
    """Return the bytes of tensors of a bound program."""
    return float(sum(local.tensor[name].bytes_at(1) for name in names))


def op_seconds(
    op: Op,
    tensor: Mapping[str, TensorMeta],
    profile: Profile,
    works: tuple[Work, Work] | None = None,
    kernels: Literal["eager", "fused"] = "eager",
) -> tuple[float, float]:
    """Return device seconds (forward, backward) of an op on the shapes in `tensor`.

    Shapes are local and concrete; sizes in the op's own arguments are not read. Ops that
    only make views take no device time; one that does its work in rounds takes as long as so many
    ops of a part of it. `works` are the op's, where the caller has them; `kernels` are what casts
    to 8 bits run as.
    """
    check_time()
    if family_of(op.target).multiplies_in:
        return narrow_seconds(op, tensor, profile, kernels)
    if op.target == LOSS_IN_CHUNKS:
        return seconds_in_chunks(
            op, tensor, profile, lambda each, around: op_seconds(each, around, profile)
        )
    forward, backward = works or op_works(op, tensor)
    # Views move nothing, and their backward counts nothing either (`backward_work`).
    if forward.num_bytes == 0:
        return 0.0, 0.0
    dtype = op_dtype(op, tensor)
    shapes = tuple(tensor[name].shape_at(1) for name in op.inputs)
    in_rounds = family_of(op.target).rounds
    rounds = 1 if in_rounds is None else in_rounds(Call(op, tensor, 1))

    def seconds(direction: Direction, work: Work) -> float:
        query = OpQuery(
            target=op.target,
            shapes=shapes,
            dtype=dtype,
            direction=direction,
            flop=work.flop / rounds,
            num_bytes=work.num_bytes / rounds,
        )
        return rounds * profile.op_seconds(query).seconds

    forward_s = seconds("forward", forward)
    return forward_s, seconds("backward", backward) if backward.num_bytes else 0.0


def op_dtype(op: Op, tensor: Mapping[str, TensorMeta]) -> str:
    """Return the dtype an op computes in: what it casts to, its first floating-point input's, else
    its output's.
    """
    return family_of(op.target).multiplies_in or next(
        (tensor[n].dtype for n in op.inputs if "float" in tensor[n].dtype),
        tensor[op.outputs[0]].dtype,
    )


def redistribute_seconds(
    op: Op, tensor: Mapping[str, TensorMeta], profile: Profile, axes: Mapping[str, Axis]
) -> tuple[float, float]:
    """Return seconds (forward, backward) of a `planner.redistribute` op of a local program."""
    there_s, back_s, _ = redistribution(op, tensor, profile, axes)
    return there_s, back_s


def redistribution(
    op: Op, tensor: Mapping[str, TensorMeta], profile: Profile, axes: Mapping[str, Axis]
) -> tuple[float, float, int]:
    """Return those seconds, and the bytes that move in either direction."""
    axis = axes[str(op.args[1])]
    if axis.size == 1:
        return 0.0, 0.0, 0
    (forward_kind, backward_kind), num_bytes = op_collectives(op, dict(tensor), axis.size)
    forward_s = _collective(profile, forward_kind, num_bytes, axis.group)
    # Without a gradient of the input no collective runs in the backward.
    if not tensor[op.inputs[0]].requires_grad:
        return forward_s, 0.0, num_bytes
    return forward_s, _collective(profile, backward_kind, num_bytes, axis.group), num_bytes


def inner_seconds(
    op: Op, tensor: Mapping[str, TensorMeta], profile: Profile, axes: Mapping[str, Axis]
) -> tuple[float, ...]:
    """Return seconds of each collective inside a local op of ours (a sharded loss), forward."""
    if op.target == GATHER_SAMPLES:
        return gather_seconds(op, tensor, profile, apart=prod(axis.size for axis in axes.values()))
    axis = axes.get(inner_axis(op, axes))
    if axis is None or axis.size == 1:
        return ()
    return tuple(
        _collective(profile, kind, num_bytes, axis.group)
        for kind, num_bytes in inner_collectives(op, dict(tensor))
    )


def inner_axis(op: Op, axes: Mapping[str, Axis]) -> str:
    """Return the axis along which collectives inside a local op of ours run; "dp" where samples of
    all replicas are gathered, "" of an op without any.
    """
    if op.target == GATHER_SAMPLES:
        return "dp"
    return next((arg for arg in op.args if isinstance(arg, str) and arg in axes), "")


def inner_bytes(op: Op, tensor: Mapping[str, TensorMeta]) -> int:
    """Return the bytes of all collectives inside a local op of ours."""
    return sum(num_bytes for _, num_bytes in inner_collectives(op, dict(tensor)))


def ring_moved(
    op: Op,
    tensor: Mapping[str, TensorMeta],
    profile: Profile,
    axes: Mapping[str, Axis],
    compute_s: tuple[float, float],
) -> tuple[Moved, Moved]:
    """Return the messages of attention over a ring (forward, backward), and by how much they
    lengthen it, which computes for `compute_s`.

    With rounds 1 .. r and m seconds for a part of keys and values from a rank to the next,

        forward     r - 1 messages beside the compute of all rounds but the last
        backward    as many, and the gradients of each part behind it: 2 (r - 1); at last the
                    gradients go home, beside nothing

    On a CPU messages take the cores that compute: nothing is hidden.
    """
    messages, messages_home = ring_messages(op)
    axis = str(op.args[13])
    num_bytes = sum(tensor[name].bytes_at(1) for name in op.inputs[1:3])
    each_s = shown_s = shown_back_s = 0.0
    if messages + messages_home:
        pair = neighbours(axes[axis].group)
        each_s = profile.collective_seconds("send_recv", num_bytes, pair).seconds
        shown_s, shown_back_s = messages * each_s, 2 * messages * each_s
    if each_s and profile.cluster.device_type != "cpu":
        beside = messages / (messages + 1)
        shown_s = float(beside_seconds(profile, shown_s, beside * compute_s[0]))
        shown_back_s = float(beside_seconds(profile, shown_back_s, beside * compute_s[1]))

    def moved(count: int, shown_s: float) -> Moved:
        return Moved(axis, count, count * num_bytes, count * each_s, shown_s)

    back = moved(2 * messages + messages_home, shown_back_s + messages_home * each_s)
    return moved(messages, shown_s), back


def ring_messages(op: Op) -> tuple[int, int]:
    """Return how often keys and values of attention over a ring are sent on, and whether gradients
    are behind that not yet at home (0 or 1).
    """
    rounds: tuple[int, ...] = op.args[11]  # type: ignore[assignment]
    return len(rounds) - 1 + (rounds[0] > 0), int(rounds[-1] > 0)


def gather_seconds(
    op: Op, tensor: Mapping[str, TensorMeta], profile: Profile, *, apart: int
) -> tuple[float, ...]:
    """Return seconds of the collective of an op that gathers samples, of replicas so many ranks
    apart.
    """
    group = axis_group(profile.cluster, size=replicas_of(op, tensor), stride=apart)
    return tuple(
        _collective(profile, kind, num_bytes, group)
        for kind, num_bytes in inner_collectives(op, dict(tensor))
    )


def _collective(profile: Profile, kind: str | None, num_bytes: float, group: Group) -> float:
    if kind is None:
        return 0.0
    return profile.collective_seconds(kind, num_bytes, group).seconds


class Spent(NamedTuple):
    """Seconds a device computes, and those it waits for the host on top."""

    device_s: float
    host_s: float


class ProgramTimes(NamedTuple):
    """What a block takes on one rank, gradient sums apart."""

    forward: Spent
    """Compute of the forward."""
    backward: Spent
    """Compute of the backward, nothing recomputed."""
    recomputed: Spent
    """What selective recomputation adds to the backward, collectives too."""
    weight_s: float
    """Seconds of the backward that make weight gradients."""
    beside_s: float
    """Part of that which is made beside collectives of the backward."""
    moved: BlockMoved
    """Its collectives."""
    forward_flop: float
    """Flop of the forward."""
    backward_flop: float
    """Flop of the backward, recomputation not counted."""

    @property
    def forward_comm_s(self) -> float:
        """Seconds of exposed collectives in the forward."""
        return shown_s(self.moved.forward)

    @property
    def backward_comm_s(self) -> float:
        """Seconds of exposed collectives in the backward."""
        return shown_s(self.moved.backward)
