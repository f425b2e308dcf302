"""Attention by plain products: what the CPU does where a mask needs a gradient (T5's positions).

Its fused kernel makes no gradient for a mask. Query, key and value are scaled and multiplied as
batches of matrices instead, in fp32 or wider, and the whole matrix of probabilities is saved
(`_scaled_dot_product_attention_math` in PyTorch's transformers/attention.cpp). The result
lies in memory as its shape says, whatever the query's order of dims.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from planner.language.ops.kernel import KernelCall


def is_plain(call: KernelCall) -> bool:
    """Whether a `scaled_dot_product_attention` is computed by plain products."""
    masks = call.op.inputs[3:4]
    return call.device_type == "cpu" and any(call.needs_grad(mask) for mask in masks)


class _Sizes(NamedTuple):
    """Bytes of the tensors in the dtype of the computation."""

    query: int
    """A copy of the query."""
    key: int
    """A copy of the key, with a head for each of the query's."""
    value: int
    """A copy of the value, likewise."""
    output: int
    """The result."""
    matrix: int
    """The scores of all queries with all keys."""
    narrow: bool
    """The inputs have a narrower dtype than the computation."""


def _sizes(call: KernelCall) -> _Sizes:
    query, key, value = call.op.inputs[:3]
    dtype_bytes = call.element_bytes(query)
    element = max(4, dtype_bytes)
    rows = prod(call.shape(query)[:-1])
    grouped = call.arg(7, "enable_gqa", False)
    copies = call.shape(query)[-3] // call.shape(key)[-3] if grouped else 1
    return _Sizes(
        query=element * call.numel(query),
        key=element * call.numel(key) * copies,
        value=element * call.numel(value) * copies,
        output=element * call.numel(call.op.outputs[0]),
        matrix=element * rows * call.shape(key)[-2],
        narrow=dtype_bytes < 4,
    )


def saved_bytes(call: KernelCall) -> int:
    """Bytes saved for the backward: scaled copies of the inputs, and the probabilities."""
    size = _sizes(call)
    return size.query + size.key + size.value + size.matrix


def forward_scratch(call: KernelCall) -> int:
    """Bytes beside the result and what is kept: the higher of the softmax and the end."""
    size, output = _sizes(call), call.num_bytes(call.op.outputs[0])
    casts = size.query + size.key + size.value if size.narrow else 0
    cast_back = size.matrix * output // size.output + size.output if size.narrow else 0
    return max(casts + size.query + cast_back, casts + size.matrix - output)


def backward_scratch(call: KernelCall) -> int:
    """Bytes beside what is kept and all gradients it gets and makes; below zero, as these are
    never there at once. The highest of three moments: the gradients of value and probabilities
    are made, with all that is kept; the softmax's, with value's copy let go; query's and key's,
    with the probabilities let go. Gradients are cast, or summed to a mask's shape, at the end.
    """
    size, mask = _sizes(call), call.num_bytes(call.op.inputs[3])
    kept = saved_bytes(call)
    own_mask = mask if size.narrow or mask != size.matrix else 0
    height = max(
        kept + size.output + size.value + size.matrix,
        size.query + size.key + size.value + 3 * size.matrix,
        2 * (size.query + size.key) + size.value + size.matrix + own_mask,
    )
    made = [name for name in dict.fromkeys(call.op.inputs) if call.needs_grad(name)]
    arriving = call.num_bytes(call.op.outputs[0])
    return height - kept - arriving - sum(call.num_bytes(name) for name in made)
