"""Losses: cross entropy with the classes or the samples divided among the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.graph import Op, Ref
from planner.layout.placement import OpSharding, Partial, Shard
from planner.ops.call import Call, P, R, normal_dim
from planner.ops.letters import Letters, by_letters
from planner.ops.registry import LocalForm, Placed, local_form, rule

NONE, MEAN, SUM = 0, 1, 2
"""ATen's numbers for a loss's `reduction`."""


@rule("aten.cross_entropy_loss", contiguous=True, together=True)
def cross_entropy_by_class(call: Call) -> Iterator[OpSharding]:
    """Ranks exchange a few numbers a sample instead of the logits."""
    if _has_plain_targets(call):
        rank = len(call.inputs[0])
        yield OpSharding(inputs=(Shard(min(1, rank - 1)), R), outputs=(R,))


@rule("aten.cross_entropy_loss")
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


@local_form("aten.cross_entropy_loss")
def cross_entropy_on_shard(placed: Placed) -> LocalForm:
    """The same loss, told how the logits are divided."""
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


@rule("planner.vocab_cross_entropy", "planner.vocab_nll_loss")
def vocab_cross_entropy(call: Call) -> Iterator[OpSharding]:
    """Classes are divided on another axis already; on this one samples can be."""
    rank = len(call.inputs[0])
    samples = [d for d in range(rank) if d != min(1, rank - 1)]
    out = samples if call.op.args[2] == NONE else []
    inputs: list[Letters] = [[d if d in samples else None for d in range(rank)], samples]
    yield from by_letters(inputs, [out], summed=() if call.op.args[2] == NONE else samples)


@local_form("planner.vocab_cross_entropy", "planner.vocab_nll_loss")
def vocab_cross_entropy_on_shard(placed: Placed) -> LocalForm:
    """A mean is over the targets of all ranks of both axes."""
    op = placed.op
    if op.args[2] != MEAN:
        return LocalForm((op,))
    summed = replace(op, args=(*op.args[:2], SUM, *op.args[3:]))
    return divided_by_count(placed, summed, int(op.args[3]))  # type: ignore[arg-type]


_NLL = ("aten.nll_loss", "aten.nll_loss_nd", "aten.nll_loss2d")


@rule(*_NLL)
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


@rule(*_NLL, contiguous=True, together=True)
def nll_loss_by_class(call: Call) -> Iterator[OpSharding]:
    """A target's class is on one rank; the others' terms are zero."""
    if _has_plain_targets(call) and len(call.op.outputs) == 1:
        rank = len(call.inputs[0])
        yield OpSharding(inputs=(Shard(min(1, rank - 1)), R), outputs=(P,))


@local_form(*_NLL)
def nll_loss_on_shard(placed: Placed) -> LocalForm:
    """The same loss, told how the log-probabilities are divided."""
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


@rule("aten.log_softmax", contiguous=True, together=True)
def log_softmax_by_class(call: Call) -> Iterator[OpSharding]:
    """Ranks exchange two numbers a sample; other dims are those of `reductions`."""
    place = Shard(normal_dim(int(call.op.args[1]), len(call.inputs[0])))  # type: ignore[arg-type]
    yield OpSharding(inputs=(place,), outputs=(place,))


@local_form("aten.log_softmax")
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


_ELEMENTWISE = (
    "aten.mse_loss",
    "aten.l1_loss",
    "aten.smooth_l1_loss",
    "aten.huber_loss",
    "aten.binary_cross_entropy",
    "aten.binary_cross_entropy_with_logits",
)


@rule(*_ELEMENTWISE)
def elementwise_loss(call: Call) -> Iterator[OpSharding]:
    """A loss of each element; summed or averaged, a shard of it is a term."""
    if any(shape != call.inputs[0] for shape in call.inputs):
        return
    reduction = _reduction(call)
    letters = list(range(len(call.inputs[0])))
    out = letters if reduction == NONE else []
    summed = () if reduction == NONE else letters
    yield from by_letters([letters] * len(call.inputs), [out], summed=summed)


@local_form(*_ELEMENTWISE)
def elementwise_loss_on_shard(placed: Placed) -> LocalForm:
    """A mean over a shard is divided by the number of shards, as for `aten.mean`."""
    from planner.ops.families.reductions import scaled_by_shards

    is_term = isinstance(placed.sharding.outputs[0], Partial)
    if is_term and _reduction(placed.call) == MEAN:
        return scaled_by_shards(placed)
    return LocalForm((placed.op,))


def _reduction(call: Call) -> int:
    index = {"aten.binary_cross_entropy": 3, "aten.binary_cross_entropy_with_logits": 4}
    return int(call.arg(index.get(call.packet, 2), "reduction", MEAN))
