"""Attention by plain products: what the CPU does where a mask needs a gradient (T5's positions).

Its fused kernel makes no gradient for a mask. Query, key and value are scaled and multiplied as
batches of matrices instead, in fp32 or wider, and the whole matrix of probabilities is kept
(`_scaled_dot_product_attention_math` in PyTorch's transformers/attention.cpp). The result
lies in memory as its shape says, whatever the query's order of dims.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from planner.graph import Op, Program
from planner.units import DTYPE_BYTES


def is_plain(op: Op, program: Program, device_type: str) -> bool:
    """Whether a `scaled_dot_product_attention` goes by plain products."""
    has_trained_mask = len(op.inputs) > 3 and program.tensor[op.inputs[3]].requires_grad
    return device_type == "cpu" and has_trained_mask


class _Sizes(NamedTuple):
    """Bytes of the tensors in the dtype that is computed in: copies of query, key and value, the
    result, and the matrix of all queries with all keys. `narrow`: that dtype is not the inputs'.
    """

    query: int
    key: int
    value: int
    output: int
    matrix: int
    narrow: bool


def _sizes(op: Op, program: Program) -> _Sizes:
    query, key, value = (program.tensor[name] for name in op.inputs[:3])
    dtype_bytes = DTYPE_BYTES[query.dtype]
    element = max(4, dtype_bytes)
    rows = prod(query.shape_at(1)[:-1])
    return _Sizes(
        query=element * prod(query.shape_at(1)),
        key=element * prod(key.shape_at(1)),
        value=element * prod(value.shape_at(1)),
        output=element * prod(program.tensor[op.outputs[0]].shape_at(1)),
        matrix=element * rows * key.shape_at(1)[-2],
        narrow=dtype_bytes < 4,
    )


def kept_bytes(op: Op, program: Program) -> int:
    """Bytes kept for the backward: scaled copies of the inputs, and the probabilities."""
    size = _sizes(op, program)
    return size.query + size.key + size.value + size.matrix


def forward_scratch(op: Op, program: Program) -> int:
    """Bytes beside the result and what is kept: the higher of the softmax and the end."""
    size, output = _sizes(op, program), program.tensor[op.outputs[0]].bytes_at(1)
    casts = size.query + size.key + size.value if size.narrow else 0
    cast_back = size.matrix * output // size.output + size.output if size.narrow else 0
    return max(casts + size.query + cast_back, casts + size.matrix - output)


def backward_scratch(op: Op, program: Program) -> int:
    """Bytes beside what is kept and all gradients it gets and makes; below zero, as these are
    never there at once. The highest of three moments: the gradients of value and probabilities
    are made, with all that is kept; the softmax's, with value's copy let go; query's and key's,
    with the probabilities let go. Gradients are cast, or summed to a mask's shape, at the end.
    """
    size, mask = _sizes(op, program), program.tensor[op.inputs[3]].bytes_at(1)
    kept = kept_bytes(op, program)
    own_mask = mask if size.narrow or mask != size.matrix else 0
    height = max(
        kept + size.output + size.value + size.matrix,
        size.query + size.key + size.value + 3 * size.matrix,
        2 * (size.query + size.key) + size.value + size.matrix + own_mask,
    )
    made = [name for name in dict.fromkeys(op.inputs) if program.tensor[name].requires_grad]
    arriving = program.tensor[op.outputs[0]].bytes_at(1)
    return height - kept - arriving - sum(program.tensor[name].bytes_at(1) for name in made)
