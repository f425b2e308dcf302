"""Which kernels do their part of a cast to 8 bits for the product beside them (`casts`)."""

from __future__ import annotations

from collections.abc import Sequence

from costmodel.execution.execution import Execution
from planner.language.graph import Op, Program
from planner.language.layout.redistribute import REDISTRIBUTE
from planner.language.ops.flops import op_work
from planner.language.ops.record import family_of, packet_of
from profiles.lookup.families import ATTENTION, MATMUL

NORMS = ("rms_norm", "layer_norm", "native_layer_norm")


def input_is_ready(ops: Sequence[Op], local: Program, execution: Execution) -> bool:
    """Whether the kernel that makes the input of products does its part of the cast: a norm of a
    library of layers, if nothing beside them takes its result; any pass with a compiler.
    """
    name = ops[0].inputs[family_of(ops[0].target).first_factor]
    makers = {made: op for op in local.ops for made in op.outputs}
    is_compiled = execution.kernels == "fused"
    takers = {op.name for op in ops}
    while name in makers:
        if not is_compiled and any(name in op.inputs for op in local.ops if op.name not in takers):
            return False
        maker = makers[name]
        # Through a gather, and for a compiler through views, to the kernel that made the values.
        if maker.target != REDISTRIBUTE and not (is_compiled and _is_view(maker, local)):
            return _is_pass(maker) if is_compiled else packet_of(maker.target) in NORMS
        takers, name = {maker.name}, maker.inputs[0]
    return False


def gradient_is_ready(op: Op, local: Program, execution: Execution) -> bool:
    """Whether the kernel that makes the gradient of a product's output does its part of the cast:
    with a compiler, where passes alone take that output.
    """
    if execution.kernels != "fused":
        return False
    outputs = set(op.outputs)
    for user in local.ops:
        if outputs.isdisjoint(user.inputs):
            continue
        if user.target == REDISTRIBUTE or _is_view(user, local):
            outputs.update(user.outputs)
        elif not _is_pass(user):
            return False
    return True


def _is_view(op: Op, local: Program) -> bool:
    return op_work(op, local.tensor).num_bytes == 0 and not _multiplies(op)


def _is_pass(op: Op) -> bool:
    return not _multiplies(op)


def _multiplies(op: Op) -> bool:
    return family_of(op.target).arithmetic in (MATMUL, ATTENTION)
