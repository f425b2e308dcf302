"""Cross entropy with the classes or the samples divided among the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.language.layout.placement import OpSharding, Shard
from planner.language.ops.call import Call, LocalForm, Placed, R
from planner.language.ops.families.losses.counted_labels import class_loss
from planner.language.ops.families.losses.targets import (
    MEAN,
    NONE,
    SUM,
    divided_by_count,
    has_plain_targets,
)
from planner.language.ops.kernel import KernelCall, Saved
from planner.language.ops.letters import Letters, by_letters
from planner.language.ops.record import OpFamily, ShardRule, aten, register
from planner.language.ops.samples.step import Across

VOCAB_CROSS_ENTROPY = "planner.vocab_cross_entropy"
SIZED_CROSS_ENTROPY = "planner.sized_vocab_cross_entropy"
"""The same as another runtime computes it, which takes `bytes_per_logit` of memory at most: logits
and their probabilities in fp32 among them. Only priced."""


def cross_entropy_by_class(call: Call) -> Iterator[OpSharding]:
    """Ranks exchange a few numbers a sample instead of the logits."""
    if has_plain_targets(call):
        rank = len(call.inputs[0])
        yield OpSharding(inputs=(Shard(min(1, rank - 1)), R), outputs=(R,))


def cross_entropy(call: Call) -> Iterator[OpSharding]:
    """Logits [n, c, …] or [c], target [n, …], divided by sample.

    A mean needs the number of targets counted on all ranks.
    """
    if not has_plain_targets(call):
        return
    reduction = call.arg(3, "reduction", MEAN)
    rank = len(call.inputs[0])
    samples = [d for d in range(rank) if d != min(1, rank - 1)]
    out = samples if reduction == NONE else []
    inputs: list[Letters] = [[d if d in samples else None for d in range(rank)], samples]
    yield from by_letters(inputs, [out], summed=() if reduction == NONE else samples)


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
            target=VOCAB_CROSS_ENTROPY,
        )
    if reduction != MEAN:
        return LocalForm((placed.op,))
    # The op sums over its own samples; the division is by the targets of all ranks.
    summed = replace(
        placed.op,
        args=(*placed.op.args[:2], None, SUM, *placed.op.args[4:]),
        kwargs=tuple(pair for pair in placed.op.kwargs if pair[0] != "reduction"),
    )
    return divided_by_count(placed, summed, call.arg(4, "ignore_index", -100))


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


# ------------------------------------------------------------------------------------- memory


def _log_probabilities(call: KernelCall) -> Saved:
    """The log-softmax of the logits, the labels and the number of them that count."""
    logits, labels = call.op.inputs[:2]
    extra = call.num_bytes(logits) + call.element_bytes(logits)
    return Saved(tensors=(labels,), extra_bytes=extra)


def _log_probabilities_gradient(call: KernelCall, *, forward: bool) -> int:
    """Backward: the gradient of the log-softmax, then the logits'."""
    return 0 if forward else call.num_bytes(call.op.inputs[0])


def _local_probabilities(call: KernelCall) -> Saved:
    """Probabilities of the local classes in fp32 or wider; per sample an int64 and two flags."""
    logits, labels = call.op.inputs[:2]
    element = max(4, call.element_bytes(logits))
    return Saved(extra_bytes=element * call.numel(logits) + 10 * call.numel(labels) + 8)


def _local_logits(call: KernelCall, *, forward: bool) -> int:
    """Forward, by sample: the maximum, three sums before and after they are reduced, two losses
    and a flag. Backward: the gradient in fp32 where logits are narrower; by sample the target's
    share of it and the loss's gradient.
    """
    logits, labels = call.op.inputs[:2]
    size = call.element_bytes(logits)
    element, samples = max(4, size), call.numel(labels)
    if forward:
        return samples * (9 * element + 1)
    cast = call.numel(logits) * element if size < element else 0
    return cast + 2 * samples * element


def _beside_probabilities(call: KernelCall, *, forward: bool) -> int:
    """Forward: what is left of the bytes of a logit. Backward: the gradient is written over the
    probabilities.
    """
    logits = call.op.inputs[0]
    each = int(dict(call.op.kwargs)["bytes_per_logit"])  # type: ignore[arg-type]
    held = call.element_bytes(logits) + max(4, call.element_bytes(logits))
    return max(0, each - held) * call.numel(logits) if forward else 0


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
        across=Across(reduction_arg=3, handlers=(class_loss,)),
    )
)
register(
    OpFamily(
        name="cross entropy with a shard of the classes",
        targets=(VOCAB_CROSS_ENTROPY,),
        shard=(ShardRule(vocab_cross_entropy),),
        local_form=vocab_cross_entropy_on_shard,
        saved=_local_probabilities,
        scratch=_local_logits,
        inlined=True,
        recomputed=False,
    )
)
register(
    OpFamily(
        name="cross entropy with a shard of the classes, of another runtime",
        targets=(SIZED_CROSS_ENTROPY,),
        saved=_local_probabilities,
        scratch=_beside_probabilities,
        recomputed=False,
    )
)
