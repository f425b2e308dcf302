"""What each op keeps for its backward: one rule per op family.

The rules are those of PyTorch's `derivatives.yaml` and of the kernels behind composite ops. An op
without a rule is taken to keep all its differentiable inputs, which is never too little for
the usual op.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

from costmodel.memory.ops.kept import Context, Kept
from costmodel.memory.ops.kept_products import addmm, linear, matmul, rows_linear
from costmodel.memory.ops.storage import base_name, dropout_probability
from costmodel.time.plain_attention import is_plain, kept_bytes
from planner.graph import Op, Ref
from planner.units import DTYPE_BYTES


def kept_by(op: Op, context: Context) -> Kept:
    """Return what an op keeps."""
    if not any(context.needs_grad(name) for name in op.outputs):
        return Kept()
    name = base_name(op.target)
    if op.name in context.aside:
        return Kept(tensors=op.inputs)
    if name in _KEEP_NOTHING or op.outputs[0] in context.storages.views:
        return Kept()
    rule = _RULES.get(name.rstrip("_") if not name.startswith("_") else name)
    if rule is None:
        return Kept(tensors=tuple(n for n in op.inputs if context.needs_grad(n)))
    return rule(op, context)


_KEEP_NOTHING = frozenset({
    "add", "sub", "rsub", "neg", "sum", "mean", "cat", "stack", "clone", "contiguous", "to",
    "_to_copy", "type_as", "float", "pad", "constant_pad_nd", "cumsum", "tril", "triu",
    "redistribute",
    "expand", "repeat", "zeros_like", "ones_like", "full_like", "new_ones", "new_zeros", "roll",
    "flip", "reshape", "flatten", "copy_", "fill_", "arange", "full", "view",
    "repeat_interleave", "squeeze", "unsqueeze", "upsample_nearest1d", "upsample_nearest2d",
    "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d",
    "upsample_bicubic2d",
})  # fmt: skip


def _first(op: Op, context: Context) -> Kept:
    return Kept(tensors=op.inputs[:1])


def _result(op: Op, context: Context) -> Kept:
    return Kept(tensors=op.outputs[:1])


def _product(op: Op, context: Context) -> Kept:
    """`a * b` keeps each factor whose partner needs a gradient."""
    if len(op.inputs) < 2:
        return Kept()
    left, right = op.inputs[:2]
    kept = [left] if context.needs_grad(right) else []
    return Kept(tensors=(*kept, right) if context.needs_grad(left) else tuple(kept))


def _quotient(op: Op, context: Context) -> Kept:
    if len(op.inputs) < 2:
        return Kept()
    return Kept(tensors=op.inputs[:2] if context.needs_grad(op.inputs[1]) else op.inputs[1:2])


def _power(op: Op, context: Context) -> Kept:
    """The gradient of x**2 reads x, of x**c reads x; of x**0 and x**1 nothing."""
    exponent = op.args[1] if len(op.args) > 1 else None
    return Kept() if exponent in (0, 1) else Kept(tensors=op.inputs)


def _embedding(op: Op, context: Context) -> Kept:
    return Kept(tensors=op.inputs[1:2])


def _layer_norm(op: Op, context: Context) -> Kept:
    """Inputs, mean and reciprocal deviation, one of each per normalised row."""
    return _norm(op, context, statistics=2)


def _rms_norm(op: Op, context: Context) -> Kept:
    return _norm(op, context, statistics=1)


def _norm(op: Op, context: Context, *, statistics: int) -> Kept:
    source = op.inputs[0]
    shape = context.shape(source)
    normalised = op.args[1] if isinstance(op.args[1], tuple) else (shape[-1],)
    rows = prod(shape[: len(shape) - len(normalised)])
    return Kept(tensors=op.inputs, extra_bytes=statistics * rows * context.stat_bytes(source))


def _dropout(op: Op, context: Context) -> Kept:
    if dropout_probability(op) == 0.0:
        return Kept()
    numel = prod(context.shape(op.inputs[0]))
    noise = DTYPE_BYTES[context.program.tensor[op.inputs[0]].dtype]
    return Kept(extra_bytes=numel * (noise if context.device_type == "cpu" else 1))


def _cross_entropy(op: Op, context: Context) -> Kept:
    """The log-softmax of the logits, the labels and the number of them that count."""
    logits, labels = op.inputs[:2]
    dtype_bytes = DTYPE_BYTES[context.program.tensor[logits].dtype]
    return Kept(tensors=(labels,), extra_bytes=context.num_bytes(logits) + dtype_bytes)


def _attention(op: Op, context: Context) -> Kept:
    """Fused attention keeps query, key, value, output and the log-sum-exp of each row.

    A boolean mask is turned into an additive one, which is kept besides.
    """
    if is_plain(op, context.program, context.device_type):
        return Kept(extra_bytes=kept_bytes(op, context.program))
    query, key, value = op.inputs[:3]
    mask = op.inputs[3] if len(op.inputs) > 3 else None
    dtype_bytes = DTYPE_BYTES[context.program.tensor[query].dtype]
    rows = prod(context.shape(query)[:-1])
    extra = rows * max(4, dtype_bytes)
    kept = [query, key, value, op.outputs[0]]
    if mask is not None:
        if context.program.tensor[mask].dtype == "bool":
            extra += prod(context.shape(mask)) * dtype_bytes
        else:
            kept.append(mask)
    return Kept(tensors=tuple(kept), extra_bytes=extra)


def _causal_attention(op: Op, context: Context) -> Kept:
    """Fused attention of some queries to all keys, with the mask of positions made additive."""
    query, key = op.inputs[:2]
    mask = context.shape(query)[-2] * context.shape(key)[-2]
    kept = _attention(op, context)
    dtype_bytes = DTYPE_BYTES[context.program.tensor[query].dtype]
    return Kept(tensors=kept.tensors, extra_bytes=kept.extra_bytes + mask * dtype_bytes)


def _divide_by_count(op: Op, context: Context) -> Kept:
    """The count, one int64."""
    return Kept(extra_bytes=8)


def _group_norm(op: Op, context: Context) -> Kept:
    """Inputs, mean and reciprocal deviation of each group of each sample."""
    source, groups = op.inputs[0], int(op.args[1])  # type: ignore[arg-type]
    rows = context.shape(source)[0] * groups
    return Kept(tensors=op.inputs, extra_bytes=2 * rows * context.stat_bytes(source))


def _batch_norm(op: Op, context: Context) -> Kept:
    """Input, weight and running statistics, and in training the batch's mean and reciprocal
    deviation of each channel.
    """
    source = op.inputs[0]
    channels = context.shape(source)[1] if bool(op.args[5]) else 0
    kept = tuple(ref.name for ref in (*op.args[:2], *op.args[3:5]) if isinstance(ref, Ref))
    return Kept(tensors=kept, extra_bytes=2 * channels * context.stat_bytes(source))


def _max_pool(op: Op, context: Context) -> Kept:
    """Input and, for each output, the position (int64) of its maximum."""
    return Kept(tensors=op.inputs[:1], extra_bytes=8 * prod(context.shape(op.outputs[0])))


def _adaptive_pool(op: Op, context: Context) -> Kept:
    """Pooling to one value is a mean, which keeps nothing."""
    spatial = prod(context.shape(op.outputs[0])[2:])
    return Kept() if spatial == 1 else Kept(tensors=op.inputs[:1])


def _top_values(op: Op, context: Context) -> Kept:
    """Where the chosen values came from: the op's second output."""
    return Kept(tensors=op.outputs[1:2])


def _vocab_embedding(op: Op, context: Context) -> Kept:
    """Indices counted from this rank's first row (int64) and which of them lie elsewhere."""
    return Kept(extra_bytes=9 * prod(context.shape(op.inputs[1])))


def _vocab_nll_loss(op: Op, context: Context) -> Kept:
    """Indices counted from this rank's first class (int64), and which lie elsewhere; a count."""
    return Kept(extra_bytes=9 * prod(context.shape(op.inputs[1])) + 8)


def _vocab_log_softmax(op: Op, context: Context) -> Kept:
    """The exponentials, and their sum for each row."""
    rows = prod(context.shape(op.outputs[0])) // context.shape(op.outputs[0])[int(op.args[1])]  # type: ignore[arg-type]
    dtype_bytes = DTYPE_BYTES[context.program.tensor[op.outputs[0]].dtype]
    return Kept(extra_bytes=context.num_bytes(op.outputs[0]) + rows * dtype_bytes)


def _vocab_cross_entropy(op: Op, context: Context) -> Kept:
    """Probabilities of the local classes in fp32 or wider; per sample an int64 and two flags."""
    logits, labels = op.inputs[:2]
    element = max(4, DTYPE_BYTES[context.program.tensor[logits].dtype])
    samples = prod(context.shape(labels))
    return Kept(extra_bytes=element * prod(context.shape(logits)) + 10 * samples + 8)


def _own_random_stream(op: Op, context: Context) -> Kept:
    """What the op it runs keeps: `args[0]` is that op's target, `args[2:]` its arguments."""
    inner = replace(op, target=str(op.args[0]), args=op.args[2:])
    return kept_by(inner, context)


def _both(op: Op, context: Context) -> Kept:
    return Kept(tensors=op.inputs[:2])


def _indices(op: Op, context: Context) -> Kept:
    return Kept(tensors=op.inputs[1:])


def _where(op: Op, context: Context) -> Kept:
    return Kept(tensors=op.inputs[:1])


def _masked_fill(op: Op, context: Context) -> Kept:
    return Kept(tensors=op.inputs[1:2])


_RULES: dict[str, Callable[[Op, Context], Kept]] = {
    **dict.fromkeys(
        ("gelu", "silu", "sin", "cos", "abs", "log", "clamp", "leaky_relu", "hardtanh", "softplus"),
        _first,
    ),
    **dict.fromkeys(
        ("relu", "tanh", "sigmoid", "softmax", "_softmax", "log_softmax", "exp", "sqrt", "rsqrt"),
        _result,
    ),
    "mul": _product,
    "div": _quotient,
    "pow": _power,
    **dict.fromkeys(("mse_loss", "l1_loss", "smooth_l1_loss"), _both),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "conv_transpose2d"), linear),
    **dict.fromkeys(("max_pool1d", "max_pool2d"), _max_pool),
    "adaptive_avg_pool2d": _adaptive_pool,
    "group_norm": _group_norm,
    **dict.fromkeys(("batch_norm", "batch_norm_by_channel"), _batch_norm),
    "linear": rows_linear,
    "mm": linear,
    "bmm": linear,
    "addmm": addmm,
    "matmul": matmul,
    "embedding": _embedding,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "dropout": _dropout,
    "cross_entropy_loss": _cross_entropy,
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("topk", "sort", "kthvalue", "cummax"), _top_values),
    "vocab_embedding": _vocab_embedding,
    "vocab_cross_entropy": _vocab_cross_entropy,
    "vocab_nll_loss": _vocab_nll_loss,
    "vocab_log_softmax": _vocab_log_softmax,
    "divide_by_count": _divide_by_count,
    "causal_attention": _causal_attention,
    "with_own_random_stream": _own_random_stream,
    "index": _indices,
    "gather": _indices,
    "index_select": _indices,
    "where": _where,
    "masked_fill": _masked_fill,
}
