"""Work of one op: flop, bytes read and written, forward and backward; torch-free.

Counts follow the usual conventions: a multiply-add is 2 flop; causal attention counts half of
the score matrix; views move nothing. Backward counts what autograd computes for the inputs that
need a gradient: one matrix product per such operand. What is particular to a family stands in
its record (`planner.language.ops.record`).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from planner.language.graph import ModelGraph, Op, TensorMeta
from planner.language.ops.call import NO_WORK, Call, Work
from planner.language.ops.record import OpFamily, family_of
from planner.units import DTYPE_BYTES


def op_work(op: Op, tensor: Mapping[str, TensorMeta]) -> Work:
    """Return the forward work of an op of a bound program (every size a number)."""
    family, call = family_of(op.target), Call(op, tensor, 1)
    if _moves_nothing(family, call):
        return NO_WORK
    outs = [tensor[name] for name in op.outputs]
    if family.reads is not None:
        read = family.reads(call)
    else:
        read = float(sum(_bytes(tensor[name]) for name in dict.fromkeys(op.inputs)))
    return Work(
        flop=forward_flop(family, call),
        read_bytes=read,
        write_bytes=float(sum(_bytes(t) for t in outs)),
    )


def backward_work(op: Op, tensor: Mapping[str, TensorMeta], forward: Work | None = None) -> Work:
    """Return the backward work of an op; none if no input needs a gradient.

    `forward` is its forward work, where the caller has it.
    """
    forward = forward or op_work(op, tensor)
    needing = needing_gradient(op, tensor)
    if not needing or forward.num_bytes == 0:
        return NO_WORK
    family = family_of(op.target)
    if family.backward is not None:
        return family.backward(Call(op, tensor, 1), forward)
    call = Call(op, tensor, 1)
    return Work(
        flop=2.0 * forward.flop,
        read_bytes=arriving_bytes(call) + forward.read_bytes,
        write_bytes=made_bytes(call),
    )


def op_kernels(op: Op, tensor: Mapping[str, TensorMeta]) -> tuple[int, int]:
    """Return how many kernels the forward and the backward of an op of a bound program launch."""
    kernels = family_of(op.target).kernels
    return (1, 1) if kernels is None else kernels(Call(op, tensor, 1))


def forward_flop(family: OpFamily, call: Call) -> float:
    """Return the flop of a forward."""
    if family.flop is not None:
        return family.flop(call)
    return float(output_numel(call) * family.flop_per_element)


def needing_gradient(op: Op, tensor: Mapping[str, TensorMeta]) -> list[str]:
    """Return the inputs that need a gradient, each once."""
    return [n for n in dict.fromkeys(op.inputs) if tensor[n].requires_grad]


def output_numel(call: Call) -> int:
    """Return how many entries an op makes."""
    return sum(prod(shape) for shape in call.outputs)


def arriving_bytes(call: Call) -> float:
    """Return the bytes of the gradients of an op's outputs."""
    return float(sum(_bytes(call.tensor[name]) for name in call.op.outputs))


def made_bytes(call: Call) -> float:
    """Return the bytes of the gradients that the backward of an op makes."""
    return float(sum(_bytes(call.tensor[n]) for n in needing_gradient(call.op, call.tensor)))


def model_flop(graph: ModelGraph, num_samples: int) -> float:
    """Return the flop of the model's ops for so many samples, forward and backward, once each."""
    of_class = []
    for program in graph.classes:
        bound = program.bind(num_samples)
        works = [op_work(op, bound.tensor) for op in bound.ops]
        backs = [backward_work(op, bound.tensor, w) for op, w in zip(bound.ops, works, strict=True)]
        of_class.append(sum(work.flop for work in (*works, *backs)))
    return sum(of_class[block.class_index] for block in graph.blocks)


def product_backward(call: Call, forward: Work) -> Work:
    """A product again for each operand that needs a gradient: it reads the output's gradient and
    the other operand.
    """
    # (A bias has a single dim: its gradient is a sum and no product.)
    operands = [n for n in needing_gradient(call.op, call.tensor) if len(call.tensor[n].shape) > 1]
    return Work(
        flop=forward.flop * len(operands),
        read_bytes=arriving_bytes(call) * max(1, len(operands)) + forward.read_bytes,
        write_bytes=made_bytes(call),
    )


def _moves_nothing(family: OpFamily, call: Call) -> bool:
    free = family.moves_nothing
    return free if isinstance(free, bool) else free(call)


def _bytes(meta: TensorMeta) -> int:
    return prod(meta.shape_at(1)) * DTYPE_BYTES[meta.dtype]
