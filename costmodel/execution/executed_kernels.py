"""Seconds of the kernels of a block's ops, from the rates of a device.

An op that multiplies is a kernel of its own; ops that only move bytes are fused as the execution
says (`costmodel.table.fusion`), and a kernel reads what comes from outside of it and writes what is
used outside. A backward reads the gradients that arrive and what the forward saved, and writes
gradients; where a tensor has several users, their gradients are added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

from costmodel.execution.casts import Casts
from costmodel.execution.executed import ExecutedProfile, KernelSeconds
from costmodel.execution.execution import Execution
from costmodel.execution.narrow import gradient_is_ready, input_is_ready
from costmodel.memory.saved import SavedTensors
from costmodel.table.fusion import fused_groups, module_groups
from costmodel.time.block.compute import bytes_of, op_works
from planner.language.graph import Op, Program
from planner.language.layout.redistribute import EXCHANGE_ROWS, REDISTRIBUTE
from planner.language.ops.families.entries.routing import BIAS_OF_RUNS, UNSORT_ROWS
from planner.language.ops.families.products.narrow import NARROW_DTYPE, scaling_of
from planner.language.ops.families.products.rings import RING
from planner.language.ops.flops import needing_gradient
from planner.language.ops.record import family_of, op_inside, packet_of
from profiles.lookup.families import ATTENTION, MATMUL, matmul_sizes

LOSSES = (
    "cross_entropy_loss",
    "vocab_cross_entropy",
    "sized_vocab_cross_entropy",
    "cross_entropy_sum",
)
HALVES = ("bfloat16", "float16")

PRODUCT_STREAMS = 4
"""Streams on which runs of rows are multiplied side by side (Transformer Engine 2.8:
common/gemm/cublaslt_gemm.cu, nvte_multi_tensor_gemm)."""

ROW_ORDERS = ("sort_rows", "unsort_rows")
"""Ops of ours that put tokens' rows in the order of their experts, and back."""

LOSS_KERNELS = 5
"""Launches of a loss, forward and as many backward."""


def kernels_of(local: Program, execution: Execution) -> list[tuple[Op, ...]]:
    """Return the ops of each kernel, those of views that stand alone too.

    Weights by which one tensor is multiplied (queries, keys and values; gate and up) are one matrix
    in modules of a runtime's own, however a model's code writes them.
    """
    groups: tuple[tuple[Op, ...], ...] = ()
    if execution.kernels == "fused":
        groups = fused_groups(local)
    elif execution.kernels == "modules":
        groups = module_groups(local)
    # A loss has bytes of its own (`loss_pass_bytes`), so it stays a kernel by itself.
    groups = tuple(ops for ops in groups if not any(packet_of(op.target) in LOSSES for op in ops))
    inside = {op.name for ops in groups for op in ops}
    alone: dict[tuple, list[Op]] = {}
    for op in local.ops:
        if op.name not in inside and op.target != REDISTRIBUTE:
            # Products of one input are gathered under one key: together they are a wider product.
            alone.setdefault(_multiplied(op, local) or (op.name,), []).append(op)
    return [*groups, *map(tuple, alone.values())]


def _multiplied(op: Op, local: Program) -> tuple | None:
    """Return what products have in common that one kernel does: the op, its input, what needs a
    gradient; nothing for other ops.
    """
    if not is_product(op):
        return None
    first = family_of(op.target).first_factor
    factor, weight = op.inputs[first : first + 2]
    if not _is_weight(weight, local):
        return None
    needing = needing_gradient(op, local.tensor)
    return op.target, factor, factor in needing, weight in needing


def _is_adapter(op: Op, local: Program) -> bool:
    """Whether an op multiplies by a trained weight in a block of which others are frozen.

    Adapters are layers beside a library's own, and multiply in 16 bits where those cast: NeMo's
    are Megatron-Core's, not Transformer Engine's (adapters/parallel_adapters.py, NeMo 2.0).
    """
    weights = [
        local.tensor[name]
        for each in local.ops
        if is_product(each)
        for name in each.inputs
        if _is_weight(name, local)
    ]
    is_trained = any(local.tensor[n].requires_grad for n in op.inputs if _is_weight(n, local))
    return is_trained and not all(meta.requires_grad for meta in weights)


def _is_weight(name: str, local: Program) -> bool:
    return local.tensor[name].kind == "param"


def is_product(op: Op) -> bool:
    """Whether an op multiplies matrices."""
    return family_of(op.target).arithmetic == MATMUL


def multiplies_weights(op: Op, local: Program) -> bool:
    """Whether an op is one product with a weight: no product of heads, none of many experts."""
    return (
        is_product(op)
        and any(_is_weight(name, local) for name in op.inputs)
        and (not family_of(op.target).deals_rows)
    )


def is_attention(op: Op) -> bool:
    """Whether an op is attention as one kernel."""
    return family_of(op_inside(op).target).arithmetic == ATTENTION


def is_layer_product(op: Op, local: Program) -> bool:
    """Whether a product is of weights in 16 bits, which a runtime may multiply in fewer: one of a
    layer, or of the head.
    """
    if not is_product(op) or local.tensor[op.outputs[0]].dtype not in HALVES:
        return False
    return _has_weights(op, local) and not _is_adapter(op, local)


def _has_weights(op: Op, local: Program) -> bool:
    has_params = any(local.tensor[name].kind == "param" for name in op.inputs)
    return has_params or family_of(op.target).deals_rows


def products_of_head(local: Program) -> frozenset[str]:
    """Return the products whose results a loss takes, through views and casts."""
    wanted = {op.inputs[0] for op in local.ops if packet_of(op.target) in LOSSES}
    found = set()
    for op in reversed(local.ops):
        if wanted.intersection(op.outputs):
            if is_product(op):
                found.add(op.name)
            else:
                wanted.update(op.inputs[:1])
    return frozenset(found)


def kernel_seconds(
    ops: tuple[Op, ...],
    local: Program,
    profile: ExecutedProfile,
    saved: SavedTensors,
    in_head: frozenset[str],
) -> KernelSeconds:
    """Return the seconds of a kernel: a product, attention, a loss, or a pass over memory."""
    op = ops[0]
    if is_product(op):
        return _product_seconds(ops, local, profile, is_head=op.name in in_head)
    if op.target == EXCHANGE_ROWS:
        return _arrival_seconds(op, local, profile)
    if not profile.dispatcher.sorts_ahead and any(packet_of(o.target) in ROW_ORDERS for o in ops):
        # Rows are made of tokens where these arrive.
        return KernelSeconds(forward_s=0.0, backward_s=0.0, kernels=0)
    if len(ops) == 1:
        if is_attention(op):
            return _attention_seconds(op, local, profile)
        if packet_of(op.target) in LOSSES:
            logits = _numel(local, op.inputs[0])
            # The bytes are of forward and backward together, half to each.
            each = profile.execution.loss_pass_bytes * logits / 2
            once = profile.pass_seconds(each, LOSS_KERNELS)
            return KernelSeconds(forward_s=once, backward_s=once, kernels=LOSS_KERNELS)
        if op.target == BIAS_OF_RUNS and any(profile.execution.bias_pass_bytes):
            return _bias_seconds(op, local, profile)
    return _pass_seconds(ops, local, profile, saved)


def adds_last(op: Op, local: Program) -> bool:
    """Whether an op adds biases to rows that go back to where they came from next."""
    if op.target != BIAS_OF_RUNS:
        return False
    users = [each.target for each in local.ops if op.outputs[0] in each.inputs]
    return set(users) <= {UNSORT_ROWS, EXCHANGE_ROWS, REDISTRIBUTE}


def _bias_seconds(op: Op, local: Program, profile: ExecutedProfile) -> KernelSeconds:
    """Biases that are added to the rows of each expert by kernels of their own; those of a product
    that is not the last by its kernel, which also sums up their gradient.
    """
    if not adds_last(op, local):
        return KernelSeconds(forward_s=0.0, backward_s=0.0, kernels=0)
    execution, elements = profile.execution, _numel(local, op.inputs[0])
    kernels = execution.bias_kernels * local.tensor[op.inputs[1]].shape_at(1)[0]
    forward_s, backward_s = (
        profile.pass_seconds(each * elements, times * kernels)
        for times, each in enumerate(execution.bias_pass_bytes, 1)
    )
    return KernelSeconds(forward_s=forward_s, backward_s=backward_s, kernels=kernels)


def _product_seconds(
    ops: tuple[Op, ...], local: Program, profile: ExecutedProfile, *, is_head: bool
) -> KernelSeconds:
    """Products of one input with one or more weights, (m, k) by (k, n), n of all weights."""
    tensor, rates, op = local.tensor, profile.rates, ops[0]
    sizes = [
        matmul_sizes(tuple(tensor[name].shape_at(1) for name in each.inputs), each.target)
        for each in ops
    ]
    batch, m, _, k = sizes[0]
    n = sum(columns for _, _, columns, _ in sizes)
    of_weights = _has_weights(op, local)
    is_plans = bool(scaling_of(op))  # in 8 bits as the plan has it
    may_cast = is_plans or (not is_head and is_layer_product(op, local))
    casts = profile.casts_of(op) if may_cast else None
    dtype = profile.product_dtype if casts else tensor[op.outputs[0]].dtype
    if casts and is_plans:
        dtype = NARROW_DTYPE
    if dtype not in rates.peak_flop_per_s:
        dtype = "bfloat16"
    # Rows of logits start on 16-byte boundaries if tp pads the vocabulary or it divides.
    aligned = n % 8 == 0 or not is_head
    # Runs of rows are multiplied one by one, on a few streams: a kernel each.
    is_grouped = family_of(op.target).deals_rows
    more_s = (ceil(batch / PRODUCT_STREAMS) - 1) * rates.kernel_s * is_grouped

    def seconds(rows: int, columns: int, inner: int) -> float:
        """Return the seconds of a product of (rows, inner) and (inner, columns)."""
        alone_s = rates.matmul_seconds(
            rows, columns, inner, batch=batch, dtype=dtype, aligned=aligned
        )
        return alone_s / rate_part + more_s

    rate_part = casts.rate_part if casts else 1.0
    forward_s = seconds(m, n, k)
    backward_s = weight_s = 0.0
    factors = op.inputs[family_of(op.target).first_factor :][:2]
    needing = set(needing_gradient(op, tensor))
    if factors[0] in needing:
        # dx = dy w: (m, n) by (n, k).
        backward_s += seconds(m, k, n)
    if factors[1] in needing:
        # dw = dy^T x: linear layers store weights as (n, k). The order matters for whole tiles.
        rows, columns = (n, k) if of_weights else (k, n)
        if casts and casts.wide_weight_gradient:
            dtype, rate_part = "bfloat16", 1.0
        once_s = seconds(rows, columns, m)
        backward_s += once_s
        weight_s = once_s if _is_weight(factors[1], local) else 0.0
    cast_s = cast_back_s = 0.0
    if casts:
        cast_s, cast_back_s = _cast_seconds(
            casts, ops, local, profile, kernels=batch * is_grouped, sizes=sizes
        )
    return KernelSeconds(
        forward_s=(forward_s + cast_s) * profile.waited,
        backward_s=(backward_s + cast_back_s * bool(backward_s)) * profile.waited,
        weight_s=weight_s * profile.waited,
    )


def _cast_seconds(
    casts: Casts,
    ops: tuple[Op, ...],
    local: Program,
    profile: ExecutedProfile,
    *,
    kernels: int,
    sizes: list[tuple[int, int, int, int]],
) -> tuple[float, float]:
    """Return seconds of a product's casts, in its forward and in its backward; of runs of rows a
    kernel each. `sizes` are batch, m, n and k for each weight.
    """

    def cast_s(num_bytes: float) -> float:
        return profile.rates.pass_seconds(num_bytes, kernels) if num_bytes else 0.0

    def each_bytes(is_ready: bool) -> int:
        return casts.ready_bytes if is_ready else casts.alone_bytes

    batch, m, _, k = sizes[0]
    taken_bytes = each_bytes(input_is_ready(ops, local, profile.execution)) * batch * m * k
    arriving_bytes = sum(
        each_bytes(gradient_is_ready(op, local, profile.execution)) * batch * m * n
        for op, (_, _, n, _) in zip(ops, sizes, strict=True)
    )
    weights = batch * k * sum(n for _, _, n, _ in sizes)
    return (
        cast_s(taken_bytes) + cast_s(casts.weight_bytes * weights),
        cast_s(arriving_bytes) + cast_s(casts.weight_back_bytes * weights),
    )


def _attention_seconds(op: Op, local: Program, profile: ExecutedProfile) -> KernelSeconds:
    work, _ = op_works(op_inside(op), local.tensor)
    vendor = profile.execution.vendor_attention
    flop = work.flop
    joined_s, joined_back_s = _joining_seconds(op, local, profile)
    return KernelSeconds(
        forward_s=profile.rates.attention_seconds(flop, vendor=vendor) * profile.waited + joined_s,
        # Five products to the forward's two: scores again, and the gradients of values, scores,
        # queries and keys.
        backward_s=(
            profile.rates.attention_seconds(2.5 * flop, vendor=vendor) * profile.waited
            + joined_back_s
        )
        * bool(needing_gradient(op, local.tensor)),
    )


def ring_rounds(op: Op) -> int:
    """Return the rounds in which an op takes keys and values; 1 where all are at hand."""
    return len(op.args[11]) if op.target == RING else 1  # type: ignore[arg-type]


def _joining_seconds(op: Op, local: Program, profile: ExecutedProfile) -> tuple[float, float]:
    """Return seconds of what a ring adds to attention in its forward and its backward.

    Of r rounds each is a kernel, and

        forward     results are scaled by their sums of exponentials and added: 2 passes over the
                    first, 3 over each further one
        backward    so are gradients of queries; those of keys and values are added to what the
                    neighbour sent, 3 passes in each further round

    on the rank that meets keys of all parts in whole (Transformer Engine at d0067d0d:
    AttnFuncWithCPAndKVP2P of pytorch/attention/dot_product_attention/context_parallel.py).
    """
    rounds = ring_rounds(op)
    if rounds == 1:
        return 0.0, 0.0
    query, *keys = (bytes_of(local, [name]) for name in op.inputs[:3])
    result = bytes_of(local, op.outputs[:1])
    passes = 2 + 3 * (rounds - 1)
    return (
        profile.pass_seconds(passes * result, rounds + rounds - 1),
        profile.pass_seconds(
            passes * query + 3 * (rounds - 1) * sum(keys), 2 * rounds + rounds - 1
        ),
    )


def _arrival_seconds(op: Op, local: Program, profile: ExecutedProfile) -> KernelSeconds:
    """Rows that arrived by their senders are put in the order of their experts, and those that
    leave in the order of theirs: a pass each; in 8 bits another that pads each expert's rows.
    """
    grouped = [each for each in local.ops if family_of(each.target).deals_rows]
    experts = local.tensor[grouped[0].inputs[1]].shape_at(1)[0] if grouped else 1
    # Rows of a single expert are in its order as they come.
    passes = int(experts > 1 or not profile.dispatcher.sorts_ahead)
    pads = profile.execution.pads_rows and not profile.dispatcher.pads_rows
    passes += pads and (profile.multiplies_narrow or any(map(scaling_of, grouped)))
    num_bytes = bytes_of(local, (op.inputs[0], *op.outputs))
    seconds = profile.pass_seconds(passes * num_bytes, passes)
    is_trained = local.tensor[op.outputs[0]].requires_grad
    return KernelSeconds(forward_s=seconds, backward_s=seconds * is_trained, kernels=passes)


ADDITIONS = ("add", "sub", "neg", "to", "expand", "sum")
"""Ops whose gradient is that of their output, or its sum: nothing of the forward is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnfusedSoftmax:
    """Scale, mask, a cast to fp32, softmax and a cast back, a kernel each."""

    forward_bytes: int = 24
    backward_bytes: int = 26
    kernels: int = 7


UNFUSED_SOFTMAX = _UnfusedSoftmax()


def _softmax_is_fused(shape: tuple[int, ...]) -> bool:
    """Whether Megatron's fused causal softmax takes scores (batch, heads, queries, keys).

    Its thread blocks hold four rows, so it takes batch * local heads divisible by 4, and at
    most 2048 keys (megatron/fused_kernels/scaled_upper_triang_masked_softmax, 2021).
    """
    batch, heads, _, keys = shape
    return batch * heads % 4 == 0 and 16 < keys <= 2048


def _unfused_softmax_seconds(scores: int, profile: ExecutedProfile) -> KernelSeconds:
    parts = UNFUSED_SOFTMAX
    return KernelSeconds(
        forward_s=profile.pass_seconds(parts.forward_bytes * scores, parts.kernels),
        backward_s=profile.pass_seconds(parts.backward_bytes * scores, parts.kernels),
        kernels=parts.kernels,
    )


def _pass_seconds(
    ops: tuple[Op, ...], local: Program, profile: ExecutedProfile, saved: SavedTensors
) -> KernelSeconds:
    """A kernel that moves bytes, and the kernel of its backward."""
    tensor = local.tensor
    if all(op_works(op, tensor)[0].num_bytes == 0 for op in ops):
        # Views move nothing forward. The backward of a view with several parts joins their
        # gradients.
        back = sum(_joined_bytes(op, local) for op in ops)
        return KernelSeconds(
            forward_s=0.0,
            backward_s=profile.pass_seconds(profile.execution.pointwise_factor * back, 0),
            kernels=0,
        )
    for op in ops:
        shape = tensor[op.outputs[0]].shape_at(1)
        if packet_of(op.target) == "softmax" and len(shape) == 4 and not _softmax_is_fused(shape):
            return _unfused_softmax_seconds(prod(shape), profile)
    # What a fused kernel makes and nothing outside takes stays in registers.
    made = {name for op in ops for name in op.outputs}
    inside = {op.name for op in ops}
    others = {n for op in local.ops if op.name not in inside for n in op.inputs}
    read = dict.fromkeys(n for op in ops for n in op.inputs if n not in made)
    written = [n for n in made if n in others or n in local.outputs]
    if len(ops) == 1 and family_of(ops[0].target).reads is not None:
        work = op_works(ops[0], tensor)[0]
        forward_bytes = work.num_bytes
    else:
        forward_bytes = bytes_of(local, read) + bytes_of(local, written)
    backward_bytes = 0.0
    differentiable = [n for n in read if tensor[n].requires_grad]
    if differentiable and any(tensor[n].requires_grad for n in written):
        # A lone addition hands its gradient on: it counts no kernel.
        alone = len(ops) == 1 and packet_of(ops[0].target) in ADDITIONS
        if not alone:
            kept = {n for op in ops for n in saved.saved[op.name].tensors}
            # Vectors, such as a norm's weight, are too small to count.
            needed = [n for n in (*read, *written) if n in kept and len(tensor[n].shape) > 1]
            backward_bytes = (
                bytes_of(local, [n for n in written if tensor[n].requires_grad])
                + bytes_of(local, needed)
                + bytes_of(local, [n for n in differentiable if tensor[n].kind != "param"])
            )
            backward_bytes += sum(
                _numel(local, n) * profile.execution.gradient_bytes * 2
                for n in differentiable
                if tensor[n].kind == "param" and family_of(ops[0].target).reads is not None
            )
    factor = profile.execution.pointwise_factor
    return KernelSeconds(
        forward_s=profile.pass_seconds(factor * forward_bytes),
        backward_s=profile.pass_seconds(factor * backward_bytes) if backward_bytes else 0.0,
    )


def _joined_bytes(op: Op, local: Program) -> float:
    """Bytes of putting the gradients of parts together: each is read, and written to its place."""
    if len(op.outputs) == 1 or not local.tensor[op.outputs[0]].requires_grad:
        return 0.0
    return 2.0 * bytes_of(local, op.outputs)


def forked_bytes(local: Program, kernels: Sequence[tuple[Op, ...]]) -> float:
    """Bytes of adding up the gradients of tensors with several users that are no views; the
    gradient of what several weights multiply is one sum already.
    """
    users: Counter[str] = Counter()
    for ops in kernels:
        several = [ops[0]] if is_product(ops[0]) else ops
        for name in [name for op in several for name in dict.fromkeys(op.inputs)]:
            meta = local.tensor[name]
            if meta.requires_grad and meta.kind != "param":
                users[name] += 1
    moved = {op.inputs[0] for op in local.ops if op.target == REDISTRIBUTE}
    for name in moved:
        if local.tensor[name].requires_grad and local.tensor[name].kind != "param":
            users[name] += 1
    # Each addition reads two gradients and writes their sum.
    return sum(3.0 * (count - 1) * bytes_of(local, [name]) for name, count in users.items())


def _numel(local: Program, name: str) -> int:
    return prod(local.tensor[name].shape_at(1))
