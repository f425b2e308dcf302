"""What kernels hold only while they run, beside their inputs, outputs and what they keep."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from costmodel.memory.ops.saved import SavedTensors
from costmodel.memory.ops.storage import base_name
from costmodel.time.plain_attention import backward_scratch, forward_scratch, is_plain
from planner.graph import Op, Program
from planner.layout.placement import Placement, Shard, parse_placement
from planner.layout.redistribute import REDISTRIBUTE, collectives
from planner.units import DTYPE_BYTES


def scratch_bytes(op: Op, program: Program, saved: SavedTensors, *, forward: bool) -> int:
    """Bytes a kernel holds only while it runs, beside its inputs, outputs and what it keeps; below
    zero where it lets those go before it has made all of these.
    """
    name = base_name(op.target)
    if op.target == REDISTRIBUTE:
        src, dst = (parse_placement(str(placement)) for placement in op.args[2:4])
        size = max(
            program.tensor[op.inputs[0]].bytes_at(1), program.tensor[op.outputs[0]].bytes_at(1)
        )
        return staging_bytes(src, dst, size, forward=forward, grad_partial=bool(op.args[4]))
    if name == "cross_entropy_loss":
        # Backward: the gradient of the log-softmax, then the logits'.
        return 0 if forward else program.tensor[op.inputs[0]].bytes_at(1)
    if name in _FACTORS and not forward:
        return _FACTORS[name] * program.tensor[op.outputs[0]].bytes_at(1)
    if name == "scaled_dot_product_attention" and is_plain(op, program, saved.device_type):
        return (forward_scratch if forward else backward_scratch)(op, program)
    if name == "vocab_cross_entropy":
        logits = program.tensor[op.inputs[0]]
        element = max(4, DTYPE_BYTES[logits.dtype])
        wide = prod(logits.shape_at(1)) * element
        samples = prod(program.tensor[op.inputs[1]].shape_at(1))
        # Forward: shifted logits and their exponentials beside the probabilities, and by sample
        # the maximum, three sums before and after they are reduced, two losses and a flag.
        # Backward: the gradient before and after the targets' share is added, and by sample
        # that share and the loss's gradient.
        return 2 * wide + samples * (9 * element + 1) if forward else wide + 2 * samples * element
    return 0


_FACTORS = {"pow": 2, "rsqrt": 2, "cos": 2, "sin": 1, "sqrt": 1, "abs": 1}
"""Tensors of the result's size that a backward makes before it multiplies the gradient by the
last of them: 3 x^2 by way of x^2 (PyTorch's derivatives.yaml)."""


def unreduced_bytes(op: Op, needing: Sequence[str], program: Program) -> int:
    """Bytes by which the backward of a product with broadcasting or mixed dtypes is higher than
    its inputs' gradients: it makes them all like its output, then sums or casts one by one.
    """
    if base_name(op.target) != "mul":
        return 0
    made = program.tensor[op.outputs[0]].bytes_at(1)
    live = peak = made * len(needing)
    for name in needing:
        size = program.tensor[name].bytes_at(1)
        if size != made:
            peak = max(peak, live + size)
            live += size - made
    return peak - live


def staging_bytes(
    src: Placement, dst: Placement, num_bytes: int, *, forward: bool, grad_partial: bool = False
) -> int:
    """Bytes in which a collective's pieces are put side by side: collectives cut dim 0, and
    what is cut along another is copied before or after (`planner.runtime.stage.collectives`).
    `num_bytes` are those of the larger of what a rank has before and after.
    """
    kind = collectives(src, dst, grad_partial)[0 if forward else 1]
    cuts = [p for p in (src, dst) if isinstance(p, Shard)]
    if kind is None or kind == "all_reduce" or all(p.dim == 0 and p.segments == 1 for p in cuts):
        return 0
    return 2 * num_bytes if kind == "all_to_all" else num_bytes
