"""Losses of classes: cross entropy with the classes or the samples divided among the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from planner.graph import Op, Ref
from planner.layout.placement import OpSharding, Shard
from planner.ops.call import Call, LocalForm, P, Placed, R, normal_dim
from planner.ops.families.reductions import along_dims
from planner.ops.kernel import KernelCall, Saved, saves_result
from planner.ops.letters import Letters, by_letters, same_dims
from planner.ops.record import Across, OpFamily, ShardRule, aten, register

NONE, MEAN, SUM = 0, 1, 2
"""ATen's numbers for a loss's `reduction`."""


def cross_entropy_by_class(call: Call) -> Iterator[OpSharding]:
    """Ranks exchange a few numbers a sample instead of the logits."""
    if _has_plain_targets(call):
        rank = len(call.inputs[0])
        yield OpSharding(inputs=(Shard(min(1, rank - 1)), R), outputs=(R,))


def cross_entropy(call: Call) -> Iterator[OpSharding]:
    """Logits [n, c, …] or [c], target [n, …], divided by sample.

    A mean needs the number of targets counted on all ranks.
    """
    if not _has_plain_targets(call):
        return
    reduction = call.arg(3, "reduction", MEAN)
    rank = len(call.inputs[0])
    samples = [d for d in range(rank) if d != min(1, rank - 1)]
    out = samples if reduction == NONE else []
    inputs: list[Letters] = [[d if d in samples else None for d in range(rank)], samples]
    yield from by_letters(inputs, [out], summed=() if reduction == NONE else samples)


def _has_plain_targets(call: Call) -> bool:
    """Whether targets are indices and classes have no weights."""
    return not call.is_floating(call.op.inputs[1]) and not isinstance(call.arg(2, "weight"), Ref)


def cross_entropy_on_shard(placed: Placed) -> LocalForm:
    """The same loss, with the way its logits are divided."""
    call = placed.call
    logits = placed.sharding.inputs[0]
    rank = len(call.inputs[0])
    by_class = logits == Shard(min(1, rank - 1))
    reduction = call.arg(3, "reduction", MEAN)
    if by_class:
        return placed.with_args(
            *placed.op.args[:2],
            reduction,
            call.arg(4, "ignore_index", -100),
            call.arg(5, "label_smoothing", 0.0),
            placed.axis,
            target="planner.vocab_cross_entropy",
        )
    if reduction != MEAN:
        return LocalForm((placed.op,))
    summed = replace(
        placed.op,
        args=(*placed.op.args[:2], None, SUM, *placed.op.args[4:]),
        kwargs=tuple(pair for pair in placed.op.kwargs if pair[0] != "reduction"),
    )
    return divided_by_count(placed, summed, call.arg(4, "ignore_index", -100))


def divided_by_count(placed: Placed, summed: Op, ignore_index: int) -> LocalForm:
    """Divide one rank's sum of losses by the number of targets counted on all ranks."""
    name = placed.op.outputs[0]
    part = f"{name}_of_shard"
    mean = Op(
        name=f"{placed.op.name}_mean",
        target="planner.divide_by_count",
        args=(Ref(part), placed.op.args[1], ignore_index, placed.axis),
        outputs=(name,),
        module=placed.op.module,
    )
    meta = placed.call.tensor[name]
    return LocalForm((replace(summed, outputs=(part,)), mean), (replace(meta, name=part),))


def vocab_cross_entropy(call: Call) -> Iterator[OpSharding]:
    """Classes are divided on another axis already; on this one samples can be."""
    rank = len(call.inputs[0])
    samples = [d for d in range(rank) if d != min(1, rank - 1)]
    out = samples if call.op.args[2] == NONE else []
    inputs: list[Letters] = [[d if d in samples else None for d in range(rank)], samples]
    yield from by_letters(inputs, [out], summed=() if call.op.args[2] == NONE else samples)


def vocab_cross_entropy_on_shard(placed: Placed) -> LocalForm:
    """A mean is over the targets of all ranks of both axes."""
    op = placed.op
    if op.args[2] != MEAN:
        return LocalForm((op,))
    summed = replace(op, args=(*op.args[:2], SUM, *op.args[3:]))
    return divided_by_count(placed, summed, int(op.args[3]))  # type: ignore[arg-type]


def nll_loss(call: Call) -> Iterator[OpSharding]:
    """Log-probabilities [n, c, …], target [n, …], divided by sample."""
    if not _has_plain_targets(call) or len(call.op.outputs) != 1:
        return
    reduction = call.arg(3, "reduction", MEAN)
    rank = len(call.inputs[0])
    samples = [d for d in range(rank) if d != min(1, rank - 1)]
    inputs: list[Letters] = [[d if d in samples else None for d in range(rank)], samples]
    out = samples if reduction == NONE else []
    yield from by_letters(inputs, [out], summed=() if reduction == NONE else samples)


def nll_loss_by_class(call: Call) -> Iterator[OpSharding]:
    """A target's class is on one rank; the others' terms are zero."""
    if _has_plain_targets(call) and len(call.op.outputs) == 1:
        rank = len(call.inputs[0])
        yield OpSharding(inputs=(Shard(min(1, rank - 1)), R), outputs=(P,))


def nll_loss_on_shard(placed: Placed) -> LocalForm:
    """The same loss, with the way its log-probabilities are divided."""
    call, op = placed.call, placed.op
    reduction = call.arg(3, "reduction", MEAN)
    ignore_index = call.arg(4, "ignore_index", -100)
    if placed.sharding.inputs[0] == Shard(min(1, len(call.inputs[0]) - 1)):
        return placed.with_args(
            *op.args[:2], reduction, ignore_index, placed.axis, target="planner.vocab_nll_loss"
        )
    if reduction != MEAN:
        return LocalForm((op,))
    summed = replace(op, args=(*op.args[:2], None, SUM, ignore_index), kwargs=())
    return divided_by_count(placed, summed, ignore_index)


def log_softmax_by_class(call: Call) -> Iterator[OpSharding]:
    """Ranks exchange two numbers a sample; other dims are those of `reductions`."""
    place = Shard(normal_dim(int(call.op.args[1]), len(call.inputs[0])))  # type: ignore[arg-type]
    yield OpSharding(inputs=(place,), outputs=(place,))


def log_softmax_on_shard(placed: Placed) -> LocalForm:
    """Over a divided dim the sum of exponentials is over all ranks."""
    call = placed.call
    dim = normal_dim(int(placed.op.args[1]), len(call.inputs[0]))  # type: ignore[arg-type]
    if placed.sharding.inputs[0] != Shard(dim):
        return LocalForm((placed.op,))
    return placed.with_args(
        placed.op.args[0],
        dim,
        call.arg(2, "dtype"),
        placed.axis,
        target="planner.vocab_log_softmax",
    )


def vocab_log_softmax(call: Call) -> Iterator[OpSharding]:
    """Tensor, the dim that another axis divides: any other."""
    yield from same_dims(call, fixed=[int(call.op.args[1])])  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------- memory


def _log_probabilities(call: KernelCall) -> Saved:
    """The log-softmax of the logits, the labels and the number of them that count."""
    logits, labels = call.op.inputs[:2]
    extra = call.num_bytes(logits) + call.element_bytes(logits)
    return Saved(tensors=(labels,), extra_bytes=extra)


def _log_probabilities_gradient(call: KernelCall, *, forward: bool) -> int:
    """Backward: the gradient of the log-softmax, then the logits'."""
    return 0 if forward else call.num_bytes(call.op.inputs[0])


def _targets_and_count(call: KernelCall) -> Saved:
    """Log-probabilities, targets and the total weight of those that count."""
    names = call.op.inputs
    return Saved(tensors=names[:2], extra_bytes=call.element_bytes(names[0]))


def _local_probabilities(call: KernelCall) -> Saved:
    """Probabilities of the local classes in fp32 or wider; per sample an int64 and two flags."""
    logits, labels = call.op.inputs[:2]
    element = max(4, call.element_bytes(logits))
    return Saved(extra_bytes=element * call.numel(logits) + 10 * call.numel(labels) + 8)


def _local_logits(call: KernelCall, *, forward: bool) -> int:
    """Forward: shifted logits and their exponentials beside the probabilities, and by sample the
    maximum, three sums before and after they are reduced, two losses and a flag. Backward: the
    gradient before and after the targets' share is added, and by sample that share and the loss's
    gradient.
    """
    logits, labels = call.op.inputs[:2]
    element = max(4, call.element_bytes(logits))
    wide, samples = call.numel(logits) * element, call.numel(labels)
    return 2 * wide + samples * (9 * element + 1) if forward else wide + 2 * samples * element


def _local_targets(call: KernelCall) -> Saved:
    """Indices counted from this rank's first class (int64), and which lie elsewhere; a count."""
    return Saved(extra_bytes=9 * call.numel(call.op.inputs[1]) + 8)


def _exponentials(call: KernelCall) -> Saved:
    """The exponentials, and their sum for each row."""
    output, dim = call.op.outputs[0], int(call.op.args[1])  # type: ignore[arg-type]
    shape = call.shape(output)
    rows = prod(shape) // shape[dim]
    return Saved(extra_bytes=call.num_bytes(output) + rows * call.element_bytes(output))


# ---------------------------------------------------------------------------------------- records

register(
    OpFamily(
        name="cross entropy",
        targets=aten("cross_entropy_loss"),
        shard=(
            ShardRule(cross_entropy_by_class, contiguous=True, together=True),
            ShardRule(cross_entropy),
        ),
        local_form=cross_entropy_on_shard,
        worth_moving=True,
        flop_per_element=6,
        saved=_log_probabilities,
        scratch=_log_probabilities_gradient,
        across=Across(reduction_arg=3),
    )
)
register(
    OpFamily(
        name="cross entropy with a shard of the classes",
        targets=("planner.vocab_cross_entropy",),
        shard=(ShardRule(vocab_cross_entropy),),
        local_form=vocab_cross_entropy_on_shard,
        saved=_local_probabilities,
        scratch=_local_logits,
        recomputed=False,
    )
)
register(
    OpFamily(
        name="negative log-likelihood",
        targets=aten("nll_loss nll_loss_nd nll_loss2d"),
        shard=(
            ShardRule(nll_loss),
            ShardRule(nll_loss_by_class, contiguous=True, together=True),
        ),
        local_form=nll_loss_on_shard,
        worth_moving=True,
        saved=_targets_and_count,
        across=Across(reduction_arg=3),
    )
)
register(
    OpFamily(
        name="negative log-likelihood with a shard of the classes",
        targets=("planner.vocab_nll_loss",),
        shard=(ShardRule(vocab_cross_entropy),),
        local_form=vocab_cross_entropy_on_shard,
        saved=_local_targets,
    )
)
register(
    OpFamily(
        name="mean over targets of all ranks",
        targets=("planner.divide_by_count",),
        saved=lambda call: Saved(extra_bytes=8),  # the count, one int64
        recomputed=False,
    )
)
register(
    OpFamily(
        name="log-softmax",
        targets=aten("log_softmax"),
        shard=(
            ShardRule(log_softmax_by_class, contiguous=True, together=True),
            ShardRule(along_dims),
        ),
        local_form=log_softmax_on_shard,
        flop_per_element=5,
        saved=saves_result,
    )
)
register(
    OpFamily(
        name="log-softmax with a shard of the classes",
        targets=("planner.vocab_log_softmax",),
        shard=(ShardRule(vocab_log_softmax),),
        flop_per_element=5,
        saved=_exponentials,
        recomputed=False,
    )
)
