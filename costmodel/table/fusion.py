"""Fused kernels: what a compiler or a vendor's library makes of the ops between products.

Eager, every norm, activation, sum and cast is a kernel that reads its inputs from memory and
writes its output. Fused, ops that hand their results on to each other with no product,
attention or collective on the way between them are one kernel (as Inductor's scheduler fuses
them, Ansel et al.: PyTorch 2, 2024, section 4.2): only what comes from outside is read, and only
what is needed outside is written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from math import prod
from typing import Literal

from planner.language.graph import Op, Program
from planner.language.ops.families.entries.routing import SORT_ROWS, UNSORT_ROWS
from planner.language.ops.flops import backward_work, op_work
from planner.language.ops.record import family_of as record_of
from planner.units import DTYPE_BYTES
from profiles import OpQuery, Profile
from profiles.lookup.families import MEMORY, family_of

Kernels = Literal["eager", "fused"]
"""How a block's ops run: one by one, as the runtime does, or compiled."""

FUSED_TARGET = "planner.fused"
"""The target under which a profile has the time of memory-bound ops in general."""

Seconds = tuple[float, float]
"""Forward and backward."""


def fused_groups(program: Program) -> tuple[tuple[Op, ...], ...]:
    """Return the ops of each fused kernel of two ops or more, views among them."""
    return tuple(ops for ops in _joined(program) if len(ops) > 1)


def _joined(program: Program) -> tuple[tuple[Op, ...], ...]:
    """Return the ops that fuse, by the kernel that each is of.

    An op's depth is the most products (or other ops that don't fuse) on a way to it; ops of
    equal depth that are joined by their values fuse. A way out of a group and back into it
    would pass a product, and come back deeper.
    """
    depth: dict[str, int] = {}
    group_of: dict[str, int] = {}
    members: defaultdict[int, list[Op]] = defaultdict(list)
    for op in program.ops:
        fuses = _fuses(op)
        deepest = max((depth.get(name, 0) for name in op.inputs), default=0)
        for name in op.outputs:
            depth[name] = deepest if fuses else deepest + 1
        if not fuses:
            continue
        joined = {
            group_of[name] for name in op.inputs if name in group_of and depth[name] == deepest
        }
        # An op that reads from several groups of its depth joins them.
        group = min(joined, default=len(members))
        for other in joined - {group}:
            for earlier in members[other]:
                group_of.update(dict.fromkeys(earlier.outputs, group))
            members[group] += members[other]
            members[other] = []
        members[group].append(op)
        group_of.update(dict.fromkeys(op.outputs, group))
    return tuple(map(tuple, members.values()))


def fused_kernels(program: Program, views: Collection[str]) -> tuple[tuple[Op, ...], ...]:
    """Return the ops of each kernel that a compiler makes of ops that fuse, of one alone, too;
    those of views alone are none. An op that is `inlined` is several kernels, of which the first
    makes what only this op reads: they count as one.
    """
    groups = [
        ops
        for ops in _joined(program)
        if any(name not in views for op in ops for name in op.outputs)
    ]
    for last in (op for op in program.ops if record_of(op.target).inlined):
        ahead = [ops for ops in groups if _only_for(last, ops, program)]
        groups = [ops for ops in groups if ops not in ahead]
        groups.append((*(op for ops in ahead for op in ops), last))
    return tuple(groups)


def _only_for(reader: Op, ops: Collection[Op], program: Program) -> bool:
    """Whether an op reads what others make, and nobody else does."""
    made = {name for op in ops for name in op.outputs}
    inside = {op.name for op in ops}
    readers = {op.name for op in program.ops if not made.isdisjoint(op.inputs)} - inside
    return readers == {reader.name} and made.isdisjoint(program.outputs)


def module_groups(program: Program) -> tuple[tuple[Op, ...], ...]:
    """Return the ops of each fused kernel where only those of one module of the user's code fuse,
    or of a module inside it: a norm, an activation, rotary positions.
    """
    groups = []
    for ops in fused_groups(program):
        parts: list[list[Op]] = []
        # A module and one inside it are one kernel of a library; siblings are kernels apart.
        for op in ops:
            part = next((p for p in parts if _same_module(p[0].module, op.module)), None)
            if part is None:
                parts.append([op])
            else:
                part.append(op)
        groups += [tuple(part) for part in parts if len(part) > 1]
    return tuple(groups)


def _same_module(first: str, second: str) -> bool:
    if not first or not second:
        return False
    return (
        first == second
        or f"{first}.".startswith(f"{second}.")
        or f"{second}.".startswith(f"{first}.")
    )


def fused_seconds(
    program: Program, profile: Profile, eager: Mapping[str, Seconds]
) -> dict[str, Seconds]:
    """Return seconds of a bound program's ops by name, those of a fused kernel shared out over
    its ops as they would run alone. No kernel takes longer than its ops one by one.
    """
    seconds = dict(eager)
    for ops in fused_groups(program):
        there = _part(_fused(ops, program, profile, "forward"), sum(eager[o.name][0] for o in ops))
        back = _part(_fused(ops, program, profile, "backward"), sum(eager[o.name][1] for o in ops))
        seconds |= {op.name: (eager[op.name][0] * there, eager[op.name][1] * back) for op in ops}
    return seconds


def num_kernels(program: Program) -> int:
    """Return how many kernels a fused program launches; views alone launch none."""
    fused = fused_groups(program)
    inside = {op.name for ops in fused for op in ops}
    alone = [op for op in program.ops if op.name not in inside and _moves(op, program)]
    return len(alone) + sum(any(_moves(op, program) for op in ops) for ops in fused)


def _fuses(op: Op) -> bool:
    # A table is not read whole, which the bytes of a fused kernel would take for granted.
    is_lookup = record_of(op.target).reads is not None
    # Ops of ours talk to other ranks, but for those that put rows in order.
    is_ours = op.target.startswith("planner.") and op.target not in (SORT_ROWS, UNSORT_ROWS)
    return not is_ours and not is_lookup and family_of(op.target) == MEMORY


def _moves(op: Op, program: Program) -> bool:
    return op_work(op, program.tensor).num_bytes > 0


def _part(fused_s: float, eager_s: float) -> float:
    return min(1.0, fused_s / eager_s) if eager_s else 1.0


def _fused(
    ops: Iterable[Op], program: Program, profile: Profile, direction: Literal["forward", "backward"]
) -> float:
    """One kernel that reads what comes from outside and writes what is used outside; its
    backward reads the gradients of these and what the forward read, and writes gradients.
    """
    ops, tensor = tuple(ops), program.tensor
    made = {name for op in ops for name in op.outputs}
    inside = {op.name for op in ops}
    others = {n for op in program.ops if op.name not in inside for n in op.inputs}
    read = dict.fromkeys(n for op in ops for n in op.inputs if n not in made)
    written = [n for n in made if n in others or n in program.outputs]
    num_bytes = _bytes(program, read) + _bytes(program, written)
    work = [op_work(op, tensor) for op in ops]
    if direction == "backward":
        work = [backward_work(op, tensor) for op in ops]
        if not any(part.num_bytes for part in work):
            return 0.0
        # Gradients that arrive are as large as what was written, so this adds only those it makes.
        num_bytes += _bytes(program, [n for n in read if tensor[n].requires_grad])
    # The kernel goes by the shape of its largest tensor; flop and bytes are those of all its ops.
    largest = max((tensor[n] for n in (*read, *written)), key=lambda meta: prod(meta.shape_at(1)))
    query = OpQuery(
        target=FUSED_TARGET,
        shapes=(largest.shape_at(1),),
        dtype=largest.dtype,
        direction=direction,
        flop=sum(part.flop for part in work),
        num_bytes=num_bytes,
    )
    return profile.op_seconds(query).seconds


def _bytes(program: Program, names: Iterable[str]) -> float:
    metas = (program.tensor[name] for name in names)
    return float(sum(prod(meta.shape_at(1)) * DTYPE_BYTES[meta.dtype] for meta in metas))
