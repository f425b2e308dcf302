"""Log-softmax and the negative log-likelihood, classes or samples divided among the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from planner.language.layout.placement import OpSharding, Shard
from planner.language.ops.call import Call, LocalForm, P, Placed, R, normal_dim
from planner.language.ops.families.entries.reductions import along_dims
from planner.language.ops.families.losses.counted_labels import class_loss
from planner.language.ops.families.losses.cross_entropy import (
    vocab_cross_entropy,
    vocab_cross_entropy_on_shard,
)
from planner.language.ops.families.losses.targets import (
    MEAN,
    NONE,
    SUM,
    divided_by_count,
    has_plain_targets,
)
from planner.language.ops.kernel import KernelCall, Saved, saves_result
from planner.language.ops.letters import Letters, by_letters, same_dims
from planner.language.ops.record import OpFamily, ShardRule, aten, register
from planner.language.ops.samples.step import Across


def nll_loss(call: Call) -> Iterator[OpSharding]:
    """Log-probabilities [n, c, …], target [n, …], divided by sample."""
    if not has_plain_targets(call) or len(call.op.outputs) != 1:
        return
    reduction = call.arg(3, "reduction", MEAN)
    rank = len(call.inputs[0])
    samples = [d for d in range(rank) if d != min(1, rank - 1)]
    inputs: list[Letters] = [[d if d in samples else None for d in range(rank)], samples]
    out = samples if reduction == NONE else []
    yield from by_letters(inputs, [out], summed=() if reduction == NONE else samples)


def nll_loss_by_class(call: Call) -> Iterator[OpSharding]:
    """A target's class is on one rank; the others' terms are zero."""
    if has_plain_targets(call) and len(call.op.outputs) == 1:
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


def _targets_and_count(call: KernelCall) -> Saved:
    """Log-probabilities, targets and the total weight of those that count."""
    names = call.op.inputs
    return Saved(tensors=names[:2], extra_bytes=call.element_bytes(names[0]))


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
        name="negative log-likelihood",
        targets=aten("nll_loss nll_loss_nd nll_loss2d"),
        shard=(
            ShardRule(nll_loss),
            ShardRule(nll_loss_by_class, contiguous=True, together=True),
        ),
        local_form=nll_loss_on_shard,
        worth_moving=True,
        saved=_targets_and_count,
        across=Across(reduction_arg=3, handlers=(class_loss,)),
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
